"""How far cached and uncached logits of a model are apart, as usual and inside `exact`, and what `exact` costs.

    python examples/exact.py                                    # the miniatures of Llama, Qwen3 and Gemma 3; a minute
    python examples/exact.py --model smollm2 --max-new-tokens 16
    python examples/exact.py --model Qwen/Qwen3-1.7B --device cuda --dtype bfloat16 --max-new-tokens 256

A text is generated, and then read twice: in one pass without a cache, and token by token through the cache. Both passes
give the logits of every new token; the largest difference between any two of them is shown. --model takes a short name,
a hub id, a folder or a GGUF file. Exit status 1 when a difference inside `exact` is not zero, 2 for a bad argument.
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
from compare import BadArgument, encode, read_prompts
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_static_kv import StaticContiguousCache, exact
from hf_static_kv.testing import MINIATURES, load_model

Row = dict[str, Any]


def timed(call: Callable[[], torch.Tensor], device: str) -> tuple[torch.Tensor, float]:
    """The result, and the seconds until the device has it."""
    start = time.perf_counter()
    result = call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


@torch.no_grad()
def read_twice(model: PreTrainedModel, ids: torch.Tensor, prompt: int, device: str) -> Row:
    """The largest difference between the logits of one pass and those of a pass for each token, and the times."""
    cache = StaticContiguousCache.from_model(model, ids.shape[1])
    whole = model(ids, use_cache=False).logits[:, prompt - 1 :]
    first, prompt_s = timed(lambda: model(ids[:, :prompt], past_key_values=cache).logits[:, -1:], device)
    steps, decode_s = timed(
        lambda: torch.cat([model(token, past_key_values=cache).logits for token in ids[:, prompt:].split(1, dim=1)], 1),
        device,
    )
    difference = (torch.cat([first, steps], dim=1).float() - whole.float()).abs().max().item()
    return {"difference": difference, "prompt_ms": prompt_s * 1e3, "token_ms": decode_s / steps.shape[1] * 1e3}


def parting(model: PreTrainedModel, inputs: dict[str, torch.Tensor], new_tokens: int) -> int | None:
    """The first new token at which greedy runs with and without a cache differ; None where they never do."""
    prompt = inputs["input_ids"].shape[1]
    common = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    cache = StaticContiguousCache.from_model(model, prompt + new_tokens)
    with_cache = model.generate(**inputs, past_key_values=cache, **common)[0, prompt:].tolist()
    without = model.generate(**inputs, use_cache=False, **common)[0, prompt:].tolist()
    pairs = zip(with_cache, without, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def measure(name: str, args: argparse.Namespace, bar: tqdm) -> list[Row]:
    model, tokenizer = load_model(name, device=args.device, dtype=getattr(torch, args.dtype))
    inputs = encode(read_prompts(args, tokenizer)[0], model, tokenizer, args)
    ids = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, pad_token_id=0)
    rows = []
    for is_exact in (False, True):
        bar.set_description(f"{name}, {'exact' if is_exact else 'as usual'}")
        with exact(model) if is_exact else nullcontext():
            read_twice(model, ids, inputs["input_ids"].shape[1], args.device)  # the first pass of its kind loads code
            row = read_twice(model, ids, inputs["input_ids"].shape[1], args.device)
            row["parting"] = parting(model, inputs, args.max_new_tokens)
        rows.append({"model": name, "exact": is_exact, "prompt": inputs["input_ids"].shape[1], **row})
        bar.update()
    return rows


def table(rows: list[Row], new_tokens: int) -> str:
    lines = [
        f"| model | | largest difference of logits | greedy runs of {new_tokens} part | prompt, ms | a token, ms |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        where = "never" if row["parting"] is None else f"at token {row['parting'] + 1}"
        kind = "**exact**" if row["exact"] else "as usual"
        difference = "0" if row["difference"] == 0 else f"{row['difference']:.1e}"
        lines.append(
            f"| {row['model']} | {kind} | {difference} | {where} | {row['prompt_ms']:.1f} | {row['token_ms']:.1f} |"
        )
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="may be given several times; default: the miniatures")
    parser.add_argument("--prompt", help="default: the first of examples/data/prompts.jsonl that suits the model")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda" if gpu else "cpu", help="default: %(default)s")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="bfloat16" if gpu else "float32",
        help="default: %(default)s",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    args.model = args.model or list(MINIATURES)
    return args


def main() -> int:
    args = parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows: list[Row] = []
    try:
        if args.max_new_tokens < 2:
            raise BadArgument(f"--max-new-tokens must be at least 2, got {args.max_new_tokens}")
        with tqdm(total=2 * len(args.model), disable=None, leave=False) as bar:
            for name in args.model:
                rows += measure(name, args, bar)
    except (BadArgument, ValueError) as error:
        print(f"exact.py: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:  # an operation that exact has no kernel for
        print(f"exact.py: {error}", file=sys.stderr)
        return 1
    print(table(rows, args.max_new_tokens))
    if args.json:
        args.json.write_text(json.dumps({"dtype": args.dtype, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["difference"] == 0 for row in rows if row["exact"]) else 1


if __name__ == "__main__":
    sys.exit(main())
