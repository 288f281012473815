"""Write `benchmarks/RESULTS.md` and its pictures from the records in `benchmarks/results/` alone: nothing is measured.

python benchmarks/write_results.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_context
import bench_exact
import bench_speedup
import bench_step
import bench_update
import generation_report
from contenders import CONTENDERS

HERE = Path(__file__).parent
RESULTS = HERE / "results"
Record = dict[str, Any]

INTRODUCTION = """# Results

Every figure on this page is in a record under [results](results); `make results` writes the page and its pictures
from the records alone. Above each table stands the command that made it, at the commit that it names.

Where a range stands beside a figure, the figure is a median and the range is the spread inside that run. **Between
runs on machines with the same GPU, eager figures moved by up to APART, most likely because the GPU waits for Python and
the host's processor is what is measured; compiled ones by COMPILED, captured ones by CAPTURED** (the tables under
'Every run' below; each column is of another commit, too).
Cold starts, memory and shares have no range: they are one run's.

**Share of the bandwidth**: the bytes that a cached decode step must read (each weight once, and the keys and values of
the text) by the time it took, over the bandwidth that a large read reached in the same run. `use_cache=False` is held
to the same bytes, though it reads no cache."""

GENERATION = """## Time of `generate`

A decode step's time is (TN - T1) / (N - 1), where T1 and TN are plain calls of `generate` for one token and for N: the
loop's own cost is in it. **Cold start** is the first call in a fresh process, from the loaded model to the last token;
*of it warm-up* is the share that a later call does not pay: compiling, loading libraries, and on a GPU cuDNN, which
builds an attention plan for every length that it has not seen. The second table of each model is one more call, with a
clock that waits for the device after each token."""

AGREEMENT = """### Every run

Decode, tokens/s, of every run that there is, on machines with the same GPU. A dash: not in that run. The older ones did
not record the host's processor; the commands of all but the first column:"""

BATCH = """## A batch

Eight rows of unlike length, padded to the left. Tokens per second are those of all rows together."""

CONTEXT = """## Time against the text, and against the room

First as the text grows, in a cache that has room for the longest; then a short text, as the room grows. A cache whose
cost follows the text and not its room is flat in the second."""

STEP = """## Inside a captured step

What `GraphDecoder` runs for one token, as one change after the other is made to it, and our decode attention alone."""

EXACT = """## Bits

What `exact` changes, and what it costs."""

SPEEDUP = "## Speed-up by tokens generated"

UPDATES = """## Putting a token into the cache, without a model

The `update` calls of one decode step alone, and one decode step of a small model on a CPU."""


def page() -> str:
    """The text of RESULTS.md."""
    parts = [introduction(), GENERATION]
    if gpu := generation_records("h200"):
        parts += [
            "```\nmake results\n```",
            overview(gpu),
            "![decode rate of each contender](results/generation-h200.png)",
        ]
    for path in sorted(RESULTS.glob("generation-*.json")):
        parts += [*heading(path), generation_report.markdown(read(path))]
    runs = [[first, *others] for first, others in reruns()]
    commands = dict.fromkeys(record["command"] for others in runs for record in others[1:])
    parts += [AGREEMENT, *[f"```\n{command}\n```" for command in commands], *[agreement(records) for records in runs]]
    if batches := sorted(RESULTS.glob("batch-*.json")):
        parts.append(BATCH)
        for path in batches:
            parts += [*heading(path), generation_report.markdown(read(path))]
    parts.append(CONTEXT)
    for path in sorted(RESULTS.glob("context-*.json")):
        parts += [*heading(path), bench_context.markdown(read(path)), picture(path, "time against text and room")]
    if steps := sorted(RESULTS.glob("step-*.json")):
        parts.append(STEP)
        for path in steps:
            parts += [*heading(path), bench_step.markdown(read(path)), picture(path, "time of a captured step")]
    if exact := sorted(RESULTS.glob("exact-*.json")):
        parts.append(EXACT)
        for path in exact:
            parts += [*heading(path), bench_exact.markdown(read(path))]
    parts.append(SPEEDUP)
    for path in sorted(RESULTS.glob("speedup-*.json")):
        parts += [*heading(path), bench_speedup.markdown(read(path)), picture(path, "speed-up by tokens")]
    record = read(RESULTS / "update.json")
    parts += [UPDATES, *heading(RESULTS / "update.json")]
    parts += [bench_update.markdown(record), picture(RESULTS / "update.json", "time of the updates")]
    return "\n\n".join(parts) + "\n"


