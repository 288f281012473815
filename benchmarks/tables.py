"""Markdown tables of records. Each takes records of one kind; the benchmarks print it for one, the pages for all.

Medians. With `spread=True` a cell has the range too: minimum to maximum of the trials, or 10th to 90th percentile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from contenders import CONTENDERS

Record = dict[str, Any]
MODELS = {"llama-3.2-1b": "Llama-3.2-1B", "qwen3-1.7b": "Qwen3-1.7B", "gemma-3-1b": "gemma-3-1b"}
OTHER_MODELS = {"smollm2": "SmolLM2-135M", "llama": "Llama miniature"}
OTHER_MODELS |= {"gpt2-xl": "GPT-2 XL", "phi-2": "Phi-2", "opt-1.3b": "OPT-1.3B"}
SPEED = ["dynamic", "static", "static-compiled", "graph"]
ATTACH = {
    "graph": "`StaticContiguousCache` and `GraphDecoder()`",
    "contiguous": "`StaticContiguousCache`",
    "decoder": "`GraphDecoder()` alone",
    "attach": "`attach(model)`",
    "attach-reuse": "`attach(model, reuse_prefix=True)`",
    "dynamic": "plain `generate`",
}
CHAT = ["dynamic", "attach", "attach-reuse"]
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
    shown = [(w["model"], ""), (w["dtype"], ""), (w.get("batch_size"), "batch "), (w.get("prompt_len"), "prompt ")]
    shown += [(w.get("new_tokens"), "new tokens "), (record["hardware"], ""), (record["torch"], "torch ")]
    shown += [(record["transformers"], "transformers "), (record["commit"], "commit ")]
    return ", ".join(f"{name}{value}" for value, name in shown if value is not None) + "."


def measured(record: Record) -> dict[str, Record]:
    """The contenders of a generation record that ran, by name; those that no longer exist are left out."""
    return {row["name"]: row for row in record["contenders"] if "summary" in row and row["name"] in CONTENDERS}


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


# --- bench_generation.py


def generation(records: list[Record], names: Iterable[str] = tuple(CONTENDERS), spread: bool = False) -> str:
    """Contenders as rows, models as columns, and what the bandwidth allows."""
    names = [name for name in names if any(name in measured(record) for record in records)]
    cell = _full_cell if spread else _short_cell
    rows = [[label(name), *(cell(record, name) for record in records)] for name in names]
    rows.append([LIMIT, *(_limit_cell(record) for record in records)])
    first = "(min to max); first call; first token" if spread else "(first call)"
    return table([f"decode, tokens/s {first}", *map(title, records)], rows)


def _short_cell(record: Record, name: str) -> str:
    if (row := measured(record).get(name)) is None:
        return "-"
    fewer = f", {row['new_tokens']} tokens" if row["new_tokens"] < record["workload"]["new_tokens"] else ""
    return f"{row['summary']['decode_tokens_per_s']['median']:,.0f} ({row['summary']['cold_start_s']:.1f} s{fewer})"


def _full_cell(record: Record, name: str) -> str:
    if (row := measured(record).get(name)) is None:
        return "-"
    s = row["summary"]
    fewer = f" for {row['new_tokens']} tokens" if row["new_tokens"] < record["workload"]["new_tokens"] else ""
    rate, first_token = with_range(s["decode_tokens_per_s"]), figure(s["first_token_ms"]["median"])
    return f"{rate}; {s['cold_start_s']:.1f} s{fewer}; {first_token} ms"


def _limit_cell(record: Record) -> str:
    limit = limit_tokens_per_s(record)
    return "-" if limit is None else f"{limit:,.0f}"


def limit_tokens_per_s(record: Record) -> float | None:
    """Tokens/s of a cached step that reads its bytes at the full bandwidth and does nothing else."""
    rows = [row for name, row in measured(record).items() if CONTENDERS[name].cached and row["bytes_per_step"]]
    batch_size: int = record["workload"]["batch_size"]
    return batch_size * record["bandwidth_gb_per_s"] * 1e9 / rows[0]["bytes_per_step"] if rows else None


def not_run(rows: list[Record]) -> list[str]:
    lines = [f"- {row['name']} did not run: {row['unavailable']}." for row in rows if "unavailable" in row]
    return lines + [f"- {row['name']} FAILED: {row['error']}" for row in rows if "error" in row]


# --- bench_layernorm.py


def layernorm(record: Record, spread: bool = False) -> str:
    """Contenders as rows, models as columns; empty where nothing ran."""
    ran = [row for row in record["rows"] if "tokens_per_s" in row]
    cells = {(row["contender"], row["model"]): layernorm_cell(row, spread) for row in ran}
    models = list(dict.fromkeys(row["model"] for row in ran))
    names = [name for name in CONTENDERS if any(row["contender"] == name for row in ran)]
    rows = [[CONTENDERS[name].label, *(cells.get((name, model), "-") for model in models)] for name in names]
    words = f"(low to high of {record['trials']}; first call)" if spread else "(first call)"
    head = [f"tokens/s {words}", *(model_name({"model": model}) for model in models)]
    return table(head, rows) if ran else ""


def layernorm_cell(row: Record, spread: bool) -> str:
    rate, seconds = row["tokens_per_s"], f"{row['first_call_s']:.1f} s"
    if not spread:
        return f"{rate['median']:,.0f} ({seconds})"
    return f"{figure(rate['median'])} ({figure(rate['low'])} to {figure(rate['high'])}; {seconds})"


def layers_gain(record: Record) -> str:
    """How much faster `GraphDecoder("layers")` is than `GraphDecoder()`, over the models, in percent."""
    rates = {(row["contender"], row["model"]): row["tokens_per_s"]["median"] for row in record["rows"]}
    models = dict.fromkeys(model for _, model in rates)
    return f"{span([100 * (rates['graph-layers', m] / rates['graph', m] - 1) for m in models])} %"


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
    head = ["ms per token", "sequence", "capacity", *(CONTENDERS[name].label for name in names), "bandwidth allows"]
    return table(head, rows)


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
            measured_here = [item for item in (measured_here[0], measured_here[-1]) if item[0] not in seen]
        found += measured_here
    return found


def _context_cell(row: Record | None, best: bool, spread: bool) -> str:
    if row is None:
        return "-"
    middle = f"**{figure(row['median_ms'])}**" if best else figure(row["median_ms"])
    return f"{middle} ({figure(row['p10_ms'])} to {figure(row['p90_ms'])})" if spread else middle


def limit_ms(row: Record, record: Record) -> float:
    """Milliseconds of the bytes that a step must read, at the measured bandwidth; nan where they are not known."""
    return (row["bytes_per_step"] or float("nan")) / record["bandwidth_gb_per_s"] / 1e6


# --- bench_exact.py


def exact(records: list[Record], spread: bool = False) -> str:
    """One record a row: the largest difference of logits without and inside `exact`, and what `exact` costs."""
    names = list(records[0].get("ms", {}).get("usual", {}))
    head = ["", "largest logit difference without `exact`", "inside `exact`", *(f"{name}, ms" for name in names)]
    rows = []
    for record in records:
        usual, inside = record["differences"]["usual"], record["differences"]["exact"]
        largest = f"{max(usual.values()):.2g}"
        if spread:
            largest = ", ".join(f"{name} {difference:.2g}" for name, difference in usual.items())
        times = [_cost(record["ms"]["usual"][name], record["ms"]["exact"][name], spread) for name in names]
        name = f"{model_name(record)}, {record['workload']['dtype']}"
        rows.append([name, largest, f"{max(inside.values()):.2g}", *times])
    return table(head, rows)


def _cost(usual: dict[str, float], inside: dict[str, float], spread: bool) -> str:
    factor = f"{inside['median'] / usual['median']:.2f}x"
    return f"{with_range(usual, spread)} → {with_range(inside, spread)}, {factor}"


# --- bench_attach.py


def attach(records: list[Record], spread: bool = False) -> str:
    """Models as columns: the calls with each contender, then the first token of a turn by the history."""
    rows = []
    for name in (name for name in ATTACH if any(name in _attach_rows(record) for record in records)):
        rows.append([f"{ATTACH[name]}: per token; first token", *(_attach_cell(r, name, spread) for r in records)])
    for history in dict.fromkeys(row["history"] for record in records for row in record["chat"]):
        words = " → ".join(ATTACH[name] for name in CHAT)
        cells = (_chat_cell(record, history, spread) for record in records)
        rows.append([f"first token of a turn after {history:,} tokens: {words}", *cells])
    return table([f"ms{' (min to max)' if spread else ''}", *map(title, records)], rows)


def _attach_rows(record: Record) -> dict[str, Record]:
    return {row["name"]: row["summary"] for row in record["contenders"]}


def _attach_cell(record: Record, name: str, spread: bool) -> str:
    if (row := _attach_rows(record).get(name)) is None:
        return "-"
    return "; ".join(with_range(row[key], spread) for key in ("decode_ms", "first_token_ms"))


def _chat_cell(record: Record, history: int, spread: bool) -> str:
    found = {row["contender"]: row["first_token_ms"] for row in record["chat"] if row["history"] == history}
    return " → ".join(with_range(found[name], spread) for name in CHAT) if found else "-"


def attach_cost(record: Record) -> str:
    """What `attach` adds to the explicit objects."""
    words = []
    for key, unit in (("token_percent", "% per token"), ("first_token_ms", "ms to the first token")):
        middle, low, high = (f"{record['overhead'][key][end]:+.2f}" for end in ("median", "min", "max"))
        words.append(f"{middle} {unit} ({low} to {high})")
    return " and ".join(words)


def chat_growth(record: Record) -> str:
    """The longest history over the shortest: how many times as long the first token of a turn takes."""
    histories = [row["history"] for row in record["chat"]]
    if len(set(histories)) < 2:
        return ""
    ends = (min(histories), max(histories))
    ms = {(row["contender"], row["history"]): row["first_token_ms"]["median"] for row in record["chat"]}
    factors = [f"{ms[name, ends[1]] / ms[name, ends[0]]:.2f} times as long with {ATTACH[name]}" for name in CHAT]
    return f"After {ends[1]:,} tokens the first token of a turn takes, against {ends[0]:,}: {', '.join(factors)}."


# --- bench_step.py


def step(records: list[Record], spread: bool = False) -> str:
    """One change a row, one model a column; with `spread` also the replay and the attention of one layer."""
    rows = []
    for i, words in enumerate(row["words"] for row in records[0]["variants"]):
        if not words.startswith("for comparison"):
            rows.append([words, *(_step_cell(record["variants"][i], spread) for record in records)])
    if spread:
        lengths = ", ".join(f"{row['seq_len']:,}" for row in records[0]["attention"])
        cells = [", ".join(_attention_cell(row, record) for row in record["attention"]) for record in records]
        rows.append([f"attention of one layer alone, sequence {lengths}: µs (of the bandwidth)", *cells])
    head = "tokens/s (min to max); replay; kernels" if spread else "tokens/s (kernels)"
    return table([head, *map(title, records)], rows)


def _step_cell(row: Record, spread: bool) -> str:
    if not spread:
        return f"{row['tokens_per_s']:,.0f} ({row['kernels']:.0f})"
    batch_size = row["tokens_per_s"] * sorted(row["step_ms"])[len(row["step_ms"]) // 2] / 1e3
    rates = [batch_size * 1e3 / ms for ms in row["step_ms"]]
    figures = {"median": row["tokens_per_s"], "min": min(rates), "max": max(rates)}
    return f"{with_range(figures)}; {row['replay_ms']:.3f} ms; {row['kernels']:.0f}"


def _attention_cell(row: Record, record: Record) -> str:
    share = row["bytes"] / (row["us"] * 1e-6) / (record["bandwidth_gb_per_s"] * 1e9)
    return f"{row['us']:.1f} ({share:.0%})"


# --- bench_speedup.py


def speedup(records: list[Record]) -> str:
    """One number of tokens a row: the factor on paper, and predicted and measured factors of each record."""
    rows = []
    for i, row in enumerate(records[0]["rows"]):
        cells = [_speedup_cells(record["rows"][i]) for record in records]
        rows.append([f"{row['tokens']}", f"{row['theoretical']:.1f}", *(cell for both in cells for cell in both)])
    heads = [[f"{title(record)}: predicted", "measured: seconds without a cache → with"] for record in records]
    return table(["new tokens", "on paper, (N + 1) / 2", *(head for both in heads for head in both)], rows)


def _speedup_cells(row: Record) -> list[str]:
    uncached, cached = (with_range(row[key]) for key in ("uncached_s", "cached_s"))
    return [f"{row['predicted']:.2f}", f"**{row['measured']:.2f}**: {uncached} → {cached}"]


# --- bench_update.py


def update(record: Record, spread: bool = False, every: int = 1) -> str:
    """The updates of one step by the sequence's length, then a decode step of a small model by the capacity."""
    lengths = list(dict.fromkeys(row["length"] for row in record["updates"]))[::every]
    groups = [
        (f"updates of one step, sequence {value:,}", [row for row in record["updates"] if row["length"] == value])
        for value in lengths
    ]
    for value in dict.fromkeys(row["capacity"] for row in record["model"]):
        cells = [row for row in record["model"] if row["capacity"] == value]
        groups.append((f"decode step of a small model, sequence 64, capacity {value:,}", cells))
    rows = [[words, *(_update_cell(row, spread) for row in cells)] for words, cells in groups]
    return table(["ms", *(f"`{row['cache']}`" for row in groups[0][1])], rows)


