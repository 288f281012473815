"""Caches in files: saving and loading against safetensors alone, and the first token from a file
against from the ids.

    python benchmarks/bench_files.py --model llama-3.2-1b --json benchmarks/results/files-llama-3.2-1b-h200.json
    python benchmarks/bench_files.py --model smollm2 --device cpu --tokens 2048 --trials 3

All contenders run in this process, in turns of changing order, after one call of each as warm-up.
The files are in `--folder`, by default the system's folder for temporary files, and in the page
cache.
  save         `plain`: `safetensors.torch.save_file` of the same states, contiguous on the same device. `flushed`: the
               same, then fsync. `ours`: `cache.save`, with checksums, fsync and renaming.
  load         `plain`: `safetensors.torch.load_file` to the device; on a CPU the mapped tensors are copied. `ours`:
               `StaticContiguousCache.load`, with all checks, into storage of `--tokens` and room for a question.
  first token  of a prompt of `--tokens` random tokens and a question. `ids`: `generate` with its default cache. `file`:
               the file is loaded, and `generate` computes the question.
  next token   the same with a question of one token.
Median (minimum to maximum) over the trials. GB/s are those of the file. Shares and factors compare
the same trial. Exit status 1 when a loaded cache is not what was saved, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import measure as timing
import tables
import torch
from measure import spread
from outputs import at_least, benchmark_parser, run_benchmark
from provenance import provenance
from record_figures import conditions
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from workload import BadArgument, Workload, check_workload_arguments, context_length

from hf_static_kv import StaticContiguousCache

Record = dict[str, Any]
Call = Callable[[], object]


class Files:
    """One model, a cache that has read the prompt, and what each contender does with it."""

    def __init__(self, workload: Workload, question_tokens: int, folder: Path) -> None:
        self.workload, self.folder = workload, folder
        self.model: Any = workload.build_model()
        self.ids = workload.prompt(workload.prompt_len + question_tokens)["input_ids"]
        text = self.ids[:, : workload.prompt_len]
        self.cache = StaticContiguousCache.from_model(
            self.model, workload.max_cache_len, workload.batch_size
        )
        self.generate(text, past_key_values=self.cache)
        states = {"keys": self.cache.key_storage, "values": self.cache.value_storage}
        self.states = {
            name: storage[:, :, :, : workload.prompt_len].contiguous()
            for name, storage in states.items()
        }
        self.ours, self.plain, self.flushed = (
            folder / f"{name}.safetensors" for name in ("ours", "plain", "flushed")
        )

    def generate(self, ids: torch.Tensor, **how: Any) -> None:
        mask = torch.ones_like(ids)
        self.model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, **how)

    def save(self) -> None:
        self.cache.save(self.ours, model=self.model)

    def save_flushed(self) -> None:
        save_file(self.states, self.flushed)
        with open(self.flushed, "rb") as file:
            os.fsync(file.fileno())

    def load(self) -> StaticContiguousCache:
        return StaticContiguousCache.load(self.ours, self.model, self.workload.max_cache_len)

    def load_plain(self) -> None:
        loaded = load_file(self.plain, device=self.workload.device)
        if not self.workload.on_gpu:
            for states in loaded.values():
                states.clone()

    def generate_from_file(self, ids: torch.Tensor) -> None:
        self.generate(ids, past_key_values=self.load())

    def is_what_was_saved(self) -> bool:
        loaded = self.load()
        storages = {"keys": loaded.key_storage, "values": loaded.value_storage}
        return all(
            torch.equal(storages[name][:, :, :, : s.shape[3]], s) for name, s in self.states.items()
        )

    def cases(self) -> dict[tuple[str, str], Call]:
        one_more = self.ids[:, : self.workload.prompt_len + 1]
        return {
            ("save", "plain"): lambda: save_file(self.states, self.plain),
            ("save", "flushed"): self.save_flushed,
            ("save", "ours"): self.save,
            ("load", "plain"): self.load_plain,
            ("load", "ours"): self.load,
            ("first token", "ids"): lambda: self.generate(self.ids),
            ("first token", "file"): lambda: self.generate_from_file(self.ids),
            ("next token", "ids"): lambda: self.generate(one_more),
            ("next token", "file"): lambda: self.generate_from_file(one_more),
        }


def measure_files(files: Files, trials: int) -> list[Record]:
    """A row for each case and contender."""
    cases = files.cases()
    for call in cases.values():
        call()
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in cases}
    for trial in tqdm(range(trials), disable=None, leave=False):
        order = list(cases)[trial % len(cases) :] + list(cases)[: trial % len(cases)]
        for key in order:
            seconds[key].append(timing.seconds(cases[key], files.workload.device))
    return [
        {"case": case, "contender": name, "trials_s": own, "ms": spread([s * 1e3 for s in own])}
        for (case, name), own in seconds.items()
    ]


PAIRS = {
    "save": ("save", "plain", "ours"),
    "save_flushed": ("save", "flushed", "ours"),
    "load": ("load", "plain", "ours"),
    "first_token": ("first token", "ids", "file"),
    "next_token": ("next token", "ids", "file"),
}


def factors(rows: list[Record]) -> Record:
    """How many times as long the first of a pair takes as the second, in the same trial."""
    times = {(row["case"], row["contender"]): row["trials_s"] for row in rows}
    found = {}
    for name, (case, slow, fast) in PAIRS.items():
        trials = zip(times[case, slow], times[case, fast], strict=True)
        found[name] = spread([one / other for one, other in trials])
    return found


def measure(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        files = Files(workload, args.question_tokens, Path(folder))
        rows = measure_files(files, args.trials)
        size, is_right = files.ours.stat().st_size, files.is_what_was_saved()
    return {
        **provenance(workload.device),
        "workload": asdict(workload),
        "random_weights": workload.has_random_weights,
        "trials": args.trials,
        "question_tokens": args.question_tokens,
        "file_bytes": size,
        "is_what_was_saved": is_right,
        "rows": rows,
        "factors": factors(rows),
    }


def report(record: Record) -> str:
    lines = "\n".join(f"- {line}" for line in problems(record))
    return "\n\n".join([conditions(record), tables.files([record], spread=True), lines]).rstrip()


def problems(record: Record) -> list[str]:
    return [] if record["is_what_was_saved"] else ["the loaded cache is not what was saved"]


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--tokens", type=int, help="of the file; default: 32768, or half of a shorter context"
    )
    parser.add_argument("--question-tokens", type=int, default=16, help="%(default)s")
    parser.add_argument(
        "--folder", type=Path, help="where the files are; default: the system's temporary folder"
    )
    parser.add_argument("--trials", type=int, default=7, help="%(default)s")
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    context = context_length(args) or 1 << 20
    tokens = args.tokens if args.tokens is not None else min(32768, context // 2)
    at_least(tokens=(tokens, 1), question_tokens=(args.question_tokens, 1), trials=(args.trials, 1))
    if args.folder is not None and not args.folder.is_dir():
        raise BadArgument(f"--folder {args.folder}: there is no such folder")
    capacity = tokens + args.question_tokens
    check_workload_arguments(args, capacity)
    return Workload(
        args.model, args.device, args.dtype, tokens, 1, args.batch_size, capacity, args.real_weights
    )


def main() -> int:
    return run_benchmark(parser(), measure, report, failed=lambda record: bool(problems(record)))


if __name__ == "__main__":
    sys.exit(main())
