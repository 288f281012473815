"""Where another cache is ahead of ours, and what our own settings cost:

sentences made from the records.
"""

from __future__ import annotations

from contenders import CONTENDERS
from record_figures import Record, attach_cost, figure, measured, model_name, points, span, title


def losses(records: dict[str, list[Record]]) -> list[str]:
    """All sentences; `records` by kind, as `write_results.load` gives them."""
    generated = records["generation"] + records["families"] + records["batch"]
    lines = [line for record in generated for line in behind(record)]
    lines += [*without_decoder(generated), *first_token(generated), *memory(generated)]
    lines += [line for record in records["context"] for line in context_behind(record)]
    lines += [line for record in records["speedup"] for line in slower_than_no_cache(record)]
    lines += cost_of_exact(records["exact"]) + cost_of_exact(records["training"], "training with ")
    lines += cost_of_attach(records["attach"]) + files_behind(records["files"])
    return lines + update_behind(records["update"][0])


def behind(record: Record) -> list[str]:
    """Contenders that decode faster than the fastest of ours."""
    decode = {name: row["summary"]["decode_ms"] for name, row in measured(record).items()}
    mine = fastest_of_ours({name: figures["median"] for name, figures in decode.items()})
    lines = []
    for name, theirs in decode.items():
        if mine is not None and theirs["median"] < decode[mine]["median"]:
            factor = decode[mine]["median"] / theirs["median"]
            words = f"{_label(name)} decodes {factor:.2f} times as fast as {_label(mine)}"
            lines.append(
                f"{title(record)}: {words}{_overlap(theirs['max'] >= decode[mine]['min'])}."
            )
    return lines


def without_decoder(records: list[Record]) -> list[str]:
    rows = [
        row
        for row in map(measured, records)
        if {"static", "static-compiled", "contiguous"} <= row.keys()
    ]
    if not rows:
        return []
    decode = [
        {name: row["summary"]["decode_ms"]["median"] for name, row in found.items()}
        for found in rows
    ]
    factors = span([ms["contiguous"] / ms["static-compiled"] for ms in decode])
    first_call = [
        {name: row["summary"]["cold_start_s"] for name, row in found.items()} for found in rows
    ]
    ours, theirs = (
        span([seconds[name] for seconds in first_call]) for name in ("contiguous", "static")
    )
    return [
        f"Without `GraphDecoder`, `StaticCache` compiled decodes {factors} times as fast as "
        "`StaticContiguousCache` after its first call: an eager step waits for Python.",
        f"Without `GraphDecoder`, the first call of `StaticContiguousCache` takes {ours} s and "
        f"that of `StaticCache` {theirs} s: cuDNN builds an attention plan for each new length.",
    ]


def first_token(records: list[Record]) -> list[str]:
    lines = []
    for record in records:
        first = {
            name: row["summary"]["first_token_ms"]["median"]
            for name, row in measured(record).items()
        }
        others = [ms for name, ms in first.items() if not CONTENDERS[name].ours]
        if "graph" in first and min(others, default=first["graph"]) < first["graph"]:
            batch = f", batch {record['workload']['batch_size']}"
            lines.append(
                f"{figure(first['graph'])} and {figure(min(others))} ms "
                f"({model_name(record)}{batch})"
            )
    return (
        [f"First token, `GraphDecoder()` and the fastest other cache: {'; '.join(lines)}."]
        if lines
        else []
    )


def memory(records: list[Record]) -> list[str]:
    rows = [row for row in map(measured, records) if {"dynamic", "graph"} <= row.keys()]
    more = [(row["graph"]["peak_bytes"] - row["dynamic"]["peak_bytes"]) / 2**20 for row in rows]
    return (
        [f"Peak memory of `GraphDecoder()`: {span(more)} MiB above that of `DynamicCache`."]
        if more
        else []
    )


def context_behind(record: Record) -> list[str]:
    """Points at which another contender is faster than the fastest of ours."""
    lines = []
    for (length, capacity), cells in points(record):
        times = {name: row["median_ms"] for name, row in cells.items()}
        best, mine = min(times, key=times.__getitem__), fastest_of_ours(times)
        if mine is not None and best != mine:
            within = _overlap(cells[best]["p90_ms"] >= cells[mine]["p10_ms"])
            both = (
                f"{_label(best)} {figure(times[best])} ms, {_label(mine)} {figure(times[mine])} ms"
            )
            lines.append(f"{length:,} of {capacity:,} tokens: {both}{within}")
    return [f"{title(record)}, {'; '.join(lines)}."] if lines else []


def slower_than_no_cache(record: Record) -> list[str]:
    rows = [row for row in record["rows"] if row["measured"] < 1]
    if not rows:
        return []
    tokens, factors = (
        ", ".join(f"{row['tokens']}" for row in rows),
        span([1 / row["measured"] for row in rows]),
    )
    return [
        f"{title(record)}, prompt of one token, {tokens} new tokens: `use_cache=False` is "
        f"{factors} times as fast as `StaticContiguousCache` without `GraphDecoder`."
    ]


def cost_of_exact(records: list[Record], what: str = "") -> list[str]:
    times, costs = [record["ms"] for record in records], []
    for name in times[0]["usual"] if times else []:
        factors = [ms["exact"][name]["median"] / ms["usual"][name]["median"] for ms in times]
        costs.append(f"{what}{name} takes {span(factors)} times as long")
    return [f"Inside `exact`: {'; '.join(costs)}."] if costs else []


def files_behind(records: list[Record]) -> list[str]:
    """Where a cache file takes longer than a plain safetensors file of the same bytes."""
    named = {
        "save": "saving",
        "save_flushed": "saving where both are flushed to disk",
        "load": "loading",
    }
    slower = [
        f"{words} {record['factors'][name]['median']:.0%} on {title(record)}"
        for record in records
        for name, words in named.items()
        if record["factors"][name]["median"] < 1
    ]
    return (
        [f"A cache file, in shares of the rate of safetensors alone: {'; '.join(slower)}."]
        if slower
        else []
    )


def cost_of_attach(records: list[Record]) -> list[str]:
    costs = [f"{attach_cost(record)} on {title(record)}" for record in records]
    return (
        [f"`attach(model)`, against cache and decoder passed to `generate`: {'; '.join(costs)}."]
        if costs
        else []
    )


def update_behind(record: Record) -> list[str]:
    lines = []
    for key, rows in (("length", record["updates"]), ("capacity", record["model"])):
        for value in dict.fromkeys(row[key] for row in rows):
            *others, mine = (row for row in rows if row[key] == value)
            best = min(others, key=lambda row: row["median_ms"])
            if best["median_ms"] < mine["median_ms"]:
                both = f"`{best['cache']}` {figure(best['median_ms'])} ms, ours {figure(mine['median_ms'])} ms"
                lines.append(f"{key} {value:,}: {both}{_overlap(best['p90_ms'] >= mine['p10_ms'])}")
    return [f"Small model on a CPU, {'; '.join(lines)}."] if lines else []


def fastest_of_ours(times: dict[str, float]) -> str | None:
    return min(
        (name for name in times if CONTENDERS[name].ours), key=times.__getitem__, default=None
    )


def _label(name: str) -> str:
    return CONTENDERS[name].label.removesuffix(" (the default)")


def _overlap(within: bool) -> str:
    return " (within the spread)" if within else ""
