"""Markdown tables of records. Each takes records of one kind; the benchmarks print it for one, the
pages for all.

Medians. With `spread=True` a cell has the range too: minimum to maximum of the trials, or 10th to
90th percentile.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from contenders import CONTENDERS
from record_figures import (
    ATTACH,
    CHAT,
    Record,
    context_rows,
    figure,
    label,
    limit_ms,
    limit_tokens_per_s,
    measured,
    model_name,
    points,
    title,
    with_range,
)

SPEED = ["dynamic", "static", "static-compiled", "graph"]
SIDES = ("usual", "exact")
LIMIT = "what the measured bandwidth allows"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table.

    >>> print(table(["", "a"], [["x", "1"]]))
    | | a |
    |---|---|
    | x | 1 |
    """
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * (lines[0].count("|") - 1) + "|", *lines[1:]])


# --- bench_generation.py


def generation(
    records: list[Record], names: Iterable[str] = tuple(CONTENDERS), spread: bool = False
) -> str:
    """Contenders as rows, models as columns, and what the bandwidth allows."""
    names = [name for name in names if any(name in measured(record) for record in records)]
    cell = _full_cell if spread else _short_cell
    rows = [[label(name), *(cell(record, name) for record in records)] for name in names]
    rows.append([LIMIT, *(_limit_cell(record) for record in records)])
    first = "(min to max); first call; first token" if spread else "(first call)"
    batches = [record["workload"]["batch_size"] for record in records]
    heads = [
        f"{title(r)}, {batch} rows" if batch > 1 else title(r)
        for r, batch in zip(records, batches, strict=True)
    ]
    return table([f"decode, tokens/s {first}", *heads], rows)


def _short_cell(record: Record, name: str) -> str:
    if (row := measured(record).get(name)) is None:
        return "-"
    fewer = (
        f", {row['new_tokens']} tokens"
        if row["new_tokens"] < record["workload"]["new_tokens"]
        else ""
    )
    return f"{row['summary']['decode_tokens_per_s']['median']:,.0f} ({row['summary']['cold_start_s']:.1f} s{fewer})"


def _full_cell(record: Record, name: str) -> str:
    if (row := measured(record).get(name)) is None:
        return "-"
    s = row["summary"]
    fewer = (
        f" for {row['new_tokens']} tokens"
        if row["new_tokens"] < record["workload"]["new_tokens"]
        else ""
    )
    rate, first_token = with_range(s["decode_tokens_per_s"]), figure(s["first_token_ms"]["median"])
    return f"{rate}; {s['cold_start_s']:.1f} s{fewer}; {first_token} ms"


def _limit_cell(record: Record) -> str:
    limit = limit_tokens_per_s(record)
    return "-" if limit is None else f"{limit:,.0f}"


def sliding(records: list[Record], spread: bool = False) -> str:
    """One record a row: bytes of the cache and time per token with full layers → compact ones."""
    rows = []
    for record in records:
        work, (full, compact) = (
            record["workload"],
            (measured(record)[name] for name in ("graph", "graph-compact")),
        )
        sizes = " → ".join(f"{row['cache_bytes'] / 2**20:,.0f}" for row in (full, compact))
        cost = _cost(
            full["summary"]["decode_ms"], compact["summary"]["decode_ms"], spread, digits=3
        )
        rows.append(
            [title(record), f"{work['prompt_len']:,}", f"{work['max_cache_len']:,}", sizes, cost]
        )
    return table(
        ['full → `sliding="compact"`', "prompt", "capacity", "cache, MiB", "decode, ms per token"],
        rows,
    )


# --- bench_context.py


def context(records: list[Record], spread: bool = False, ends: bool = False) -> str:
    """One row for each of the `points`, one column a contender."""
    found = {row["contender"] for record in records for row in context_rows(record)}
    names = [name for name in CONTENDERS if name in found]
    rows = []
    for record in records:
        for (length, capacity), cells in points(record, ends):
            best = min(cells.values(), key=lambda row: row["median_ms"])["contender"]
            figures = [_context_cell(cells.get(name), name == best, spread) for name in names]
            limit = figure(limit_ms(next(iter(cells.values())), record))
            rows.append([title(record), f"{length:,}", f"{capacity:,}", *figures, limit])
    head = [
        "ms per token",
        "sequence",
        "capacity",
        *(CONTENDERS[name].label for name in names),
        "bandwidth allows",
    ]
    return table(head, rows)


