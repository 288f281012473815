"""What each rewrite rule saves: a captured decode step with all rules, and without each one.

    python benchmarks/bench_step.py --model llama-3.2-1b --json step.json
    python benchmarks/bench_step.py --model llama --device cpu --prompt-len 16 --new-tokens 64
    python benchmarks/bench_step.py --model llama-3.2-1b --batch-size 64 --profile

A rule that builds on the one left out does not apply either. A rule that does not change the
recorded list of this model is not measured. Below the rules: a step without any rule, and one
without PDL. On a CPU the lists run without a graph, and there are no kernels to count.
  replay    milliseconds of the step alone: the mean of 50 in a row, 7 times in turns
  tokens/s  through `generate`, as in bench_generation.py: the median of 3, in turns
  kernels   launches of one step
`--profile` (on a GPU) measures the step with all rules alone, and lists its kernels: how often a
step launches each, and their microseconds together. With PDL kernels overlap, so their sum is more
than the step takes.
Exit status 1 if a decoder without a rule fell back, 2 for a bad argument, or if the one with all
rules did.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import contenders
import torch
from measure import TimedGenerate, seconds
from outputs import at_least, benchmark_parser, run_benchmark
from records import Record
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm
from transformers import PreTrainedModel
from workload import BadArgument, Workload, build_workload

from hf_static_kv import GraphDecoder
from hf_static_kv.program.rules import RULES, rewrite

REPLAYS = 50
REPLAY_TRIALS = 7
TRIALS = 3
PROFILED = 10


# --- what this script knows of the package's inside


REWRITE = "hf_static_kv.program.step.rewrite"
SUPPORTS_PDL = "hf_static_kv.kernels.launch_triton._supports_pdl"


@contextmanager
def noted_list() -> Iterator[list[str]]:
    """Yields the list of the step that is recorded inside the context, as text."""
    found: list[str] = []

    def rewrite_and_note(program: Any, *args: Any, **kwargs: Any) -> None:
        rewrite(program, *args, **kwargs)
        # Objects of each recording are new, and their addresses with them.
        found[:] = (re.sub(r" at 0x\w+", "", str(call)) for call in program)

    with patch(REWRITE, rewrite_and_note):
        yield found


def replay_of(decoder: GraphDecoder, workload: Workload) -> Callable[[int], None]:
    """A function that replays the decoder's only captured step a number of times."""
    ((step,),) = (list(kinds.values()) for kinds in decoder.steps.by_cache.values())
    seq_start = torch.zeros(workload.batch_size, dtype=torch.int64, device=workload.device)

    @torch.no_grad()
    def replay(times: int) -> None:
        step.set_position(workload.prompt_len, seq_start)
        for _ in range(times):
            step.replay()

    return replay


# --- the measurements


class Variant(NamedTuple):
    """A row: its words, the rules that it does not have, and whether it launches with PDL."""

    words: str
    without: Collection[str] = ()
    has_pdl: bool = True


def variants(on_gpu: bool) -> list[Variant]:
    one_less = [Variant(f"without `{name}`", (name,)) for name in RULES]
    found = [Variant("all rules"), *one_less, Variant("without any rule", tuple(RULES))]
    return [*found, Variant("without PDL", has_pdl=False)] if on_gpu else found


class Side:
    """A decoder of one variant, and the list of its step."""

    def __init__(self, model: PreTrainedModel, workload: Workload, variant: Variant) -> None:
        set_up = partial(contenders.graph, without=variant.without, persistent=False)
        self.generate = TimedGenerate(model, "graph", workload, set_up)
        no_pdl = nullcontext() if variant.has_pdl else patch(SUPPORTS_PDL, lambda device: False)
        with noted_list() as self.list, no_pdl:
            for _ in range(2):  # the second call captures the pass of the prompt
                self.generate.seconds(workload.new_tokens)
        decoder = self.generate.keywords["custom_generate"]
        self.fallback_reason: str | None = decoder.fallback_reason
        self.replay = None if self.fallback_reason else replay_of(decoder, workload)


