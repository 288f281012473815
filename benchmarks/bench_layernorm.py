"""`GraphDecoder("layers")` beside `GraphDecoder()` and `DynamicCache`, on models with LayerNorm.

    python benchmarks/bench_layernorm.py --json benchmarks/results/layernorm-h200.json
    python benchmarks/bench_layernorm.py --model gpt2 --device cpu --prompt-len 16 --new-tokens 8 --trials 1

By default the true shapes of GPT-2 XL, Phi-2 and OPT-1.3B with random weights. `--model` takes names separated by
commas. Each contender runs in a fresh process and is measured as in `bench_generation.py`: first call, then trials in
turns. tokens/s are those of a decode step, (N - 1) / (TN - T1): median, minimum (low) and maximum (high).
Exit status 1 when a contender failed or fell back to transformers' loop, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import tables
from bench_generation import contest
from measure import spread
from outputs import at_least, benchmark_parser, run_benchmark
from provenance import provenance
from workload import Workload, check_workload_arguments

Record = dict[str, Any]
MODELS = ["gpt2-xl", "phi-2", "opt-1.3b"]
NAMES = ["dynamic", "graph", "graph-layers"]


def measure(args: argparse.Namespace) -> Record:
    workloads = [chosen(args, model) for model in args.model.split(",")]  # all are checked before the first one runs
    contests = [(workload, contest(NAMES, workload, args.new_tokens, args.trials)) for workload in workloads]
    sizes = {key: getattr(workloads[0], key) for key in ("dtype", "batch_size", "prompt_len", "new_tokens")}
    return {
        **provenance(args.device),
        "workload": {"model": ", ".join(workload.model for workload in workloads), **sizes},
        "random_weights": all(workload.has_random_weights for workload in workloads),
        "trials": args.trials,
        "rows": [summarize(row, workload) for workload, rows in contests for row in rows],
    }


def summarize(row: Record, workload: Workload) -> Record:
    """The figures of one contender's raw times, or the reason why it did not run."""
    found = {"model": workload.model, "contender": row["name"]}
    if reason := row.keys() & {"unavailable", "error"}:
        return found | {key: row[key] for key in reason}
    tokens = workload.batch_size * (workload.new_tokens - 1)
    rates = spread([tokens / (total - first) for first, total in row["trials_s"]])
    rates = {"median": rates["median"], "low": rates["min"], "high": rates["max"]}
    figures = {"first_call_s": row["cold_start_s"], "tokens_per_s": rates}
    return {**found, **figures, "fallback_reason": row["fallback_reason"]}


def report(record: Record) -> str:
    named = [{**row, "name": f"{row['model']}, {row['contender']}"} for row in record["rows"]]
    lines = tables.not_run(named)
    lines += [f"- {row['name']} fell back: {row['fallback_reason']}" for row in named if row.get("fallback_reason")]
    return "\n\n".join([tables.conditions(record), tables.layernorm(record, spread=True), "\n".join(lines)]).rstrip()


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    parser.set_defaults(model=",".join(MODELS))
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--trials", type=int, default=7)
    return parser


def chosen(args: argparse.Namespace, model: str) -> Workload:
    at_least(prompt_len=(args.prompt_len, 1), new_tokens=(args.new_tokens, 3), trials=(args.trials, 1))
    capacity = args.prompt_len + args.new_tokens
    own = argparse.Namespace(**{**vars(args), "model": model})
    check_workload_arguments(own, capacity)
    sizes = (args.prompt_len, args.new_tokens, args.batch_size, capacity, args.real_weights)
    return Workload(model, args.device, own.dtype, *sizes)


def failed(record: Record) -> bool:
    return any("error" in row or row.get("fallback_reason") for row in record["rows"])


def main() -> int:
    return run_benchmark(parser(), measure, report, failed=failed)


if __name__ == "__main__":
    sys.exit(main())