def introduction() -> str:
    """The first paragraphs, with how far runs of one model are apart."""
    eager, compiled, captured = (f"{share:.0%}" for share in spread_between_runs())
    return INTRODUCTION.replace("APART", eager).replace("COMPILED", compiled).replace("CAPTURED", captured)


def spread_between_runs() -> tuple[float, float, float]:
    """By what share at most runs of one contender on one model are apart: of what runs eagerly, compiled, captured."""
    eager, compiled, captured = [0.0], [0.0], [0.0]
    for first, others in reruns():
        for name, share in _apart([first, *others]).items():
            kind = compiled if name == "static-compiled" else captured if name.startswith("graph") else eager
            kind.append(share)
    return max(eager), max(compiled), max(captured)


def reruns() -> Iterator[tuple[Record, list[Record]]]:
    """Each record of a model that was run more than once, and its other runs."""
    for path in sorted(RESULTS.glob("generation-*.json")):
        if others := sorted(RESULTS.glob(path.name.replace("generation", "rerun*"))):
            yield read(path), [read(other) for other in others]


def _rates(records: list[Record]) -> dict[str, list[Record | None]]:
    """Of each contender its rate in each of these runs."""
    runs = [{row["name"]: row["summary"]["decode_tokens_per_s"] for row in r["contenders"]} for r in records]
    return {name: [run.get(name) for run in runs] for name in CONTENDERS if any(name in run for run in runs)}


def _apart(records: list[Record]) -> dict[str, float]:
    """By what share the slowest of these runs is below the fastest, for each contender that is in several."""
    medians = {name: [rate["median"] for rate in rates if rate] for name, rates in _rates(records).items()}
    return {name: 1 - min(rates) / max(rates) for name, rates in medians.items() if len(rates) > 1}


def agreement(records: list[Record]) -> str:
    """The medians of every contender, and by how much the slowest is below the fastest."""
    model, apart = records[0]["workload"]["model"], _apart(records)
    lines = [f"| {model} | " + " | ".join(f"commit {r['commit']}" for r in records) + " | apart |"]
    lines.append("|---" * (len(records) + 2) + "|")
    for name, rates in _rates(records).items():
        cells = " | ".join("-" if rate is None else generation_report.with_range(rate, ",.1f") for rate in rates)
        lines.append(f"| {name} | {cells} | {f'{apart[name]:.0%}' if name in apart else '-'} |")
    return "\n".join(lines)


def overview(records: list[Record]) -> str:
    """Decode rate and cold start of every contender on every model; the table that the README shows too."""
    models = [record["workload"]["model"] for record in records]
    lines = ["| decode, tokens/s (cold start) | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    found = {row["name"] for record in records for row in record["contenders"]}
    for name in (name for name in CONTENDERS if name in found):
        words = CONTENDERS[name].words
        cells = [_overview_cell(record, name) for record in records]
        lines.append(f"| {f'**{words}**' if CONTENDERS[name].is_ours else words} | " + " | ".join(cells) + " |")
    limits = [f"{generation_report.limit_tokens_per_s(record) or float('nan'):,.0f}" for record in records]
    lines.append("| what the measured bandwidth allows | " + " | ".join(limits) + " |")
    return "\n".join(lines)


def _overview_cell(record: Record, name: str) -> str:
    row = next((row for row in record["contenders"] if row["name"] == name), {})
    if "summary" not in row:
        return "-"
    fewer = f" for {row['new_tokens']}" if row["new_tokens"] < record["workload"]["new_tokens"] else ""
    return f"{row['summary']['decode_tokens_per_s']['median']:,.0f} ({row['summary']['cold_start_s']:.1f} s{fewer})"


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
    for path in RESULTS.glob("step-*.json"):
        bench_step.plot(read(path), path.with_suffix(".png"))
    for path in RESULTS.glob("speedup-*.json"):
        bench_speedup.plot(read(path), path.with_suffix(".png"))
    bench_update.plot(read(RESULTS / "update.json"), RESULTS / "update.png")


def main() -> None:
    draw()
    (HERE / "RESULTS.md").write_text(page())
    print(f"{HERE / 'RESULTS.md'}: written from {len(list(RESULTS.glob('*.json')))} records")


if __name__ == "__main__":
    main()
