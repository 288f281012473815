"""Markdown tables of the pages. Each takes the records of one kind; figures are medians."""

from __future__ import annotations

import inspect
import re
import statistics
from collections.abc import Iterable
from typing import Any

import torch
from contenders import CONTENDERS
from measure import SIDES, Spread
from records import (
    DEV_MODELS,
    NAMES,
    Record,
    figure,
    label,
    limit_ms,
    limit_tokens_per_s,
    measured,
    percentiles,
    points,
    title,
)

from hf_static_kv import cache_bytes
from hf_static_kv.program.rules import RULES
from hf_static_kv.testing import dev_config

SPEED = ["dynamic", "static", "static-compiled", "graph"]
FIRST_TOKEN = {
    "attach": "**`attach(model)`**",
    "dynamic": "`DynamicCache` (the default)",
}
REQUESTS = {
    "attach": "**`attach(model)`**",
    "packed": "the same, packed by hand",
    "transformers": "transformers' own",
}
# Of a case, or of what is forced.
DRAFTED = {
    "plain": "without drafts",
    "lookup": "random text, where none is right",
    "transformers": "random text, transformers' own loop",
    "forced": "{:.0%} of drafts right",
    "always": "{:.0%} right, and never given up",
}

# Of `bench_assistant.py`: of a case, what stands before its share of right drafts.
ASSISTED = {
    "plain": "without drafts",
    "forced": "{:.0%} of drafts right",
    "transformers": "transformers' own loop without drafts",
    "transformers forced": "{:.0%} right, transformers' own loop",
}

