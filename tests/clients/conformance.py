"""transformers' own tests of generation, without `attach` and with every model attached that generates.

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers
    python tests/clients/conformance.py transformers --models llama qwen3 gemma3

The checkout must be of the version that is installed, and `pip install parameterized` is needed. By
default the tests of drafted tokens run; `--tests` takes another expression of `pytest -k`. On a CPU
the decoder's loop runs, too. It prints the tests whose result differs, what became of the calls, and
exits with 1 if a test fails with `attach` alone.

These tests ask for scores, attention weights and hidden states, which no captured pass gives. With
`--tokens` they are not asked for: a test then compares the tokens alone.
"""

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from functools import wraps
from pathlib import Path

HERE = Path(__file__).resolve()
DRAFTED = "assisted_decoding or prompt_lookup"
MODELS = [
    "llama", "qwen3", "qwen2", "mistral", "gemma2", "gemma3", "gemma3n", "gpt2", "gpt_neox", "phi3",
    "olmo2", "cohere2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "t5", "bart", "lfm2",
]  # fmt: skip
RESULT = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\S* (tests/\S+)", re.MULTILINE)


# --- inside pytest, as a plugin

MODES = os.environ.get("CONFORMANCE", "").split()
OUTPUTS = ["output_scores", "output_logits", "output_hidden_states", "output_attentions"]


def pytest_configure():
    """Attach each model in its first call of `generate`."""
    from transformers import GenerationMixin

    from hf_static_kv import attach, served

    served._DECODER_DEVICES = ("cpu", "cuda")
    served._MIN_PROMPT_ON_CPU = 0
    original = GenerationMixin.generate

    @wraps(original)
    def generate(model, *args, **kwargs):
        if "tokens" in MODES:
            kwargs |= dict.fromkeys(OUTPUTS, False)
        if "attached" not in MODES or model in served.ATTACHMENTS or model in refused:
            return original(model, *args, **kwargs)
        try:
            infos.append(attach(model))
        except ValueError as error:
            refused[model] = str(error)
        return model.generate(*args, **kwargs)

    GenerationMixin.generate = generate


def pytest_collection_finish():
    from tests.generation.test_utils import GenerationTesterMixin

    if "tokens" in MODES:
        GenerationTesterMixin._check_generate_outputs = lambda *args, **kwargs: None


infos = []
refused = {}


def pytest_terminal_summary(terminalreporter):
    reasons = sum((info.fallbacks for info in infos), Counter())
    calls = sum(info.calls for info in infos)
    drafted = sum(info.drafted_passes for info in infos)
    terminalreporter.write_line(f"{calls} calls, {drafted} captured passes with drafts")
    for what, found in (("falls back", reasons), ("refused", Counter(refused.values()))):
        for reason, times in found.most_common():
            terminalreporter.write_line(f"{what} {times}: {reason}")


# --- outside


def results(checkout, files, tests, options, modes):
    """The result of each test, by name, and what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", "-k", tests]
    command += [
        "-c",
        os.devnull,
        "--rootdir",
        ".",
        "-W",
        "ignore",
        "--tb",
        "line",
        "-p",
        HERE.stem,
        *options,
    ]
    paths = [checkout, HERE.parent, HERE.parents[2], os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "CONFORMANCE": " ".join(modes),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command + files, cwd=checkout, env=env, capture_output=True, text=True)
    found = {name: result for result, name in RESULT.findall(done.stdout)}
    if not found:
        raise SystemExit(f"No test ran.\n{done.stdout}{done.stderr}")
    return found, done.stdout


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--models", nargs="+", default=MODELS, help="folders; `all`: every one")
    parser.add_argument("--tests", default=DRAFTED, help="default: %(default)s")
    parser.add_argument("--tokens", action="store_true", help="compare the tokens alone")
    parser.add_argument("--plugin", default="no:doctest", help="another one of pytest")
    args = parser.parse_args()
    root = args.checkout.resolve()
    names = ["*"] if args.models == ["all"] else args.models
    files = [p for name in names for p in root.glob(f"tests/models/{name}/test_modeling_*.py")]
    files = [str(path.relative_to(root)) for path in sorted(files)]
    how = root, files, args.tests, ["-p", args.plugin]
    modes = ["tokens"] if args.tokens else []
    before, _ = results(*how, modes)
    after, printed = results(*how, [*modes, "attached"])
    differ = [name for name in before if before[name] != after.get(name)]
    for name in differ:
        print(f"{before[name]} -> {after.get(name)}: {name}")
    for words, found in (("without", before), ("with", after)):
        print(f"{words} attach: {dict(Counter(found.values()))}")
    print(tail(printed))
    return int(any(before[name] == "PASSED" for name in differ))


def tail(printed):
    """What the plugin has written."""
    lines = printed.splitlines()
    first = next(n for n, line in enumerate(lines) if "captured passes with drafts" in line)
    return "\n".join(line for line in lines[first:] if not line.startswith(("PASSED", "=")))


if __name__ == "__main__":
    sys.exit(main())
