"""What it costs to put one token into a cache, against the length of the text and against the capacity.

    python benchmarks/bench_update.py --json update.json --plot update.png

Two tables, every cache in the same run:
  updates   one decode step's `update` calls, 16 layers of 8 heads x 64 (Llama-3.2-1B), text of 256 to 16384 tokens
  model     one decode step of a small model, text of 64 tokens, capacity 1k to 32k

Every figure is the median over `--repeats` steps after 10 warm-up steps; the spread is the 10th to 90th percentile.
Caches take turns step by step, each round in another order, so that whatever else the machine does, and whatever the
one before leaves in the CPU's caches, falls on all of them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from outputs import add_output_arguments, save_picture, write_outputs
from tqdm import tqdm
from transformers import Cache, DynamicCache, LlamaConfig, StaticCache

from hf_static_kv import StaticContiguousCache
from hf_static_kv.testing import dev_config, provenance, random_model

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


def alternate(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of `repeats` calls of each step, taken in turns after the warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    orders = list(itertools.permutations(steps))
    for i in range(WARM_UP + repeats):
        for name in orders[i % len(orders)]:
            start = time.perf_counter()
            steps[name]()
            elapsed = (time.perf_counter() - start) * 1e3
            if i >= WARM_UP:
                times[name].append(elapsed)
    return times


def summary(times: list[float]) -> dict[str, float]:
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return {"median_ms": statistics.median(times), "p10_ms": deciles[0], "p90_ms": deciles[-1]}


def update_step(cache: Cache, length: int) -> Callable[[], None]:
    """The updates of one decode step, on a cache that holds `length` tokens."""
    layers, heads, dim = LLAMA_1B.num_hidden_layers, LLAMA_1B.num_key_value_heads, LLAMA_1B.head_dim
    prompt, token = torch.randn(1, heads, length, dim), torch.randn(1, heads, 1, dim)
    for layer_idx in range(layers):
        cache.update(prompt, prompt, layer_idx)

    def step() -> None:
        for layer_idx in range(layers):
            cache.update(token, token, layer_idx)

    return step


def model_step(model: transformers.PreTrainedModel, cache: Cache, length: int) -> Callable[[], None]:
    """One decode step of the model, on a cache that holds `length` tokens."""
    model(torch.ones(1, length, dtype=torch.long), past_key_values=cache)
    token = torch.ones(1, 1, dtype=torch.long)
    return lambda: model(token, past_key_values=cache)


def bench_updates(lengths: list[int], repeats: int) -> list[dict]:
    rows = []
    for length in tqdm(lengths, desc="updates", disable=None):
        capacity = length + WARM_UP + repeats
        steps = {name: update_step(build(LLAMA_1B, capacity), length) for name, build in CACHES.items()}
        times = alternate(steps, repeats)
        rows += [{"cache": name, "length": length, **summary(times[name])} for name in CACHES]
    return rows


def bench_model(capacities: list[int], repeats: int) -> list[dict]:
    model, rows = random_model(SMALL), []
    for capacity in tqdm(capacities, desc="model", disable=None):
        steps = {name: model_step(model, build(SMALL, capacity), 64) for name, build in CACHES.items()}
        times = alternate(steps, repeats)
        rows += [{"cache": name, "capacity": capacity, **summary(times[name])} for name in CACHES]
    return rows


def table(rows: list[dict], key: str) -> str:
    """A Markdown table, one line for each value of `key`, one column for each cache."""
    lines = [f"| {key} | " + " | ".join(f"{name}, ms" for name in CACHES) + " |", "|---" * (1 + len(CACHES)) + "|"]
    for value in dict.fromkeys(row[key] for row in rows):
        cells = [row for row in rows if row[key] == value]
        figures = [f"{c['median_ms']:.3f} ({c['p10_ms']:.3f} to {c['p90_ms']:.3f})" for c in cells]
        lines.append(f"| {value} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def markdown(report: dict) -> str:
    where = f"{report['hardware']}, {report['threads']} threads, torch {report['torch']}, commit {report['commit']}"
    how = f"float32; median (10th to 90th percentile) of {report['repeats']} steps"
    tables = [table(report["updates"], "length"), table(report["model"], "capacity")]
    return "\n\n".join([f"{where}, {how}.", *tables])


def plot(report: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    titles = {"length": "Updates of one decode step, 16 layers", "capacity": "Decode step of a small model, text of 64"}
    for axis, (rows, key) in zip(axes, ((report["updates"], "length"), (report["model"], "capacity")), strict=True):
        for name in CACHES:
            mine = [row for row in rows if row["cache"] == name]
            x, middle = [row[key] for row in mine], [row["median_ms"] for row in mine]
            axis.plot(x, middle, marker="o", label=name)
            axis.fill_between(x, [row["p10_ms"] for row in mine], [row["p90_ms"] for row in mine], alpha=0.2)
        axis.set(title=titles[key], xlabel=f"{key}, tokens", ylabel="ms", yscale="log", ylim=(None, None))
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, [f"{value:,}" for value in x])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend()
    where = f"{report['hardware']}, {report['threads']} threads, float32"
    figure.suptitle(f"{where}; line: median, band: 10th to 90th percentile")
    save_picture(figure, path)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--capacities", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=120)
    add_output_arguments(parser)
    args = parser.parse_args()
    if args.repeats < 2 or min(args.lengths + args.capacities) < 1:
        parser.error("--repeats must be at least 2, lengths and capacities at least 1")
    if min(args.capacities) < 64 + WARM_UP + args.repeats:
        parser.error(
            f"--capacities must be at least {64 + WARM_UP + args.repeats}: a text of 64 and every step's token"
        )
    return args


@torch.no_grad()
def main() -> None:
    args = parse_args()
    report = {
        **provenance(),
        "warm_up": WARM_UP,
        "repeats": args.repeats,
        "updates": bench_updates(args.lengths, args.repeats),
        "model": bench_model(args.capacities, args.repeats),
    }
    write_outputs(args, report, markdown, plot)


if __name__ == "__main__":
    main()
