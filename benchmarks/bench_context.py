"""What one more token costs against the length of the sequence, and against the capacity.

    python benchmarks/bench_context.py --model llama-3.2-1b --json context.json
    python benchmarks/bench_context.py --model llama --device cpu --contexts 64 256 --capacities 300 500
    python benchmarks/bench_context.py --model gemma-3-1b --contenders graph,graph-compact
    python benchmarks/bench_context.py --model llama-3.2-1b --device cpu --updates --contexts 256 2048

Two sweeps, each contender in a fresh process, in turns:
  context    sequences of 512 to 32k tokens, capacity for the longest
  capacity   a sequence of 512 tokens, capacity 1k to 32k
The last tokens of each sequence are generated. Figures are over the steps of `--rounds` clocked
runs of `generate` after one for warming up: median, 10th and 90th percentile. `DynamicCache` has no
capacity: it is measured once in the second sweep.

`--updates` times the `update` calls of one decode step alone, with random keys and values in the
shape of the model, after 10 steps for warming up. The caches take turns step by step in this
process, so that the noise of the machine falls on all of them.
Exit status 1 if a contender failed, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from contenders import CONTENDERS, NextKeywords, bytes_held, refuse_gpu_only
from contest import Entry, entered
from measure import (
    Clock,
    bytes_per_step,
    in_turns,
    measure_bandwidth,
    seconds,
    step_percentiles,
    wait_for_kernels,
)
from outputs import at_least, benchmark_parser, names_of, run_benchmark
from records import Record
from tqdm import tqdm
from transformers import Cache, DynamicCache, StaticCache
from workload import BadArgument, Workload, build_workload, context_length, find_config

from hf_static_kv import StaticContiguousCache
from hf_static_kv.cache.layout import known_shapes, plan_layers

DEFAULT = ["dynamic", "static", "static-compiled", "contiguous", "graph"]
CONTEXTS = [512, 2048, 8192, 32768]
CAPACITIES = [1024, 8192, 32768]
HAVE_NO_CAPACITY = ("dynamic", "no-cache")
WARM_UP = 10


class Runner:
    """One contender with its model, in a process of its own.

    It keeps its cache while the capacity stays the same.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self.name = name
        self.workload = workload
        self.model: Any = workload.build_model()
        self.point = (0, 0)
        self.cache_bytes = 0
        self.next_keywords: NextKeywords | None = None

    def measure(self, context: int, capacity: int, steps: int) -> Record:
        """Milliseconds of each step of one run, and the bytes that a step must read."""
        if (context, capacity) != self.point:
            if capacity != self.point[1]:
                self._set_up(capacity)
                self._step_ms(context, steps)  # a kernel may take over in the next call
            self._step_ms(context, steps)  # warm-up: a new length costs more the first time
            self.point = (context, capacity)
        batch_size = self.workload.batch_size
        needed = bytes_per_step(self.model, context - steps - 1, steps + 1, batch_size)
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
        how = {"max_new_tokens": steps + 1, "do_sample": False, "stopping_criteria": [clock]}
        self.model.generate(**prompt, **keywords, **how)
        wait_for_kernels(keywords)
        self.cache_bytes = bytes_held(keywords.get("past_key_values"))
        return clock.step_ms


def sweep(
    points: list[tuple[int, int]], entries: list[Entry], steps: int, rounds: int
) -> list[Record]:
    """A row for each (context, capacity) and contender."""
    rows: dict[tuple[str, int, int], Record] = {}
    for context, capacity in tqdm(points, leave=False, disable=None):
        for entry in entries * rounds:
            key = (entry.name, context, capacity)
            done = [other for other in rows if other[:2] == key[:2] and other != key]
            if done and entry.name in HAVE_NO_CAPACITY:
                continue
            result = entry.call("measure", context, capacity, steps)
            if result is not None:
                result["step_ms"] += rows.get(key, {"step_ms": []})["step_ms"]
                rows[key] = result
    for row in rows.values():
        row |= step_percentiles(row.pop("step_ms"))
    names = ("contender", "context", "max_cache_len")
    return [dict(zip(names, key, strict=True)) | row for key, row in rows.items()]


