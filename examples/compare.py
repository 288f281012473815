"""Compare the tokens of `generate` with and without the cache, on three small trained models or on
your own.

    python examples/compare.py                             # Llama, Qwen3 and Gemma 3 miniatures; two minutes
    python examples/compare.py --model smollm2 --max-new-tokens 64
    python examples/compare.py --model Qwen/Qwen3-1.7B --device cuda --against no-cache,dynamic

--model takes a short name, a hub id, a folder or a GGUF file. Exit status 1 when tokens differ, 2
for a bad argument.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub
import torch
import transformers
from common import BadArgument, encode, environment, read_prompts
from token_agreement import TokenAgreement
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, StaticCache
from transformers.generation.streamers import BaseStreamer

from hf_static_kv import StaticContiguousCache
from hf_static_kv.testing import MINIATURES, load_model

MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0},
}
OURS = "contiguous"
CACHES = {
    "no-cache": None,
    "dynamic": lambda model, max_cache_len: DynamicCache(config=model.config),
    "static": lambda model, max_cache_len: StaticCache(
        config=model.config, max_cache_len=max_cache_len
    ),
    OURS: StaticContiguousCache.from_model,
}


@dataclass
class Run:
    """One call of `generate`: the new tokens and the seconds that each of them took."""

    tokens: list[int]
    seconds: list[float]
    cache_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        """From the median time per token.

        The first token is left out: its time is that of the prefill.
        """
        return 1 / statistics.median(self.seconds[1:]) if len(self.seconds) > 1 else float("nan")

    def growth(self) -> tuple[float, float]:
        """Median milliseconds per token over the first and the last eighth of the run."""
        steps = self.seconds[1:] or self.seconds
        part = max(1, len(steps) // 8)
        return statistics.median(steps[:part]) * 1e3, statistics.median(steps[-part:]) * 1e3


@dataclass
class Comparison:
    """Our cache against another cache or none, on one prompt in one mode."""

    model: str
    prompt: int
    mode: str
    against: str
    theirs: Run
    ours: Run
    equal: bool
    common_prefix: int
    difference: dict | None = field(default=None)

    @property
    def speed_up(self) -> float:
        return self.ours.tokens_per_second / self.theirs.tokens_per_second


class Clock(BaseStreamer):
    """Records when each token arrives and moves the progress bar.

    Reading the token synchronizes with the device.
    """

    def __init__(self, bar: tqdm) -> None:
        self.bar, self.seconds, self.tokens = bar, [], []
        self.last = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if value.ndim > 1:  # the prompt
            return
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now
        self.tokens += value.tolist()
        self.bar.update()

    def end(self) -> None:
        pass


def run(
    model: PreTrainedModel,
    inputs: dict,
    cache_name: str,
    mode: str,
    args: argparse.Namespace,
    bar: tqdm,
) -> Run:
    build = CACHES[cache_name]
    cache = build(model, inputs["input_ids"].shape[1] + args.max_new_tokens) if build else None
    how = {"use_cache": False} if cache is None else {"past_key_values": cache}
    torch.manual_seed(args.seed)
    clock = Clock(bar)
    model.generate(
        **inputs,
        **how,
        **MODES[mode],
        max_new_tokens=args.max_new_tokens,
        streamer=clock,
        disable_compile=True,
        pad_token_id=model.generation_config.pad_token_id or 0,
    )
    return Run(clock.tokens, clock.seconds, getattr(cache, "memory_bytes", None))


@torch.no_grad()
def explain_difference(
    model: PreTrainedModel, inputs: dict, theirs: list[int], ours: list[int], at: int
) -> dict:
    """The first difference of two runs: both tokens, the gap of the two best logits, and its
    rounding error.
    """
    prompt = inputs["input_ids"]
    ids = torch.cat(
        [prompt, torch.tensor([theirs[:at]], device=prompt.device, dtype=prompt.dtype)], dim=1
    )
    logits = model(ids, use_cache=False).logits[0, -1].float()
    best = logits.topk(2).values
    # Each layer adds to the residual stream twice and each sum is rounded: the errors add up as a
    # random walk.
    roundings = (2 * model.config.get_text_config().num_hidden_layers + 1) ** 0.5
    rounding = torch.finfo(model.dtype).eps * logits.abs().max().item() * roundings
    gap = (best[0] - best[1]).item()
    return {
        "position": at,
        "their_token": theirs[at] if at < len(theirs) else None,
        "our_token": ours[at] if at < len(ours) else None,
        "gap": gap,
        "rounding": rounding,
        "within_rounding": gap <= rounding,
    }


def compare(
    name: str,
    prompt: int,
    model: PreTrainedModel,
    inputs: dict,
    args: argparse.Namespace,
    bar: tqdm,
) -> list[Comparison]:
    """All modes of one model on one prompt, our cache against each of `args.against`."""
    comparisons = []
    for mode in MODES:
        bar.set_description(f"{name}, {mode}")
        runs = {
            cache: run(model, inputs, cache, mode, args, bar) for cache in [*args.against, OURS]
        }
        ours = runs.pop(OURS)
        for against, theirs in runs.items():
            agreement = TokenAgreement().compute(
                predictions=[ours.tokens], references=[theirs.tokens]
            )
            equal, prefix = agreement["exact_match"] == 1.0, agreement["common_prefix"][0]
            difference = (
                None
                if equal
                else explain_difference(model, inputs, theirs.tokens, ours.tokens, prefix)
            )
            comparisons.append(
                Comparison(name, prompt, mode, against, theirs, ours, equal, prefix, difference)
            )
    return comparisons


def print_text(
    name: str, prompt: str, comparisons: list[Comparison], tokenizer: PreTrainedTokenizerBase
) -> None:
    """For each mode: the first lines of the text, the verdict, and the time per token."""
    for mode in MODES:
        mine = [c for c in comparisons if c.mode == mode]
        ours = mine[0].ours
        lines = (prompt + tokenizer.decode(ours.tokens, skip_special_tokens=True)).splitlines()
        more = [f"... ({len(lines) - 7} more lines)"] if len(lines) > 8 else []
        print(f"\n{name}, {mode}")
        print(
            textwrap.indent(
                "\n".join([*lines[:7], *more] if more else lines), "    | ", lambda line: True
            )
        )
        for c in mine:
            print(verdict(c, tokenizer))


def verdict(c: Comparison, tokenizer: PreTrainedTokenizerBase) -> str:
    """Whether the tokens are equal, and how the time per token grew."""
    (theirs_first, theirs_last), (ours_first, ours_last) = c.theirs.growth(), c.ours.growth()
    theirs = f"{c.against} {theirs_first:.1f} -> {theirs_last:.1f}"
    growth = f"{theirs}, {OURS} {ours_first:.1f} -> {ours_last:.1f}"
    result = (
        f"  {len(c.ours.tokens)} tokens, equal to {c.against}"
        if c.equal
        else describe_difference(c, tokenizer)
    )
    return f"{result}; ms per token, first to last: {growth}"


def describe_difference(c: Comparison, tokenizer: PreTrainedTokenizerBase) -> str:
    d = c.difference
    tokens = [
        repr(tokenizer.decode([t])) if t is not None else "the end"
        for t in (d["their_token"], d["our_token"])
    ]
    within = "within" if d["within_rounding"] else "NOT within"
    return (
        f"  DIFFERENT from {c.against} at new token {d['position']}: {tokens[0]} there, "
        f"{tokens[1]} here; the two best logits are {d['gap']:.2g} apart, {within} the rounding "
        f"error of {d['rounding']:.2g}"
    )


def print_table(comparisons: list[Comparison]) -> None:
    head = f"{'model':16} prompt {'mode':8} {'against':9} {'tokens':9}"
    print(f"\n{head} {'theirs':>9} {'ours':>9} {'speed-up':>9} {'cache':>10}")
    for c in comparisons:
        verdict = "equal" if c.equal else f"DIFF @{c.common_prefix}"
        case = f"{c.model[-16:]:16} {c.prompt:6} {c.mode:8} {c.against:9} {verdict:9}"
        speeds = f"{c.theirs.tokens_per_second:7.0f}/s {c.ours.tokens_per_second:7.0f}/s {c.speed_up:8.1f}x"
        print(f"{case} {speeds} {c.ours.cache_bytes / 2**20:6.2f} MiB")
    equal = sum(c.equal for c in comparisons)
    print(f"{equal} of {len(comparisons)} runs give the same tokens")


def plot(comparisons: list[Comparison], path: Path) -> None:
    """Time per token against position: it grows without a cache and stays flat with one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(c.model for c in comparisons))
    figure, axes = plt.subplots(
        1,
        len(names),
        figsize=(1 + 4 * len(names), 4),
        sharey=True,
        squeeze=False,
        constrained_layout=True,
    )
    highest = 0.0
    for axis, name in zip(axes[0], names, strict=True):
        mine = [c for c in comparisons if c.model == name and c.mode == "greedy" and c.prompt == 1]
        for label, one in [
            *((c.against, c.theirs) for c in mine),
            (f"{OURS} (ours)", mine[0].ours),
        ]:
            steps = [second * 1e3 for second in one.seconds[1:]]
            smooth = [statistics.median(steps[max(0, i - 4) : i + 5]) for i in range(len(steps))]
            highest = max(highest, *smooth)
            (line,) = axis.plot(range(2, len(steps) + 2), smooth, label=label)
            axis.plot(
                range(2, len(steps) + 2), steps, color=line.get_color(), alpha=0.2, linewidth=0.7
            )
        axis.set(title=name, xlabel="new token")
        axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="ms per token (median of 9)", ylim=(0, 1.2 * highest))
    axes[0][0].legend()
    figure.savefig(path, dpi=130)