def measure_variants(model: PreTrainedModel, workload: Workload) -> list[Record]:
    """A row for each variant. All are captured, then measured in turns.

    A variant with the same list as the first has no times.
    """
    first, *others = variants(workload.on_gpu)
    full = Side(model, workload, first)
    if full.fallback_reason:
        raise BadArgument(f"--model {workload.model}: {full.fallback_reason}")
    rows: list[Record] = [{"words": first.words, "without": []}]
    measured = [(rows[0], full)]
    for variant in tqdm(others, desc="capturing", disable=None, leave=False):
        side = Side(model, workload, variant)
        row: Record = {"words": variant.words, "without": list(variant.without)}
        rows.append(row)
        if side.fallback_reason:
            row["fallback_reason"] = side.fallback_reason
        elif variant.has_pdl and side.list == full.list:
            row["same_list"] = True
        else:
            measured.append((row, side))
    measure_times(measured, workload)
    return rows


def measure_times(measured: list[tuple[Record, Side]], workload: Workload) -> None:
    """Add the figures of each side to its row, of trials in turns."""
    for row, _ in measured:
        row |= {"step_ms": [], "replay_ms": []}
    for trial in tqdm(range(REPLAY_TRIALS), desc="measuring", disable=None, leave=False):
        for row, side in measured:
            if trial < TRIALS:
                row["step_ms"].append(side.generate.step_ms())
            side.replay(1)
            taken = seconds(partial(side.replay, REPLAYS), workload.device)
            row["replay_ms"].append(taken / REPLAYS * 1e3)
    for row, side in measured:
        row["tokens_per_s"] = workload.batch_size * 1e3 / statistics.median(row["step_ms"])
        if workload.on_gpu:
            row["kernels"] = count_kernels(side.replay)


def count_kernels(replay: Callable[[int], None]) -> float:
    """Kernels of a step."""
    return len(profiled(replay)) / PROFILED


def profiled(replay: Callable[[int], None]) -> list[Any]:
    """The kernels of `PROFILED` steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        replay(PROFILED)
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return [event for event in profiler.events() if event.device_type == on_gpu]


def time_by_kernel(replay: Callable[[int], None]) -> list[Record]:
    """The kernels of a step by name, those that take longest first."""
    times: dict[str, list[float]] = {}
    for event in profiled(replay):
        times.setdefault(event.name, []).append(event.device_time)
    rows = [
        {"kernel": name[:80], "launches": len(us) / PROFILED, "us": sum(us) / PROFILED}
        for name, us in times.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def measure_profile(model: PreTrainedModel, workload: Workload) -> Record:
    """The step with all rules, and its kernels."""
    first = variants(workload.on_gpu)[0]
    side = Side(model, workload, first)
    if side.replay is None:
        raise BadArgument(f"--model {workload.model}: {side.fallback_reason}")
    row: Record = {"words": first.words, "without": []}
    measure_times([(row, side)], workload)
    return {"variants": [row], "profile": time_by_kernel(side.replay)}


def measure(args: argparse.Namespace) -> Record:
    at_least(args, prompt_len=1, new_tokens=REPLAYS)
    workload = build_workload(args)
    if args.profile and not workload.on_gpu:
        raise BadArgument("--profile needs a GPU: a CPU launches no kernels")
    model = workload.build_model()
    if args.profile:
        return {**workload.origin(), **measure_profile(model, workload)}
    variants = measure_variants(model, workload)
    return {**workload.origin(), "rules": list(RULES), "variants": variants}


def problems(record: Record) -> list[str]:
    rows = [row for row in record["variants"] if "fallback_reason" in row]
    return [f"{row['words']} fell back: {row['fallback_reason']}" for row in rows]


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    return run_benchmark(parser, measure, problems)


if __name__ == "__main__":
    sys.exit(main())