def measure(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    record = {**workload.origin(), "steps": args.steps}
    if args.updates:
        return record | {"updates": measure_updates(workload, args.contexts, args.steps)}
    record["rounds"] = args.rounds
    record["bandwidth_gb_per_s"] = measure_bandwidth(workload.device) / 1e9
    sweeps = {
        "context": [(context, max(args.contexts)) for context in args.contexts],
        "capacity": [(args.sequence, capacity) for capacity in args.capacities],
    }
    with entered(args.contenders, lambda name: Entry(name, workload, Runner)) as entries:
        for name, points in sweeps.items():
            record[name] = sweep(points, entries, args.steps, args.rounds)
    return record | {"not_run": {e.name: e.outcome for e in entries if e.outcome}}


# --- updates alone


def update_step(cache: Cache, workload: Workload, length: int) -> Callable[[], None]:
    """The updates of one decode step, on a cache that holds `length` tokens."""
    config = find_config(workload.model)
    kind = {"dtype": getattr(torch, workload.dtype), "device": workload.device}

    def states(tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for shape in known_shapes(plan_layers(config), config):
            size = (workload.batch_size, shape.num_kv_heads, tokens)
            dims = (shape.key_head_dim, shape.value_head_dim)
            found.append(tuple(torch.randn(*size, dim, **kind) for dim in dims))
        return found

    def write(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for layer_idx, (keys, values) in enumerate(layers):
            cache.update(keys, values, layer_idx)

    write(states(length))
    token = states(1)
    return lambda: write(token)


@torch.no_grad()
def measure_updates(workload: Workload, lengths: list[int], steps: int) -> list[Record]:
    """A row for each length and cache."""
    config = find_config(workload.model)
    rows = []
    for length in tqdm(lengths, desc="updates", disable=None, leave=False):
        capacity = length + WARM_UP + steps
        caches: list[Cache] = [
            DynamicCache(config=config),
            StaticCache(config=config, max_cache_len=capacity),
            StaticContiguousCache(config, capacity),
        ]
        calls = {}
        for cache in caches:
            step = update_step(cache, workload, length)
            calls[type(cache).__name__] = partial(seconds, step, workload.device)
        times = in_turns(calls, WARM_UP + steps)
        for name, taken in times.items():
            ms = [s * 1e3 for s in taken[WARM_UP:]]
            rows.append({"cache": name, "length": length, **step_percentiles(ms)})
    return rows


# --- the command line


def problems(record: Record) -> list[str]:
    outcomes = record.get("not_run", {})
    return [f"{name} FAILED: {why['error']}" for name, why in outcomes.items() if "error" in why]


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__, lengths=False)
    add = parser.add_argument
    add(
        "--contexts", type=int, nargs="+", help=f"default: those of {CONTEXTS} that the model takes"
    )
    add("--sequence", type=int, help="tokens in the second sweep; default: the shortest context")
    add("--capacities", type=int, nargs="+", help=f"default: {CAPACITIES}")
    add("--steps", type=int, default=32, help="%(default)s")
    add("--rounds", type=int, default=3, help="runs of each point, in turns (%(default)s)")
    who = parser.add_mutually_exclusive_group()
    names = ",".join(DEFAULT)
    who.add_argument(
        "--contenders", type=names_of(CONTENDERS), default=DEFAULT, help=f"default: {names}"
    )
    who.add_argument("--updates", action="store_true", help="the update calls alone")
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    refuse_gpu_only(args.contenders, args.device)
    limit = context_length(args)
    args.contexts = args.contexts or [n for n in CONTEXTS if limit is None or n <= limit] or [limit]
    fitting = [n for n in CAPACITIES if n >= min(args.contexts)]
    args.capacities = args.capacities or fitting or [max(args.contexts)]
    if args.sequence is None:
        args.sequence = min(args.contexts)
    at_least(args, rounds=1, steps=2)
    if not args.updates:
        at_least(args, contexts=args.steps + 2, sequence=args.steps + 2)
        check_capacities(args)
    at_least(args, contexts=1)
    args.prompt_len = max(args.sequence - args.steps - 1, 1)
    args.new_tokens = args.steps + 1
    return build_workload(args, longest=max([args.sequence, *args.contexts]))


def check_capacities(args: argparse.Namespace) -> None:
    smallest = min(args.capacities)
    if smallest < args.sequence:
        raise BadArgument(
            f"--capacities {smallest} is less than the sequence of {args.sequence} tokens"
        )


def main() -> int:
    return run_benchmark(parser(), measure, problems)


if __name__ == "__main__":
    sys.exit(main())
