"""How many times faster a cache generates N tokens: on paper, predicted from pass times, and
measured.

    python benchmarks/bench_speedup.py --model llama --device cpu
    python benchmarks/bench_speedup.py --model llama-3.2-1b --json speedup.json --plot speedup.png

From a prompt of one token. On paper: without a cache N tokens take passes over 1, 2, ... N tokens,
N (N + 1) / 2 in all; with a cache they take N: a factor of (N + 1) / 2. That counts a pass over n
tokens as n passes over one. So the script also measures passes over 1 to N tokens and predicts the
factor from them. Passes and runs in turns; medians over the trials after one warm-up of each; the
spread is minimum to maximum.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import plots
import tables
import torch
from measure import TimedGenerate, seconds, spread
from outputs import at_least, benchmark_parser, run_benchmark
from provenance import provenance
from record_figures import conditions
from tqdm import tqdm
from workload import Workload, check_workload_arguments

Record = dict[str, Any]
CONTENDERS = ("no-cache", "contiguous")


def theoretical(tokens: int) -> float:
    """The factor when every token of a pass costs the same.

    >>> theoretical(128)
    64.5
    """
    return (tokens + 1) / 2


def predicted(tokens: int, pass_ms: dict[int, float]) -> float:
    """The factor when a pass takes its measured time.

    >>> predicted(3, {1: 10.0, 3: 20.0})  # passes of 10, 15 and 20 against three of 10
    1.5
    """
    return passes_s(tokens, pass_ms) * 1e3 / (tokens * pass_ms[1])


def passes_s(tokens: int, pass_ms: dict[int, float]) -> float:
    """Seconds of the passes over 1, 2, ... `tokens` tokens, interpolated between the measured
    lengths.

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


def timers(
    model: Any, workload: Workload, tokens: list[int]
) -> dict[tuple[str, int], Callable[[], float]]:
    """Seconds of a pass without a cache over each length, and of `generate` for each number of
    tokens.
    """
    found: dict[tuple[str, int], Callable[[], float]] = {}
    for length in sorted({1, *tokens}):
        one_pass = partial(model, **workload.prompt(length), use_cache=False, logits_to_keep=1)
        found["pass", length] = partial(seconds, one_pass, workload.device)
    for number in tokens:
        for name in CONTENDERS:
            timed = TimedGenerate(model, name, replace(workload, max_cache_len=number + 1))
            found[name, number] = partial(timed.seconds, number)
    return found


@torch.no_grad()
def measure(args: argparse.Namespace) -> Record:
    """Everything once for warming up, then `--trials` times in turns; a pass five times in each
    turn.
    """
    at_least(tokens=(min(args.tokens), 2), trials=(args.trials, 1))
    check_workload_arguments(args, 1 + max(args.tokens))
    workload = Workload(
        args.model, args.device, args.dtype, 1, 1, args.batch_size, 0, args.real_weights
    )
    with tqdm(desc="loading", leave=False, disable=None) as bar:
        calls = timers(workload.build_model(), workload, args.tokens)
        bar.reset(total=(1 + args.trials) * len(calls))
        times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
        for _ in range(1 + args.trials):
            for (kind, number), call in calls.items():
                bar.set_description(f"{kind}, {number}")
                times[kind, number] += [call() for _ in range(5 if kind == "pass" else 1)]
                bar.update()
    pass_ms = {
        n: statistics.median(taken[5:]) * 1e3
        for (kind, n), taken in times.items()
        if kind == "pass"
    }
    runs = {n: [spread(times[name, n][1:]) for name in CONTENDERS] for n in args.tokens}
    return {
        **provenance(workload.device),
        **workload.summary(),
        "trials": args.trials,
        "pass_ms": pass_ms,
        "rows": [_row(tokens, pass_ms, *run) for tokens, run in runs.items()],
    }


def _row(tokens: int, pass_ms: dict[int, float], uncached: Record, cached: Record) -> Record:
    return {
        "tokens": tokens,
        "theoretical": theoretical(tokens),
        "passes_s": passes_s(tokens, pass_ms),
        "predicted": predicted(tokens, pass_ms),
        "measured": uncached["median"] / cached["median"],
        "uncached_s": uncached,
        "cached_s": cached,
    }


def report(record: Record) -> str:
    pass_ms = {int(length): ms for length, ms in record["pass_ms"].items()}
    longest = max(pass_ms)
    words = (
        f"A pass over {longest} tokens takes {pass_ms[longest] / pass_ms[1]:.1f} times as long as "
        f"a pass over one ({pass_ms[longest]:.2f} ms and {pass_ms[1]:.2f} ms), not {longest} "
        "times: both read the weights once."
    )
    return "\n\n".join([conditions(record), tables.speedup([record]), words])


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__, plot=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10, 50, 128, 200])
    parser.add_argument("--trials", type=int, default=3)
    return parser


def main() -> int:
    return run_benchmark(parser(), measure, report, plots.speedup)


if __name__ == "__main__":
    sys.exit(main())
