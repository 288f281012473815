"""
python -m hf_static_kv check MODEL                  is it served, captured, exact and faster?
python -m hf_static_kv check --random llama-3.2-1b  the same for a true shape with random weights
python -m hf_static_kv env                          versions and settings, for a bug report
python -m hf_static_kv run script.py ARGS           run a script (or -m module): models are attached
python -m hf_static_kv serve ARGS                   `transformers serve ARGS` with attached models
"""

import argparse
import os
import platform
import runpy
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_static_kv import Attachment, __version__, attached, exact
from hf_static_kv.attaching import attaching_loaded_models
from hf_static_kv.testing import dev_config, load_model, random_model

_TRIALS = 3
_PACKAGES = (
    "torch", "transformers", "triton", "accelerate", "bitsandbytes", "datasets", "fastapi", "gguf", "lm-eval",
    "peft", "torchao", "trl",
)  # fmt: skip


class _BadArgument(Exception):
    """The message is one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _BadArgument(message)


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status; 2 is a bad argument."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    commands = {"check": check, "env": env, "run": run, "serve": serve}
    if name in ("-h", "--help"):
        print(str(__doc__).strip())
        return 0
    try:
        if name not in commands:
            raise _BadArgument(f"no such command: choose one of {', '.join(commands)}")
        return commands[name](rest)
    except _BadArgument as error:
        _note(f"hf_static_kv {name}: {error}")
        return 2


def check(arguments: list[str]) -> int:
    """Generate without and with attach, and compare. Exit status 1: the tokens differ."""
    options = _options(arguments)
    _note(f"loading {options.model} ...")
    model = _load(options)
    ids = _prompt(model, options)
    _note("generate without attach ...")
    expected, plain_speed = _measure(model, ids, options.new_tokens)
    _note("generate with attach ...")
    with attached(model) as info:
        tokens, speed = _measure(model, ids, options.new_tokens, info)
        memory = f"{info.memory_bytes / 2**20:,.1f} MiB" if info.caches else None
        reason = info.fallback_reason
        kernel_reason = reason or info.kernel_reason
    if memory is None and reason is None:  # a call that attach does not touch
        reason = "the model's generation_config asks for a cache of its own"
    weights = "random weights, " if options.random else ""
    sizes = f"prompt {options.prompt_len}, {options.new_tokens} new tokens, greedy, batch 1"
    print(f"model: {options.model}, {weights}{options.dtype} on {options.device}; {sizes}")
    print("served:", "yes" if memory else f"no: {reason}")
    print("captured:", f"no: {reason}" if reason else "yes")
    print("one kernel:", f"no: {kernel_reason}" if kernel_reason else "yes, after the first call")
    print("exact:", _exact(model))
    print("tokens:", _agreement(expected, tokens, options.dtype))
    print("without attach:", plain_speed)
    print("with attach:", speed)
    print("cache:", memory or "none of ours")
    return int(tokens != expected)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser("python -m hf_static_kv check", description=check.__doc__)
    parser.add_argument("model", help="hub id, folder, GGUF file or short name")
    parser.add_argument("--random", action="store_true", help="random weights, of a short name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    return options


def _load(options: argparse.Namespace) -> Any:
    how: Any = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    try:
        if options.random:
            return random_model(dev_config(options.model), **how)
        return load_model(options.model, **how)[0]
    except (ValueError, RuntimeError, AssertionError) as error:  # the last two: no such device
        raise _BadArgument(_first_line(error)) from error


def _prompt(model: Any, options: argparse.Namespace) -> Tensor:
    config = model.config.get_text_config()
    room = getattr(config, "max_position_embeddings", sys.maxsize) - options.new_tokens
    if options.new_tokens < 2 or not 1 <= options.prompt_len <= room:
        raise _BadArgument(f"take 2 --new-tokens or more, and a --prompt-len of 1 to {room}")
    torch.manual_seed(0)
    return torch.randint(1, config.vocab_size, (1, options.prompt_len)).to(model.device)


def _measure(
    model: Any, ids: Tensor, new_tokens: int, info: Attachment | None = None
) -> tuple[list[int], str]:
    """The new tokens, and a line about their speed."""
    no_end = {"eos_token_id": model.config.get_text_config().vocab_size, "pad_token_id": 0}

    def generate(count: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        output = model.generate(ids, do_sample=False, max_new_tokens=count, **no_end)
        tokens = output[0, ids.shape[1] :].tolist()  # waits for the device
        return time.perf_counter() - start, tokens

    warm_up, tokens = generate(new_tokens)
    if info is not None:
        info.decoder.steps.wait_for_kernels()
        generate(new_tokens)  # a kernel takes over
    trials = [(generate(1)[0], generate(new_tokens)[0]) for _ in range(_TRIALS)]
    first = median(first for first, _ in trials)
    steps = median(whole - first for first, whole in trials)
    rate = f"{(new_tokens - 1) / steps:,.1f}" if steps > 0 else "(take more --new-tokens)"
    speed = f"first token {first * 1e3:.1f} ms, then {rate} tokens/s"
    return tokens, f"{speed} (medians of {_TRIALS}; warm-up: one call, {warm_up:.1f} s)"


def _exact(model: Any) -> str:
    _note("exact ...")
    try:
        with exact(model):
            return "yes, inside exact(model)"
    except (ValueError, RuntimeError) as error:
        return f"no: {_first_line(error)}"


def _agreement(expected: list[int], tokens: list[int], dtype: str) -> str:
    equal = [one == other for one, other in zip(expected, tokens, strict=True)]
    if all(equal):
        return "the same"
    rounding = f"our kernels round {dtype} differently (docs/exact.md)"
    reason = "please report it" if dtype == "float32" else rounding
    return f"different from new token {equal.index(False) + 1} on: {reason}"


def env(arguments: list[str]) -> int:
    """Print what a bug report needs."""
    _Parser("python -m hf_static_kv env", description=env.__doc__).parse_args(arguments)
    query = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"
    failed, gpus = subprocess.getstatusoutput(query)
    own = sorted(item for item in os.environ.items() if item[0].startswith("HF_STATIC_KV"))
    print(f"hf_static_kv {__version__}, python {platform.python_version()}, {platform.platform()}")
    print("packages:", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    print("torch's CUDA:", torch.version.cuda or "none")
    print("GPU, driver:", "none found by nvidia-smi" if failed else gpus.replace("\n", "; "))
    print("environment:", ", ".join("=".join(item) for item in own) or "no HF_STATIC_KV_*")
    return 0


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def run(arguments: list[str]) -> int:
    """Run a script, or -m and a module, with the arguments that follow."""
    is_module = arguments[:1] == ["-m"]
    sys.argv = arguments[is_module:]
    if not sys.argv:
        raise _BadArgument("name a script, or -m and a module")
    path = Path(sys.argv[0])
    if not is_module and not path.exists():
        raise _BadArgument(f"there is no script {path}")
    with attaching_loaded_models():
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(path.resolve().parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def serve(arguments: list[str]) -> int:
    """Run transformers' own server."""
    if "--compile" in arguments and "--continuous-batching" not in arguments:
        reason = "--compile asks for transformers' static cache"
        _note(f"{reason}: hf_static_kv does not serve it. Leave it out.")
    try:
        from transformers.cli.transformers import app

        with attaching_loaded_models():
            app(["serve", *arguments], prog_name="transformers")
    except ImportError as error:
        raise _BadArgument(_first_line(error)) from error
    return 0


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    sys.exit(main())
