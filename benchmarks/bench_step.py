"""What each rewrite rule saves: the time of a captured decode step with all rules, and without each
one.

    python benchmarks/bench_step.py --model llama-3.2-1b --json benchmarks/results/step-llama-3.2-1b-h200.json
    python benchmarks/bench_step.py --model llama --device cpu --prompt-len 16 --new-tokens 64

A rule that builds on the one left out does not apply either. A rule that does not change the
recorded list of this model is not measured. Below the rules: a step without any rule, and one
without PDL. Then our decode attention alone against the length of the sequence, and the step of a
decoder that once ran inside `trace_attention` beside that of one that never did. On a CPU the lists
run without a graph, and there are no kernels to count.
  replay    milliseconds of the step alone: the mean of 50 in a row; median (minimum to maximum) of 7, in turns
  tokens/s  through `generate`, as in bench_generation.py: the median of 3, in turns
  kernels   launches of one step; 'busy' is the time in which at least one of them runs. With PDL a kernel's time
            includes its wait for the one before it, so that the largest five can exceed the step.
Exit status 1 when a decoder without a rule fell back, 2 for a bad argument, or when the one with
all rules did.
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
import tables
import torch
from measure import TimedGenerate, measure_bandwidth, seconds, spread
from outputs import at_least, benchmark_parser, run_benchmark
from provenance import provenance
from record_figures import conditions, with_range
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm
from transformers import PreTrainedModel
from workload import BadArgument, Workload, check_workload_arguments

from hf_static_kv import GraphDecoder, trace_attention
from hf_static_kv.cache.layout import known_shapes, plan_layers
from hf_static_kv.kernels.decode_attention import decode_attention
from hf_static_kv.program.rules import RULES, rewrite

Record = dict[str, Any]
REPLAYS, REPLAY_TRIALS, TRIALS, PROFILED = 50, 7, 3, 10
LENGTHS = [1024, 8192, 32768]


# What this script knows of the package's inside: where a list is rewritten, what switches PDL off,
# how a step replays.

REWRITE, SUPPORTS_PDL = (
    "hf_static_kv.program.step.rewrite",
    "hf_static_kv.kernels.launch_triton._supports_pdl",
)


@contextmanager
def noted_list() -> Iterator[list[str]]:
    """Yields the list of the step that is recorded inside the context, as text."""
    found: list[str] = []

    def rewrite_and_note(program: Any, *args: Any, **kwargs: Any) -> None:
        rewrite(program, *args, **kwargs)
        found[:] = (
            re.sub(r" at 0x\w+", "", str(call)) for call in program
        )  # objects of each recording are new

    with patch(REWRITE, rewrite_and_note):
        yield found


def replay_of(decoder: GraphDecoder, workload: Workload) -> Callable[[int], None]:
    """A function that replays the decoder's only captured step a number of times."""
    ((step,),) = (list(kinds.values()) for kinds in decoder._steps.values())
    seq_start = torch.zeros(workload.batch_size, dtype=torch.int64, device=workload.device)

    @torch.no_grad()
    def replay(times: int) -> None:
        step.set_position(workload.prompt_len, seq_start)
        for _ in range(times):
            step.replay()

    return replay


def attention_call(
    model: PreTrainedModel, length: int, layers: int, device: str
) -> tuple[Callable[[], None], int]:
    """Decode attention of a full layer, over several layers' keys and values, and the bytes that
    one layer reads.
    """
    shape = known_shapes(plan_layers(model.config), model.config)[0]
    heads = model.config.get_text_config().num_attention_heads
    query = torch.randn(1, heads, 1, shape.key_head_dim, device=device, dtype=model.dtype)
    keys = torch.randn(
        layers, 1, shape.num_kv_heads, length, shape.key_head_dim, device=device, dtype=model.dtype
    )
    values, spans = torch.randn_like(keys), torch.tensor([[0, 0, length]], device=device)

    def attend() -> None:
        for layer in range(layers):
            scale = shape.key_head_dim**-0.5
            decode_attention(
                query, keys[layer], values[layer], spans, scale=scale, spans_ready=True
            )

    return attend, 2 * keys[0].numel() * keys.element_size()


