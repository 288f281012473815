"""How many times faster a cache makes N tokens, counted on paper and measured, and where the difference goes.

    python benchmarks/bench_speedup.py --model llama --device cpu
    python benchmarks/bench_speedup.py --model llama-3.2-1b --json speedup.json --plot speedup.png

From a prompt of one token. On paper: without a cache N tokens take passes over 1, 2, ... N tokens, N (N + 1) / 2 in
all; with one they take N: a factor of (N + 1) / 2. That counts a pass over n tokens as n times a pass over one. So the
script also measures what passes over 1 to N tokens take, and predicts the factor from them.
Medians over trials in turns, after one warm-up run of each; the spread is least to greatest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS, OURS
from measure import seconds, spread
from outputs import add_output_arguments, write_outputs
from tqdm import tqdm
from workload import BadArgument, Workload, add_workload_arguments, check_workload_arguments

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
    return sum(_between(n, pass_ms) for n in range(1, tokens + 1)) / (tokens * pass_ms[1])


def _between(length: int, pass_ms: dict[int, float]) -> float:
    below = max(n for n in pass_ms if n <= length)
    above = min(n for n in pass_ms if n >= length)
    if below == above:
        return pass_ms[below]
    return pass_ms[below] + (pass_ms[above] - pass_ms[below]) * (length - below) / (above - below)


def measure_passes(model: Any, workload: Workload, lengths: list[int], trials: int, bar: tqdm) -> dict[int, float]:
    """Median milliseconds of one pass without a cache over each length."""
    taken: dict[int, float] = {}
    for length in lengths:
        bar.set_description(f"a pass over {length}")
        prompt = workload.prompt(length)

        def forward(prompt: dict[str, torch.Tensor] = prompt) -> None:
            model(**prompt, use_cache=False, logits_to_keep=1)

        times = [seconds(forward, workload.device) for _ in range(3 + 5 * trials)][3:]
        taken[length] = statistics.median(times) * 1e3
        bar.update()
    return taken


def measure_runs(model: Any, workload: Workload, tokens: int, trials: int, bar: tqdm) -> dict[str, dict[str, float]]:
    """Seconds of `generate` for this many tokens, without a cache and with ours, in turns."""
    workload = replace(workload, new_tokens=tokens, max_cache_len=tokens + 1)
    prompt = workload.prompt()
    keywords = {name: CONTENDERS[name].set_up(model, tokens + 1, workload.batch_size) for name in ("no-cache", OURS)}
    times: dict[str, list[float]] = {name: [] for name in keywords}
    for _ in range(1 + trials):
        for name, next_keywords in keywords.items():
            bar.set_description(f"{tokens} tokens, {name}")
            more = next_keywords()
            times[name].append(
                seconds(
                    lambda more=more: model.generate(**prompt, **more, max_new_tokens=tokens, do_sample=False),
                    workload.device,
                )
            )
            bar.update()
    return {name: spread(values[1:]) for name, values in times.items()}


@torch.no_grad()
def measure_all(args: argparse.Namespace, workload: Workload) -> Record:
    lengths = sorted({1, *args.tokens})
    with tqdm(total=len(lengths) + 2 * len(args.tokens) * (1 + args.trials), leave=False, disable=None) as bar:
        model = workload.build_model()
        pass_ms = measure_passes(model, workload, lengths, args.trials, bar)
        runs = {tokens: measure_runs(model, workload, tokens, args.trials, bar) for tokens in args.tokens}
    rows = [
        {
            "tokens": tokens,
            "theoretical": theoretical(tokens),
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
    longest = max(pass_ms)
    slower = [str(row["tokens"]) for row in record["rows"] if row["measured"] < 1]
    if slower:
        lines += [
            "",
            f"**With a cache it is slower here**, at {', '.join(slower)} tokens: there is nothing to save yet.",
        ]
    lines += [
        "",
        f"Why so far from paper: a pass over {longest} tokens takes {pass_ms[longest] / pass_ms[1]:.1f} times a pass "
        f"over one ({pass_ms[longest]:.2f} ms against {pass_ms[1]:.2f}), not {longest} times. The weights are read "
        "once for either, and Python sends as many operations for one token as for many; until a pass is long enough "
        "for its arithmetic to count, leaving tokens out of it saves little. What prediction and measurement differ by "
        "is the loop of `generate` and the cached attention over the text.",
    ]
    return "\n".join(lines)


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
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10, 50, 128, 200])
    parser.add_argument("--trials", type=int, default=3)
    add_output_arguments(parser)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    try:
        if min(args.tokens) < 2 or args.trials < 1:
            raise BadArgument("--tokens must be at least 2, --trials at least 1")
        check_workload_arguments(args, 1 + max(args.tokens))
    except BadArgument as error:
        print(f"bench_speedup.py: {error}", file=sys.stderr)
        return 2
    workload = Workload(args.model, args.device, args.dtype, 1, 1, args.batch_size, 0, args.real_weights)
    record = measure_all(args, workload)
    write_outputs(args, record, markdown, plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
