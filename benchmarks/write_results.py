"""Write `benchmarks/RESULTS.md` and its pictures from the records in `benchmarks/results/` alone: nothing is measured.

python benchmarks/write_results.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_context
import bench_speedup
import bench_update
import generation_report
from contenders import CONTENDERS

HERE = Path(__file__).parent
RESULTS = HERE / "results"
Record = dict[str, Any]

INTRODUCTION = """# Results

Every figure on this page is in a record under [results](results); `make results` writes the page and its pictures
from the records alone. Above each table stands the command that made it. On other hardware, and on a busy host,
figures differ: each is a median with its spread beside it.

**Share of the bandwidth**: the bytes that a decode step must read (each weight once, and the keys and values of the
text) by the time it took, over the bandwidth that a large read reached in the same run."""

GENERATION = """## Time of `generate`

A decode step's time is (TN - T1) / (N - 1), where T1 and TN are plain calls of `generate` for one token and for N: the
loop's own cost is in it. **Cold start** is the first call in a fresh process, from the loaded model to the last token;
*of it warm-up* is the share that a later call does not pay: compiling, and on a GPU cuDNN, which builds an attention
plan for every length that it has not seen. The second table of each model is one more call, with a clock that waits
for the device after each token."""

AGREEMENT = """### Two runs of the same command

The spread in the tables is that of one run. Another run, on another day or another machine with the same GPU, differs
by more wherever the GPU waits for Python: then the host's processor is what is measured. Decode, tokens/s:"""

CONTEXT = """## Time against the text, and against the room

Left: as the text grows, in a cache that has room for the longest. Right: a short text, as the room grows. A cache whose
cost follows the text and not its room is flat on the right."""

SPEEDUP = "## Speed-up by tokens generated"

UPDATES = """## Putting a token into the cache, without a model

The `update` calls of one decode step alone, and one decode step of a small model on a CPU."""


def page() -> str:
    """The text of RESULTS.md."""
    parts = [INTRODUCTION, GENERATION]
    if gpu := generation_records("h200"):
        parts += [overview(gpu), "![decode rate of each contender](results/generation-h200.png)"]
    for path in sorted(RESULTS.glob("generation-*.json")):
        parts += [*heading(path), generation_report.markdown(read(path))]
    for path in sorted(RESULTS.glob("rerun-*.json")):
        first = RESULTS / path.name.replace("rerun", "generation")
        parts += [AGREEMENT, f"```\n{read(path)['command']}\n```", agreement(read(first), read(path))]
    parts.append(CONTEXT)
    for path in sorted(RESULTS.glob("context-*.json")):
        parts += [*heading(path), bench_context.markdown(read(path)), picture(path, "time against text and room")]
    parts.append(SPEEDUP)
    for path in sorted(RESULTS.glob("speedup-*.json")):
        parts += [*heading(path), bench_speedup.markdown(read(path)), picture(path, "speed-up by tokens")]
    record = read(RESULTS / "update.json")
    parts += [UPDATES, *heading(RESULTS / "update.json")]
    parts += [bench_update.markdown(record), picture(RESULTS / "update.json", "time of the updates")]
    return "\n\n".join(parts) + "\n"


def agreement(first: Record, second: Record) -> str:
    """Both medians of every contender, and by how much the slower is below the faster."""
    lines = [f"| | commit {first['commit']} | commit {second['commit']} | apart |", "|---" * 4 + "|"]
    others = {row["name"]: row for row in second["contenders"]}
    for row in first["contenders"]:
        rates = [r["summary"]["decode_tokens_per_s"] for r in (row, others[row["name"]])]
        low, high = sorted(rate["median"] for rate in rates)
        cells = [generation_report.with_range(rate, ".1f") for rate in rates]
        lines.append(f"| {row['name']} | {cells[0]} | {cells[1]} | {1 - low / high:.0%} |")
    return "\n".join(lines)


def overview(records: list[Record]) -> str:
    """Decode rate and cold start of every contender on every model; the table that the README shows too."""
    models = [record["workload"]["model"] for record in records]
    lines = ["| decode, tokens/s (cold start) | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    rows = {record["workload"]["model"]: {row["name"]: row for row in record["contenders"]} for record in records}
    for name in dict.fromkeys(row["name"] for record in records for row in record["contenders"]):
        words = CONTENDERS[name].words
        cells = [_overview_cell(rows[model].get(name), records[0]["workload"]["new_tokens"]) for model in models]
        lines.append(f"| {f'**{words}**' if CONTENDERS[name].is_ours else words} | " + " | ".join(cells) + " |")
    limits = [_limit(record) for record in records]
    lines.append("| what the measured bandwidth allows | " + " | ".join(f"{limit:,.0f}" for limit in limits) + " |")
    return "\n".join(lines)


def _overview_cell(row: Record | None, new_tokens: int) -> str:
    if row is None or "summary" not in row:
        return "-"
    fewer = f" for {row['new_tokens']}" if row["new_tokens"] < new_tokens else ""
    return f"{row['summary']['decode_tokens_per_s']['median']:,.0f} ({row['summary']['cold_start_s']:.1f} s{fewer})"


def _limit(record: Record) -> float:
    cached = next(row for row in record["contenders"] if "summary" in row and CONTENDERS[row["name"]].cached)
    return cached["summary"]["decode_tokens_per_s"]["median"] / cached["summary"]["bandwidth_share"]


def heading(path: Path) -> list[str]:
    kind, _, rest = path.stem.partition("-")
    title = f"### {rest}" if rest else f"### {kind}"
    return [title, f"```\n{read(path)['command']}\n```"]


def picture(path: Path, words: str) -> str:
    return f"![{words}](results/{path.stem}.png)"


def generation_records(hardware: str) -> list[Record]:
    order = ("llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b")
    records = [read(path) for path in RESULTS.glob(f"generation-*-{hardware}.json")]
    return sorted(records, key=lambda record: order.index(record["workload"]["model"]))


def read(path: Path) -> Record:
    record: Record = json.loads(path.read_text())
    return record


def draw() -> None:
    """Every picture of the page, beside its record."""
    generation_report.plot(generation_records("h200"), RESULTS / "generation-h200.png")
    for path in RESULTS.glob("context-*.json"):
        bench_context.plot(read(path), path.with_suffix(".png"))
    for path in RESULTS.glob("speedup-*.json"):
        bench_speedup.plot(read(path), path.with_suffix(".png"))
    bench_update.plot(read(RESULTS / "update.json"), RESULTS / "update.png")


def main() -> None:
    draw()
    (HERE / "RESULTS.md").write_text(page())
    print(f"{HERE / 'RESULTS.md'}: written from {len(list(RESULTS.glob('*.json')))} records")


if __name__ == "__main__":
    main()
