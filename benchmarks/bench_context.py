"""What one more token costs against the length of the text, and against the room that the cache was given.

    python benchmarks/bench_context.py --model llama-3.2-1b --json context.json --plot context.png
    python benchmarks/bench_context.py --model llama --device cpu --contexts 64 128 256 --capacities 300 400 500

Two sweeps, every contender in a process of its own, in turns:
  context    texts of 512 to 32k tokens, room for the longest
  capacity   a text of 512 tokens, room for 1k to 32k
The last tokens of each text are generated. A figure is the median over the steps of `--rounds` clocked runs of
`generate`, in turns with the others, after one run to warm up; the spread is the 10th to 90th percentile.
`DynamicCache` has no capacity: it is measured once in the second sweep.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS, OURS, Keywords, contender_names, fastest_of_ours, refuse_gpu_only
from measure import Clock, bytes_per_step, measure_bandwidth, percentile
from outputs import benchmark_parser, check_outputs, save_picture, write_outputs
from processes import Failed, FreshProcess
from tqdm import tqdm
from workload import BadArgument, Workload, check_workload_arguments, context_length

from hf_static_kv.testing import provenance

Record = dict[str, Any]
DEFAULT = ["dynamic", "static", "static-compiled", OURS]
CONTEXTS, CAPACITIES = [512, 2048, 8192, 32768], [1024, 8192, 32768]
HAVE_NO_CAPACITY = ("dynamic", "no-cache")


class Runner:
    """One contender with its model, in a process of its own; keeps its cache while the capacity stays the same."""

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.workload, self.model = name, workload, workload.build_model()
        self.point = (0, 0)
        self.next_keywords: Callable[[], Keywords] | None = None

    def measure(self, context: int, capacity: int, steps: int) -> Record:
        """Milliseconds of each step of one run, and the bytes that a step must read."""
        if (context, capacity) != self.point:
            if capacity != self.point[1]:
                self._set_up(capacity)
            self._step_ms(context, steps)  # lengths that were never seen cost more the first time
            self.point = (context, capacity)
        needed = bytes_per_step(self.model, context - steps - 1, steps + 1, self.workload.batch_size)
        return {"step_ms": self._step_ms(context, steps), "bytes_per_step": needed}

    def _set_up(self, capacity: int) -> None:
        self.next_keywords = None  # the old cache goes before the new one comes
        torch._dynamo.reset()  # compiled for the old shape; kept, it would be compiled again for any shape
        set_up = CONTENDERS[self.name].set_up
        self.next_keywords = set_up(self.model, capacity, self.workload.batch_size)

    def _step_ms(self, context: int, steps: int) -> list[float]:
        clock = Clock(self.workload.device, self.workload.batch_size)
        prompt = self.workload.prompt(context - steps - 1)
        keywords = self.next_keywords()
        self.model.generate(**prompt, **keywords, max_new_tokens=steps + 1, do_sample=False, stopping_criteria=[clock])
        return clock.step_ms


def sweep(
    points: list[tuple[int, int]], processes: dict[str, FreshProcess], steps: int, rounds: int, bar: tqdm
) -> list[Record]:
    """A row for each (context, capacity) and contender; one that fails is reported and asked no more."""
    rows: dict[tuple[str, int, int], Record] = {}
    for context, capacity in points:
        for _ in range(rounds):
            for name in list(processes):
                bar.set_description(f"{name}: text {context}, capacity {capacity}")
                bar.update()
                if name in HAVE_NO_CAPACITY and any(k[:2] == (name, context) and k[2] != capacity for k in rows):
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
    percentiles = {key: percentile(row["step_ms"], p) for key, p in (("median_ms", 50), ("p10_ms", 10), ("p90_ms", 90))}
    return point | percentiles | {"bytes_per_step": row["bytes_per_step"]}


def start(names: list[str], workload: Workload, processes: dict[str, FreshProcess]) -> dict[str, str]:
    """Fill in a process for each contender; those that have none, each with the reason."""

    def load(name: str) -> FreshProcess | str:
        if CONTENDERS[name].gpu_only and not workload.on_gpu:
            return CONTENDERS[name].gpu_only
        try:
            return FreshProcess(Runner, name, workload)
        except Failed as failure:
            return f"FAILED, {failure}"

    with ThreadPoolExecutor() as pool:  # all at once: nothing is measured before the last one is there
        loaded = dict(zip(names, pool.map(load, names), strict=True))
    processes |= {name: process for name, process in loaded.items() if not isinstance(process, str)}
    return {name: reason for name, reason in loaded.items() if isinstance(reason, str)}


def measure_all(args: argparse.Namespace, workload: Workload) -> Record:
    bytes_per_second = measure_bandwidth(workload.device)
    sweeps = {
        "context": [(context, max(args.contexts)) for context in args.contexts],
        "capacity": [(args.text, capacity) for capacity in args.capacities],
    }
    processes: dict[str, FreshProcess] = {}
    total = sum(map(len, sweeps.values())) * len(args.contenders) * args.rounds
    try:
        with tqdm(total=total, desc="loading", leave=False, disable=None) as bar:
            not_run = start(args.contenders, workload, processes)
            results = {name: sweep(points, processes, args.steps, args.rounds, bar) for name, points in sweeps.items()}
    finally:
        for process in processes.values():
            process.close()
    return {
        **provenance(workload.device),
        "model": workload.model,
        "dtype": workload.dtype,
        "batch_size": workload.batch_size,
        "random_weights": workload.has_random_weights,
        "steps": args.steps,
        "rounds": args.rounds,
        "bandwidth_gb_per_s": bytes_per_second / 1e9,
        "not_run": not_run,
        **results,
    }


def limit_ms(row: Record, record: Record) -> float:
    """What the bytes that a step must read take at the measured bandwidth; nan where they are not known."""
    return (row["bytes_per_step"] or float("nan")) / record["bandwidth_gb_per_s"] / 1e6


def markdown(record: Record) -> str:
    where = f"{record['hardware']}, torch {record['torch']}, transformers {record['transformers']}"
    weights = "random weights" if record["random_weights"] else "trained weights"
    head = (
        f"{record['model']} ({weights}, {record['dtype']}), batch {record['batch_size']}; {where}, commit "
        f"{record['commit']}; reads {record['bandwidth_gb_per_s']:,.0f} GB/s. Milliseconds per token, median (10th to "
        f"90th percentile) of {record.get('rounds', 1)} x {record['steps']} steps."
    )
    parts = [head]
    if any("median_ms" in row for row in record["context"]):
        room, text = record["context"][0]["max_cache_len"], record["capacity"][0]["context"]
        parts.append(table(record, "context", "context", f"text, tokens (room for {room:,})"))
        parts.append(table(record, "capacity", "max_cache_len", f"room, tokens (text of {text:,})"))
    parts += [words for words in [drift(record)] if words]
    parts += [words for key in ("context", "capacity") if (words := where_behind(record, key))]
    parts += [f"- {name} was not run: {reason}." for name, reason in record.get("not_run", {}).items()]
    measured = {row["contender"] for row in record["context"]} | record.get("not_run", {}).keys()
    parts += [f"- {name} was not asked for in this run." for name in DEFAULT if name not in measured]
    errors = [row for row in record["context"] + record["capacity"] if "error" in row]
    parts += [f"- {row['contender']} at {row['context']}, {row['max_cache_len']}: {row['error']}" for row in errors]
    return "\n\n".join(parts)


def table(record: Record, sweep_name: str, key: str, words: str) -> str:
    """One line for each value of `key`, one column for each contender, the memory's limit last, the best marked."""
    rows = [row for row in record[sweep_name] if "median_ms" in row]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    lines = [f"| {words} | " + " | ".join(names) + " | bandwidth allows |", "|---" * (len(names) + 2) + "|"]
    for value in dict.fromkeys(row[key] for row in rows):
        cells = {row["contender"]: row for row in rows if row[key] == value}
        best = min(cells.values(), key=lambda row: row["median_ms"])["contender"]
        figures = [_cell(cells.get(name), name == best) for name in names]
        limit = limit_ms(next(iter(cells.values())), record)
        lines.append(f"| {value:,} | " + " | ".join(figures) + f" | {limit:.2f} |")
    return "\n".join(lines)


