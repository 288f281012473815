"""How long `generate` takes with each cache: first token, decode, first call, memory, bandwidth.

    python benchmarks/bench_generation.py --model gemma3 --device cpu --compare
    python benchmarks/bench_generation.py --model llama-3.2-1b --compare --json generation.json
    python benchmarks/bench_generation.py --model qwen3-30b-a3b --contenders dynamic,graph  # 57 GiB for each
    python benchmarks/bench_generation.py --model llama --device cpu --lengths 10 50 128 200

Each contender runs in a fresh process with its own copy of the model, all at once in memory:
  first call   from the loaded model to the last token, with empty compile caches
  second call  for one token: it captures the pass of the prompt. Both are the warm-up of what follows
  trials       contenders in turns; a call for one token (T1, the time to first token) and a call
               for all N (TN): a decode step takes (TN - T1) / (N - 1), the loop included
  latencies    one more call in the last turn, with a clock that synchronizes after each token

`--lengths` measures instead how many times faster our cache, without the decoder, generates N
tokens than no cache, from a prompt of one token. On paper that is (N + 1) / 2: passes over 1, 2,
... N tokens against N passes over one. But a pass over n tokens does not take n times as long: both
read the weights once.
Exit status 1 if a contender failed or fell back, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from functools import partial

import measure as timing
import torch
from contenders import CONTENDERS, bytes_held, refuse_gpu_only
from contest import Entry, entered
from measure import Clock, TimedGenerate, bytes_per_step, in_turns, measure_bandwidth, spread
from outputs import at_least, benchmark_parser, names_of, run_benchmark
from records import Record
from tqdm import tqdm
from workload import Workload, build_workload


class Runner:
    """One contender with its model, in a process of its own."""

    def __init__(self, name: str, workload: Workload, new_tokens: int) -> None:
        self.workload = workload
        self.new_tokens = new_tokens
        model = workload.build_model()
        self.generate = TimedGenerate(model, name, workload)
        self.loaded_bytes = 0
        prompt_len = workload.mean_prompt_len
        self.bytes_per_step = bytes_per_step(model, prompt_len, new_tokens, workload.batch_size)

    def first_call(self) -> float:
        """Seconds from the loaded model to the last token, the cache's set-up included."""
        if self.workload.on_gpu:
            self.loaded_bytes = torch.cuda.memory_allocated(self.workload.device)
            torch.cuda.reset_peak_memory_stats(self.workload.device)
        return self.generate.seconds(self.new_tokens)

    def second_call(self) -> float:
        """Seconds for one token."""
        taken = self.generate.seconds(1)
        if "custom_generate" in self.generate.keywords:  # a kernel may take over in the next call
            self.generate.seconds(self.new_tokens)
        return taken

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


def contest(
    names: list[str], workload: Workload, uncached_tokens: int, trials: int
) -> list[Record]:
    """A row for each contender: first calls one by one, then trials in turns."""
    tokens = dict.fromkeys(names, workload.new_tokens)
    for name in names:
        if not CONTENDERS[name].cached:
            tokens[name] = min(uncached_tokens, workload.new_tokens)
    rows: dict[str, Record] = {name: {"name": name, "new_tokens": tokens[name]} for name in names}
    with entered(names, lambda name: Entry(name, workload, Runner, tokens[name])) as entries:
        for entry in tqdm(entries, desc="first calls", leave=False, disable=None):
            rows[entry.name]["cold_start_s"] = entry.call("first_call")
            rows[entry.name]["second_call_s"] = entry.call("second_call")
            rows[entry.name]["trials_s"] = []
        for trial in tqdm(range(trials), desc="trials", leave=False, disable=None):
            for entry in timing.shuffled(entries, trial):
                rows[entry.name]["trials_s"].append(entry.call("trial"))
                if trial == trials - 1:
                    rows[entry.name]["step_ms"] = entry.call("step_ms")
        for entry in entries:
            rows[entry.name] |= entry.call("state") or {}
            rows[entry.name] |= entry.outcome
    return list(rows.values())


