"""What one more token costs against the length of the sequence, and against the capacity of the
cache.

    python benchmarks/bench_context.py --model llama-3.2-1b --json context.json --plot context.png
    python benchmarks/bench_context.py --model llama --device cpu --contexts 64 128 256 --capacities 300 400 500
    python benchmarks/bench_context.py --model gemma-3-1b --sliding --contexts 512 30720 --capacities 32768
    python benchmarks/bench_context.py --model gemma-3-4b --sliding --contexts 512 131072 --capacities 131072

Two sweeps, each contender in a fresh process, in turns:
  context    sequences of 512 to 32k tokens, capacity for the longest
  capacity   a sequence of 512 tokens, capacity 1k to 32k
The last tokens of each sequence are generated. A figure is the median over the steps of `--rounds`
clocked runs of `generate` after one run for warming up; the spread is the 10th to 90th percentile.
`DynamicCache` has no capacity: it is measured once in the second sweep. `--sliding` compares full
with compact layers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import plots
import tables
import torch
from contenders import CONTENDERS, Keywords, bytes_held, contender_names, refuse_gpu_only
from measure import Clock, bytes_per_step, measure_bandwidth, percentile
from outputs import at_least, benchmark_parser, run_benchmark
from processes import Failed, FreshProcess
from provenance import provenance
from record_figures import conditions, context_rows, not_run
from tqdm import tqdm
from workload import BadArgument, Workload, check_workload_arguments, context_length

Record = dict[str, Any]
DEFAULT = ["dynamic", "static", "static-compiled", "contiguous", "graph"]
CONTEXTS, CAPACITIES = [512, 2048, 8192, 32768], [1024, 8192, 32768]
SLIDING = {"cuda": ["graph", "graph-compact"], "cpu": ["contiguous", "contiguous-compact"]}
HAVE_NO_CAPACITY = ("dynamic", "no-cache")


class Runner:
    """One contender with its model, in a process of its own; keeps its cache while the capacity
    stays the same.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.workload, self.model = name, workload, workload.build_model()
        self.point, self.cache_bytes = (0, 0), 0
        self.next_keywords: Callable[[], Keywords] | None = None

    def measure(self, context: int, capacity: int, steps: int) -> Record:
        """Milliseconds of each step of one run, and the bytes that a step must read."""
        if (context, capacity) != self.point:
            if capacity != self.point[1]:
                self._set_up(capacity)
            self._step_ms(context, steps)  # warm-up: a new length costs more the first time
            self.point = (context, capacity)
        needed = bytes_per_step(
            self.model, context - steps - 1, steps + 1, self.workload.batch_size
        )
        step_ms = self._step_ms(context, steps)
        return {"step_ms": step_ms, "bytes_per_step": needed, "cache_bytes": self.cache_bytes}

    def _set_up(self, capacity: int) -> None:
        self.next_keywords = None  # free the old cache before the new one is allocated
        torch._dynamo.reset()  # otherwise the second shape is compiled as a dynamic one
        set_up = CONTENDERS[self.name].set_up
        self.next_keywords = set_up(self.model, capacity, self.workload.batch_size)

    def _step_ms(self, context: int, steps: int) -> list[float]:
        clock = Clock(self.workload.device, self.workload.batch_size)
        prompt = self.workload.prompt(context - steps - 1)
        keywords = self.next_keywords()
        self.model.generate(
            **prompt,
            **keywords,
            max_new_tokens=steps + 1,
            do_sample=False,
            stopping_criteria=[clock],
        )
        self.cache_bytes = bytes_held(keywords.get("past_key_values"))
        return clock.step_ms


def sweep(
    points: list[tuple[int, int]],
    processes: dict[str, FreshProcess],
    steps: int,
    rounds: int,
    bar: tqdm,
) -> list[Record]:
    """A row for each (context, capacity) and contender; a contender that fails is dropped."""
    rows: dict[tuple[str, int, int], Record] = {}
    for context, capacity in points:
        for _ in range(rounds):
            for name in list(processes):
                bar.set_description(f"{name}: sequence {context}, capacity {capacity}")
                bar.update()
                if name in HAVE_NO_CAPACITY and any(
                    k[:2] == (name, context) and k[2] != capacity for k in rows
                ):
                    continue
                row = rows.setdefault((name, context, capacity), {"step_ms": []})
                try:
                    result = processes[name].call("measure", context, capacity, steps)
                    row["step_ms"] += result.pop("step_ms")
                    row |= result
                except Failed as failure:
                    row["error"] = str(failure)
                    processes.pop(name).close()
    return [_summary(*key, row) for key, row in rows.items()]


def _summary(name: str, context: int, capacity: int, row: Record) -> Record:
    point = {"contender": name, "context": context, "max_cache_len": capacity}
    if "error" in row:
        return point | {"error": row["error"]}
    percentiles = {
        key: percentile(row["step_ms"], p)
        for key, p in (("median_ms", 50), ("p10_ms", 10), ("p90_ms", 90))
    }
    return point | percentiles | {key: row[key] for key in ("bytes_per_step", "cache_bytes")}


