"""The command line that all benchmarks share: arguments, printed figures, files, exit status."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from measure import spread
from processes import Failed
from records import Record, figure, with_range
from workload import BadArgument, add_workload_arguments


def benchmark_parser(description: str | None, lengths: bool = True) -> argparse.ArgumentParser:
    """The arguments of every benchmark; `lengths` adds those of a prompt."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_workload_arguments(parser, lengths)
    parser.add_argument("--json", type=Path, help="write the record here")
    return parser


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """The argument type of some of these names, separated by commas."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f"unknown {', '.join(unknown)}: choose from {', '.join(known)}"
            )
        return names

    return chosen


def run_benchmark(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Record],
    problems: Callable[[Record], list[str]],
) -> int:
    """Measure, print, write. The exit status is 1 if there are problems, 2 for a bad argument."""
    args = parser.parse_args()
    try:
        if args.json and not os.access(args.json.parent, os.W_OK):
            raise BadArgument(f"--json {args.json}: there is no folder {args.json.parent}")
        record = measure(args)
    except (BadArgument, Failed) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadArgument) else 1
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(*listing(record), *problems(record), sep="\n")
    return int(bool(problems(record)))


def listing(record: Record) -> Iterator[str]:
    """Each part of the record, or each of its rows, in a line."""
    for key, part in record.items():
        for row in part if isinstance(part, list) else [part]:
            yield f"{key}: {', '.join(figures(row))}"


def figures(node: Any, name: str = "") -> Iterator[str]:
    """Numbers and words of a part of a record. Of a list: median (minimum to maximum).

    >>> list(figures({"name": "graph", "summary": {"ms": [1.0, 3.0, 2.0]}, "tokens": 8}))
    ['name graph', 'summary ms 2.00 (1.00 to 3.00)', 'tokens 8']
    """
    if isinstance(node, dict) and node.keys() != {"median", "min", "max"}:
        for key, part in node.items():
            yield from figures(part, f"{name} {key}".strip())
    elif isinstance(node, dict):
        yield f"{name} {with_range(node)}"
    elif isinstance(node, list):
        if node and isinstance(node[0], int | float):
            yield f"{name} {with_range(spread(node))}"
    elif node is not None:
        yield f"{name} {figure(node) if isinstance(node, float) else node}".strip()


def at_least(args: argparse.Namespace, **lowest: int) -> None:
    """Raise `BadArgument` for an option below its minimum: `at_least(args, trials=1)`.

    All numbers of a list must reach it. An option that is not given is not checked.
    """
    for option, least in lowest.items():
        value = getattr(args, option)
        smallest = min(value, default=None) if isinstance(value, list) else value
        if smallest is not None and smallest < least:
            name = option.replace("_", "-")
            raise BadArgument(f"--{name} must be at least {least}, got {smallest}")
