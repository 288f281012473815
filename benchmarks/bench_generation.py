"""How long `generate` takes with each cache: first token, decode, first call, memory, share of the
bandwidth.

    python benchmarks/bench_generation.py --model gemma3 --device cpu --compare
    python benchmarks/bench_generation.py --model llama-3.2-1b --compare --json llama.json --plot llama.png
    python benchmarks/bench_generation.py --model qwen3-1.7b --contenders dynamic,contiguous --trials 5
    python benchmarks/bench_generation.py --model qwen3-30b-a3b --contenders dynamic,graph  # 57 GiB for each

Each contender runs in a fresh process with its own copy of the model, all at once in memory:
  first call   from the loaded model to the last token, set-up of the cache included, with empty compile caches; it is
               also the warm-up of what follows
  trials       contenders in turns; a call for one token (T1, the time to first token) and a call for all N (TN):
               a decode step takes (TN - T1) / (N - 1), the cost of the loop included
  latencies    one more call in the last turn, with a clock that synchronizes after each token
Median (minimum to maximum) over the trials; percentiles over the steps of the clocked call. Greedy,
random prompts. Exit status 1 when a contender failed, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import plots
import tables
import torch
from contenders import CONTENDERS, bytes_held, contender_names, refuse_gpu_only
from measure import Clock, TimedGenerate, bytes_per_step, latency, measure_bandwidth, spread
from outputs import at_least, benchmark_parser, run_benchmark
from processes import Failed, FreshProcess
from provenance import provenance
from record_figures import conditions, label, measured, not_run, with_range
from tqdm import tqdm
from workload import BadArgument, Workload, check_workload_arguments, context_length

Record = dict[str, Any]


class Runner:
    """One contender with its model, in a process of its own."""

    def __init__(self, name: str, workload: Workload, new_tokens: int) -> None:
        self.workload, self.new_tokens = workload, new_tokens
        model = workload.build_model()
        self.generate = TimedGenerate(model, name, workload)
        self.loaded_bytes = 0
        self.bytes_per_step = bytes_per_step(
            model, workload.mean_prompt_len, new_tokens, workload.batch_size
        )

    def first_call(self) -> float:
        """Seconds from the loaded model to the last token, the cache's set-up included."""
        if self.workload.on_gpu:
            self.loaded_bytes = torch.cuda.memory_allocated(self.workload.device)
            torch.cuda.reset_peak_memory_stats(self.workload.device)
        return self.generate.seconds(self.new_tokens)

    def trial(self) -> tuple[float, float]:
        """Seconds of a call for one token, and of a call for all."""
        return self.generate.seconds(1), self.generate.seconds(self.new_tokens)

    def step_ms(self) -> list[float]:
        clock = Clock(self.workload.device, self.workload.batch_size)
        self.generate.seconds(self.new_tokens, stopping_criteria=[clock])
        return [round(ms, 4) for ms in clock.step_ms]

    def state(self) -> Record:
        """Bytes held and read, and why the decoder fell back in the last call."""
        peak = None
        if self.workload.on_gpu:
            peak = torch.cuda.max_memory_allocated(self.workload.device) - self.loaded_bytes
        keywords = self.generate.keywords
        return {
            "cache_bytes": bytes_held(keywords.get("past_key_values")),
            "peak_bytes": peak,
            "bytes_per_step": self.bytes_per_step,
            "fallback_reason": getattr(keywords.get("custom_generate"), "fallback_reason", None),
        }


