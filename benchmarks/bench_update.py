"""What it costs to put one token into a cache, against the length of the sequence and against the
capacity.

    python benchmarks/bench_update.py --json update.json --plot update.png

Two tables, all caches in the same run, on the CPU in float32:
  updates   the `update` calls of one decode step, 16 layers of 8 heads x 64 (Llama-3.2-1B), 256 to 16384 tokens
  model     one decode step of a small model, sequence of 64 tokens, capacity 1k to 32k

A figure is the median over `--repeats` steps after 10 for warming up; the spread is the 10th to
90th percentile. Caches take turns step by step, each round in another order, so that noise of the
machine and what the one before leaves in the CPU's caches fall on all of them.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import Any

import plots
import tables
import torch
import transformers
from measure import percentile, seconds
from outputs import at_least, benchmark_parser, run_benchmark
from provenance import provenance
from tqdm import tqdm
from transformers import Cache, DynamicCache, LlamaConfig, StaticCache

from hf_static_kv import StaticContiguousCache
from hf_static_kv.testing import dev_config, random_model

Record = dict[str, Any]
WARM_UP = 10
LLAMA_1B = dev_config("llama-3.2-1b")
SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=65536,
)
CACHES: dict[str, Callable[[LlamaConfig, int], Cache]] = {
    "DynamicCache": lambda config, capacity: DynamicCache(config=config),
    "StaticCache": lambda config, capacity: StaticCache(config=config, max_cache_len=capacity),
    "StaticContiguousCache": StaticContiguousCache,
}


def alternate(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of `repeats` calls of each step, in turns after the warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    orders = list(itertools.permutations(steps))
    for i in range(WARM_UP + repeats):
        for name in orders[i % len(orders)]:
            times[name].append(seconds(steps[name], "cpu") * 1e3)
    return {name: taken[WARM_UP:] for name, taken in times.items()}


def update_step(cache: Cache, length: int) -> Callable[[], object]:
    """The updates of one decode step, on a cache that holds `length` tokens."""
    layers, heads, dim = LLAMA_1B.num_hidden_layers, LLAMA_1B.num_key_value_heads, LLAMA_1B.head_dim
    prompt, token = torch.randn(1, heads, length, dim), torch.randn(1, heads, 1, dim)
    for layer_idx in range(layers):
        cache.update(prompt, prompt, layer_idx)

    def step() -> None:
        for layer_idx in range(layers):
            cache.update(token, token, layer_idx)

    return step


def model_step(
    model: transformers.PreTrainedModel, cache: Cache, length: int
) -> Callable[[], object]:
    """One decode step of the model, on a cache that holds `length` tokens."""
    model(torch.ones(1, length, dtype=torch.long), past_key_values=cache)
    token = torch.ones(1, 1, dtype=torch.long)
    return lambda: model(token, past_key_values=cache)


def sweep(
    key: str, values: list[int], repeats: int, build: Callable[[str, int], Callable[[], object]]
) -> list[Record]:
    """A row for each value and cache; `build(cache, value)` gives the step to time."""
    rows = []
    for value in tqdm(values, desc=key, disable=None):
        times = alternate({name: build(name, value) for name in CACHES}, repeats)
        for name, taken in times.items():
            figures = {
                f"{p}_ms": percentile(taken, q)
                for p, q in (("median", 50), ("p10", 10), ("p90", 90))
            }
            rows.append({"cache": name, key: value, **figures})
    return rows


@torch.no_grad()
def measure(args: argparse.Namespace) -> Record:
    at_least(repeats=(args.repeats, 2), lengths=(min(args.lengths), 1))
    at_least(capacities=(min(args.capacities), 64 + WARM_UP + args.repeats))
    model, steps = random_model(SMALL), WARM_UP + args.repeats

    def updates(name: str, length: int) -> Callable[[], object]:
        return update_step(CACHES[name](LLAMA_1B, length + steps), length)

    def decode(name: str, capacity: int) -> Callable[[], object]:
        return model_step(model, CACHES[name](SMALL, capacity), 64)

    return {
        **provenance(),
        "warm_up": WARM_UP,
        "repeats": args.repeats,
        "updates": sweep("length", args.lengths, args.repeats, updates),
        "model": sweep("capacity", args.capacities, args.repeats, decode),
    }


def report(record: Record) -> str:
    where = f"{record['hardware']}, {record['threads']} threads, torch {record['torch']}, commit {record['commit']}"
    return f"{where}, float32.\n\n{tables.update(record, spread=True)}"


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__, workload=False, plot=True)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192, 16384]
    )
    parser.add_argument("--capacities", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=120)
    return parser


def main() -> int:
    return run_benchmark(parser(), measure, report, plots.update)


if __name__ == "__main__":
    sys.exit(main())
