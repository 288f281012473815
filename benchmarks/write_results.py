"""Write what is generated from the records in `benchmarks/results/`; nothing is measured.

    python benchmarks/write_results.py

It writes `benchmarks/RESULTS.md`, the pictures beside the records, the new rows of
`benchmarks/history.csv`, and every block of figures between `<!-- results:NAME -->` and `<!--
/results -->` in README.md and docs/*.md. To add a run, write its record over the old one with
`--json`; the old figures are rows of `history.csv` by then.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import computed_tables
import history
import plots
import tables
from losses import losses
from record_figures import MODELS, OTHER_MODELS, Record, measured, on_cpu, span

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
Records = dict[str, list[Record]]
KINDS = (
    "generation",
    "families",
    "batch",
    "sliding",
    "context",
    "exact",
    "training",
    "attach",
    "step",
    "sampling",
)
KINDS += ("files", "speedup", "update")
NOT_MEASURED = "Not measured yet."
BLOCK = re.compile(r"(<!-- results:(\S+) -->)(.*?)(<!-- /results -->)", re.DOTALL)
MARKER = re.compile(r"<!-- /?results\b")


class BadPage(Exception):
    """A page with a block that cannot be filled."""


def load() -> Records:
    """The records by kind, in the order of the tables: dev models first, a CPU last.

    "families": those of `bench_generation.py` on a GPU that are of no dev model of the tables.
    """
    order = [*MODELS, *OTHER_MODELS]

    def place(path: Path) -> tuple[int, str]:
        named = [i for i, model in enumerate(order) if model in path.name]
        return (named[0] if named else len(order), path.name)

    paths = {kind: sorted(RESULTS.glob(f"{kind}*.json"), key=place) for kind in KINDS}
    records = {kind: [json.loads(path.read_text()) for path in paths[kind]] for kind in KINDS}
    families = [r for r in on_gpu(records["generation"]) if r["workload"]["model"] not in MODELS]
    records["generation"] = [record for record in records["generation"] if record not in families]
    return {**records, "families": families}


def on_gpu(records: list[Record]) -> list[Record]:
    return [record for record in records if not on_cpu(record)]


def headline(records: Records) -> str:
    """How many times as fast as `DynamicCache` the decoder is, over the dev models."""
    rows = [measured(record) for record in on_gpu(records["generation"])]
    ms = [
        {name: row[name]["summary"]["decode_ms"]["median"] for name in ("dynamic", "graph")}
        for row in rows
    ]
    return f"{span([row['dynamic'] / row['graph'] for row in ms])} times"


BLOCKS: dict[str, Callable[[Records], str]] = {
    "headline": headline,
    "speed": lambda records: tables.generation(on_gpu(records["generation"]), tables.SPEED),
    "bytes": lambda records: computed_tables.cache_sizes(),
    "rank_bytes": lambda records: computed_tables.rank_sizes(),
    "rules": lambda records: computed_tables.rules(),
    "generation": lambda records: tables.generation(records["generation"]),
    "batch": lambda records: tables.generation(records["batch"]),
    "sliding": lambda records: (
        tables.sliding(records["sliding"]) if records["sliding"] else NOT_MEASURED
    ),
    "families": lambda records: (
        tables.generation(records["families"]) if records["families"] else NOT_MEASURED
    ),
    "context": lambda records: tables.context(records["context"], ends=True),
    "exact": lambda records: tables.exact(records["exact"]),
    "training": lambda records: (
        tables.training(records["training"]) if records["training"] else NOT_MEASURED
    ),
    "attach": lambda records: (
        tables.attach(records["attach"]) if records["attach"] else NOT_MEASURED
    ),
    "step": lambda records: (
        f"{tables.step_caption(records['step'])}\n\n{tables.step(records['step'])}"
    ),
    "sampling": lambda records: (
        tables.sampling(records["sampling"]) if records["sampling"] else NOT_MEASURED
    ),
    "files": lambda records: tables.files(records["files"]) if records["files"] else NOT_MEASURED,
    "update": lambda records: tables.update(records["update"][0], every=3),
}


def fill(text: str, records: Records, page: str) -> str:
    """The text with each of its blocks as the records give it."""

    def block(match: re.Match[str]) -> str:
        start, name, _, end = match.groups()
        if name not in BLOCKS:
            raise BadPage(f"{page}: no block is named {name!r}. Choose from {', '.join(BLOCKS)}")
        figures = BLOCKS[name](records)
        return f"{start}\n{figures}\n{end}" if "\n" in figures else f"{start}{figures}{end}"

    if len(MARKER.findall(text)) != 2 * len(BLOCK.findall(text)):
        raise BadPage(
            f"{page}: a <!-- results:NAME --> without its <!-- /results -->, or the other way round"
        )
    return BLOCK.sub(block, text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def results_page(records: Records, known: list[history.Row]) -> str:
    """The text of RESULTS.md."""
    eager, compiled, captured = (
        f"{history.between_runs(known, name):.0%}"
        for name in ("dynamic", "static-compiled", "graph")
    )
    sections = [
        "# Results",
        "`make results` writes this page from the newest [record](results) of each kind. "
        "[history.csv](history.csv) has the figures of all runs, "
        "[docs/performance.md](../docs/performance.md) what they mean for a user. Pictures: "
        f"{', '.join(f'[{path.stem}](results/{path.name})' for path in pictures(records))}.",
        "A figure is a median, and a range beside it the spread inside that run. The command, "
        "machine and commit of each run stand [at the end](#records). Between runs on machines "
        f"with the same GPU, at different commits, `DynamicCache` moved by up to {eager}, "
        f"`StaticCache` compiled by {compiled}, `GraphDecoder()` by {captured}: the first two "
        "wait for the host's processor.",
        "## Where we lose",
        "\n".join(f"- {line}" for line in losses(records)),
        "## `generate`\nA decode step takes (TN - T1) / (N - 1), where T1 and TN are calls for "
        "one token and for N. The first call runs in a fresh process, from the loaded model to "
        "the last token. Range: minimum to maximum of the trials.",
        tables.generation(records["generation"] + records["families"], spread=True),
        "Batches, left padding of different lengths; tokens/s of all batch rows together:",
        tables.generation(records["batch"], spread=True),
        *sliding_section(records["sliding"]),
        "## Long sequences and large capacities\nMilliseconds per token at the ends of the "
        "sweeps; pictures have all points. Range: 10th to 90th percentile.",
        tables.context(records["context"], spread=True, ends=True),
        "## `exact`\nThe largest difference of logits in each comparison; then the time without "
        "`exact` → inside, minimum to maximum of 5 trials.",
        tables.exact(records["exact"], spread=True),
        *training_section(records["training"]),
        *attach_section(records["attach"]),
        f"## A captured step\n{tables.step_caption(records['step'])} The last row is the "
        "attention of one layer alone.",
        tables.step(records["step"], spread=True),
        *sampling_section(records["sampling"]),
        *files_section(records["files"]),
        "## Speed-up over `use_cache=False`, without `GraphDecoder`\nOn paper: (N + 1) / 2. "
        "Predicted: from the measured times of passes over 1 to N tokens.",
        tables.speedup(records["speedup"]),
        "## Records",
        records_table(records),
    ]
    return "\n\n".join(sections) + "\n"


def sliding_section(records: list[Record]) -> list[str]:
    """Nothing where there is no record."""
    how = "`GraphDecoder()` with full layers and with compact ones, each in a process of its own, in turns."
    return (
        [f"## Compact sliding layers\n{how}", tables.sliding(records, spread=True)]
        if records
        else []
    )


def training_section(records: list[Record]) -> list[str]:
    """Nothing where there is no record."""
    return (
        [f"## Training\n{tables.TRAINING}", tables.training(records, spread=True)]
        if records
        else []
    )


def attach_section(records: list[Record]) -> list[str]:
    """Nothing where there is no record."""
    if not records:
        return []
    how = (
        "In one process, in turns, on instances that share their weights, from the second call "
        "on. A turn is a call for one token: its prompt is a history of random tokens, the "
        "answer to it, and new tokens."
    )
    return [f"## `attach`\n{how}", tables.attach(records, spread=True)]


def sampling_section(records: list[Record]) -> list[str]:
    """Nothing where there is no record."""
    how = "In one process, in turns, from the second call on. T: temperature 0.8."
    return [f"## Sampling\n{how}", tables.sampling(records, spread=True)] if records else []


def files_section(records: list[Record]) -> list[str]:
    """Nothing where there is no record."""
    how = "In one process, in turns, files in the page cache. A question follows the tokens of the file."
    return [f"## Files\n{how}", tables.files(records, spread=True)] if records else []


def records_table(records: Records) -> str:
    """One row for each command, with the models that it ran and where."""
    models: dict[tuple[str, ...], list[str]] = {}
    for record in (record for kind in KINDS for record in records[kind]):
        command = re.sub(r" --(json|plot|csv|markdown) \S+", "", record["command"]).removeprefix(
            "python benchmarks/"
        )
        where = record["hardware"]
        if not on_cpu(record) and record.get("host"):
            where += f", {record['host']}"
        ran = (f"{where}, {record['threads']} threads", record["torch"], record["transformers"])
        ran += (f"{record['commit']} {record.get('date', '')}".strip(),)
        if model := re.search(r"--model (\S+)", command):
            command = command.replace(model[0], "--model MODEL")
        named = model[1] if model else record.get("workload", {}).get("model", "")
        models.setdefault((f"`{command}`", *ran), []).append(named)
    head = ["command", "MODEL", "hardware", "torch", "transformers", "commit"]
    rows = [
        [command, ", ".join(dict.fromkeys(names)), *ran]
        for (command, *ran), names in models.items()
    ]
    return tables.table(head, rows)


def pictures(records: Records) -> dict[Path, Callable[[Path], None]]:
    """Where each picture stands, beside its record, and what draws it."""
    drawn = {
        RESULTS / "generation-h200.png": partial(plots.generation, on_gpu(records["generation"]))
    }
    for kind, plot in (
        ("context", plots.context),
        ("speedup", plots.speedup),
        ("update", plots.update),
    ):
        for path in sorted(RESULTS.glob(f"{kind}*.json")):
            drawn[path.with_suffix(".png")] = partial(plot, json.loads(path.read_text()))
    return drawn


def main() -> int:
    records = load()
    history.add([record for kind in KINDS for record in records[kind]])
    try:
        written = {page: fill(page.read_text(), records, page.name) for page in pages()}
    except BadPage as error:
        print(f"write_results.py: {error}", file=sys.stderr)
        return 1
    written[HERE / "RESULTS.md"] = results_page(records, history.read())
    for page, text in written.items():
        page.write_text(text)
    for path, draw in pictures(records).items():
        draw(path)
    print(
        f"RESULTS.md and {sum(len(BLOCK.findall(text)) for text in written.values())} blocks "
        "written"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
