# make test      ruff, mypy --strict, and the tests that need no GPU and few seconds, in .venv
# make test-all  the same with the tests of tests/long.txt
# make compare   the same tokens with and without the cache, on three architectures
# make test-gpu  what needs a CUDA device or minutes: slow and gpu tests, in the Python that is on the PATH
# make sanitize  every kernel under compute-sanitizer (memcheck, racecheck) on a GPU, and a record of it
# make results   the blocks of figures in README.md and docs, from the records in benchmarks/results
# make test-5.17 the tests with the oldest supported transformers, in an environment of its own
# make test-clients  programs that call generate (pipelines, serve, lm-eval, PEFT, TRL, ...) with and without attach
# make coverage  docs/coverage.md: what every decoder of transformers gets, measured with the newest and the oldest version
# make fuzz      random models, settings and histories against no cache: make fuzz CASES=10000 SEED=0 JOBS=2
PYTHON ?= python3
CASES ?= 1000
SEED ?= 0
JOBS ?= 1
# Empty, whatever the shell says: without bytecode on disk each script that the tests start compiles transformers anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: test test-all compare test-gpu test-5.17 test-clients coverage results fuzz sanitize clean

test: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest -n 2 --dist worksteal -m "not slow and not long"

test-all: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest -n 2 --dist worksteal -m "not slow"

compare: .venv/.installed
	.venv/bin/python examples/compare.py --plot compare.png

test-gpu:
	$(PYTHON) -m pytest -m "slow or gpu" -rs tests
	$(PYTHON) -m pytest -m "not slow and not gpu" -rs tests/kernels tests/program tests/decoding tests/inspection tests/test_attention.py tests/test_patching.py

# The CUDA toolkit has compute-sanitizer: its bin folder is on the PATH, or CUDA_HOME is set.
sanitize:
	$(PYTHON) -m tests.kernels.sanitize

test-5.17: .venv-5.17/.installed
	.venv-5.17/bin/pytest -n 2 --dist worksteal -m "not slow"

# Offline: what a client would ask the hub for must be here.
test-clients: .venv-clients/.installed
	HF_HUB_OFFLINE=1 .venv-clients/bin/pytest -n 2 --dist worksteal -rs -m clients tests/clients

coverage: .venv/.installed .venv-5.17/.installed
	.venv/bin/python -m tests.coverage.measure
	.venv-5.17/bin/python -m tests.coverage.measure
	.venv/bin/python -m tests.coverage.write_page

fuzz: .venv/.installed
	.venv/bin/python -m tests.fuzz.fuzz --cases $(CASES) --seed $(SEED) --jobs $(JOBS)

results: .venv/.installed
	.venv/bin/python benchmarks/write_results.py

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev,examples]"
	touch $@

# The same pins but for transformers; ruff and mypy belong to the newest.
.venv-5.17/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-5.17
	sed 's/^transformers==.*/transformers==5.17.*/' constraints.txt > .venv-5.17/constraints.txt
	.venv-5.17/bin/pip install --quiet --no-compile --disable-pip-version-check -c .venv-5.17/constraints.txt -e ".[dev,examples]"
	touch $@

.venv-clients/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev,examples,clients]"
	touch $@

clean:
	rm -rf .venv .venv-5.17 .venv-clients
