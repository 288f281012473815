"""The table, the words and the picture of a record of `bench_generation.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contenders import CONTENDERS, fastest_of_ours
from outputs import save_picture

Record = dict[str, Any]


def conditions(record: Record) -> str:
    """One line: what ran where."""
    w = record["workload"]
    weights = "random weights" if record["random_weights"] else "trained weights"
    rows = f"{w['batch_size']} padded to the left" if w.get("padded") else w["batch_size"]
    where = record["hardware"] + ("" if w["device"].startswith("cuda") else f", {record['threads']} threads")
    return (
        f"{w['model']} ({weights}, {w['dtype']}), batch {rows}, prompt {w['prompt_len']}, {w['new_tokens']} "
        f"new tokens, static caches with room for {w['max_cache_len']}; {where}, torch {record['torch']}, transformers "
        f"{record['transformers']}, commit {record['commit']}; reads {record['bandwidth_gb_per_s']:,.1f} GB/s"
    )


def markdown(record: Record) -> str:
    """Conditions, both tables, and the words that belong to them."""
    ran = [row for row in record["contenders"] if "summary" in row]
    parts = [conditions(record) + "."]
    if ran:
        parts += [speed_table(record), step_table(ran)]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes(record))]).rstrip()


def speed_table(record: Record) -> str:
    ran = {row["name"]: row for row in record["contenders"] if "summary" in row}
    best = fastest(record)
    lines = [
        "| | first token, ms | prompt, tokens/s | decode, tokens/s | ms per token | of the bandwidth "
        "| cold start, s | of it warm-up | cache, MiB | peak over the model, MiB |",
        "|---" * 10 + "|",
    ]
    for name, row in ran.items():
        s = row["summary"]
        mark = " **fastest**" if name == best and len(ran) > 1 else ""
        fewer = f" ({row['new_tokens']} tokens)" if row["new_tokens"] < record["workload"]["new_tokens"] else ""
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}"
        cells = [
            f"{CONTENDERS[name].words}{mark}",
            with_range(s["first_token_ms"], ".1f"),
            f"{s['prompt_tokens_per_s']:,.0f}",
            with_range(s["decode_tokens_per_s"], ",.1f"),
            f"{s['decode_ms']['median']:.2f}",
            "-" if s["bandwidth_share"] is None else f"{s['bandwidth_share']:.1%} ({s['gb_per_s']:,.1f} GB/s)",
            f"{s['cold_start_s']:.2f}{fewer}",
            f"{s['cold_share']:.0%}",
            f"{row['cache_bytes'] / 2**20:,.2f}",
            peak,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def step_table(ran: list[Record]) -> str:
    lines = ["| ms per step, clocked | mean | P50 | P95 | P99 | min | max |", "|---" * 7 + "|"]
    for row in ran:
        figures = row["summary"]["latency_ms"]
        cells = [f"{figures[key]:.2f}" for key in ("mean", "p50", "p95", "p99", "min", "max")]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def notes(record: Record) -> list[str]:
    """Where ours is behind and why, what ran with fewer tokens, what did not run."""
    w, found = record["workload"], []
    if (behind := where_behind(record)) is not None:
        found.append(behind)
    for row in record["contenders"]:
        if "unavailable" in row:
            found.append(f"{row['name']} was not run: {row['unavailable']}.")
        elif "error" in row:
            found.append(f"{row['name']} FAILED: {row['error']}")
        elif row["new_tokens"] < w["new_tokens"]:
            found.append(
                f"{row['name']} ran {row['new_tokens']} tokens, not {w['new_tokens']}: over a longer text its steps "
                "can only be slower, and its cold start is not that of the others."
            )
    shares = [row["summary"]["bandwidth_share"] for row in record["contenders"] if "summary" in row]
    if max((share for share in shares if share is not None), default=0) > 1:
        found.append("More than all of the bandwidth: this model's weights fit into the processor's own caches.")
    return found


def fastest(record: Record) -> str | None:
    rates = {row["name"]: row["summary"]["decode_ms"]["median"] for row in record["contenders"] if "summary" in row}
    return min(rates, key=rates.__getitem__) if rates else None


def where_behind(record: Record) -> str | None:
    """One sentence that names every contender which decodes faster than the fastest of ours, and why."""
    decode = {row["name"]: row["summary"]["decode_ms"] for row in record["contenders"] if "summary" in row}
    mine = fastest_of_ours({name: figures["median"] for name, figures in decode.items()})
    if mine is None:
        return None
    ours, words = decode[mine], []
    for name, theirs in sorted(decode.items(), key=lambda item: item[1]["median"]):
        if theirs["median"] < ours["median"]:
            times = f"{name} decodes {ours['median'] / theirs['median']:.2f} times as fast as {mine}"
            overlap = theirs["max"] >= ours["min"]
            words.append(f"{times} ({'within the spread' if overlap else CONTENDERS[name].why_ahead})")
    return f"**Ours is not the fastest here**: {'; '.join(words)}." if words else None


def limit_tokens_per_s(record: Record) -> float | None:
    """Tokens per second at which the bytes that a cached step must read would take all of the bandwidth."""
    for row in record["contenders"]:
        if "summary" in row and CONTENDERS[row["name"]].cached and row["bytes_per_step"]:
            batch_size: int = record["workload"]["batch_size"]
            return batch_size * record["bandwidth_gb_per_s"] * 1e9 / row["bytes_per_step"]
    return None


def with_range(figures: dict[str, float], form: str) -> str:
    return f"{figures['median']:{form}} ({figures['min']:{form}} to {figures['max']:{form}})"


def plot(records: list[Record], path: Path) -> None:
    """One panel for each record: decode rate of each contender against what the bandwidth allows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    height = 1.6 + 0.35 * max(len(record["contenders"]) for record in records)
    figure, axes = plt.subplots(
        1, len(records), figsize=(1.5 + 4 * len(records), height), squeeze=False, sharey=True, constrained_layout=True
    )
    for axis, record in zip(axes[0], records, strict=True):
        ran = [row for row in record["contenders"] if "summary" in row]
        rates = [row["summary"]["decode_tokens_per_s"] for row in ran]
        middle = [rate["median"] for rate in rates]
        errors = [[r["median"] - r["min"] for r in rates], [r["max"] - r["median"] for r in rates]]
        colors = [CONTENDERS[row["name"]].color for row in ran]
        bars = axis.barh([row["name"] for row in ran], middle, xerr=errors, color=colors)
        axis.bar_label(bars, [f"{rate:,.0f}" for rate in middle], padding=4)
        limit = limit_tokens_per_s(record)
        if limit is not None:
            axis.axvline(limit, color="black", linestyle="--", linewidth=1)
            axis.text(
                limit * 0.99,
                0.5,
                f"bandwidth allows {limit:,.0f}",
                rotation=90,
                ha="right",
                transform=axis.get_xaxis_transform(),
                va="center",
                fontsize=8,
            )
        axis.set(title=record["workload"]["model"], xlabel="decode, tokens/s")
        axis.set_xlim(0, max([limit or 1, *middle]) * 1.06)
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].invert_yaxis()
    w = records[0]["workload"]
    figure.suptitle(
        f"{records[0]['hardware']}, {w['dtype']}, batch {w['batch_size']}, prompt {w['prompt_len']}, "
        f"{w['new_tokens']} new tokens",
        fontsize=10,
    )
    save_picture(figure, path)
