"""Figures of a record: what ran where, the rows that were measured, what the bandwidth allows, and
numbers in words.

Tables, pictures and sentences are made of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from contenders import CONTENDERS

Record = dict[str, Any]
MODELS = {"llama-3.2-1b": "Llama-3.2-1B", "qwen3-1.7b": "Qwen3-1.7B", "gemma-3-1b": "gemma-3-1b"}
OTHER_MODELS = {"smollm2": "SmolLM2-135M", "llama": "Llama miniature"}
OTHER_MODELS |= {
    "smollm2-135m": "SmolLM2-135M",
    "gpt2-xl": "GPT-2 XL",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
}
OTHER_MODELS |= {"llama-3.1-8b": "Llama-3.1-8B", "gemma-3-4b": "gemma-3-4b (text)"}
OTHER_MODELS |= {"qwen3-30b-a3b-8l-16e": "8 layers of Qwen3-30B-A3B with 16 experts"}
ATTACH = {
    "graph": "`StaticContiguousCache` and `GraphDecoder()`",
    "contiguous": "`StaticContiguousCache`",
    "decoder": "`GraphDecoder()` alone",
    "attach": "`attach(model)`",
    "attach-reuse": "`attach(model, reuse_prefix=True)`",
    "dynamic": "plain `generate`",
}
CHAT = ["dynamic", "attach", "attach-reuse"]


# --- what ran where


def model_name(record: Record) -> str:
    name = record.get("workload", record)["model"]
    return (MODELS | OTHER_MODELS).get(name, name)


def on_cpu(record: Record) -> bool:
    return record["hardware"] == record.get("host") or "--device cpu" in record["command"]


def title(record: Record) -> str:
    """The model, and the CPU where it ran on one."""
    return f"{model_name(record)} (CPU)" if on_cpu(record) else model_name(record)


def conditions(record: Record) -> str:
    """One line: what ran where."""
    w = record.get("workload", record)
    shown = [
        (w["model"], ""),
        (w["dtype"], ""),
        (w.get("batch_size"), "batch "),
        (w.get("prompt_len"), "prompt "),
    ]
    shown += [
        (w.get("new_tokens"), "new tokens "),
        (record["hardware"], ""),
        (record["torch"], "torch "),
    ]
    shown += [(record["transformers"], "transformers "), (record["commit"], "commit ")]
    return ", ".join(f"{name}{value}" for value, name in shown if value is not None) + "."


def not_run(rows: list[Record]) -> list[str]:
    lines = [
        f"- {row['name']} did not run: {row['unavailable']}."
        for row in rows
        if "unavailable" in row
    ]
    return lines + [f"- {row['name']} FAILED: {row['error']}" for row in rows if "error" in row]


def differs_inside_exact(record: Record) -> bool:
    return any(record["differences"]["exact"].values())


# --- numbers in words


def label(name: str) -> str:
    return f"**{CONTENDERS[name].label}**" if name == "graph" else CONTENDERS[name].label


def figure(value: float) -> str:
    """Three digits.

    >>> [figure(value) for value in (1234.5, 67.0, 8.9, 0.1)]
    ['1,234', '67.0', '8.90', '0.100']
    """
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def with_range(figures: dict[str, float], spread: bool = True) -> str:
    middle, low, high = (figure(figures[key]) for key in ("median", "min", "max"))
    return f"{middle} ({low} to {high})" if spread else middle


def span(figures: Iterable[float]) -> str:
    """From the least to the greatest.

    >>> span([3.14, 17.8, 2.0]), span([1.01, 2.126])
    ('2.0 to 18', '1.01 to 2.13')
    """
    low, high = min(figures := list(figures)), max(figures)
    digits = 2 if low < 2 else 1
    ends = dict.fromkeys(f"{value:.{0 if value >= 10 else digits}f}" for value in (low, high))
    return " to ".join(ends)


# --- what was measured


def measured(record: Record) -> dict[str, Record]:
    """The contenders of a generation record that ran, by name; those that no longer exist are left
    out.
    """
    return {
        row["name"]: row
        for row in record["contenders"]
        if "summary" in row and row["name"] in CONTENDERS
    }


def limit_tokens_per_s(record: Record) -> float | None:
    """Tokens/s of a cached step that reads its bytes at the full bandwidth and does nothing else."""
    rows = [
        row
        for name, row in measured(record).items()
        if CONTENDERS[name].cached and row["bytes_per_step"]
    ]
    batch_size: int = record["workload"]["batch_size"]
    return (
        batch_size * record["bandwidth_gb_per_s"] * 1e9 / rows[0]["bytes_per_step"]
        if rows
        else None
    )


def context_rows(record: Record, sweeps: Iterable[str] = ("context", "capacity")) -> list[Record]:
    rows = [row for sweep in sweeps for row in record[sweep]]
    return [row for row in rows if "median_ms" in row and row["contender"] in CONTENDERS]


def points(record: Record, ends: bool = False) -> list[tuple[tuple[int, int], dict[str, Record]]]:
    """(sequence, capacity) and the contenders' rows there, of one sweep after the other.

    With `ends`: the first and last point of each sweep, and a point that both sweeps measured once.
    """
    found: list[tuple[tuple[int, int], dict[str, Record]]] = []
    for sweep in ("context", "capacity"):
        cells: dict[tuple[int, int], dict[str, Record]] = {}
        for row in context_rows(record, [sweep]):
            cells.setdefault((row["context"], row["max_cache_len"]), {})[row["contender"]] = row
        measured_here = list(cells.items())
        if ends:
            seen = [point for point, _ in found]
            measured_here = [
                item for item in (measured_here[0], measured_here[-1]) if item[0] not in seen
            ]
        found += measured_here
    return found


def limit_ms(row: Record, record: Record) -> float:
    """Milliseconds of the bytes that a step must read, at the measured bandwidth; nan where they
    are not known.
    """
    return (row["bytes_per_step"] or float("nan")) / record["bandwidth_gb_per_s"] / 1e6


def attach_cost(record: Record) -> str:
    """What `attach` adds to the explicit objects."""
    words = []
    for key, unit in (
        ("token_percent", "% per token"),
        ("first_token_ms", "ms to the first token"),
    ):
        middle, low, high = (
            f"{record['overhead'][key][end]:+.2f}" for end in ("median", "min", "max")
        )
        words.append(f"{middle} {unit} ({low} to {high})")
    return " and ".join(words)


def chat_growth(record: Record) -> str:
    """The longest history over the shortest:

    how many times as long the first token of a turn takes.
    """
    histories = [row["history"] for row in record["chat"]]
    if len(set(histories)) < 2:
        return ""
    ends = (min(histories), max(histories))
    ms = {
        (row["contender"], row["history"]): row["first_token_ms"]["median"]
        for row in record["chat"]
    }
    factors = [
        f"{ms[name, ends[1]] / ms[name, ends[0]]:.2f} times as long with {ATTACH[name]}"
        for name in CHAT
    ]
    return f"After {ends[1]:,} tokens the first token of a turn takes, against {ends[0]:,}: {', '.join(factors)}."
