"""Drafted tokens: `prompt_lookup_num_tokens` with the captured step, and without.

python examples/speculate.py
python examples/speculate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --text letter.txt --device cuda

A model is asked to correct a text, so that its answer repeats most of it; a miniature, which follows no
requests, goes on with a play and repeats itself. Prints tokens/s, how many passes the answer took, and
whether the tokens are the same. `--plot` draws how many drafts were right in a pass.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_static_kv import GraphDecoder, StaticContiguousCache
from hf_static_kv.testing import load_model

CORPUS = Path(__file__).parent / "data" / "tinyshakespeare.txt"
REQUEST = "Write the following text again. Correct its mistakes and change nothing else.\n\n"


def read_prompt(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """A request to correct the text, or a beginning of the corpus for a model without a template."""
    text = CORPUS.read_text()[: args.characters] if args.text is None else args.text.read_text()
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": REQUEST + text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, return_tensors="pt")


def timed(
    model: PreTrainedModel, inputs: dict[str, Any], args: argparse.Namespace, **how: Any
) -> tuple[Any, float, GraphDecoder]:
    """The tokens of a second call, its seconds, and the decoder. The first call captures."""
    length = inputs["input_ids"].shape[1] + args.max_new_tokens
    cache = StaticContiguousCache.from_model(model, max_cache_len=length)
    decoder = GraphDecoder()
    for _ in range(2):
        cache.reset()
        decoder.accepted = type(decoder.accepted)()
        begin = time.perf_counter()
        tokens = model.generate(
            **inputs, past_key_values=cache, custom_generate=decoder, do_sample=False,
            max_new_tokens=args.max_new_tokens, **how,
        ).tolist()[0]  # fmt: skip
        seconds = time.perf_counter() - begin
    return tokens, seconds, decoder


def draw(counts: Counter[int], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    numbers = range(max(counts) + 1)
    axes.bar(numbers, [counts[number] for number in numbers], color="#3b6ea5")
    axes.set(xlabel="drafts that were right", ylabel="passes", xticks=list(numbers))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama", help="a short name, a hub id or a folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--text", type=Path, help="a file; default: a part of the corpus")
    parser.add_argument("--characters", type=int, default=600, help="of the corpus (%(default)s)")
    parser.add_argument("--drafts", type=int, default=8, help="in a pass (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="%(default)s")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    args = parser.parse_args(arguments)

    model, tokenizer = load_model(args.model, device=args.device)
    inputs = {name: value.to(args.device) for name, value in read_prompt(args, tokenizer).items()}
    plain, seconds, _ = timed(model, inputs, args)
    drafted, faster, decoder = timed(model, inputs, args, prompt_lookup_num_tokens=args.drafts)

    number = len(drafted) - inputs["input_ids"].shape[1]
    accepted = decoder.accepted
    print(tokenizer.decode(drafted[-number:], skip_special_tokens=True))
    print(f"\nwithout drafts: {number / seconds:.0f} tokens/s, {number - 1} passes")
    passes = number - 1 - accepted.tokens
    print(f"with drafts:    {number / faster:.0f} tokens/s, {passes} passes")
    if accepted.passes:
        mean = accepted.tokens / accepted.passes
        print(f"of these {accepted.passes} had drafts, and {mean:.1f} of {args.drafts} were right")
    print(f"the same tokens: {drafted == plain}")
    if args.plot and accepted.counts:
        draw(accepted.counts, args.plot)
        print(f"picture: {args.plot}")
    return 0 if drafted == plain else 1


if __name__ == "__main__":
    sys.exit(main())