def start(
    names: list[str], workload: Workload, processes: dict[str, FreshProcess]
) -> dict[str, str]:
    """Start a process for each contender; returns those that have none, with the reason."""

    def load(name: str) -> FreshProcess | str:
        if CONTENDERS[name].gpu_only and not workload.on_gpu:
            return CONTENDERS[name].gpu_only
        try:
            return FreshProcess(Runner, name, workload)
        except Failed as failure:
            return f"FAILED, {failure}"

    with ThreadPoolExecutor() as pool:  # nothing is measured before all are loaded
        loaded = dict(zip(names, pool.map(load, names), strict=True))
    processes |= {name: process for name, process in loaded.items() if not isinstance(process, str)}
    return {name: reason for name, reason in loaded.items() if isinstance(reason, str)}


def measure(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    bandwidth = measure_bandwidth(workload.device) / 1e9
    sweeps = {
        "context": [(context, max(args.contexts)) for context in args.contexts],
        "capacity": [(args.sequence, capacity) for capacity in args.capacities],
    }
    processes: dict[str, FreshProcess] = {}
    total = sum(map(len, sweeps.values())) * len(args.contenders) * args.rounds
    try:
        with tqdm(total=total, desc="loading", leave=False, disable=None) as bar:
            not_run = start(args.contenders, workload, processes)
            results = {
                name: sweep(points, processes, args.steps, args.rounds, bar)
                for name, points in sweeps.items()
            }
    finally:
        for process in processes.values():
            process.close()
    return {
        **provenance(workload.device),
        **workload.summary(),
        "steps": args.steps,
        "rounds": args.rounds,
        "bandwidth_gb_per_s": bandwidth,
        "not_run": not_run,
        **results,
    }


def report(record: Record) -> str:
    errors = [
        {**row, "name": row["contender"]}
        for row in record["context"] + record["capacity"]
        if "error" in row
    ]
    reasons = [
        {"name": name, "unavailable": reason} for name, reason in record.get("not_run", {}).items()
    ]
    body = [tables.context([record], spread=True), _memory(record)] if context_rows(record) else []
    return "\n\n".join([conditions(record), *body, "\n".join(not_run(reasons + errors))]).rstrip()


def _memory(record: Record) -> str:
    """The cache of each contender at the longest context."""
    held = {
        row["contender"]: row for row in sorted(record["context"], key=lambda row: row["context"])
    }
    figures = [
        f"{name} {row['cache_bytes'] / 2**20:,.1f} MiB"
        for name, row in held.items()
        if "cache_bytes" in row
    ]
    return f"Cache: {', '.join(figures)}." if figures else ""


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__, plot=True)
    parser.add_argument(
        "--contexts", type=int, nargs="+", help=f"default: those of {CONTEXTS} that the model takes"
    )
    parser.add_argument(
        "--sequence", type=int, help="tokens in the second sweep; default: the shortest context"
    )
    parser.add_argument("--capacities", type=int, nargs="+", help=f"default: {CAPACITIES}")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each point, in turns (%(default)s)"
    )
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--contenders", type=contender_names, default=DEFAULT, help=f"default: {','.join(DEFAULT)}"
    )
    who.add_argument(
        "--sliding", action="store_true", help="full against compact layers of our cache"
    )
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    if args.sliding:
        args.contenders = SLIDING["cuda" if args.device.startswith("cuda") else "cpu"]
    refuse_gpu_only(args.contenders, args.device)
    limit = context_length(args)
    args.contexts = args.contexts or [n for n in CONTEXTS if limit is None or n <= limit] or [limit]
    args.capacities = args.capacities or [n for n in CAPACITIES if n >= min(args.contexts)]
    args.sequence = args.sequence if args.sequence is not None else min(args.contexts)
    at_least(rounds=(args.rounds, 1), steps=(args.steps, 2))
    at_least(
        contexts=(min(args.contexts), args.steps + 2), sequence=(args.sequence, args.steps + 2)
    )
    if min(args.capacities) < args.sequence:
        raise BadArgument(
            f"--capacities {min(args.capacities)} is less than the sequence of {args.sequence} "
            "tokens"
        )
    check_workload_arguments(args, max([args.sequence, *args.contexts]))
    sizes = (args.sequence, args.steps + 1, args.batch_size, 0, args.real_weights)
    return Workload(args.model, args.device, args.dtype, *sizes)


def failed(record: Record) -> bool:
    failures = [row for row in record["context"] + record["capacity"] if "error" in row]
    return bool(failures) or any("FAILED" in reason for reason in record["not_run"].values())


def main() -> int:
    return run_benchmark(parser(), measure, report, plots.context, failed)


if __name__ == "__main__":
    sys.exit(main())
