"""What sampling costs over greedy decoding: time per token with each set of processors.

    python benchmarks/bench_sampling.py --model llama-3.2-1b --json benchmarks/results/sampling-llama-3.2-1b-h200.json
    python benchmarks/bench_sampling.py --model llama --device cpu --prompt-len 16 --new-tokens 8 --trials 2

`GraphDecoder()` samples inside the captured step, `DynamicCache` in the loop of `generate`. Both
run in this process on one model. After a call for one token and a call for all N as warm-up, each
trial is a call for one token (T1) and a call for N (TN): a token takes (TN - T1) / (N - 1). All
cases and both contenders run in turns, greedy decoding with them. `DynamicCache` makes
`--plain-tokens` only. On a CPU the decoder's step runs without a graph. Median (minimum to maximum)
over the trials; factors are over greedy decoding with the same contender. Exit status 1 when the
decoder fell back or the host sampled for it, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

import tables
from measure import TimedGenerate, spread
from outputs import at_least, benchmark_parser, run_benchmark
from provenance import provenance
from record_figures import conditions
from tqdm import tqdm
from workload import Workload, check_workload_arguments, context_length

from hf_static_kv import GraphDecoder
from hf_static_kv.program.step import SelectingStep

Record = dict[str, Any]
CONTENDERS = ["graph", "dynamic"]
T = {
    "do_sample": True,
    "top_k": 0,
    "temperature": 0.8,
}  # 0: no top-k, where `generate` would have one
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T": T,
    "T, top-k 50": {**T, "top_k": 50},
    "T, top-k 50, top-p 0.9": {**T, "top_k": 50, "top_p": 0.9},
    "min-p 0.05": {**T, "temperature": 1.0, "min_p": 0.05},
    "T, top-p 0.9, repetition penalty 1.1": {**T, "top_p": 0.9, "repetition_penalty": 1.1},
}


def selects_on_device(decoder: GraphDecoder) -> bool:
    """Whether every step of this decoder selects its tokens itself.

    This reads the package's inside.
    """
    return all(
        isinstance(step, SelectingStep)
        for steps in decoder._steps.values()
        for step in steps.values()
    )


def measure_cases(workload: Workload, plain_tokens: int, trials: int) -> list[Record]:
    """A row for each contender and case."""
    model, rows = workload.build_model(), []
    sides = {name: TimedGenerate(model, name, workload) for name in CONTENDERS}
    tokens = {"graph": workload.new_tokens, "dynamic": min(plain_tokens, workload.new_tokens)}
    for name, side in sides.items():
        for case, settings in CASES.items():
            for length in (1, tokens[name]):
                side.seconds(length, **settings)
            decoder = side.keywords.get("custom_generate")
            rows.append(
                {"contender": name, "case": case, "new_tokens": tokens[name], "trials_s": []}
            )
            rows[-1]["fallback_reason"] = decoder and decoder.fallback_reason
            rows[-1]["on_device"] = decoder and selects_on_device(decoder)
    for trial in tqdm(range(trials), disable=None, leave=False):
        first = trial % len(rows)
        for row in rows[first:] + rows[:first]:
            side, settings = sides[row["contender"]], CASES[row["case"]]
            row["trials_s"].append(
                [side.seconds(length, **settings) for length in (1, row["new_tokens"])]
            )
    return [row | {"ms": spread(token_ms(row))} for row in rows]


def token_ms(row: Record) -> list[float]:
    """Milliseconds of a token after the first, of each trial."""
    return [(total - first) / (row["new_tokens"] - 1) * 1e3 for first, total in row["trials_s"]]


def measure(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    return {
        **provenance(workload.device),
        "workload": asdict(workload),
        "random_weights": workload.has_random_weights,
        "trials": args.trials,
        "settings": CASES,
        "rows": measure_cases(workload, args.plain_tokens, args.trials),
    }


def report(record: Record) -> str:
    lines = "\n".join(f"- {line}" for line in problems(record))
    return "\n\n".join([conditions(record), tables.sampling([record], spread=True), lines]).rstrip()


def problems(record: Record) -> list[str]:
    """Cases that the decoder did not run as a captured step that samples."""
    ours = [row for row in record["rows"] if row["contender"] == "graph"]
    lines = [
        f"{row['case']} fell back: {row['fallback_reason']}"
        for row in ours
        if row["fallback_reason"]
    ]
    by_host = [row["case"] for row in ours if not row["fallback_reason"] and not row["on_device"]]
    return lines + [
        f"{case}: the host selected the tokens" for case in by_host[:1]
    ]  # later cases have its step too


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--prompt-len", type=int, help="default: 512, or half of a context below 1024"
    )
    parser.add_argument(
        "--new-tokens", type=int, help="default: 256, or a quarter of a context below 1024"
    )
    parser.add_argument(
        "--plain-tokens", type=int, default=32, help="limit for DynamicCache (%(default)s)"
    )
    parser.add_argument("--trials", type=int, default=7, help="%(default)s")
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    context = context_length(args) or 1024
    prompt_len = args.prompt_len if args.prompt_len is not None else min(512, context // 2)
    new_tokens = args.new_tokens if args.new_tokens is not None else min(256, context // 4)
    at_least(prompt_len=(prompt_len, 1), new_tokens=(new_tokens, 3), trials=(args.trials, 1))
    at_least(plain_tokens=(args.plain_tokens, 3))
    capacity = prompt_len + new_tokens
    check_workload_arguments(args, capacity)
    sizes = (prompt_len, new_tokens, args.batch_size, capacity, args.real_weights)
    return Workload(args.model, args.device, args.dtype, *sizes)


def main() -> int:
    return run_benchmark(parser(), measure, report, failed=lambda record: bool(problems(record)))


if __name__ == "__main__":
    sys.exit(main())
