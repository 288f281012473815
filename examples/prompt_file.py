"""Read a long text once, keep its keys and values in a file, and ask questions of it from the file.

    python examples/prompt_file.py                   # a miniature, some hundred tokens of a play
    python examples/prompt_file.py --model smollm2 --tokens 2048 --question "What do the citizens want?"
    python examples/prompt_file.py --model Qwen/Qwen3-1.7B --device cuda --dtype bfloat16 --tokens 32000

The first run reads the text and writes the file, later runs find it. For each question the time to
the first token is printed, without the file (all tokens are computed) and with it (the file is
loaded, the question is computed). --model takes a short name, a hub id, a folder or a GGUF file.
Exit status 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from common import BadArgument
from transformers import PreTrainedModel

from hf_static_kv import CacheFile, StaticContiguousCache
from hf_static_kv.testing import load_model

TEXT = Path(__file__).parent / "data" / "tinyshakespeare.txt"
QUESTIONS = ["Who speaks first?", "What do the citizens want?"]


def timed(call: Callable[[], torch.Tensor], device: str) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    result = call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def read_text(model: PreTrainedModel, ids: torch.Tensor, path: Path) -> None:
    """Compute the keys and values of the text and write them to the file."""
    cache = StaticContiguousCache.from_model(model, ids.shape[1])
    seconds, _ = timed(lambda: generate(model, ids, 1, past_key_values=cache), str(model.device))
    print(f"{ids.shape[1]} tokens read in {seconds:.2f} s")
    seconds, _ = timed(lambda: cache.save(path, model=model), str(model.device))
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB written in {seconds:.2f} s")


def generate(
    model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, **how: object
) -> torch.Tensor:
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **how
    )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="llama", help="short name, hub id, folder or GGUF file (%(default)s)"
    )
    parser.add_argument("--text", type=Path, default=TEXT, help="a text file; default: Shakespeare")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of the text (%(default)s)")
    parser.add_argument(
        "--file", type=Path, default=Path("text.safetensors"), help="the cache file (%(default)s)"
    )
    parser.add_argument("--question", action="append", help="may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(argv)


def answer(model: PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """Print both times to the first token; returns the tokens of the answer."""
    without, _ = timed(lambda: generate(model, ids, 1), args.device)

    def from_file() -> torch.Tensor:
        nonlocal cache
        cache = StaticContiguousCache.load(args.file, model)
        return generate(model, ids, 1, past_key_values=cache)

    cache: StaticContiguousCache | None = None
    within, tokens = timed(from_file, args.device)
    print(
        f"first token after {without * 1e3:.0f} ms without the file, {within * 1e3:.0f} ms with it",
        end=" ",
    )
    print(f"({without / within:.1f} times sooner)")
    return generate(model, tokens, args.max_new_tokens - 1, past_key_values=cache)[
        0, ids.shape[1] :
    ]


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, tokenizer = load_model(
            args.model, device=args.device, dtype=getattr(torch, args.dtype)
        )
        text = (
            tokenizer(args.text.read_text(), return_tensors="pt")
            .input_ids[:, : args.tokens]
            .to(model.device)
        )
        if not args.file.exists():
            read_text(model, text, args.file)
        with CacheFile(args.file) as file:
            if not torch.equal(file.tokens, text.cpu()):
                raise BadArgument(
                    f"{args.file} holds another text: remove it, or give another --file"
                )
        for question in args.question or QUESTIONS:
            asked = tokenizer(
                f"\n\n{question}\n", return_tensors="pt", add_special_tokens=False
            ).input_ids
            tokens = answer(model, torch.cat([text, asked.to(model.device)], dim=1), args)
            print(f"{question} {tokenizer.decode(tokens, skip_special_tokens=True)!r}")
    except (BadArgument, OSError, ValueError) as error:  # the file of another model says so itself
        print(f"prompt_file.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