def _update_cell(row: Record, spread: bool) -> str:
    figures = {key: row[f"{name}_ms"] for key, name in (("median", "median"), ("min", "p10"), ("max", "p90"))}
    return with_range(figures, spread)


# --- computed, not measured


def cache_sizes() -> str:
    """Bytes of a `StaticContiguousCache` for the dev models in bfloat16, batch 1."""
    import torch

    from hf_static_kv import cache_bytes
    from hf_static_kv.testing import dev_config

    def mib(model: str, length: int) -> str:
        return f"{cache_bytes(dev_config(model), length, dtype=torch.bfloat16) >> 20:,} MiB"

    rows = [[name, *(mib(model, length) for length in (1024, 8192, 32768))] for model, name in MODELS.items()]
    return table(["`max_cache_len`", "1,024", "8,192", "32,768"], rows)


def span(figures: Iterable[float]) -> str:
    """From the least to the greatest.

    >>> span([3.14, 17.8, 2.0]), span([1.01, 2.126])
    ('2.0 to 18', '1.01 to 2.13')
    """
    low, high = min(figures := list(figures)), max(figures)
    digits = 2 if low < 2 else 1
    ends = dict.fromkeys(f"{value:.{0 if value >= 10 else digits}f}" for value in (low, high))
    return " to ".join(ends)
