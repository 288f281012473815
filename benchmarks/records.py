"""Figures of a record: what ran where, what was measured, what the bandwidth allows, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from contenders import CONTENDERS

Record = dict[str, Any]
DEV_MODELS = {
    "llama-3.2-1b": "Llama-3.2-1B",
    "qwen3-1.7b": "Qwen3-1.7B",
    "gemma-3-1b": "gemma-3-1b",
}
NAMES = {
    **DEV_MODELS,
    "smollm2": "SmolLM2-135M",
    "smollm2-135m": "SmolLM2-135M",
    "llama-3.1-8b": "Llama-3.1-8B",
    "gpt2-xl": "GPT-2 XL",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "gemma-3-4b": "gemma-3-4b (text)",
    "qwen3-30b-a3b-8l-16e": "8 layers of Qwen3-30B-A3B with 16 experts",
    "llama": "Llama miniature",
    "gemma3": "Gemma 3 miniature",
    "qwen3": "Qwen 3 miniature",
}


# --- what ran where


def model_of(record: Record) -> str:
    """The name that was given as `--model`; some records have it outside of a workload."""
    name: str = record.get("workload", record).get("model", "")
    return name


def on_cpu(record: Record) -> bool:
    return record["hardware"] == record.get("host") or "--device cpu" in record["command"]


def title(record: Record) -> str:
    """The model, and '(CPU)' if it ran on one."""
    name = NAMES.get(model_of(record), model_of(record))
    return f"{name} (CPU)" if on_cpu(record) else name


# --- numbers in words


def label(name: str) -> str:
    return f"**{CONTENDERS[name].label}**" if name == "graph" else CONTENDERS[name].label


def figure(value: float) -> str:
    """Three digits.

    >>> [figure(value) for value in (1234.5, 67.0, 8.9, 0.1)]
    ['1,234', '67.0', '8.90', '0.100']
    """
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def with_range(spread: dict[str, float]) -> str:
    middle, low, high = (figure(spread[key]) for key in ("median", "min", "max"))
    return f"{middle} ({low} to {high})"


def span(figures: Iterable[float]) -> str:
    """From the least to the greatest.

    >>> span([3.14, 17.8, 2.0]), span([1.01, 2.126])
    ('2.0 to 18', '1.01 to 2.13')
    """
    ordered = sorted(figures)
    digits = 2 if ordered[0] < 2 else 1
    ends = [f"{v:.{0 if v >= 10 else digits}f}" for v in (ordered[0], ordered[-1])]
    return " to ".join(dict.fromkeys(ends))


# --- what was measured


def measured(record: Record) -> dict[str, Record]:
    """The contenders of a generation record that ran, by name, without those that are gone."""
    rows = [row for row in record["contenders"] if "summary" in row]
    return {row["name"]: row for row in rows if row["name"] in CONTENDERS}


def medians(record: Record, key: str) -> dict[str, float]:
    """This figure of a generation record's summaries: `medians(record, "decode_ms")["graph"]`."""
    return {name: row["summary"][key]["median"] for name, row in measured(record).items()}


def limit_tokens_per_s(record: Record) -> float | None:
    """Tokens/s of a cached step that reads its bytes at the full bandwidth and does nothing else."""
    for name, row in measured(record).items():
        if CONTENDERS[name].cached and row["bytes_per_step"]:
            bandwidth = record["bandwidth_gb_per_s"] * 1e9
            return record["workload"]["batch_size"] * bandwidth / row["bytes_per_step"]
    return None


def points(record: Record, sweep: str) -> dict[tuple[int, int], dict[str, Record]]:
    """By (sequence, capacity): the rows of the contenders that were measured there."""
    found: dict[tuple[int, int], dict[str, Record]] = {}
    for row in record[sweep]:
        found.setdefault((row["context"], row["max_cache_len"]), {})[row["contender"]] = row
    return found


def percentiles(row: Record) -> dict[str, float]:
    """Median, 10th and 90th percentile under the names of a spread."""
    return {"median": row["median_ms"], "min": row["p10_ms"], "max": row["p90_ms"]}


def limit_ms(row: Record, record: Record) -> float:
    """Milliseconds of the bytes that a step must read, at the measured bandwidth.

    It is nan if the bytes are not known.
    """
    return (row["bytes_per_step"] or float("nan")) / record["bandwidth_gb_per_s"] / 1e6


def differs_inside_exact(record: Record) -> list[str]:
    found = {name: value for name, value in record["differences"]["exact"].items() if value}
    return [f"{name}: a difference of {value:.2g} inside `exact`" for name, value in found.items()]
