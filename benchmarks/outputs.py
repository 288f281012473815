"""Where a benchmark's record goes: the terminal, and files of the user's choice."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workload import BadArgument, add_workload_arguments


def benchmark_parser(description: str) -> argparse.ArgumentParser:
    """What every benchmark of a model asks for: the workload, and where its record goes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    add_output_arguments(parser)
    return parser


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--plot", type=Path, help="write the picture here")


def check_outputs(args: argparse.Namespace) -> None:
    """Raise `BadArgument` for a file that could not be written, before anything is measured."""
    for option in ("json", "markdown", "plot", "csv"):
        path: Path | None = getattr(args, option, None)
        if path is not None and not os.access(path.parent, os.W_OK):
            raise BadArgument(f"--{option} {path}: there is no folder {path.parent} to write to")
    if args.plot is not None:
        if args.plot.suffix not in (".png", ".svg", ".pdf"):
            raise BadArgument(f"--plot {args.plot}: a picture is .png, .svg or .pdf")
        if importlib.util.find_spec("matplotlib") is None:
            raise BadArgument("--plot needs matplotlib: pip install matplotlib")


def write_outputs(
    args: argparse.Namespace,
    record: dict[str, Any],
    markdown: Callable[[dict[str, Any]], str],
    plot: Callable[[dict[str, Any], Path], None],
) -> None:
    """The record first, which is what took the time; then the tables on the terminal and each file asked for."""
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(markdown(record))
    if args.markdown:
        args.markdown.write_text(markdown(record) + "\n")
    if args.plot:
        plot(record, args.plot)


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib's, and give back its memory."""
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=130)
    plt.close(figure)