# The measurements.


class Variant(NamedTuple):
    """A row:

    its words, the rules that it does not have, and whether its kernels are launched with PDL.
    """

    words: str
    without: Collection[str] = ()
    has_pdl: bool = True


def variants(on_gpu: bool) -> list[Variant]:
    one_less = [Variant(f"without `{name}`", (name,)) for name in RULES]
    rest = [
        Variant("without any rule", tuple(RULES)),
        *([Variant("without PDL", has_pdl=False)] if on_gpu else []),
    ]
    return [Variant("all rules"), *one_less, *rest]


class Side:
    """A decoder of one variant, and the list of its step."""

    def __init__(self, model: PreTrainedModel, workload: Workload, variant: Variant) -> None:
        set_up = partial(contenders.graph, without=variant.without)
        self.variant, self.generate = variant, TimedGenerate(model, "graph", workload, set_up)
        no_pdl = nullcontext() if variant.has_pdl else patch(SUPPORTS_PDL, lambda device: False)
        with noted_list() as self.list, no_pdl:
            self.generate.seconds(workload.new_tokens)
        decoder = self.generate.keywords["custom_generate"]
        self.fallback_reason: str | None = decoder.fallback_reason
        self.replay = None if self.fallback_reason else replay_of(decoder, workload)


def measure_variants(model: PreTrainedModel, workload: Workload) -> list[Record]:
    """A row for each variant:

    all are captured, then measured in turns. One whose list is the same has no times.
    """
    first, *others = variants(workload.on_gpu)
    full = Side(model, workload, first)
    if full.fallback_reason:
        raise BadArgument(f"--model {workload.model}: {full.fallback_reason}")
    rows: list[Record] = [{"words": first.words, "without": []}]
    measured = {0: full}  # by row
    for variant in tqdm(others, desc="capturing", disable=None, leave=False):
        side = Side(model, workload, variant)
        rows.append({"words": variant.words, "without": list(variant.without)})
        if side.fallback_reason:
            rows[-1]["fallback_reason"] = side.fallback_reason
        elif variant.has_pdl and side.list == full.list:
            rows[-1]["same_list"] = True
        else:
            measured[len(rows) - 1] = side
    times = measure_times(list(measured.values()), workload)
    for i, figures in zip(measured, times, strict=True):
        rows[i] |= figures
    return rows


def measure_times(sides: list[Side], workload: Workload) -> list[Record]:
    """The figures of each side, of trials in turns."""
    steps, replays = ([[] for _ in sides] for _ in range(2))
    for trial in tqdm(range(REPLAY_TRIALS), desc="measuring", disable=None, leave=False):
        for i, side in enumerate(sides):
            if trial < TRIALS:
                steps[i].append(side.generate.step_ms())
            side.replay(1)
            replays[i].append(
                seconds(partial(side.replay, REPLAYS), workload.device) / REPLAYS * 1e3
            )
    return [
        {
            "calls": len(side.list),
            "tokens_per_s": workload.batch_size * 1e3 / statistics.median(steps[i]),
            "step_ms": steps[i],
            "replay_ms": replays[i],
            **(profiled(side.replay) if workload.on_gpu else {}),
        }
        for i, side in enumerate(sides)
    ]


