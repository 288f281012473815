"""Where a benchmark's record goes: the terminal, and files of the user's choice."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--plot", type=Path, help="write the picture here")


def write_outputs(
    args: argparse.Namespace,
    record: dict[str, Any],
    markdown: Callable[[dict[str, Any]], str],
    plot: Callable[[dict[str, Any], Path], None],
) -> None:
    """The tables on the terminal, and each file that was asked for."""
    print(markdown(record))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(record) + "\n")
    if args.plot:
        plot(record, args.plot)
