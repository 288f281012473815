"""One kernel for a whole step beside the graph of its list: speed, phases, distance from float32.

    python benchmarks/bench_one_kernel.py --model llama-3.2-1b --positions 200 --json one_kernel.json

The kernel serves here whether or not `GraphDecoder()` would choose it. It runs on
compute capability 9.0 only.
  ms         a token through `generate`, greedy and sampled: of a call for one token (T1) and a call
             for all N (TN) it is (TN - T1) / (N - 1); in turns, after three calls as warm-up
  replay_ms  the greedy step alone: the mean of 50 in a row, 7 times in turns
  phases     where the kernel spends its time: cycles between the marks of each block, the mean over
             the blocks, as microseconds of a replay
  accuracy   `--positions`: random text, token by token; of the logits the mean KL divergence from a
             float32 model and the largest difference, beside those of an ordinary pass
Exit status 1 if the kernel did not take over, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import contenders
import torch
from bench_sampling import CASES, timed_trial
from bench_step import REPLAY_TRIALS, REPLAYS, TRIALS
from measure import (
    TimedGenerate,
    bytes_per_step,
    in_turns,
    measure_bandwidth,
    seconds,
    spread,
    token_ms,
)
from outputs import at_least, benchmark_parser, run_benchmark
from processes import Failed
from records import Record
from torch import Tensor
from transformers import PreTrainedModel
from workload import BadArgument, Workload, build_workload

from hf_static_kv.kernels.persistent_step_cuda import Build
from hf_static_kv.program.step import Runs
from hf_static_kv.program.takeover import takeover_of

SIDES = {"graph": False, "one kernel": True}
SETTINGS = {case: CASES[case] for case in ("greedy", "T, top-k 50")}
# From each MARK of a layer to the next one, and behind the layers.
PHASES = (
    "wait for the layer before", "q, k, v", "attention, and the wait for q, k, v",
    "splits combined", "wait for attention", "o", "wait for o", "gate, up",
    "wait for gate, up", "down",
)  # fmt: skip
LAST_PHASES = ("wait for the last layer", "head")


# --- what this script knows of the package's inside


IS_FASTER = "hf_static_kv.program.takeover.is_faster"
MOST_TOKENS = "hf_static_kv.program.takeover.MOST_TOKENS"


def steps_of(side: TimedGenerate) -> list[Any]:
    return [
        step
        for kinds in side.keywords["custom_generate"].steps.by_cache.values()
        for step in kinds.values()
    ]


def kernel_of(step: Any) -> Any:
    """The kernel that serves, or `Failed` with the reason why none does."""
    takeover = takeover_of(step)
    if takeover is None or takeover.kernel is None:
        raise Failed("no kernel", takeover.reason if takeover else "the step has no list")
    return takeover.kernel


def replay_of(step: Any, workload: Workload) -> Callable[[int], None]:
    start = torch.zeros(1, dtype=torch.int64, device=workload.device)

    @torch.no_grad()
    def replay(times: int) -> None:
        step.set_position(workload.prompt_len, start)
        for _ in range(times):
            step.replay()

    return replay


@torch.no_grad()
def marks_of(step: Any, workload: Workload) -> Tensor:
    """The marks of one launch after the prompt."""
    build = Build(kernel_of(step).plan, has_marks=True)
    kernel = build.step()
    before = step.exchange(Runs(kernel, None, None, kernel.buffers))
    try:
        replay_of(step, workload)(3)
        return kernel.marks.cpu()
    finally:
        step.exchange(before)


@torch.no_grad()
def logits_of(step: Any, text: Tensor) -> Tensor:
    """The logits [n, V] after each token of a text [1, n], by a step for each."""
    step.set_position(0, torch.zeros(1, dtype=torch.int64, device=text.device))
    return torch.cat([step.run(token) for token in text.T])


# --- the measurements


class Both(NamedTuple):
    """Both ways to decode, and the greedy step of each."""

    sides: dict[str, TimedGenerate]
    greedy: dict[str, Any]


def build_both(model: PreTrainedModel, workload: Workload) -> Both:
    """After their warm-up; `Failed` if the kernel does not serve."""
    sides = {}
    with patch(IS_FASTER, lambda plan: True):
        for name, persistent in SIDES.items():
            set_up = partial(contenders.graph, persistent=persistent)
            side = sides[name] = TimedGenerate(model, "graph", workload, set_up)
            for case in SETTINGS.values():
                for _ in range(2):  # the second call captures the pass of the prompt
                    side.seconds(workload.new_tokens, **case)
        steps = steps_of(sides["one kernel"])
        for case in SETTINGS.values():
            sides["one kernel"].seconds(workload.new_tokens, **case)
    for step in steps:
        kernel_of(step)
    return Both(sides, {name: steps_of(side)[0] for name, side in sides.items()})


def measure_speed(both: Both, workload: Workload) -> list[Record]:
    calls = {
        (name, case): partial(timed_trial, side, workload.new_tokens, settings)
        for name, side in both.sides.items()
        for case, settings in SETTINGS.items()
    }
    times = in_turns(calls, TRIALS)
    replays = {name: replay_of(step, workload) for name, step in both.greedy.items()}

    def replay_ms(replay: Callable[[int], None]) -> float:
        replay(1)
        return seconds(partial(replay, REPLAYS), workload.device) / REPLAYS * 1e3

    alone = in_turns({n: partial(replay_ms, one) for n, one in replays.items()}, REPLAY_TRIALS)
    rows = []
    for (name, case), trials in times.items():
        row: Record = {"name": name, "case": case}
        row["ms"] = spread(token_ms(trials, workload.new_tokens))
        rows.append(row | ({"replay_ms": spread(alone[name])} if case == "greedy" else {}))
    return rows


def phases(marks: Tensor, step_us: float) -> list[Record]:
    """Microseconds of each phase in a step, from marks [blocks, layers + 1, 16]."""
    cycles = marks.double().mean(0).diff(dim=-1)  # [layers + 1, 15]
    whole = (marks[:, -1, len(LAST_PHASES)] - marks[:, 0, 0]).double().mean()
    sums = [*cycles[:-1, : len(PHASES)].sum(0), *cycles[-1, : len(LAST_PHASES)]]
    names = (*PHASES, *LAST_PHASES)
    return [
        {"phase": name, "us": float(part / whole * step_us)}
        for name, part in zip(names, sums, strict=True)
    ]


@torch.no_grad()
def measure_accuracy(
    model: PreTrainedModel, both: Both, workload: Workload, positions: int
) -> list[Record]:
    text = workload.prompt(positions)["input_ids"]
    found = {"ordinary pass": model(text, use_cache=False).logits[0].float()}
    for name, step in both.greedy.items():
        found[name] = logits_of(step, text)
        if not torch.equal(found[name], logits_of(step, text)):
            raise RuntimeError(f"two runs of the {name} give other bits")
    expected = model.float()(text, use_cache=False).logits[0]
    return [
        {
            "name": name,
            "kl": _divergence(expected, got),
            "largest": float((expected - got).abs().max()),
        }
        for name, got in found.items()
    ]


def _divergence(expected: Tensor, got: Tensor) -> float:
    """The mean KL divergence over the positions."""
    p, q = (logits.double().log_softmax(-1) for logits in (expected, got))
    return float((p.exp() * (p - q)).sum(-1).mean())


def measure(args: argparse.Namespace) -> Record:
    at_least(args, prompt_len=1, new_tokens=REPLAYS, positions=0)
    workload = build_workload(args)
    if not workload.on_gpu or workload.batch_size > 1:
        raise BadArgument("one kernel needs a GPU, and serves one row")
    if args.positions > workload.max_cache_len:
        raise BadArgument(f"--positions {args.positions}: {workload.max_cache_len} fit")
    model = workload.build_model()
    with patch(MOST_TOKENS, sys.maxsize):
        both = build_both(model, workload)
        rows = measure_speed(both, workload)
    step_us = next(r["replay_ms"]["median"] * 1e3 for r in rows if r["name"] == "one kernel")
    record = {**workload.origin(), "positions": args.positions, "rows": rows}
    record["bandwidth"] = measure_bandwidth(workload.device)
    record["bytes"] = bytes_per_step(model, workload.prompt_len, workload.new_tokens, 1)
    record["phases"] = phases(marks_of(both.greedy["one kernel"], workload), step_us)
    if args.positions:
        record["accuracy"] = measure_accuracy(model, both, workload, args.positions)
    return record


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--positions", type=int, default=0, help="of the text; default: no text")
    return run_benchmark(parser, measure, lambda record: [])


if __name__ == "__main__":
    sys.exit(main())
