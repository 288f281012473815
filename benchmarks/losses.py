"""Where another cache is ahead of ours, and what our own settings cost: sentences of the records."""

from __future__ import annotations

from collections.abc import Iterator

from contenders import CONTENDERS
from measure import SIDES, Spread, spread
from records import Record, figure, measured, percentiles, points, span, title


def losses(records: dict[str, list[Record]]) -> str:
    """All sentences, as a list; `records` by kind, as `write_results.load` gives them."""
    generated = records["generation"] + records["families"] + records["batch"]
    behind = [ahead(where, ms) for where, ms in decode_points(generated, records["context"])]
    sentences = {
        "A decode step, another cache and the fastest of ours": [line for line in behind if line],
        "`StaticContiguousCache` without `GraphDecoder`, in multiples of the speed without a cache "
        "after a prompt of one token": over_no_cache(records["speedup"]),
        "First token, `attach(model)` and the fastest other cache": first_token(
            records["first_token"]
        ),
        "First token of a short prompt between calls of others": among_others(
            records["first_token"]
        ),
        "A prompt whose pass is captured, the second of its size": captures(records["first_token"]),
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
        ms: dict[tuple[int, ...], dict[str, float]] = {}
        for row in record["rows"]:
            case = row["rows"], row["held"], row["tokens"], row["answered"]
            ms.setdefault(case, {})[row["name"]] = row["ms"]["median"]
        for (rows, _, tokens, _), taken in ms.items():
            others = min(taken[name] for name in taken.keys() - {"attach"})
            if others < taken["attach"]:
                where = f"{title(record)}, {rows} x {tokens} tokens"
                lines.append(f"{figure(taken['attach'])} and {figure(others)} ms ({where})")
    return lines


def among_others(records: list[Record]) -> list[str]:
    """How much longer a call takes that finds the caches of the CPU filled by others."""
    rows = [row for record in records for row in record["rows"] if row.get("passes")]
    rows = [row for row in rows if row["tokens"] <= 16 and "among_others_s" in row]
    more = [1e3 * spread(row["among_others_s"])["median"] - row["ms"]["median"] for row in rows]
    return [f"{span(more)} ms longer"] if more else []


def captures(records: list[Record]) -> list[str]:
    """How long the calls took that captured a pass of one row."""
    rows = [row for record in records for row in record["rows"] if row.get("passes")]
    prompts = [row for row in rows if row["case"] == "prompt"]
    seconds = [max(row["warm_up_s"][1:]) for row in prompts]
    return [f"{span(seconds)} s"] if seconds else []


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
