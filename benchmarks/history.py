"""`history.csv`: the figures of every run that was ever recorded, one row each.

`make results` adds the rows of the records in `results/`. A new run overwrites its record there;
the rows of the old one stay here, and git keeps the old file.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Row = dict[str, str]
PATH = Path(__file__).parent / "history.csv"
# Cells that a record does not have are empty: the oldest records have no date and no host.
COLUMNS = [
    "date",
    "commit",
    "hardware",
    "host",
    "torch",
    "transformers",
    "kind",
    "model",
    "dtype",
    "batch_size",
]
COLUMNS += [
    "contender",
    "case",
    "ms_median",
    "ms_low",
    "ms_high",
    "low_to_high",
    "first_call_s",
    "logit_difference",
]


def kind(record: Record) -> str:
    """The benchmark that made the record: "generation" of `bench_generation.py`."""
    return re.search(r"bench_(\w+)\.py", record["command"])[1]


def rows(record: Record) -> list[Row]:
    """The rows of one record, every cell as text."""
    workload = {"dtype": "float32", "batch_size": 1, **record.get("workload", record)}
    common = {key: workload.get(key) or record.get(key, "") for key in COLUMNS[:10]}
    common["kind"] = kind(record)
    return [_row(common | figures) for figures in _FIGURES[kind(record)](record)]


def read(path: Path = PATH) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(rows: list[Row], path: Path = PATH) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def add(records: list[Record], path: Path = PATH) -> None:
    """Append the rows of these records that are not yet in the file."""
    known = read(path)
    write(known + missing(known, records), path)


def missing(known: list[Row], records: list[Record]) -> list[Row]:
    seen = {tuple(row.values()) for row in known}
    return [row for record in records for row in rows(record) if tuple(row.values()) not in seen]


def between_runs(known: list[Row], contender: str) -> float:
    """How far the slowest run of `bench_generation.py` is below the fastest, over all models:

    a share of tokens/s.
    """
    runs: dict[tuple[str, ...], list[float]] = {}
    for row in known:
        if (row["kind"], row["contender"]) == ("generation", contender) and row["case"].startswith(
            "decode step"
        ):
            same = tuple(row[key] for key in ("hardware", "model", "dtype", "batch_size", "case"))
            runs.setdefault(same, []).append(float(row["ms_median"]))
    return max((1 - min(ms) / max(ms) for ms in runs.values()), default=0.0)


def _row(cells: dict[str, Any]) -> Row:
    return {
        key: f"{cell:.4g}" if isinstance(cell := cells.get(key, ""), float) else str(cell)
        for key in COLUMNS
    }


def _min_max(figures: dict[str, float], trials: int | str, scale: float = 1.0) -> dict[str, Any]:
    ms = {
        f"ms_{name}": figures[key] * scale
        for name, key in (("median", "median"), ("low", "min"), ("high", "max"))
    }
    return {**ms, "low_to_high": f"min to max of {trials}"}


def _percentiles(row: Record, steps: int) -> dict[str, Any]:
    ms = {
        f"ms_{name}": row[key]
        for name, key in (("median", "median_ms"), ("low", "p10_ms"), ("high", "p90_ms"))
    }
    return {**ms, "low_to_high": f"p10 to p90 of {steps}"}


def _generation(record: Record) -> Iterator[dict[str, Any]]:
    prompt_len, trials = record["workload"]["prompt_len"], record["trials"]
    for row in (row for row in record["contenders"] if "summary" in row):
        summary, case = (
            row["summary"],
            f"decode step, prompt {prompt_len}, {row['new_tokens']} new tokens",
        )
        first_call = {"first_call_s": summary["cold_start_s"]}
        yield {
            "contender": row["name"],
            "case": case,
            **_min_max(summary["decode_ms"], trials),
            **first_call,
        }
        case = f"first token, prompt {prompt_len}"
        yield {
            "contender": row["name"],
            "case": case,
            **_min_max(summary["first_token_ms"], trials),
        }


def _context(record: Record) -> Iterator[dict[str, Any]]:
    steps = record.get("rounds", 1) * record["steps"]
    for row in (row for row in record["context"] + record["capacity"] if "median_ms" in row):
        case = f"decode step, sequence {row['context']}, capacity {row['max_cache_len']}"
        yield {"contender": row["contender"], "case": case, **_percentiles(row, steps)}


def _exact(record: Record) -> Iterator[dict[str, Any]]:
    for side, differences in record["differences"].items():
        contender = {"usual": "without exact"}.get(side, side)
        case = f"largest of {len(differences)} comparisons"
        yield {"contender": contender, "case": case, "logit_difference": max(differences.values())}
        for case, figures in record.get("ms", {}).get(side, {}).items():
            yield {
                "contender": contender,
                "case": case,
                **_min_max(figures, record.get("trials", 5)),
            }


def _training(record: Record) -> Iterator[dict[str, Any]]:
    workload = record["workload"]
    for side, differences in record["differences"].items():
        contender = {"usual": "without exact"}.get(side, side)
        case = f"log-probabilities of {workload['new_tokens']} sampled tokens, prompt {workload['prompt_len']}"
        yield {
            "contender": contender,
            "case": case,
            "logit_difference": differences["log-probability"],
        }
        for name, figures in record["ms"][side].items():
            case = f"training step with {name}, {workload['train_len']} tokens"
            yield {"contender": contender, "case": case, **_min_max(figures, record["trials"])}


def _attach(record: Record) -> Iterator[dict[str, Any]]:
    prompt_len, trials = record["workload"]["prompt_len"], record["trials"]
    for row in record["contenders"]:
        case = f"decode step, prompt {prompt_len}, {row['new_tokens']} new tokens"
        yield {
            "contender": row["name"],
            "case": case,
            **_min_max(row["summary"]["decode_ms"], trials),
        }
        case = f"first token, prompt {prompt_len}"
        yield {
            "contender": row["name"],
            "case": case,
            **_min_max(row["summary"]["first_token_ms"], trials),
        }
    for row in record["chat"]:
        case = f"first token of a turn of {record['turn_tokens']}, history {row['history']}"
        figures = _min_max(row["first_token_ms"], record["turns"])
        yield {"contender": row["contender"], "case": case, **figures}


def _step(record: Record) -> Iterator[dict[str, Any]]:
    for row in (row for row in record["variants"] if "step_ms" in row):
        replays = (
            [("replay of a step", row["replay_ms"])] if "rules" in record else []
        )  # older ones: one number
        for words, ms in [("decode step", row["step_ms"]), *replays]:
            figures = {"median": statistics.median(ms), "min": min(ms), "max": max(ms)}
            yield {
                "contender": "graph",
                "case": f"{words}, {row['words']}",
                **_min_max(figures, len(ms)),
            }
    for row in record["attention"]:
        case = f"attention of one layer, sequence {row['seq_len']}"
        yield {"contender": "graph", "case": case, "ms_median": row["us"] / 1e3}


def _sampling(record: Record) -> Iterator[dict[str, Any]]:
    prompt_len = record["workload"]["prompt_len"]
    for row in record["rows"]:
        case = f"decode step, {row['case']}, prompt {prompt_len}, {row['new_tokens']} new tokens"
        yield {"contender": row["contender"], "case": case, **_min_max(row["ms"], record["trials"])}


def _files(record: Record) -> Iterator[dict[str, Any]]:
    for row in record["rows"]:
        case = f"{row['case']}, {record['workload']['prompt_len']} tokens"
        yield {"contender": row["contender"], "case": case, **_min_max(row["ms"], record["trials"])}


def _speedup(record: Record) -> Iterator[dict[str, Any]]:
    for row in record["rows"]:
        for contender, key in (("no-cache", "uncached_s"), ("contiguous", "cached_s")):
            figures = _min_max(row[key], record["trials"], 1e3)
            yield {
                "contender": contender,
                "case": f"generate {row['tokens']} tokens, prompt 1",
                **figures,
            }


def _update(record: Record) -> Iterator[dict[str, Any]]:
    for row in record["updates"] + record["model"]:
        if "length" in row:
            case = {
                "model": "llama-3.2-1b",
                "case": f"updates of one step, sequence {row['length']}",
            }
        else:
            case = {
                "model": "small Llama",
                "case": f"decode step, sequence 64, capacity {row['capacity']}",
            }
        yield {"contender": row["cache"], **case, **_percentiles(row, record["repeats"])}


_FIGURES = {
    "generation": _generation,
    "context": _context,
    "exact": _exact,
    "training": _training,
    "attach": _attach,
    "step": _step,
    "sampling": _sampling,
    "files": _files,
    "speedup": _speedup,
    "update": _update,
}