class Entry:
    """A contender's process and its row of the record. After a failure the process is closed."""

    def __init__(self, name: str, workload: Workload, new_tokens: int, bar: tqdm) -> None:
        self.row: Record = {"name": name, "new_tokens": new_tokens}
        self.bar, self.process = bar, None
        if CONTENDERS[name].gpu_only and not workload.on_gpu:
            self.row["unavailable"] = CONTENDERS[name].gpu_only
            return
        with self._reporting("loading"):
            self.process = FreshProcess(Runner, name, workload, new_tokens)

    def measure(self, method: str) -> Any:
        """The result of this method of the `Runner`, or None after a failure."""
        with self._reporting(method):
            return self.process.call(method) if self.process else None

    def close(self) -> None:
        if self.process:
            self.process.close()
            self.process = None

    @contextmanager
    def _reporting(self, words: str) -> Iterator[None]:
        self.bar.set_description(f"{self.row['name']}: {words.replace('_', ' ')}")
        try:
            yield
        except Failed as failure:
            self.row["error"] = str(failure)
            self.close()
        self.bar.update()


def contest(
    names: list[str], workload: Workload, uncached_tokens: int, trials: int
) -> list[Record]:
    """A row for each contender:

    first calls one by one, then trials in turns, each turn in another order.
    """
    with (
        tqdm(total=len(names) * (trials + 4), leave=False, disable=None) as bar,
        ExitStack() as stack,
    ):

        def load(name: str) -> Entry:
            tokens = (
                workload.new_tokens
                if CONTENDERS[name].cached
                else min(uncached_tokens, workload.new_tokens)
            )
            entry = Entry(name, workload, tokens, bar)
            stack.callback(entry.close)
            return entry

        with ThreadPoolExecutor() as pool:  # nothing is measured before all are loaded
            entries = list(pool.map(load, names))
        for entry in entries:
            entry.row["cold_start_s"] = entry.measure("first_call")
            entry.row["trials_s"] = []
        for i in range(trials):
            first = i % len(entries)
            for entry in entries[first:] + entries[:first]:
                entry.row["trials_s"].append(entry.measure("trial"))
                if i == trials - 1:
                    entry.row["step_ms"] = entry.measure("step_ms")
        for entry in entries:
            entry.row |= entry.measure("state") or {}
    return [entry.row for entry in entries]


def summarize(row: Record, prompt_len: int, batch_size: int, bandwidth: float) -> Record:
    """The figures of one contender's raw times; `bandwidth` in bytes per second."""
    steps = row["new_tokens"] - 1
    step_s = [(total - first) / steps for first, total in row["trials_s"]]
    first_token = spread([first for first, _ in row["trials_s"]])
    warm = statistics.median(total for _, total in row["trials_s"])
    bytes_per_second = (
        None if row["bytes_per_step"] is None else row["bytes_per_step"] / statistics.median(step_s)
    )
    return {
        "first_token_ms": {key: value * 1e3 for key, value in first_token.items()},
        "prompt_tokens_per_s": batch_size * prompt_len / first_token["median"],
        "decode_ms": spread([s * 1e3 for s in step_s]),
        "decode_tokens_per_s": spread([batch_size / s for s in step_s]),
        "latency_ms": latency(row["step_ms"]),
        "cold_start_s": row["cold_start_s"],
        "cold_share": max(0.0, 1 - warm / row["cold_start_s"]),
        "gb_per_s": None if bytes_per_second is None else bytes_per_second / 1e9,
        "bandwidth_share": None if bytes_per_second is None else bytes_per_second / bandwidth,
    }


def measure(args: argparse.Namespace) -> Record:
    """The record: each contender with its summary, or with the reason why it did not run."""
    names, workload = chosen(args)
    bandwidth = measure_bandwidth(workload.device) / 1e9
    rows = contest(names, workload, args.uncached_tokens, args.trials)
    for row in rows:
        if "error" not in row and "unavailable" not in row:
            row["summary"] = summarize(
                row, workload.prompt_len, workload.batch_size, bandwidth * 1e9
            )
    return {
        **provenance(workload.device),
        "workload": asdict(workload),
        "random_weights": workload.has_random_weights,
        "trials": args.trials,
        "bandwidth_gb_per_s": bandwidth,
        "contenders": rows,
    }


