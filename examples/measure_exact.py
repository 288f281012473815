"""Measure the difference between cached and uncached logits, outside and inside `exact`, and the
cost of `exact`.

    python examples/measure_exact.py                      # Llama, Qwen3 and Gemma 3 miniatures; a minute
    python examples/measure_exact.py --model smollm2 --max-new-tokens 16
    python examples/measure_exact.py --model Qwen/Qwen3-1.7B --device cuda --max-new-tokens 256

A sequence is generated, then computed twice: in one pass without a cache, and token by token with
the cache. Both give logits for every new token; the table shows their largest difference. --model
takes a short name, a hub id, a folder or a GGUF file. Exit status 1 when a difference inside
`exact` is not zero, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from common import BadArgument, encode, environment, read_prompts
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_static_kv import StaticContiguousCache, exact
from hf_static_kv.testing import MINIATURES, load_model

Result = dict[str, Any]


def timed(call: Callable[[], torch.Tensor], device: str) -> tuple[torch.Tensor, float]:
    """The result, and the seconds until the device has computed it."""
    start = time.perf_counter()
    result = call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


@torch.no_grad()
def compute_twice(
    model: PreTrainedModel, ids: torch.Tensor, prompt_len: int, device: str
) -> Result:
    """The largest difference between the logits of one uncached pass and those of cached steps, and
    the times.
    """
    cache = StaticContiguousCache.from_model(model, ids.shape[1])
    uncached = model(ids, use_cache=False).logits[:, prompt_len - 1 :]
    first, prefill_s = timed(
        lambda: model(ids[:, :prompt_len], past_key_values=cache).logits[:, -1:], device
    )
    new = ids[:, prompt_len:].split(1, dim=1)
    steps, decode_s = timed(
        lambda: torch.cat([model(x, past_key_values=cache).logits for x in new], dim=1), device
    )
    difference = (torch.cat([first, steps], dim=1).float() - uncached.float()).abs().max().item()
    return {
        "difference": difference,
        "prefill_ms": prefill_s * 1e3,
        "decode_ms": decode_s / steps.shape[1] * 1e3,
    }


def first_difference(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], new_tokens: int
) -> int | None:
    """Index of the first new token that differs between greedy runs with and without a cache, or
    None.
    """
    prompt_len = inputs["input_ids"].shape[1]
    common = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    cache = StaticContiguousCache.from_model(model, prompt_len + new_tokens)
    cached = model.generate(**inputs, past_key_values=cache, **common)[0, prompt_len:].tolist()
    uncached = model.generate(**inputs, use_cache=False, **common)[0, prompt_len:].tolist()
    pairs = zip(cached, uncached, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def measure(name: str, args: argparse.Namespace, bar: tqdm) -> list[Result]:
    model, tokenizer = load_model(name, device=args.device, dtype=getattr(torch, args.dtype))
    inputs = encode(read_prompts(args, tokenizer)[0], model, tokenizer, args)
    ids = model.generate(
        **inputs, max_new_tokens=args.max_new_tokens, do_sample=False, pad_token_id=0
    )
    prompt_len, results = inputs["input_ids"].shape[1], []
    for is_exact in (False, True):
        bar.set_description(f"{name}, {'inside' if is_exact else 'outside'} exact")
        with exact(model) if is_exact else nullcontext():
            compute_twice(model, ids, prompt_len, args.device)  # warm-up
            result = compute_twice(model, ids, prompt_len, args.device)
            result["first_difference"] = first_difference(model, inputs, args.max_new_tokens)
        results.append({"model": name, "exact": is_exact, "prompt": prompt_len, **result})
        bar.update()
    return results


def table(results: list[Result], new_tokens: int) -> str:
    lines = [
        "| model | `exact` | largest difference of logits | first different token of "
        f"{new_tokens} (greedy) | prefill, ms | decode, ms per token |",
        "|---" * 6 + "|",
    ]
    for r in results:
        is_exact = "**inside**" if r["exact"] else "outside"
        difference = "0" if r["difference"] == 0 else f"{r['difference']:.1e}"
        token = "none" if r["first_difference"] is None else r["first_difference"] + 1
        times = f"{r['prefill_ms']:.1f} | {r['decode_ms']:.1f}"
        lines.append(f"| {r['model']} | {is_exact} | {difference} | {token} | {times} |")
    return "\n".join(lines)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", action="append", help="may be given several times; default: the miniatures"
    )
    parser.add_argument(
        "--prompt", help="default: the first of examples/data/prompts.jsonl that suits the model"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda" if gpu else "cpu", help="default: %(default)s")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="bfloat16" if gpu else "float32",
        help="default: %(default)s",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    args.model = args.model or list(MINIATURES)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results: list[Result] = []
    try:
        if args.max_new_tokens < 2:
            raise BadArgument(f"--max-new-tokens must be at least 2, got {args.max_new_tokens}")
        with tqdm(total=2 * len(args.model), disable=None, leave=False) as bar:
            for name in args.model:
                results += measure(name, args, bar)
    except (BadArgument, ValueError) as error:
        print(f"measure_exact.py: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:  # an operation that exact has no kernel for
        print(f"measure_exact.py: {error}", file=sys.stderr)
        return 1
    print(table(results, args.max_new_tokens))
    if args.json:
        record = {**environment(args.device), "dtype": args.dtype, "results": results}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(result["difference"] == 0 for result in results if result["exact"]) else 1


if __name__ == "__main__":
    sys.exit(main())
