"""Fill the blocks of figures in README.md and docs from the records; nothing is measured.

    python benchmarks/write_results.py
    python benchmarks/write_results.py --records  # list the records with their commands, write nothing

A block stands between `<!-- results:NAME -->` and `<!-- /results -->`. To add a run, write its
record over the old one with `--json`: git keeps the old one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import tables
from losses import losses
from picture import draw
from records import DEV_MODELS, NAMES, Record, measured, medians, model_of, on_cpu, span

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
Records = dict[str, list[Record]]
BLOCK = re.compile(r"(<!-- results:(\S+) -->)(.*?)(<!-- /results -->)", re.DOTALL)
MARKER = re.compile(r"<!-- /?results\b")


class BadPage(Exception):
    """A page with a block that cannot be filled."""


def load() -> Records:
    """The records by kind, dev models first.

    "families": those of generation on a GPU that are of no dev model.
    """
    records = {}
    for kind in (*TABLES, "speedup"):
        found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{kind}*.json"))]
        records[kind] = sorted(found, key=place)
    families = [r for r in on_gpu(records["generation"]) if model_of(r) not in DEV_MODELS]
    records["generation"] = [record for record in records["generation"] if record not in families]
    return {**records, "families": families}


def place(record: Record) -> int:
    """The model's place in a table. The record of updates names no model."""
    order = list(NAMES)
    return order.index(model_of(record)) if model_of(record) in order else len(order)


def on_gpu(records: list[Record]) -> list[Record]:
    return [record for record in records if not on_cpu(record)]


def headline(records: Records) -> str:
    """How many times as fast as `DynamicCache` the decoder is, over the dev models."""
    ms = [medians(record, "decode_ms") for record in on_gpu(records["generation"])]
    return f"{span(row['dynamic'] / row['graph'] for row in ms)} times"


def claim(records: Records) -> str:
    """Against the fastest that transformers has, and against the default; with first calls."""
    dev = on_gpu(records["generation"])
    ms = [medians(record, "decode_ms") for record in dev]
    compiled = span(row["static-compiled"] / row["graph"] for row in ms)
    first = {
        name: span(measured(record)[name]["summary"]["cold_start_s"] for record in dev)
        for name in ("static-compiled", "graph")
    }
    return (
        f"{compiled} times as fast as compiled `StaticCache`, with a first call of "
        f"{first['graph']} s instead of {first['static-compiled']} s, and {headline(records)} as "
        "fast as the default"
    )


def beside(records: list[Record]) -> str:
    """How long a call waits for its first token while another streams, and the stream for it."""
    (row,) = records[0]["beside"]
    first, pause = (tables.median(row[name]) for name in ("first_token_ms", "longest_pause_ms"))
    return f"{first} ms, and the longest pause of the stream was {pause} ms"


TABLES: dict[str, Callable[[list[Record]], str]] = {
    "generation": tables.generation,
    "families": tables.generation,
    "batch": tables.generation,
    "sliding": tables.sliding,
    "codes": tables.codes,
    "quantised": tables.quantised,
    "context": tables.context,
    "exact": tables.exact,
    "training": tables.training,
    "first_token": tables.first_token,
    "threads": tables.threads,
    "requests": tables.requests,
    "drafts": tables.drafts,
    "assistant": tables.assistants,
    "serve": tables.users,
    "step": tables.step,
    "profile": tables.profiled,
    "long": tables.long,
    "one_kernel": tables.one_kernel,
    "sampling": tables.sampling,
    "files": tables.files,
    "update": tables.update,
}


def blocks(records: Records) -> dict[str, str]:
    """The text of every block, by name."""
    of_records = {name: make(records[name]) for name, make in TABLES.items()}
    return {
        **of_records,
        "headline": headline(records),
        "claim": claim(records),
        "coded": tables.coded(records["context"]),
        "beside": beside(records["threads"]),
        "losses": losses(records),
        "speed": tables.generation(on_gpu(records["generation"]), tables.SPEED),
        "bytes": tables.cache_sizes(),
        "rank_bytes": tables.rank_sizes(),
        "rules": tables.rules(),
    }


def fill(text: str, figures: dict[str, str], page: str) -> str:
    """The text with each of its blocks filled; `figures` are those of `blocks`."""

    def block(match: re.Match[str]) -> str:
        start, name, _, end = match.groups()
        if name not in figures:
            raise BadPage(f"{page}: no block is named {name!r}. Choose from {', '.join(figures)}")
        new = figures[name]
        return f"{start}\n{new}\n{end}" if "\n" in new else f"{start}{new}{end}"

    if len(MARKER.findall(text)) != 2 * len(BLOCK.findall(text)):
        raise BadPage(
            f"{page}: a <!-- results:NAME --> without its <!-- /results -->, or the other way round"
        )
    return BLOCK.sub(block, text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def describe(path: Path) -> str:
    """Two lines: where a record was made, and its command."""
    record = json.loads(path.read_text())
    made = [f"{key} {record[key]}" for key in ("torch", "transformers", "commit")]
    script = re.search(r"bench_\w+\.py", record["command"])
    earlier = "" if script is None or (HERE / script[0]).exists() else "  # an earlier script"
    where = ", ".join([record["hardware"], *made, record.get("date", "")]).rstrip(", ")
    return f"{path.name}: {where}\n    {record['command']}{earlier}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", action="store_true", help="list the records, write nothing")
    if parser.parse_args().records:
        print("\n".join(describe(path) for path in sorted(RESULTS.glob("*.json"))))
        return 0
    records = load()
    figures = blocks(records)
    try:
        written = {page: fill(page.read_text(), figures, page.name) for page in pages()}
    except BadPage as error:
        print(f"write_results.py: {error}", file=sys.stderr)
        return 1
    for page, text in written.items():
        page.write_text(text)
    draw(on_gpu(records["generation"]), RESULTS / "generation-h200.png")
    print(f"{sum(len(BLOCK.findall(text)) for text in written.values())} blocks written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