def summarize(row: Record, prompt_len: int, batch_size: int, bandwidth: float) -> Record:
    """The figures of one contender's raw times; `bandwidth` in bytes per second."""
    steps = row["new_tokens"] - 1
    step_s = [(total - first) / steps for first, total in row["trials_s"]]
    first_token = spread([first for first, _ in row["trials_s"]])
    warm = statistics.median(total for _, total in row["trials_s"])
    read = row["bytes_per_step"]
    bytes_per_second = None if read is None else read / statistics.median(step_s)
    return {
        "first_token_ms": {key: value * 1e3 for key, value in first_token.items()},
        "prompt_tokens_per_s": batch_size * prompt_len / first_token["median"],
        "decode_ms": spread([s * 1e3 for s in step_s]),
        "decode_tokens_per_s": spread([batch_size / s for s in step_s]),
        "latency_ms": timing.latency(row["step_ms"]),
        "cold_start_s": row["cold_start_s"],
        "cold_share": max(0.0, 1 - warm / row["cold_start_s"]),
        "gb_per_s": None if bytes_per_second is None else bytes_per_second / 1e9,
        "bandwidth_share": None if bytes_per_second is None else bytes_per_second / bandwidth,
    }


def measure(args: argparse.Namespace) -> Record:
    """The record: each contender with its summary, or with the reason why it did not run."""
    names, workload = chosen(args)
    if args.lengths:
        return measure_lengths(workload, args.lengths, args.trials)
    bandwidth = measure_bandwidth(workload.device) / 1e9
    rows = contest(names, workload, args.uncached_tokens, args.trials)
    sizes = (workload.prompt_len, workload.batch_size, bandwidth * 1e9)
    for row in rows:
        if "error" not in row and "unavailable" not in row:
            row["summary"] = summarize(row, *sizes)
    figures = {"trials": args.trials, "bandwidth_gb_per_s": bandwidth, "contenders": rows}
    return {**workload.origin(), **figures}


def measure_lengths(workload: Workload, lengths: list[int], trials: int) -> Record:
    """No cache and ours in turns, after one call of each for warming up."""
    model = workload.build_model()
    calls = {}
    for tokens in lengths:
        for name in ("no-cache", "contiguous"):
            timed = TimedGenerate(model, name, replace(workload, max_cache_len=tokens + 1))
            calls[name, tokens] = partial(timed.seconds, tokens)
    times = {key: spread(taken[1:]) for key, taken in in_turns(calls, 1 + trials).items()}
    rows = []
    for tokens in lengths:
        uncached, cached = times["no-cache", tokens], times["contiguous", tokens]
        row = {"tokens": tokens, "theoretical": (tokens + 1) / 2}
        row["measured"] = uncached["median"] / cached["median"]
        rows.append(row | {"uncached_s": uncached, "cached_s": cached})
    return {**workload.origin(), "trials": trials, "rows": rows}


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--max-cache-len", type=int, help="capacity of a static cache; default: just enough")
    add("--uncached-tokens", type=int, default=32, help="limit without a cache (%(default)s)")
    add("--trials", type=int, default=3, help="%(default)s")
    add("--padded", action="store_true", help="batch rows of different lengths with left padding")
    who = parser.add_mutually_exclusive_group()
    add = who.add_argument
    add("--kv-cache", action="store_true", help="our cache alone; this is the default")
    add("--no-kv-cache", action="store_true", help="use_cache=False alone")
    add("--compare", action="store_true", help="every contender")
    add(
        "--contenders",
        type=names_of(CONTENDERS),
        help=f"separated by commas: {', '.join(CONTENDERS)}",
    )
    add("--lengths", type=int, nargs="+", help="new tokens: the speed-up of our cache over none")
    return parser


def chosen(args: argparse.Namespace) -> tuple[list[str], Workload]:
    """The contenders and the workload of these arguments, or `BadArgument`."""
    at_least(args, prompt_len=1, new_tokens=3, trials=1, uncached_tokens=3)
    if args.lengths:
        at_least(args, lengths=2)
        args.prompt_len = 1
        args.new_tokens = max(args.lengths)
    workload = build_workload(args, capacity=args.max_cache_len, padded=args.padded)
    every = [name for name, contender in CONTENDERS.items() if contender.in_all]
    names = ["no-cache"] if args.no_kv_cache else every if args.compare else args.contenders
    names = names or ["contiguous"]
    refuse_gpu_only(names, args.device)
    return names, workload


def problems(record: Record) -> list[str]:
    """Contenders that failed, or whose decoder fell back."""
    rows = record.get("contenders", [])
    lines = [f"{row['name']} FAILED: {row['error']}" for row in rows if "error" in row]
    fell_back = [row for row in rows if row.get("fallback_reason")]
    return lines + [f"{row['name']} fell back: {row['fallback_reason']}" for row in fell_back]


def main() -> int:
    return run_benchmark(parser(), measure, problems)


if __name__ == "__main__":
    sys.exit(main())