def as_json(comparisons: list[Comparison], args: argparse.Namespace) -> str:
    records = []
    for c in comparisons:
        record = {"model": c.model, "mode": c.mode, "against": c.against, "equal": c.equal}
        record |= {
            "common_prefix": c.common_prefix,
            "difference": c.difference,
            "speed_up": c.speed_up,
        }
        for name, one in {"theirs": c.theirs, "ours": c.ours}.items():
            record[name] = {**vars(one), "tokens_per_second": one.tokens_per_second}
        records.append(record)
    return json.dumps({**environment(args.device), "comparisons": records}, indent=1) + "\n"


def cache_names(text: str) -> list[str]:
    names = text.split(",")
    choices = [name for name in CACHES if name != OURS]
    if unknown := [name for name in names if name not in choices]:
        raise argparse.ArgumentTypeError(
            f"unknown {', '.join(unknown)}: choose from {', '.join(choices)}"
        )
    return names


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=list(MINIATURES),
        help="short name, hub id, folder or GGUF file",
    )
    parser.add_argument(
        "--against",
        type=cache_names,
        default=["no-cache"],
        help="no-cache, dynamic, static; separated by commas",
    )
    parser.add_argument("--max-new-tokens", type=int, default=240)
    parser.add_argument(
        "--prompt", help="your own; default: a few from examples/data/prompts.jsonl"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--attn",
        choices=["sdpa", "eager"],
        help="attention implementation; default: the model's own",
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--plot", type=Path, help="write the picture here")
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: this machine has no CUDA device")
    return args


def compare_model(name: str, args: argparse.Namespace) -> list[Comparison]:
    """Load one model, compare on each prompt, and print the results."""
    try:
        model, tokenizer = load_model(
            name, device=args.device, dtype=getattr(torch, args.dtype), attn=args.attn
        )
    except ValueError as error:
        raise BadArgument(str(error)) from error
    prompts = read_prompts(args, tokenizer)
    encoded = [encode(prompt, model, tokenizer, args) for prompt in prompts]
    total = len(prompts) * len(MODES) * (len(args.against) + 1) * args.max_new_tokens
    with tqdm(total=total, unit=" tokens", leave=False, disable=None) as bar:
        results = [
            compare(name, i + 1, model, inputs, args, bar) for i, inputs in enumerate(encoded)
        ]
    print_text(name, "" if tokenizer.chat_template else prompts[0], results[0], tokenizer)
    for c in (c for comparisons in results[1:] for c in comparisons if not c.equal):
        print(verdict(c, tokenizer))
    return [comparison for comparisons in results for comparison in comparisons]


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()
    try:
        comparisons = [
            comparison for name in args.model for comparison in compare_model(name, args)
        ]
    except BadArgument as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    print_table(comparisons)
    if args.json:
        args.json.write_text(as_json(comparisons, args))
    if args.plot:
        plot(comparisons, args.plot)
        print(f"{args.plot}: time per token as the sequence grows")
    return 0 if all(comparison.equal for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