def _context_cell(row: Record | None, best: bool, spread: bool) -> str:
    if row is None:
        return "-"
    middle = f"**{figure(row['median_ms'])}**" if best else figure(row["median_ms"])
    return f"{middle} ({figure(row['p10_ms'])} to {figure(row['p90_ms'])})" if spread else middle


# --- bench_exact.py


def exact(records: list[Record], spread: bool = False) -> str:
    """One record a row:

    the largest difference of logits without and inside `exact`, and what `exact` costs.
    """
    names = list(records[0].get("ms", {}).get("usual", {}))
    head = [
        "",
        "largest logit difference without `exact`",
        "inside `exact`",
        *(f"{name}, ms" for name in names),
    ]
    rows = []
    for record in records:
        usual, inside = record["differences"]["usual"], record["differences"]["exact"]
        largest = f"{max(usual.values()):.2g}"
        if spread:
            largest = ", ".join(f"{name} {difference:.2g}" for name, difference in usual.items())
        times = [
            _cost(record["ms"]["usual"][name], record["ms"]["exact"][name], spread)
            for name in names
        ]
        name = f"{model_name(record)}, {record['workload']['dtype']}"
        rows.append([name, largest, f"{max(inside.values()):.2g}", *times])
    return table(head, rows)


def _cost(usual: dict[str, float], inside: dict[str, float], spread: bool, digits: int = 2) -> str:
    factor = f"{inside['median'] / usual['median']:.{digits}f}x"
    return f"{with_range(usual, spread)} → {with_range(inside, spread)}, {factor}"


# --- bench_training.py


TRAINING = (
    "Without `exact` → inside. Log-probabilities, over the whole vocabulary, and ratios are "
    "those of a generation against a training pass over its sequences with more padding. Errors "
    "of gradients are against float64, medians of 8 pairs of sequences. A step is a forward and "
    "a backward pass."
)


def training(records: list[Record], spread: bool = False) -> str:
    """One record a row, without `exact` → inside:

    differences, errors of gradients, times and memory of a step.
    """
    cases = list(records[0]["ms"]["usual"])
    head = [
        "",
        "largest difference of log-probabilities",
        "largest deviation of a ratio from 1",
        "relative error of gradients",
    ]
    head += [
        f"a step with `{name}`, ms{'; GiB' if records[0]['gib']['usual'] else ''}" for name in cases
    ]
    rows = []
    for record in records:
        pairs = [
            [record["differences"][side][key] for side in SIDES]
            for key in ("log-probability", "ratio")
        ]
        cells = [f"{usual:.2g} → {inside:.2g}" for usual, inside in pairs]
        usual, inside = (record["gradient_errors"][side]["median"] for side in SIDES)
        cells.append(f"{usual:.3g} → {inside:.3g}, {inside / usual:.3f}x")
        cells += [_training_cell(record, name, spread) for name in cases]
        rows.append([f"{model_name(record)}, {record['workload']['dtype']}", *cells])
    return table(head, rows)


def _training_cell(record: Record, name: str, spread: bool) -> str:
    cost = _cost(*(record["ms"][side][name] for side in SIDES), spread)
    peaks = [figure(record["gib"][side][name]) for side in SIDES if record["gib"][side]]
    return f"{cost}; {' → '.join(peaks)}" if peaks else cost


# --- bench_attach.py


def attach(records: list[Record], spread: bool = False) -> str:
    """Models as columns: the calls with each contender, then the first token of a turn by the
    history.

    With `spread` the histories share a row: the page of results has a limit.
    """
    rows = []
    for name in (
        name for name in ATTACH if any(name in _attach_rows(record) for record in records)
    ):
        rows.append(
            [
                f"{ATTACH[name]}: per token; first token",
                *(_attach_cell(r, name, spread) for r in records),
            ]
        )
    histories = list(dict.fromkeys(row["history"] for record in records for row in record["chat"]))
    words = " → ".join(ATTACH[name] for name in CHAT)
    for group in filter(None, [histories] if spread else [[history] for history in histories]):
        cells = (
            "; ".join(_chat_cell(record, history, spread) for history in group)
            for record in records
        )
        rows.append(
            [
                f"first token of a turn after {'; '.join(f'{n:,}' for n in group)} tokens: {words}",
                *cells,
            ]
        )
    return table([f"ms{' (min to max)' if spread else ''}", *map(title, records)], rows)


def _attach_rows(record: Record) -> dict[str, Record]:
    return {row["name"]: row["summary"] for row in record["contenders"]}


def _attach_cell(record: Record, name: str, spread: bool) -> str:
    if (row := _attach_rows(record).get(name)) is None:
        return "-"
    return "; ".join(with_range(row[key], spread) for key in ("decode_ms", "first_token_ms"))