def drift(record: Record) -> str | None:
    """How far apart two measurements of the same point are: one that both sweeps hold."""
    first = {
        (r["contender"], r["context"], r["max_cache_len"]): r["median_ms"]
        for r in record["context"]
        if "median_ms" in r
    }
    twice = []
    for row in record["capacity"]:
        before = first.get((row["contender"], row["context"], row["max_cache_len"]))
        if before is not None and "median_ms" in row:
            twice.append((row["contender"], before, row["median_ms"], row["context"], row["max_cache_len"]))
    if not twice:
        return None
    figures = ", ".join(f"{name} {before:.2f} and {after:.2f}" for name, before, after, *_ in twice)
    _, _, _, text, room = twice[0]
    return (
        f"Both sweeps hold the text of {text:,} in the room for {room:,}: {figures}. Take no smaller difference for a "
        "real one."
    )


def where_behind(record: Record, sweep_name: str) -> str | None:
    """Where another contender is faster than ours, with the reason; None where none is."""
    rows = [row for row in record[sweep_name] if "median_ms" in row]
    behind: dict[str, list[str]] = {}
    key = "context" if sweep_name == "context" else "max_cache_len"
    for value in dict.fromkeys(row[key] for row in rows):
        cells = {row["contender"]: row for row in rows if row[key] == value}
        times = {name: cell["median_ms"] for name, cell in cells.items()}
        best, mine = min(times, key=times.__getitem__), fastest_of_ours(times)
        if mine is not None and best != mine:
            overlap = cells[best]["p90_ms"] >= cells[mine]["p10_ms"]
            behind.setdefault(best, []).append(f"{value:,}" + (" (within the spread)" if overlap else ""))
    if not behind:
        return None
    parts = [
        f"{name} is ahead at {', '.join(at)}"
        + ("" if all("within" in words for words in at) else f": {CONTENDERS[name].why_ahead}")
        for name, at in behind.items()
    ]
    return "**Ours is not the fastest everywhere**: " + "; ".join(parts) + "."


