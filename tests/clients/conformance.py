"""transformers' own tests of generation, without `attach` and with every model attached that generates.

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers
    python tests/clients/conformance.py transformers --models llama qwen3 gemma3

The checkout must be of the version that is installed, and `pip install parameterized` is needed. By
default the tests of drafted tokens run; `--tests` takes another expression of `pytest -k`. On a CPU
the decoder's loop runs, too. It prints the tests whose result differs, what became of the calls, and
exits with 1 if a test fails with `attach` alone.

These tests ask for attention weights and hidden states and give masks with holes and processors, which no
captured pass with drafts serves. With `--captured` a call has none of these, 12 new tokens, and drafts in
every pass; a test then compares the tokens alone.
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
# What captured passes do not serve, or not with drafts.
OTHERS = {
    "output_scores", "output_logits", "output_hidden_states", "output_attentions", "attention_mask",
    "bad_words_ids", "remove_invalid_values", "repetition_penalty",
}  # fmt: skip


def pytest_configure():
    """Attach each model in its first call of `generate`."""
    from transformers import GenerationMixin

    from hf_static_kv import attach, served
    from hf_static_kv.decoding import speculation

    served._DECODER_DEVICES = ("cpu", "cuda")
    served._MIN_PROMPT_ON_CPU = 0
    if "captured" in MODES:
        speculation._PAYS = -1.0
        speculation._COST = 0.0
    original = GenerationMixin.generate

    @wraps(original)
    def generate(model, *args, **kwargs):
        if "captured" in MODES and "max_new_tokens" in kwargs and "generation_config" not in kwargs:
            kwargs = {k: v for k, v in kwargs.items() if k not in OTHERS}
            kwargs["max_new_tokens"] = 12
        if "attached" not in MODES or model in served.ATTACHMENTS or model in refused:
            return original(model, *args, **kwargs)
        try:
            infos.append(attach(model))
        except ValueError as error:
            refused[model] = str(error)
        return model.generate(*args, **kwargs)

    GenerationMixin.generate = generate


def pytest_collection_finish():
    from tests.generation import test_utils

    if "captured" in MODES:
        test_utils.GenerationTesterMixin._check_generate_outputs = lambda *args, **kwargs: None
        test_utils.assert_similar_generate_outputs = assert_equal_tokens


def assert_equal_tokens(one, other, **tolerances):
    assert one.sequences.tolist() == other.sequences.tolist()


infos = []
refused = {}


def pytest_terminal_summary(terminalreporter):
    reasons = sum((info.fallbacks for info in infos), Counter())
    calls = sum(info.calls for info in infos)
    drafted = sum(info.drafted_passes for info in infos)
    terminalreporter.write_line(f"{calls} calls, {drafted} captured passes with drafts")
    undrafted = Counter(info.draft_reason for info in infos if info.draft_reason)
    kinds = {"falls back": reasons, "no drafts": undrafted, "refused": Counter(refused.values())}
    for what, found in kinds.items():
        for reason, times in found.most_common():
            terminalreporter.write_line(f"{what} {times}: {reason}")


# --- outside


def results(checkout, files, tests, options, modes):
    """The result of each test, by name, and what pytest printed."""
    command = f"{sys.executable} -m pytest -rA -q -c {os.devnull} --rootdir . -W ignore --tb line"
    command += f" -p no:cacheprovider -p {HERE.stem} --continue-on-collection-errors"
    paths = [checkout, HERE.parent, HERE.parents[2], os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "CONFORMANCE": " ".join(modes), "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [*command.split(), *options, "-k", tests, *files]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
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
    parser.add_argument("--captured", action="store_true", help="see above")
    parser.add_argument("--plugin", default="no:doctest", help="another one of pytest")
    args = parser.parse_args()
    root = args.checkout.resolve()
    names = ["*"] if args.models == ["all"] else args.models
    files = [p for name in names for p in root.glob(f"tests/models/{name}/test_modeling_*.py")]
    files = [str(path.relative_to(root)) for path in sorted(files)]
    how = root, files, args.tests, ["-p", args.plugin]
    modes = ["captured"] if args.captured else []
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
