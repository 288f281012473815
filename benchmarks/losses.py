"""Where another cache is ahead of ours, and what our own settings cost: sentences of the records."""

from __future__ import annotations

from collections.abc import Iterator

from contenders import CONTENDERS
from measure import SIDES, Spread
from records import Record, figure, measured, medians, percentiles, points, span, title


def losses(records: dict[str, list[Record]]) -> str:
    """All sentences, as a list; `records` by kind, as `write_results.load` gives them."""
    generated = records["generation"] + records["families"] + records["batch"]
    behind = [ahead(where, ms) for where, ms in decode_points(generated, records["context"])]
    sentences = {
        "A decode step, another cache and the fastest of ours": [line for line in behind if line],
        "`StaticContiguousCache` without `GraphDecoder`, in multiples of the speed without a cache "
        "after a prompt of one token": over_no_cache(records["speedup"]),
        "First token, `GraphDecoder()` and the fastest other cache": first_token(generated),
        "Peak memory of `GraphDecoder()`": memory(generated),
        "Inside `exact`": cost_of_exact(records["exact"] + records["training"]),
    }
    found = {words: lines for words, lines in sentences.items() if lines}
    return "\n".join(f"- {words}: {'; '.join(lines)}." for words, lines in found.items())


def decode_points(
    generated: list[Record], context: list[Record]
) -> Iterator[tuple[str, dict[str, Spread]]]:
    """Where decode steps were measured, and the milliseconds of each contender there."""
    for record in generated:
        ms = {name: row["summary"]["decode_ms"] for name, row in measured(record).items()}
        yield title(record), ms
    for record in context:
        for (length, capacity), rows in points(record, "context").items():
            where = f"{title(record)}, {length:,} of {capacity:,} tokens"
            yield where, {name: percentiles(row) for name, row in rows.items()}


def ahead(where: str, ms: dict[str, Spread]) -> str:
    """The fastest contender, if it is not ours; empty if it is, or if none of ours ran."""
    order = sorted(ms, key=lambda name: ms[name]["median"])
    ours = [name for name in order if CONTENDERS[name].ours]
    if not ours or ours[0] == order[0]:
        return ""
    both = (order[0], ours[0])
    words = [f"{short_label(name)} {figure(ms[name]['median'])} ms" for name in both]
    within = ms[both[0]]["max"] >= ms[both[1]]["min"]
    return f"{where}: {', '.join(words)}{' (within the spread)' if within else ''}"


def short_label(name: str) -> str:
    return CONTENDERS[name].label.removesuffix(" (the default)")


def over_no_cache(records: list[Record]) -> list[str]:
    lines = []
    for record in records:
        factors = span(row["measured"] for row in record["rows"])
        tokens = [row["tokens"] for row in record["rows"]]
        lines.append(f"{factors} on {title(record)}, {min(tokens)} to {max(tokens)} new tokens")
    return lines


def first_token(records: list[Record]) -> list[str]:
    lines = []
    for record in records:
        first = medians(record, "first_token_ms")
        others = [ms for name, ms in first.items() if not CONTENDERS[name].ours]
        if "graph" in first and min(others, default=first["graph"]) < first["graph"]:
            where = f"{title(record)}, batch {record['workload']['batch_size']}"
            lines.append(f"{figure(first['graph'])} and {figure(min(others))} ms ({where})")
    return lines


def memory(records: list[Record]) -> list[str]:
    rows = [row for row in map(measured, records) if {"dynamic", "graph"} <= row.keys()]
    more = [(row["graph"]["peak_bytes"] - row["dynamic"]["peak_bytes"]) / 2**20 for row in rows]
    return [f"{span(more)} MiB above that of `DynamicCache`"] if more else []


def cost_of_exact(records: list[Record]) -> list[str]:
    factors: dict[str, list[float]] = {}
    for record in records:
        training = "a training step with " if "gradient_errors" in record else ""
        for name in record["ms"]["usual"]:
            usual, inside = (record["ms"][side][name]["median"] for side in SIDES)
            factors.setdefault(training + name, []).append(inside / usual)
    return [f"{name} takes {span(found)} times as long" for name, found in factors.items()]
