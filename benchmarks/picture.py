"""The picture of README.md: tokens/s of three ways to call `generate`, from the records."""

from __future__ import annotations

from pathlib import Path

from records import NAMES, Record, measured, model_of

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
