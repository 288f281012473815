"""Caches in files: saving and loading against safetensors alone, and the first token from a file.

    python benchmarks/bench_files.py --model llama-3.2-1b --json files.json
    python benchmarks/bench_files.py --model smollm2 --device cpu --tokens 2048 --trials 3

All run in this process, in turns, after one call of each as warm-up. The files are in `--folder`
and in the page cache.
  save         `plain`: `save_file` of safetensors, of the same states, contiguous on the same
               device. `flushed`: the same, then fsync. `ours`: `cache.save`, with checksums, fsync
               and renaming.
  load         `plain`: `load_file` of safetensors; on a CPU the mapped tensors are copied. `ours`:
               `StaticContiguousCache.load`, with all checks, with room for a question.
  first token  of `--tokens` random tokens and a question. `ids`: `generate` with its default cache.
               `file`: the file is loaded, and `generate` computes the question.
Factors compare the same trial. Exit status 1 if a loaded cache is not what was saved, 2 for a bad
argument.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure as timing
import torch
from measure import in_turns, spread
from outputs import at_least, benchmark_parser, run_benchmark
from records import Record
from safetensors.torch import load_file, save_file
from workload import BadArgument, Workload, build_workload, context_length

from hf_static_kv import StaticContiguousCache

Call = Callable[[], object]


class Files:
    """One model, a cache that has read the prompt, and what each contender does with it."""

    def __init__(self, workload: Workload, question_tokens: int, folder: Path) -> None:
        self.workload = workload
        self.model: Any = workload.build_model()
        self.ids = workload.prompt(workload.prompt_len + question_tokens)["input_ids"]
        sizes = (workload.max_cache_len, workload.batch_size)
        self.cache = StaticContiguousCache.from_model(self.model, *sizes)
        self.generate(self.ids[:, : workload.prompt_len], past_key_values=self.cache)
        self.states = {
            name: storage[:, :, :, : workload.prompt_len].contiguous()
            for name, storage in storages(self.cache).items()
        }
        self.ours = folder / "ours.safetensors"
        self.plain = folder / "plain.safetensors"
        self.flushed = folder / "flushed.safetensors"

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

    def is_what_was_saved(self) -> bool:
        loaded = storages(self.load())
        tokens = self.workload.prompt_len
        return all(
            torch.equal(loaded[name][:, :, :, :tokens], states)
            for name, states in self.states.items()
        )

    def cases(self) -> dict[tuple[str, str], Call]:
        return {
            ("save", "plain"): lambda: save_file(self.states, self.plain),
            ("save", "flushed"): self.save_flushed,
            ("save", "ours"): self.save,
            ("load", "plain"): self.load_plain,
            ("load", "ours"): self.load,
            ("first token", "ids"): lambda: self.generate(self.ids),
            ("first token", "file"): lambda: self.generate(self.ids, past_key_values=self.load()),
        }


def storages(cache: StaticContiguousCache) -> dict[str, torch.Tensor]:
    return {"keys": cache.key_storage, "values": cache.value_storage}


def measure_files(files: Files, trials: int) -> list[Record]:
    """A row for each case and contender."""
    device = files.workload.device
    calls = {key: partial(timing.seconds, call, device) for key, call in files.cases().items()}
    for call in calls.values():
        call()
    return [
        {"case": case, "contender": name, "trials_s": own, "ms": spread([s * 1e3 for s in own])}
        for (case, name), own in in_turns(calls, trials).items()
    ]


PAIRS = {
    "save": ("save", "plain", "ours"),
    "save_flushed": ("save", "flushed", "ours"),
    "load": ("load", "plain", "ours"),
    "first_token": ("first token", "ids", "file"),
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
        size = files.ours.stat().st_size
        is_right = files.is_what_was_saved()
    return {
        **workload.origin(),
        "trials": args.trials,
        "question_tokens": args.question_tokens,
        "file_bytes": size,
        "is_what_was_saved": is_right,
        "rows": rows,
        "factors": factors(rows),
    }


def problems(record: Record) -> list[str]:
    return [] if record["is_what_was_saved"] else ["the loaded cache is not what was saved"]


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__, lengths=False)
    add = parser.add_argument
    add("--tokens", type=int, help="of the file; default: 32768, or half of a shorter context")
    add("--question-tokens", type=int, default=16, help="%(default)s")
    add("--folder", type=Path, help="of the files; default: the system's temporary folder")
    add("--trials", type=int, default=7, help="%(default)s")
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    if args.tokens is None:
        args.tokens = min(32768, (context_length(args) or 1 << 20) // 2)
    at_least(args, tokens=1, question_tokens=1, trials=1)
    if args.folder is not None and not args.folder.is_dir():
        raise BadArgument(f"--folder {args.folder}: there is no such folder")
    args.prompt_len = args.tokens
    args.new_tokens = 1
    capacity = args.tokens + args.question_tokens
    return build_workload(args, longest=capacity, capacity=capacity)


def main() -> int:
    return run_benchmark(parser(), measure, problems)


if __name__ == "__main__":
    sys.exit(main())
