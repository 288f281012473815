"""Pictures of records: decode rates, time against length and capacity, speed-up, updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contenders import CONTENDERS
from record_figures import Record, context_rows, limit_ms, limit_tokens_per_s, measured, model_name


def generation(records: list[Record], path: Path) -> None:
    """One panel for each record: decode rate of each contender and what the bandwidth allows."""
    height = 1.6 + 0.35 * max(len(measured(record)) for record in records)
    figure, axes = _panels(len(records), (1.5 + 4 * len(records), height), sharey=True)
    for axis, record in zip(axes, records, strict=True):
        ran = measured(record)
        rates = [row["summary"]["decode_tokens_per_s"] for row in ran.values()]
        middle = [rate["median"] for rate in rates]
        errors = [[r["median"] - r["min"] for r in rates], [r["max"] - r["median"] for r in rates]]
        bars = axis.barh(
            list(ran), middle, xerr=errors, color=[CONTENDERS[name].color for name in ran]
        )
        axis.bar_label(bars, [f"{rate:,.0f}" for rate in middle], padding=4)
        limit = limit_tokens_per_s(record)
        if limit is not None:
            axis.axvline(limit, color="black", linestyle="--", linewidth=1)
            style = {"rotation": 90, "ha": "right", "va": "center", "fontsize": 8}
            words = f"bandwidth allows {limit:,.0f}"
            axis.text(limit * 0.99, 0.5, words, transform=axis.get_xaxis_transform(), **style)
        axis.set(title=model_name(record), xlabel="decode, tokens/s")
        axis.set_xlim(0, max([limit or 1, *middle]) * 1.06)
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    w = records[0]["workload"]
    sizes = f"batch {w['batch_size']}, prompt {w['prompt_len']}, {w['new_tokens']} new tokens"
    figure.suptitle(f"{records[0]['hardware']}, {w['dtype']}, {sizes}", fontsize=10)
    _save(figure, path)


def context(record: Record, path: Path) -> None:
    """Left: time against the sequence's length; right: against the capacity."""
    figure, axes = _panels(2, (11, 4.4), sharey=True)
    sweeps = (
        ("context", "context", "tokens in the sequence"),
        ("capacity", "max_cache_len", "capacity, tokens"),
    )
    for axis, (sweep, key, words) in zip(axes, sweeps, strict=True):
        rows = context_rows(record, [sweep])
        values = list(dict.fromkeys(row[key] for row in rows))
        for name in dict.fromkeys(row["contender"] for row in rows):
            own = [row for row in rows if row["contender"] == name]
            _band(axis, [row[key] for row in own], own, name, CONTENDERS[name].color)
        limits = {row[key]: limit_ms(row, record) for row in rows}
        axis.plot(
            list(limits),
            list(limits.values()),
            color="black",
            linestyle="--",
            label="bandwidth allows",
        )
        axis.set(xlabel=words, yscale="log")
        _log_axes(axis, values)
    axes[0].set(ylabel="ms per token", title=f"capacity {record['context'][0]['max_cache_len']:,}")
    axes[1].set(title=f"sequence of {record['capacity'][0]['context']:,} tokens")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    figure.suptitle(f"{model_name(record)}, {record['dtype']}, {record['hardware']}", fontsize=10)
    _save(figure, path)


def speedup(record: Record, path: Path) -> None:
    figure, (axis,) = _panels(1, (6, 4))
    x = [row["tokens"] for row in record["rows"]]
    lines = {
        "theoretical": "on paper, (N + 1) / 2",
        "predicted": "predicted from pass times",
        "measured": "measured",
    }
    for (key, words), style in zip(lines.items(), ("--", ":", "-"), strict=True):
        axis.plot(x, [row[key] for row in record["rows"]], style, marker="o", label=words)
    axis.set(
        xlabel="new tokens after a prompt of one",
        ylabel="times faster than without a cache",
        yscale="log",
    )
    axis.set_title(f"{model_name(record)}, {record['dtype']}, {record['hardware']}", fontsize=10)
    axis.set_xticks(x)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    _save(figure, path)


def update(record: Record, path: Path) -> None:
    figure, axes = _panels(2, (11, 4))
    sweeps = (("updates", "length", "Updates of one decode step, 16 layers"),)
    sweeps += (("model", "capacity", "Decode step of a small model, 64 tokens"),)
    for axis, (sweep, key, words) in zip(axes, sweeps, strict=True):
        for name in dict.fromkeys(row["cache"] for row in record[sweep]):
            own = [row for row in record[sweep] if row["cache"] == name]
            _band(axis, [row[key] for row in own], own, name)
        axis.set(title=words, xlabel=f"{key}, tokens", ylabel="ms", yscale="log")
        _log_axes(axis, list(dict.fromkeys(row[key] for row in record[sweep])))
    axes[0].legend()
    where = f"{record['hardware']}, {record['threads']} threads, float32"
    figure.suptitle(f"{where}; line: median, band: 10th to 90th percentile")
    _save(figure, path)


def _panels(count: int, size: tuple[float, float], **options: Any) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, count, figsize=size, squeeze=False, constrained_layout=True, **options
    )
    return figure, list(axes[0])


def _band(
    axis: Any, x: list[int], rows: list[Record], words: str, color: str | None = None
) -> None:
    """The medians as a line, 10th to 90th percentile as a band."""
    (line,) = axis.plot(x, [row["median_ms"] for row in rows], marker="o", label=words, color=color)
    low, high = ([row[key] for row in rows] for key in ("p10_ms", "p90_ms"))
    axis.fill_between(x, low, high, alpha=0.2, color=line.get_color())


def _log_axes(axis: Any, ticks: list[int]) -> None:
    from matplotlib.ticker import LogLocator

    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.grid(alpha=0.3, which="both")


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=130)
    plt.close(figure)
