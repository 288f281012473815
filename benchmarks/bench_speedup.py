"""How many times faster a cache makes N tokens, counted on paper and measured, and where the difference goes.

    python benchmarks/bench_speedup.py --model llama --device cpu
    python benchmarks/bench_speedup.py --model llama-3.2-1b --json speedup.json --plot speedup.png

From a prompt of one token. On paper: without a cache N tokens take passes over 1, 2, ... N tokens, N (N + 1) / 2 in
all; with one they take N: a factor of (N + 1) / 2. That counts a pass over n tokens as n times a pass over one. So the
script also measures what passes over 1 to N tokens take, and predicts the factor from them.
Passes and runs in turns, medians over the trials after one warm-up of each; the spread is least to greatest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS, OURS, Keywords
from measure import seconds, spread
from outputs import benchmark_parser, check_outputs, save_picture, write_outputs
from tqdm import tqdm
from workload import BadArgument, Workload, check_workload_arguments

from hf_static_kv.testing import provenance

Record = dict[str, Any]


def theoretical(tokens: int) -> float:
    """The factor when every token of a pass costs the same.

    >>> theoretical(128)
    64.5
    """
    return (tokens + 1) / 2


def predicted(tokens: int, pass_ms: dict[int, float]) -> float:
    """The factor when a pass takes what it was measured to take, on straight lines between the measured lengths.

    >>> predicted(3, {1: 10.0, 3: 20.0})  # passes of 10, 15 and 20 against three of 10
    1.5
    """
    return passes_s(tokens, pass_ms) * 1e3 / (tokens * pass_ms[1])


def passes_s(tokens: int, pass_ms: dict[int, float]) -> float:
    """Seconds of the passes over 1, 2, ... `tokens` tokens.

    >>> passes_s(3, {1: 10.0, 3: 20.0})
    0.045
    """
    return sum(_between(n, pass_ms) for n in range(1, tokens + 1)) / 1e3


def _between(length: int, pass_ms: dict[int, float]) -> float:
    below = max(n for n in pass_ms if n <= length)
    above = min(n for n in pass_ms if n >= length)
    if below == above:
        return pass_ms[below]
    return pass_ms[below] + (pass_ms[above] - pass_ms[below]) * (length - below) / (above - below)


def things_to_time(model: Any, workload: Workload, tokens: list[int]) -> dict[tuple[str, int], Callable[[], object]]:
    """Passes without a cache over each length, and runs of `generate` for each number, uncached and with ours."""
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for length in sorted({1, *tokens}):
        calls["pass", length] = partial(model, **workload.prompt(length), use_cache=False, logits_to_keep=1)
    for number in tokens:
        for name in ("no-cache", OURS):
            next_keywords = CONTENDERS[name].set_up(model, number + 1, workload.batch_size)
            calls[name, number] = partial(_generate, model, workload.prompt(), next_keywords, number)
    return calls


def _generate(model: Any, prompt: dict[str, torch.Tensor], next_keywords: Callable[[], Keywords], tokens: int) -> None:
    model.generate(**prompt, **next_keywords(), max_new_tokens=tokens, do_sample=False)


@torch.no_grad()
def measure_all(args: argparse.Namespace, workload: Workload) -> Record:
    """Every thing to time once for warming up, then `--trials` times, in turns; a pass five times in each turn."""
    with tqdm(desc="loading", leave=False, disable=None) as bar:
        calls = things_to_time(workload.build_model(), workload, args.tokens)
        bar.reset(total=(1 + args.trials) * len(calls))
        times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
        for _ in range(1 + args.trials):
            for (kind, number), call in calls.items():
                bar.set_description(f"{kind}, {number}")
                times[kind, number] += [seconds(call, workload.device) for _ in range(5 if kind == "pass" else 1)]
                bar.update()
    pass_ms = {n: statistics.median(taken[5:]) * 1e3 for (kind, n), taken in times.items() if kind == "pass"}
    runs = {n: {name: spread(times[name, n][1:]) for name in ("no-cache", OURS)} for n in args.tokens}
    rows = [
        {
            "tokens": tokens,
            "theoretical": theoretical(tokens),
            "passes_s": passes_s(tokens, pass_ms),
            "predicted": predicted(tokens, pass_ms),
            "measured": run["no-cache"]["median"] / run[OURS]["median"],
            "uncached_s": run["no-cache"],
            "cached_s": run[OURS],
        }
        for tokens, run in runs.items()
    ]
    return {
        **provenance(workload.device),
        "model": workload.model,
        "dtype": workload.dtype,
        "batch_size": workload.batch_size,
        "random_weights": workload.has_random_weights,
        "trials": args.trials,
        "pass_ms": pass_ms,
        "rows": rows,
    }


def markdown(record: Record) -> str:
    weights = "random weights" if record["random_weights"] else "trained weights"
    pass_ms = {int(length): ms for length, ms in record["pass_ms"].items()}
    lines = [
        f"{record['model']} ({weights}, {record['dtype']}), batch {record['batch_size']}, from a prompt of one token; "
        f"{record['hardware']}, torch {record['torch']}, transformers {record['transformers']}, commit "
        f"{record['commit']}. Median (least to greatest) of {record['trials']} trials.",
        "",
        "| new tokens | on paper, (N + 1) / 2 | predicted from pass times | measured | without a cache, s | ours, s "
        "| a pass over N, ms |",
        "|---" * 7 + "|",
    ]
    for row in record["rows"]:
        without, ours = (
            f"{row[key]['median']:.2f} ({row[key]['min']:.2f} to {row[key]['max']:.2f})"
            for key in ("uncached_s", "cached_s")
        )
        lines.append(
            f"| {row['tokens']} | {row['theoretical']:.1f} | {row['predicted']:.2f} | **{row['measured']:.2f}** "
            f"| {without} | {ours} | {pass_ms[row['tokens']]:.2f} |"
        )
    return "\n".join([*lines, "", *reasons(record["rows"], pass_ms)])


def reasons(rows: list[Record], pass_ms: dict[int, float]) -> list[str]:
    """Why the factor is what it is, as far as these figures tell."""
    longest, words = max(pass_ms), []
    slower = [row for row in rows if row["measured"] < 1]
    if slower:
        at = [
            f"{row['tokens']}" + (" (within the spread)" if row["uncached_s"]["max"] >= row["cached_s"]["min"] else "")
            for row in slower
        ]
        words += [f"**With a cache it is slower here**, at {', '.join(at)} tokens: there is nothing to save yet.", ""]
    words.append(
        f"Why so far from paper: a pass over {longest} tokens takes {pass_ms[longest] / pass_ms[1]:.1f} times a pass "
        f"over one ({pass_ms[longest]:.2f} ms against {pass_ms[1]:.2f}), not {longest} times. The weights are read "
        "once for either, and Python sends as many operations for one token as for many; until a pass is long enough "
        "for its arithmetic to count, leaving tokens out of it saves little."
    )
    drifted = [row for row in rows if row["uncached_s"]["median"] < passes_s(row["tokens"], pass_ms)]
    if drifted:
        row = drifted[-1]
        words.append(
            f"Passes and runs do not fit together here: {row['tokens']} passes come to "
            f"{passes_s(row['tokens'], pass_ms):.2f} s, and the run that makes them took "
            f"{row['uncached_s']['median']:.2f} s. The host's pace changed in between; the prediction is no closer "
            "than that."
        )
    else:
        words.append("What prediction and measurement differ by is the loop of `generate` and the cached attention.")
    return words


def plot(record: Record, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), constrained_layout=True)
    x = [row["tokens"] for row in record["rows"]]
    for key, words, style in (
        ("theoretical", "on paper, (N + 1) / 2", "--"),
        ("predicted", "predicted from pass times", ":"),
        ("measured", "measured", "-"),
    ):
        axis.plot(x, [row[key] for row in record["rows"]], style, marker="o", label=words)
    axis.set(xlabel="new tokens from a prompt of one", ylabel="times faster than without a cache", yscale="log")
    axis.set_title(f"{record['model']}, {record['dtype']}, {record['hardware']}", fontsize=10)
    axis.set_xticks(x)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    save_picture(figure, path)


def parse_args() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10, 50, 128, 200])
    parser.add_argument("--trials", type=int, default=3)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    try:
        if min(args.tokens) < 2 or args.trials < 1:
            raise BadArgument("--tokens must be at least 2, --trials at least 1")
        check_outputs(args)
        check_workload_arguments(args, 1 + max(args.tokens))
        workload = Workload(args.model, args.device, args.dtype, 1, 1, args.batch_size, 0, args.real_weights)
        record = measure_all(args, workload)
    except (BadArgument, ValueError) as error:  # a ValueError says in one line that the weights cannot be loaded
        print(f"bench_speedup.py: {error}", file=sys.stderr)
        return 2
    write_outputs(args, record, markdown, plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