def _chat_cell(record: Record, history: int, spread: bool) -> str:
    found = {
        row["contender"]: row["first_token_ms"]
        for row in record["chat"]
        if row["history"] == history
    }
    return " → ".join(with_range(found[name], spread) for name in CHAT) if found else "-"


# --- bench_files.py


def files(records: list[Record], spread: bool = False) -> str:
    """Models as columns: GB/s of saving and loading, and the first token."""
    sizes = (
        f"{r['workload']['prompt_len']:,} + {r['question_tokens']}; {r['file_bytes'] / 1e6:,.0f}"
        for r in records
    )
    rows = [["tokens of the file + the question; MB", *sizes]]
    for case, names in {"save": ["plain", "flushed", "ours"], "load": ["plain", "ours"]}.items():
        cells = (
            " → ".join(_rate_cell(record, case, name, spread) for name in names)
            for record in records
        )
        flushed = " → then fsync" if "flushed" in names else ""
        rows.append([f"{case}, GB/s: safetensors{flushed} → `{case}`", *cells])
    for case, words in {
        "first token": "first token",
        "next token": "the same after one new token",
    }.items():
        cells = (_sooner_cell(record, case, spread) for record in records)
        rows.append([f"{words}, ms: from the ids → from the file", *cells])
    return table([f"files{' (min to max)' if spread else ''}", *map(title, records)], rows)


def _sooner_cell(record: Record, case: str, spread: bool) -> str:
    if (factor := record["factors"].get(case.replace(" ", "_"))) is None:
        return "-"
    ids, file = (with_range(files_ms(record, case, name), spread) for name in ("ids", "file"))
    return f"{ids} → {file}, {with_range(factor, spread)} times sooner"


def files_ms(record: Record, case: str, name: str) -> dict[str, float]:
    (row,) = (row for row in record["rows"] if (row["case"], row["contender"]) == (case, name))
    return dict(row["ms"])


def _rate_cell(record: Record, case: str, name: str, spread: bool) -> str:
    ms = files_ms(record, case, name)
    ends = {"median": "median", "min": "max", "max": "min"}  # the slowest trial has the lowest rate
    rates = {end: record["file_bytes"] / 1e6 / ms[of] for end, of in ends.items()}
    return with_range(rates, spread)


# --- bench_step.py

STEP_BY_CHANGE = (
    "Each row has one change more than the row above."  # records from before there were rules
)
STEP_BY_RULE = (
    "The time of a captured step with all rules, then without one of them, by replays of its "
    "graph. 'Same list': the rule does not change the list of this model."
)


def step_caption(records: list[Record]) -> str:
    return STEP_BY_RULE if _by_rule(records) else STEP_BY_CHANGE


def step(records: list[Record], spread: bool = False) -> str:
    """One rule a row, one model a column; with `spread` also tokens/s and the attention of one
    layer.
    """
    by_rule = _by_rule(records)
    records, cell = by_rule or records, _rule_cell if by_rule else _change_cell
    found = [{row["words"]: row for row in record["variants"]} for record in records]
    rows, unused = [], []
    for words in dict.fromkeys(words for rows_of in found for words in rows_of):
        of_models = [rows_of.get(words, {}) for rows_of in found]
        if all(row.get("same_list") for row in of_models):
            unused.append(words.removeprefix("without "))
        elif not words.startswith("for comparison"):
            pairs = zip(of_models, records, strict=True)
            rows.append(
                [words, *(cell(row, record, spread) if row else "-" for row, record in pairs)]
            )
    if unused:
        rows.append([f"without {', '.join(unused)}", *("same list" for _ in records)])
    if spread and any(record["attention"] for record in records):
        lengths = ", ".join(f"{row['seq_len']:,}" for row in records[0]["attention"])
        cells = [
            ", ".join(_attention_cell(row, record) for row in record["attention"])
            for record in records
        ]
        rows.append(
            [f"attention of one layer alone, sequence {lengths}: µs (of the bandwidth)", *cells]
        )
    heads = ["ms per step (kernels)", "ms per step (min to max), over all rules; kernels; tokens/s"]
    heads = heads if by_rule else ["tokens/s (kernels)", "tokens/s (min to max); replay; kernels"]
    return table([heads[spread], *map(title, records)], rows)


def _by_rule(records: list[Record]) -> list[Record]:
    return [record for record in records if "rules" in record]


