"""What sampling costs over greedy decoding: time per token with each set of processors.

    python benchmarks/bench_sampling.py --model llama-3.2-1b --json sampling.json
    python benchmarks/bench_sampling.py --model llama --device cpu --prompt-len 16 --new-tokens 8 --trials 2

`GraphDecoder()` samples inside the captured step, `DynamicCache` in the loop of `generate`. Both
run in this process on one model, all cases in turns. After a call for one token and a call for all
N as warm-up, each trial is a call for one token (T1) and a call for N (TN): a token takes
(TN - T1) / (N - 1). `DynamicCache` makes `--plain-tokens` only. On a CPU the decoder's step runs
without a graph. Exit status 1 if the decoder fell back or the host sampled for it, 2 for a bad
argument.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from measure import TimedGenerate, in_turns, spread, token_ms
from outputs import at_least, benchmark_parser, run_benchmark
from records import Record
from workload import Workload, build_workload

from hf_static_kv import GraphDecoder
from hf_static_kv.program.selecting import SelectingStep

CONTENDERS = ["graph", "dynamic"]
T = {"do_sample": True, "top_k": 0, "temperature": 0.8}  # 0: no top-k; `generate` would have one
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T": T,
    "T, top-k 50": {**T, "top_k": 50},
    "T, top-k 50, top-p 0.9": {**T, "top_k": 50, "top_p": 0.9},
    "min-p 0.05": {**T, "temperature": 1.0, "min_p": 0.05},
    "T, top-p 0.9, repetition penalty 1.1": {**T, "top_p": 0.9, "repetition_penalty": 1.1},
}


def selects_on_device(decoder: GraphDecoder) -> bool:
    """Whether every step of this decoder selects its tokens itself: its inside says so."""
    steps = [step for kinds in decoder.steps.by_cache.values() for step in kinds.values()]
    return all(isinstance(step, SelectingStep) for step in steps)


def measure_cases(workload: Workload, plain_tokens: int, trials: int) -> list[Record]:
    """A row for each contender and case."""
    model = workload.build_model()
    sides = {name: TimedGenerate(model, name, workload) for name in CONTENDERS}
    tokens = {"graph": workload.new_tokens, "dynamic": min(plain_tokens, workload.new_tokens)}
    rows: list[Record] = []
    calls = {}
    for name, side in sides.items():
        for case, settings in CASES.items():
            trial = partial(timed_trial, side, tokens[name], settings)
            for _ in range(2):  # a kernel may take over in the second
                trial()
            decoder = side.keywords.get("custom_generate")
            row = {"contender": name, "case": case, "new_tokens": tokens[name]}
            row["fallback_reason"] = decoder and decoder.fallback_reason
            row["on_device"] = decoder and selects_on_device(decoder)
            rows.append(row)
            calls[name, case] = trial
    times = in_turns(calls, trials)
    for row in rows:
        row["trials_s"] = times[row["contender"], row["case"]]
        row["ms"] = spread(token_ms(row["trials_s"], row["new_tokens"]))
    return rows


def timed_trial(side: TimedGenerate, new_tokens: int, settings: dict[str, Any]) -> list[float]:
    """Seconds of a call for one token, and of a call for all."""
    return [side.seconds(length, **settings) for length in (1, new_tokens)]


def measure(args: argparse.Namespace) -> Record:
    at_least(args, prompt_len=1, new_tokens=3, trials=1, plain_tokens=3)
    workload = build_workload(args)
    rows = measure_cases(workload, args.plain_tokens, args.trials)
    return {**workload.origin(), "trials": args.trials, "settings": CASES, "rows": rows}


def problems(record: Record) -> list[str]:
    """Cases that the decoder did not run as a captured step that samples."""
    ours = [row for row in record["rows"] if row["contender"] == "graph"]
    fell_back = [row for row in ours if row["fallback_reason"]]
    lines = [f"{row['case']} fell back: {row['fallback_reason']}" for row in fell_back]
    by_host = [row["case"] for row in ours if not row["fallback_reason"] and not row["on_device"]]
    # The first alone: the decoder has its step in later cases too.
    return lines + [f"{case}: the host selected the tokens" for case in by_host[:1]]


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    words = "limit for DynamicCache (%(default)s)"
    parser.add_argument("--plain-tokens", type=int, default=32, help=words)
    parser.add_argument("--trials", type=int, default=7, help="%(default)s")
    return parser


def main() -> int:
    return run_benchmark(parser(), measure, problems)


if __name__ == "__main__":
    sys.exit(main())