def profiled(replay: Callable[[int], None]) -> Record:
    """Kernels of a step:

    how many, how long at least one of them runs, and the five that run longest.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        replay(PROFILED)
        torch.cuda.synchronize()
    kernels = [
        event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels = sorted(kernels, key=lambda event: event.time_range.start)
    busy, until = 0.0, 0.0
    for event in kernels:
        busy += max(0.0, event.time_range.end - max(until, event.time_range.start))
        until = max(until, event.time_range.end)
    largest = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)[:5]
    return {
        "kernels": len(kernels) / PROFILED,
        "busy_us": busy / PROFILED,
        "largest": [
            {
                "name": row.key,
                "times": row.count / PROFILED,
                "us": row.self_device_time_total / PROFILED,
            }
            for row in largest
        ],
    }


def measure_attention(model: PreTrainedModel, device: str, layers: int = 8) -> list[Record]:
    """Microseconds of one layer; 8 layers in turns, so that their keys do not stay in the L2 cache."""
    rows = []
    for length in LENGTHS:
        attend, read = attention_call(model, length, layers, device)
        attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        times = [
            seconds(lambda graph=graph: [graph.replay() for _ in range(20)], device) / 20
            for _ in range(7)
        ]
        rows.append(
            {"seq_len": length, "us": statistics.median(times) / layers * 1e6, "bytes": read}
        )
    return rows


def measure_tracing(model: PreTrainedModel, workload: Workload) -> Record:
    """Milliseconds of a step outside `trace_attention`, in turns:

    of a decoder that once ran in it, and of another.
    """
    never, once = (TimedGenerate(model, "graph", workload) for _ in range(2))
    for generate in (never, once):
        generate.seconds(workload.new_tokens)
    with trace_attention(model, layers=[0]):
        once.seconds(8)
    once.seconds(8)
    times = [{"never": never.step_ms(), "once": once.step_ms()} for _ in range(2 * TRIALS + 1)]
    return {name: spread([trial[name] for trial in times]) for name in times[0]}


def measure(args: argparse.Namespace) -> Record:
    workload = chosen(args)
    bandwidth = measure_bandwidth(workload.device)
    model = workload.build_model()
    shown = {
        key: getattr(workload, key)
        for key in ("model", "dtype", "prompt_len", "new_tokens", "batch_size")
    }
    return {
        **provenance(workload.device),
        "workload": shown,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "rules": list(RULES),
        "variants": measure_variants(model, workload),
        "attention": measure_attention(model, workload.device) if workload.on_gpu else [],
        "tracing_ms": measure_tracing(model, workload),
    }


def report(record: Record) -> str:
    """The table, the largest kernels, and a step after `trace_attention`."""
    largest = [
        f"- {row['words']}: busy {row['busy_us'] / 1e3:.3f} ms; "
        + ", ".join(
            f"{k['times']:.0f} x {kernel_name(k['name'])} {k['us']:.0f} us" for k in row["largest"]
        )
        for row in record["variants"]
        if "largest" in row
    ]
    once, never = (with_range(record["tracing_ms"][when]) for when in ("once", "never"))
    traced = (
        f"A decode step after a run inside `trace_attention`: {once} ms, without one: {never} ms."
    )
    lines = [f"- {row['words']} fell back: {row['fallback_reason']}" for row in fell_back(record)]
    parts = [
        conditions(record),
        tables.step([record], spread=True),
        "\n".join(largest + lines),
        traced,
    ]
    return "\n\n".join(part for part in parts if part)


def fell_back(record: Record) -> list[Record]:
    return [row for row in record["variants"] if "fallback_reason" in row]


def kernel_name(name: str) -> str:
    """A kernel's name without its template arguments.

    >>> kernel_name("void at::native::reduce_kernel<512, 1>(int)")
    'reduce_kernel'
    """
    return name.removeprefix("void ").split("<")[0].split("(")[0].split("::")[-1][:40]


def parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    return parser


def chosen(args: argparse.Namespace) -> Workload:
    at_least(prompt_len=(args.prompt_len, 1), new_tokens=(args.new_tokens, REPLAYS))
    capacity = args.prompt_len + args.new_tokens
    check_workload_arguments(args, capacity)
    sizes = (args.prompt_len, args.new_tokens, args.batch_size, capacity, args.real_weights)
    return Workload(args.model, args.device, args.dtype, *sizes)


def main() -> int:
    return run_benchmark(parser(), measure, report, failed=lambda record: bool(fell_back(record)))


if __name__ == "__main__":
    sys.exit(main())
