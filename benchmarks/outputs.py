"""The command line that all benchmarks share: arguments, the record's files, the exit status."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import history
from processes import Failed
from workload import BadArgument, add_workload_arguments

Record = dict[str, Any]


def benchmark_parser(
    description: str | None, workload: bool = True, plot: bool = False
) -> argparse.ArgumentParser:
    """The arguments of every benchmark; `workload` adds those of a model, `plot` a picture."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if workload:
        add_workload_arguments(parser)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument(
        "--csv", type=Path, help="write the figures here, with the columns of history.csv"
    )
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    if plot:
        parser.add_argument("--plot", type=Path, help="write the picture here")
    return parser


def run_benchmark(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Record],
    report: Callable[[Record], str],
    plot: Callable[[Record, Path], None] | None = None,
    failed: Callable[[Record], bool] = lambda record: False,
) -> int:
    """Measure, print, write.

    The exit status is 1 where something failed and 2 for a bad argument.
    """
    args = parser.parse_args()
    try:
        check_outputs(args)
        record = measure(args)
    except (BadArgument, Failed) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadArgument) else 1
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(report(record))
    if args.markdown:
        args.markdown.write_text(report(record) + "\n")
    if args.csv:
        history.write(history.rows(record), args.csv)
    if plot and args.plot:
        plot(record, args.plot)
    return int(failed(record))


def check_outputs(args: argparse.Namespace) -> None:
    """Raise `BadArgument` for a file that could not be written, before anything is measured."""
    for option in ("json", "csv", "markdown", "plot"):
        path: Path | None = getattr(args, option, None)
        if path is not None and not os.access(path.parent, os.W_OK):
            raise BadArgument(f"--{option} {path}: there is no folder {path.parent} to write to")
    if getattr(args, "plot", None) is not None:
        if args.plot.suffix not in (".png", ".svg", ".pdf"):
            raise BadArgument(f"--plot {args.plot}: a picture is .png, .svg or .pdf")
        if importlib.util.find_spec("matplotlib") is None:
            raise BadArgument("--plot needs matplotlib: pip install matplotlib")


def at_least(**lowest: tuple[int, int]) -> None:
    """Raise `BadArgument` for an option below its minimum: `at_least(trials=(args.trials, 1))`."""
    for option, (value, least) in lowest.items():
        if value < least:
            raise BadArgument(f"--{option.replace('_', '-')} must be at least {least}, got {value}")