def report(record: Record) -> str:
    """One contender a row, and what did not run."""
    head = [
        "",
        "first token, ms",
        "decode, tokens/s",
        "ms per token: P50",
        "P95",
        "P99",
        "of the bandwidth",
    ]
    head += ["first call, s", "cache, MiB", "peak over the model, MiB"]
    rows = [[label(name), *_cells(row)] for name, row in measured(record).items()]
    body = [tables.table(head, rows)] if rows else []
    parts = [conditions(record), *body, "\n".join(not_run(record["contenders"]))]
    return "\n\n".join(parts).rstrip()


def _cells(row: Record) -> list[str]:
    s, mib = row["summary"], [row["cache_bytes"], row["peak_bytes"]]
    return [
        with_range(s["first_token_ms"]),
        with_range(s["decode_tokens_per_s"]),
        *(f"{s['latency_ms'][key]:.2f}" for key in ("p50", "p95", "p99")),
        "-"
        if s["bandwidth_share"] is None
        else f"{s['bandwidth_share']:.1%} ({s['gb_per_s']:,.1f} GB/s)",
        f"{s['cold_start_s']:.2f} for {row['new_tokens']} tokens",
        *("-" if size is None else f"{size / 2**20:,.1f}" for size in mib),
    ]


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__, plot=True)
    parser.add_argument(
        "--prompt-len", type=int, help="default: 512, or half of a context below 1024"
    )
    parser.add_argument(
        "--new-tokens", type=int, help="default: 256, or a quarter of a context below 1024"
    )
    parser.add_argument(
        "--max-cache-len",
        type=int,
        help="capacity of a static cache; default: just enough, the best for StaticCache",
    )
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--kv-cache", action="store_true", help="our cache alone; this is the default")
    who.add_argument("--no-kv-cache", action="store_true", help="use_cache=False alone")
    who.add_argument("--compare", action="store_true", help="every contender")
    who.add_argument(
        "--contenders",
        type=contender_names,
        help=f"separated by commas, of {', '.join(CONTENDERS)}",
    )
    parser.add_argument(
        "--uncached-tokens", type=int, default=32, help="limit without a cache (%(default)s)"
    )
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument(
        "--padded", action="store_true", help="batch rows of different lengths with left padding"
    )
    return parser


def chosen(args: argparse.Namespace) -> tuple[list[str], Workload]:
    """The contenders and the workload of these arguments, or `BadArgument`."""
    context = context_length(args) or 1024
    prompt_len = args.prompt_len if args.prompt_len is not None else min(512, context // 2)
    new_tokens = args.new_tokens if args.new_tokens is not None else min(256, context // 4)
    at_least(prompt_len=(prompt_len, 1), new_tokens=(new_tokens, 3), trials=(args.trials, 1))
    at_least(uncached_tokens=(args.uncached_tokens, 3))
    check_workload_arguments(args, prompt_len + new_tokens)
    capacity = args.max_cache_len if args.max_cache_len is not None else prompt_len + new_tokens
    if capacity < prompt_len + new_tokens:
        raise BadArgument(
            f"--max-cache-len {capacity} is less than {prompt_len} + {new_tokens} tokens"
        )
    every = [name for name, contender in CONTENDERS.items() if contender.in_all]
    names = ["no-cache"] if args.no_kv_cache else every if args.compare else args.contenders
    names = names or ["contiguous"]
    refuse_gpu_only(names, args.device)
    sizes = (prompt_len, new_tokens, args.batch_size, capacity, args.real_weights, args.padded)
    return names, Workload(args.model, args.device, args.dtype, *sizes)


def plot(record: Record, path: Path) -> None:
    plots.generation([record], path)


def failed(record: Record) -> bool:
    return any("error" in row for row in record["contenders"])


def main() -> int:
    return run_benchmark(parser(), measure, report, plot, failed)


if __name__ == "__main__":
    sys.exit(main())
