"""Pictures of records: tokens/s of three ways to call `generate` (README.md), users of a server."""

from __future__ import annotations

from pathlib import Path

from records import NAMES, Record, measured, model_of, title

WAYS = {
    "dynamic": "generate",
    "static-compiled": "StaticCache + compile",
    "graph": "attach",
}


def draw(records: list[Record], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 2.8), dpi=110)
    width = 0.26
    for i, (name, words) in enumerate(WAYS.items()):
        rows = [measured(record)[name]["summary"] for record in records]
        speeds = [row["decode_tokens_per_s"]["median"] for row in rows]
        bars = axes.bar([n + (i - 1) * width for n in range(len(rows))], speeds, width, label=words)
        axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], fontsize=8)
    axes.set_xticks(range(len(records)), [NAMES[model_of(record)] for record in records])
    axes.set_ylabel("tokens/s")
    axes.set_title("bf16, batch 1, prompt 512, 256 new tokens, NVIDIA H200", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def draw_users(record: Record, path: Path) -> None:
    """Of `bench_serve.py`: the first token, and tokens/s of all users."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (first, speed) = plt.subplots(1, 2, figsize=(7, 2.8), dpi=110)
    for name, words in (("attach", "attach"), ("dynamic", "generate")):
        rows = [row for row in record["rows"] if row["name"] == name]
        users = [row["users"] for row in rows]
        for percent, style in (("p50", "-o"), ("p95", "--o")):
            ms = [row["first_token_ms"][percent] for row in rows]
            color = "C0" if name == "attach" else "C1"
            first.plot(users, ms, style, color=color, markersize=3, label=f"{words}, {percent}")
        speeds = [row["tokens_per_s"] for row in rows]
        speed.plot(users, speeds, "-o", color=color, markersize=3, label=words)
    first.set_ylabel("first token, ms")
    speed.set_ylabel("tokens/s of all users")
    users = sorted({row["users"] for row in record["rows"]})
    for axis in (first, speed):
        axis.set_xscale("log", base=2)
        axis.set_xticks(users, [str(number) for number in users])
        axis.set_xlabel("users")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{title(record)}, {record['hardware']}, over HTTP", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