def _cell(row: Record | None, best: bool) -> str:
    if row is None:
        return "-"
    middle = f"{row['median_ms']:.2f}"
    return f"{f'**{middle}**' if best else middle} ({row['p10_ms']:.2f} to {row['p90_ms']:.2f})"


def plot(record: Record, path: Path) -> None:
    """Left the sweep over the text, right over the capacity; the same colour for the same contender."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, constrained_layout=True)
    panels = (("context", "context", "text, tokens"), ("capacity", "max_cache_len", "room of the cache, tokens"))
    colors = {row["contender"]: CONTENDERS[row["contender"]].color for row in record["context"]}
    for axis, (sweep_name, key, label) in zip(axes, panels, strict=True):
        rows = [row for row in record[sweep_name] if "median_ms" in row]
        values = list(dict.fromkeys(row[key] for row in rows))
        for name, color in colors.items():
            mine = [row for row in rows if row["contender"] == name]
            if name in HAVE_NO_CAPACITY and sweep_name == "capacity" and mine:
                axis.axhline(mine[0]["median_ms"], color=color, linestyle=":", label=name)
                continue
            x = [row[key] for row in mine]
            axis.plot(x, [row["median_ms"] for row in mine], color=color, marker="o", label=name)
            axis.fill_between(x, [r["p10_ms"] for r in mine], [r["p90_ms"] for r in mine], color=color, alpha=0.2)
        limits = {row[key]: limit_ms(row, record) for row in rows}
        axis.plot(list(limits), list(limits.values()), color="black", linestyle="--", label="bandwidth allows")
        axis.set(xlabel=label, yscale="log")
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [f"{value:,}" for value in values])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.grid(alpha=0.3, which="both")
    axes[0].set(ylabel="ms per token", title=f"room for {record['context'][0]['max_cache_len']:,}")
    axes[1].set(title=f"text of {record['capacity'][0]['context']:,} (dotted: has no room)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    figure.suptitle(f"{record['model']}, {record['dtype']}, {record['hardware']}", fontsize=10)
    save_picture(figure, path)


def parse_args() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", help=f"default: those of {CONTEXTS} that the model takes")
    parser.add_argument(
        "--text", type=int, help="length of the text in the second sweep; default: the shortest context"
    )
    parser.add_argument("--capacities", type=int, nargs="+", help=f"default: {CAPACITIES}")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each point, in turns (%(default)s)")
    parser.add_argument("--contenders", type=contender_names, default=DEFAULT, help=f"default: {','.join(DEFAULT)}")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> Workload:
    check_outputs(args)
    refuse_gpu_only(args.contenders, args.device)
    limit = context_length(args)
    args.contexts = args.contexts or [n for n in CONTEXTS if limit is None or n <= limit] or [limit]
    args.capacities = args.capacities or [n for n in CAPACITIES if n >= min(args.contexts)]
    args.text = args.text if args.text is not None else min(args.contexts)
    if args.rounds < 1:
        raise BadArgument(f"--rounds must be at least 1, got {args.rounds}")
    if args.steps < 2 or min([args.text, *args.contexts]) < args.steps + 2:
        raise BadArgument(
            f"--steps must be at least 2, --contexts and --text at least {args.steps + 2}: a prompt and --steps + 1"
        )
    if min(args.capacities) < args.text:
        raise BadArgument(f"--capacities {min(args.capacities)} is less than the text of {args.text} tokens")
    check_workload_arguments(args, max([args.text, *args.contexts]))
    return Workload(
        args.model, args.device, args.dtype, args.text, args.steps + 1, args.batch_size, 0, args.real_weights
    )


def main() -> int:
    args = parse_args()
    try:
        record = measure_all(args, chosen(args))
    except (BadArgument, Failed) as error:
        print(f"bench_context.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadArgument) else 1
    write_outputs(args, record, markdown, plot)
    failed = any("FAILED" in reason for reason in record["not_run"].values())
    return 1 if failed or any("error" in row for row in record["context"] + record["capacity"]) else 0


if __name__ == "__main__":
    sys.exit(main())