def _rule_cell(row: Record, record: Record, spread: bool) -> str:
    if row.get("same_list"):
        return "same list"
    if "fallback_reason" in row:
        return "fell back"
    kernels = f"{row['kernels']:.0f}" if "kernels" in row else "-"
    middle, with_all = (statistics.median(one["replay_ms"]) for one in (row, record["variants"][0]))
    if not spread:
        return f"{middle:.3f} ({kernels})"
    over = "" if row is record["variants"][0] else f", {100 * (middle / with_all - 1):+.1f} %"
    return f"{_milliseconds(row['replay_ms'])}{over}; {kernels}; {row['tokens_per_s']:,.0f}"


def _milliseconds(trials: list[float]) -> str:
    """Median (minimum to maximum), to the microsecond: a rule may save a few.

    >>> _milliseconds([1.0, 0.8, 0.9])
    '0.900 (0.800 to 1.000)'
    """
    return f"{statistics.median(trials):.3f} ({min(trials):.3f} to {max(trials):.3f})"


def _change_cell(row: Record, record: Record, spread: bool) -> str:
    if not spread:
        return f"{row['tokens_per_s']:,.0f} ({row['kernels']:.0f})"
    batch_size = row["tokens_per_s"] * sorted(row["step_ms"])[len(row["step_ms"]) // 2] / 1e3
    rates = [batch_size * 1e3 / ms for ms in row["step_ms"]]
    figures = {"median": row["tokens_per_s"], "min": min(rates), "max": max(rates)}
    return f"{with_range(figures)}; {row['replay_ms']:.3f} ms; {row['kernels']:.0f}"


def _attention_cell(row: Record, record: Record) -> str:
    share = row["bytes"] / (row["us"] * 1e-6) / (record["bandwidth_gb_per_s"] * 1e9)
    return f"{row['us']:.1f} ({share:.0%})"


# --- bench_sampling.py


def sampling(records: list[Record], spread: bool = False) -> str:
    """One model and contender a row, one set of processors a column."""
    cases = list(dict.fromkeys(row["case"] for record in records for row in record["rows"]))
    rows = []
    for record in records:
        for name in dict.fromkeys(row["contender"] for row in record["rows"]):
            found = {row["case"]: row["ms"] for row in record["rows"] if row["contender"] == name}
            cells = [_sampling_cell(found.get(case), found[cases[0]], spread) for case in cases]
            rows.append([f"{title(record)}, {label(name)}", *cells])
    return table([f"ms per token{' (min to max)' if spread else ''}, over greedy", *cases], rows)


def _sampling_cell(ms: dict[str, float] | None, greedy: dict[str, float], spread: bool) -> str:
    if ms is None:
        return "-"
    over = "" if ms is greedy else f", {ms['median'] / greedy['median']:.2f}x"
    return f"{with_range(ms, spread)}{over}"


# --- bench_speedup.py


def speedup(records: list[Record]) -> str:
    """One record a row, one number of tokens a column:

    the factor on paper, and predicted and measured factors.
    """
    head = [
        f"{row['tokens']} new tokens, {row['theoretical']:.1f} on paper"
        for row in records[0]["rows"]
    ]
    rows = [[title(record), *map(_speedup_cell, record["rows"])] for record in records]
    return table(["predicted; measured: seconds without a cache → with", *head], rows)


def _speedup_cell(row: Record) -> str:
    uncached, cached = (with_range(row[key]) for key in ("uncached_s", "cached_s"))
    return f"{row['predicted']:.2f}; **{row['measured']:.2f}**: {uncached} → {cached}"


# --- bench_update.py


def update(record: Record, spread: bool = False, every: int = 1) -> str:
    """The updates of one step by the sequence's length, then a decode step of a small model by the
    capacity.
    """
    lengths = list(dict.fromkeys(row["length"] for row in record["updates"]))[::every]
    groups = [
        (
            f"updates of one step, sequence {value:,}",
            [row for row in record["updates"] if row["length"] == value],
        )
        for value in lengths
    ]
    for value in dict.fromkeys(row["capacity"] for row in record["model"]):
        cells = [row for row in record["model"] if row["capacity"] == value]
        groups.append((f"decode step of a small model, sequence 64, capacity {value:,}", cells))
    rows = [[words, *(_update_cell(row, spread) for row in cells)] for words, cells in groups]
    return table(["ms", *(f"`{row['cache']}`" for row in groups[0][1])], rows)


def _update_cell(row: Record, spread: bool) -> str:
    figures = {
        key: row[f"{name}_ms"]
        for key, name in (("median", "median"), ("min", "p10"), ("max", "p90"))
    }
    return with_range(figures, spread)