# Of `bench_quantised.py`.
FORMATS = {
    "nf4": "bitsandbytes NF4",
    "nf4-nested": "bitsandbytes NF4, quantised scales",
    "fp4": "bitsandbytes FP4",
    "int8": "bitsandbytes int8",
    "torchao-int8": "torchao int8",
    "torchao-int4": "torchao int4",
    "quanto-int8": "quanto int8",
    "hqq-4bit": "HQQ 4 bits",
}
WAYS = {
    "eager": "`DynamicCache`",
    "recorded": "`GraphDecoder`, the package's kernels",
    "packed": "`persistent=False`",
    "one kernel": "**`GraphDecoder()`**",
}
_CODED = ("graph", "graph-int8")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table.

    >>> print(table(["", "a"], [["x", "1"]]))
    | | a |
    |---|---|
    | x | 1 |
    """
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * (lines[0].count("|") - 1) + "|", *lines[1:]])


def median(spread: Spread | None) -> str:
    return "-" if spread is None else figure(spread["median"])


def cost(usual: Spread, other: Spread, digits: int = 2) -> str:
    """Two times and their ratio."""
    factor = other["median"] / usual["median"]
    return f"{median(usual)} → {median(other)}, {factor:.{digits}f}x"


def generation(records: list[Record], names: Iterable[str] = tuple(CONTENDERS)) -> str:
    """Contenders as rows, models as columns, and what the bandwidth allows."""
    names = [name for name in names if any(name in measured(record) for record in records)]
    rows = [[label(name), *(_rate(record, name) for record in records)] for name in names]
    limits = [limit_tokens_per_s(record) for record in records]
    cells = ["-" if limit is None else f"{limit:,.0f}" for limit in limits]
    rows.append(["what the measured bandwidth allows", *cells])
    heads = []
    for record in records:
        batch_size = record["workload"]["batch_size"]
        heads.append(title(record) + (f", {batch_size} rows" if batch_size > 1 else ""))
    return table(["decode, tokens/s (first call)", *heads], rows)


def _rate(record: Record, name: str) -> str:
    row = measured(record).get(name)
    if row is None:
        return "-"
    first_call = f"{row['summary']['cold_start_s']:.1f} s"
    if row["new_tokens"] < record["workload"]["new_tokens"]:
        first_call += f", {row['new_tokens']} tokens"
    return f"{row['summary']['decode_tokens_per_s']['median']:,.0f} ({first_call})"


def sliding(records: list[Record]) -> str:
    """One record a row: bytes of the cache and time per token with full layers → compact ones."""
    rows = []
    for record in records:
        lengths = [f"{record['workload'][key]:,}" for key in ("prompt_len", "max_cache_len")]
        both = [measured(record)[name] for name in ("graph", "graph-compact")]
        sizes = " → ".join(f"{row['cache_bytes'] / 2**20:,.0f}" for row in both)
        times = [row["summary"]["decode_ms"] for row in both]
        rows.append([title(record), *lengths, sizes, cost(*times, digits=3)])
    head = ["prompt", "capacity", "cache, MiB", "decode, ms per token"]
    return table(['full → `sliding="compact"`', *head], rows)


def context(records: list[Record]) -> str:
    """The first → the last point of each sweep as rows, contenders as columns; without codes."""
    records = [record for record in records if _ran(record) - {*_CODED}]
    ran = {name for record in records for name in _ran(record)} - {"graph-int8"}
    names = [name for name in CONTENDERS if name in ran]
    rows = []
    for record in records:
        for sweep, words in (("context", "sequence"), ("capacity", "capacity")):
            found = points(record, sweep)
            ends = [min(found), max(found)]
            sizes = " → ".join(f"{at[sweep == 'capacity']:,}" for at in ends)
            cells = [_ends([found[at].get(name) for at in ends]) for name in names]
            limits = [figure(limit_ms(next(iter(found[at].values())), record)) for at in ends]
            limit = " → ".join(dict.fromkeys(limits))
            rows.append([f"{title(record)}, {words} {sizes}", *cells, limit])
    labels = [CONTENDERS[name].label for name in names]
    return table(["ms per token", *labels, "bandwidth allows"], rows)


def _ran(record: Record) -> set[str]:
    return {row["contender"] for row in record["context"]}


def coded(records: list[Record]) -> str:
    """One sequence a row: bytes of the cache and time per token without codes → with them."""
    rows = []
    for record in records:
        for lengths, found in points(record, "context").items():
            if found.keys() >= {*_CODED}:
                both = [found[name] for name in _CODED]
                sizes = " → ".join(f"{row['cache_bytes'] / 2**20:,.0f}" for row in both)
                times = cost(*map(percentiles, both), digits=3)
                rows.append([title(record), *(f"{n:,}" for n in lengths), sizes, times])
    if not rows:
        return ""
    head = ["sequence", "capacity", "cache, MiB", "decode, ms per token"]
    words = "Captured steps with states as they are, and with codes:\n\n"
    return words + table(['as they are → `kv_dtype="int8"`', *head], rows)


def _ends(rows: list[Record | None]) -> str:
    return " → ".join(figure(row["median_ms"]) for row in rows if row) or "-"


def update(records: list[Record]) -> str:
    """A sentence: each cache at every third length of the sequence."""
    (record,) = records
    ms = {(row["cache"], row["length"]): row["median_ms"] for row in record["updates"]}
    lengths = list(dict.fromkeys(length for _, length in ms))[::3]
    caches = []
    for name in dict.fromkeys(name for name, _ in ms):
        caches.append(f"`{name}` {' → '.join(figure(ms[name, n]) for n in lengths)} ms")
    return f"{' → '.join(f'{n:,}' for n in lengths)} tokens: {', '.join(caches)}"


def exact(records: list[Record]) -> str:
    """One record a row: the largest difference of logits, and what `exact` costs."""
    names = list(records[0]["ms"]["usual"])
    rows = []
    for record in records:
        largest = [f"{max(record['differences'][side].values()):.2g}" for side in SIDES]
        rows.append([_with_dtype(record), *largest, *(_sides(record, name) for name in names)])
    head = ["", "largest logit difference without `exact`", "inside `exact`"]
    return table([*head, *(f"{name}, ms" for name in names)], rows)


def training(records: list[Record]) -> str:
    """One record a row: differences, errors of gradients, times and memory of a step."""
    steps = list(records[0]["ms"]["usual"])
    rows = []
    for record in records:
        row = [_with_dtype(record)]
        for key in ("log-probability", "ratio"):
            row.append(" → ".join(f"{record['differences'][side][key]:.2g}" for side in SIDES))
        usual, inside = (record["gradient_errors"][side]["median"] for side in SIDES)
        row.append(f"{usual:.3g} → {inside:.3g}, {inside / usual:.3f}x")
        for name in steps:
            peaks = " → ".join(figure(record["gib"][side][name]) for side in SIDES)
            row.append(f"{_sides(record, name)}; {peaks}")
        rows.append(row)
    head = ["", "largest difference of log-probabilities", "largest deviation of a ratio from 1"]
    head += ["relative error of gradients", *(f"a step with `{name}`, ms; GiB" for name in steps)]
    return table(head, rows)


def _sides(record: Record, name: str) -> str:
    return cost(*(record["ms"][side][name] for side in SIDES))


def _with_dtype(record: Record) -> str:
    return f"{NAMES[record['workload']['model']]}, {record['workload']['dtype']}"


def first_token(records: list[Record]) -> str:
    """Contenders as rows: milliseconds of the first token, by the prompt; and of an answer."""
    # The record with all cases first: its columns are those of the table.
    records = sorted(records, key=lambda record: -len(record["rows"]))
    heads: dict[tuple[Any, ...], str] = {}
    rows = []
    for record in records:
        ms: dict[str, dict[tuple[Any, ...], str]] = {}
        for row in record["rows"]:
            key = (row["case"], row["rows"], row["held"], row["tokens"], row["answered"])
            heads[key] = _case(row)
            ms.setdefault(row["name"], {})[key] = median(row["ms"])
        for name, words in FIRST_TOKEN.items():
            if name in ms:
                cells = [ms[name].get(key, "-") for key in heads]
                rows.append([f"{title(record)}, {words}", *cells])
    return table(["ms", *heads.values()], rows)


def threads(records: list[Record]) -> str:
    return _together(records, "threads", "tokens/s of all calls, threads", FIRST_TOKEN)


def requests(records: list[Record]) -> str:
    return _together(records, "requests", "tokens/s of all answers, requests", REQUESTS)


def _together(records: list[Record], number: str, head: str, words: dict[str, str]) -> str:
    """Contenders as rows: tokens a second of all together, by their number."""
    heads = sorted({row[number] for record in records for row in record["rows"]})
    rows = []
    for record in records:
        by_name: dict[str, dict[int, str]] = {}
        for row in record["rows"]:
            by_name.setdefault(row["name"], {})[row[number]] = median(row["tokens_per_s"])
        for name, cells in by_name.items():
            rows.append([f"{title(record)}, {words[name]}", *(cells.get(n, "-") for n in heads)])
    return table([head, *map(str, heads)], rows)


def drafts(records: list[Record]) -> str:
    """Cases as rows: tokens a second, and times those without drafts."""
    rows = []
    for record in records:
        for row in record["rows"]:
            speed = figure(1e3 / row["ms"]["median"])
            name = f"{title(record)}, {_drafted(row['case'])}"
            if not record["random_weights"]:
                name = name.replace("random text, where none is right", "true text")
                name = name.replace("random text", "true text")
            rows.append([name, speed, figure(row["times_plain"])])
    return table(["prompt lookup", "tokens/s", "times those without"], rows)


def _drafted(case: str) -> str:
    kind, _, right = case.partition(" ")
    return DRAFTED[kind].format(float(right or 0))


def assistants(records: list[Record]) -> str:
    """Cases as rows: tokens a second, times those without drafts, and what a formula expects."""
    rows = []
    for record in records:
        for row in record["rows"]:
            kind, _, right = row["case"].rpartition(" ")
            name = ASSISTED.get(kind or right)
            if name is None:  # what a pass costs, which is in the record
                continue
            times = [figure(row[key]) if key in row else "-" for key in ("times_plain", "expected")]
            words = f"{title(record)}, {name.format(float(right) if kind else 0)}"
            rows.append([words, figure(1e3 / row["ms"]["median"]), *times])
    return table(["assistant", "tokens/s", "times those without", "by the formula"], rows)


def users(records: list[Record]) -> str:
    """Contenders and figures as rows, users as columns."""
    heads = sorted({row["users"] for record in records for row in record["rows"]})
    rows = []
    for record in records:
        for name, words in FIRST_TOKEN.items():
            by_number = {row["users"]: row for row in record["rows"] if row["name"] == name}
            for what, key in (("tokens/s", None), ("first token, ms", "p50"), ("of 95 %", "p95")):
                cells = [
                    "-" if row is None
                    else figure(row["first_token_ms"][key] if key else row["tokens_per_s"])
                    for row in map(by_number.get, heads)
                ]  # fmt: skip
                rows.append([f"{words}: {what}", *cells])
    return table(["users", *map(str, heads)], rows) if rows else ""


def long(records: list[Record]) -> str:
    """How long a captured step takes after long texts."""
    by_length = sorted((record["workload"]["prompt_len"], record) for record in records)
    steps = [figure(statistics.median(r["variants"][0]["replay_ms"])) for _, r in by_length]
    lengths = " → ".join(f"{length:,}" for length, _ in by_length)
    return f"{lengths} tokens: {' → '.join(steps)} ms"


def one_kernel(records: list[Record]) -> str:
    """Models as columns: how fast both ways decode, how far their logits are from float32, and the
    phases of the kernel.
    """
    names = list(dict.fromkeys(row["name"] for row in records[0]["rows"]))
    cells: dict[str, list[str]] = {}
    for column, record in enumerate(records):
        found = {}
        for case in dict.fromkeys(row["case"] for row in record["rows"]):
            ms = {row["name"]: row["ms"] for row in record["rows"] if row["case"] == case}
            speeds = [figure(1e3 / ms[name]["median"]) for name in names]
            found[f"tokens/s, {case}: {' → '.join(names)}"] = " → ".join(speeds)
        found["what the bandwidth allows"] = figure(record["bandwidth"] / record["bytes"])
        if accuracy := record.get("accuracy"):
            who = " → ".join(row["name"] for row in accuracy)
            found[f"KL from float32: {who}"] = _each(accuracy, "kl")
            found["the largest difference of a logit"] = _each(accuracy, "largest")
        found |= {f"{row['phase']}, us": figure(row["us"]) for row in record["phases"]}
        for name, cell in found.items():
            cells.setdefault(name, ["-"] * len(records))[column] = cell
    return table(["", *map(title, records)], ([name, *row] for name, row in cells.items()))


def _each(rows: list[Record], key: str) -> str:
    return " → ".join(f"{row[key]:.2g}" for row in rows)


def codes(records: list[Record]) -> str:
    """Models as rows, caches as columns: divergence and equal tokens."""
    names = list(dict.fromkeys(row["contender"] for r in records for row in r["rows"]))
    rows = []
    for record in records:
        by_name = {row["contender"]: _divergence(row) for row in record["rows"]}
        rows.append([title(record), *(by_name.get(name, "-") for name in names)])
    return table(["KL mean, largest; same token", *(f"`{name}`" for name in names)], rows)


def quantised(records: list[Record]) -> str:
    """Formats as rows, ways to generate as columns: tokens/s and the error of the logits."""
    ran = [(record, row) for record in records for row in record["rows"] if "ways" in row]
    if not ran:
        return ""
    rows = []
    for record, row in ran:
        sizes = [row["model_bytes"], row["peak_bytes"]]
        mib = "; ".join("-" if size is None else f"{size / 2**20:,.0f}" for size in sizes)
        cells = [_quantised_way(row["ways"][name]) for name in WAYS]
        if row["reason_for_list"]:
            cells[-1] = "-"  # the list is faster, or no kernel reads the format
        rows.append([f"{title(record)}, {_format(row)}", *cells, mib])
    how = "; ".join(dict.fromkeys(_conditions(record) for record, _ in ran))
    words = "Tokens/s, and the error of the logits against the unpacked weights in float32"
    head = ["tokens/s; relative error", *WAYS.values(), "weights; peak, MiB"]
    return f"{words} ({how}):\n\n{table(head, rows)}"


def _quantised_way(figures: Record) -> str:
    if figures["fallback_reason"]:
        return "fell back"
    return f"{median(figures['tokens_per_s'])}; {figures['error']:.2g}"


def _format(row: Record) -> str:
    numbers = row["packed_layers"], row["layers"]
    name = FORMATS[row["format"]]
    some = f" ({numbers[0]} of {numbers[1]} layers packed)"
    return name if numbers[0] == numbers[1] else name + some


def _conditions(record: Record) -> str:
    sizes = record["workload"]
    words = f"{sizes['dtype']}, batch {sizes['batch_size']}, prompt of {sizes['prompt_len']:,}"
    return f"{words}, {sizes['new_tokens']:,} new tokens"


def _divergence(row: Record) -> str:
    return f"{row['kl_mean']:.1e}, {row['kl_max']:.1e}; {row['same_token']:.1%}"


def _case(row: Record) -> str:
    if row["case"] == "prompt":
        return f"{row['tokens']:,} tokens"
    if row["case"] == "batch":
        return f"{row['rows']} x {row['tokens']:,}"
    answered = "" if row["answered"] == 1 else f", {row['answered']} answered"
    return f"{row['tokens']} after {row['held']:,}{answered}"


def files(records: list[Record]) -> str:
    """Models as columns: GB/s of saving and loading, and the first token."""
    rows = {
        "tokens of the file + the question; MB": [],
        "save, GB/s: safetensors → then fsync → `save`": [],
        "load, GB/s: safetensors → `load`": [],
        "first token, ms: from the ids → from the file": [],
    }
    for record in records:
        ms = {(row["case"], row["contender"]): row["ms"]["median"] for row in record["rows"]}
        megabytes = record["file_bytes"] / 1e6
        tokens = f"{record['workload']['prompt_len']:,} + {record['question_tokens']}"
        cells = [f"{tokens}; {megabytes:,.0f}"]
        for case, names in (("save", ["plain", "flushed", "ours"]), ("load", ["plain", "ours"])):
            cells.append(" → ".join(figure(megabytes / ms[case, name]) for name in names))
        times = " → ".join(figure(ms["first token", name]) for name in ("ids", "file"))
        cells.append(f"{times}, {median(record['factors']['first_token'])} times sooner")
        for row, cell in zip(rows.values(), cells, strict=True):
            row.append(cell)
    return table(["files", *map(title, records)], ([words, *row] for words, row in rows.items()))


def step(records: list[Record]) -> str:
    """One model a row, one rule a column."""
    words = dict.fromkeys(row["words"] for record in records for row in record["variants"])
    rows = []
    for record in records:
        found = {row["words"]: row for row in record["variants"]}
        rows.append([title(record), *(_step_cell(found.get(name, {})) for name in words)])
    return table(["ms per step (kernels)", *words], rows)


def _step_cell(row: Record) -> str:
    if "replay_ms" not in row:
        return "same" if row.get("same_list") else "-"
    # To the microsecond: a rule may save a few.
    return f"{statistics.median(row['replay_ms']):.3f} ({row['kernels']:.0f})"


def profiled(records: list[Record]) -> str:
    """Kernels as rows, numbers of batch rows as columns: launches of a step, and their microseconds."""
    records = sorted(records, key=lambda record: record["workload"]["batch_size"])
    heads = [f"rows: {record['workload']['batch_size']}" for record in records]
    cells: dict[str, list[str]] = {}
    for column, record in enumerate(records):
        for kernel in record["profile"]:
            if kernel["us"] >= _LEAST_US:
                row = cells.setdefault(_kernel(kernel["kernel"]), ["-"] * len(records))
                row[column] = f"{kernel['launches']:.0f}: {figure(kernel['us'])}"
    whole = [figure(1e3 * statistics.median(r["variants"][0]["replay_ms"])) for r in records]
    rows = [["the step", *whole], *([name, *row] for name, row in cells.items())]
    return table([f"{title(records[0])}: launches: us", *heads], rows)


_LEAST_US = 10  # of a kernel that has a row


def _kernel(name: str) -> str:
    """A short name of a kernel."""
    if name.startswith("nvjet"):
        return "the head (cuBLAS)"
    if "indexSelect" in name or "vectorized_gather" in name:
        return "embedding, cosines and sines"
    return f"`{name}`"


def sampling(records: list[Record]) -> str:
    """One model and contender a row, one set of processors a column."""
    cases = list(dict.fromkeys(row["case"] for record in records for row in record["rows"]))
    rows = []
    for record in records:
        ms = {(row["contender"], row["case"]): row["ms"] for row in record["rows"]}
        for name in dict.fromkeys(name for name, _ in ms):
            greedy = ms[name, cases[0]]
            cells = [f"{title(record)}, {label(name)}", median(greedy)]
            for case in cases[1:]:
                factor = ms[name, case]["median"] / greedy["median"]
                cells.append(f"{median(ms[name, case])}, {factor:.2f}x")
            rows.append(cells)
    return table(["ms per token, over greedy", *cases], rows)


# --- computed by the package: bytes of caches in bfloat16, batch 1, and the rewrite rules


def cache_sizes() -> str:
    lengths = (1024, 8192, 32768)
    rows = [[name, *(_mib(model, n) for n in lengths)] for model, name in DEV_MODELS.items()]
    for model, name in DEV_MODELS.items():
        if getattr(dev_config(model), "sliding_window", None):
            sizes = [_mib(model, n, sliding="compact") for n in lengths]
            rows.append([f'{name}, `sliding="compact"`', *sizes])
    return table(["`max_cache_len`", *(f"{n:,}" for n in lengths)], rows)


def rank_sizes() -> str:
    """On each rank of a tensor-parallel dev model, 32,768 positions."""
    rows = []
    for model, name in DEV_MODELS.items():
        heads = dev_config(model).num_key_value_heads
        rows.append([f"{name} ({heads})", *(_mib(model, 32768, tp=ranks) for ranks in (1, 2, 4))])
    head = ["KV heads in brackets", "one process", "each of 2 ranks", "each of 4 ranks"]
    return table(head, rows)


def _mib(model: str, max_cache_len: int, **how: str | int) -> str:
    try:
        size = cache_bytes(dev_config(model), max_cache_len, dtype=torch.bfloat16, **how)
    except ValueError:
        return "refused"
    return f"{size / 2**20:,.0f} MiB"


def rules() -> str:
    """The rewrite rules in their order: name, picture, whether a rule keeps the bits."""
    rows = [
        [f"`{name}`", picture(rule.apply.__doc__ or ""), "yes" if rule.keeps_bits else "no"]
        for name, rule in RULES.items()
    ]
    return table(["rule", "picture", "keeps the bits"], rows)


def picture(docstring: str) -> str:
    """The first picture of a rule's docstring in one line; two spaces come before a remark.

    >>> picture("y = f(x)  (some models)   ->   z = gf(x)      one token\\nz = g(y)")
    '`y = f(x)` (some models), `z = g(y)` → `z = gf(x)` (one token)'
    >>> picture("y = f(x)   ->   y = h(x,\\nz = g(y)            a)\\nw = k(z)        w = k(y)")
    '`y = f(x)`, `z = g(y)`, `w = k(z)` → `y = h(x, a)`, `w = k(y)`'
    """

    def code_and_remark(text: str) -> str:
        code, *remarks = re.split(r"\s{2,}", text.strip())
        return " ".join([f"`{code}`", *(f"({remark.strip('()')})" for remark in remarks)])

    first, *others = inspect.cleandoc(docstring).split("\n\n")[0].splitlines()
    middle = first.index("->")
    before, after = [first[:middle]], [first[middle + 2 :]]
    for line in others:
        left, right = line[:middle].strip(), line[middle:].strip()
        before += [left] if left else []
        if right and after[-1].rstrip().endswith(","):  # a call goes on
            after[-1] = f"{after[-1].rstrip()} {right}"
        elif right:
            after.append(right)
    return " → ".join(", ".join(map(code_and_remark, side)) for side in (before, after))
