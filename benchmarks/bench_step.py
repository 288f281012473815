"""What one captured decode step contains: kernels, time, the largest five, as one change after the other is added.

    python benchmarks/bench_step.py --model llama-3.2-1b --json step.json

Needs a GPU. The first row is the model's own step in a CUDA graph with our attention; each row below has one change
more. Then our decode attention alone against the length of the sequence, and the step of a decoder that once ran
inside `trace_attention` beside that of one that never did.
  tokens/s  through `generate`, as in bench_generation.py: the median of 3
  replay    milliseconds of the step alone, the mean of 50 in a row
  kernels   launches of one step; 'busy' is the time in which at least one of them runs. With PDL a kernel's time
            includes its wait for the one before it, so that the largest five can exceed the step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import tables
import torch
from measure import TimedGenerate, measure_bandwidth, seconds, spread
from outputs import at_least, benchmark_parser, run_benchmark
from provenance import provenance
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm
from transformers import PreTrainedModel
from workload import BadArgument, Workload, check_workload_arguments

from hf_static_kv import GraphDecoder, trace_attention
from hf_static_kv.cache.layout import known_shapes, plan_layers
from hf_static_kv.kernels.decode_attention import decode_attention

Record = dict[str, Any]
REPLAYS, TRIALS, PROFILED = 50, 3, 10
LENGTHS = [1024, 8192, 32768]


# What this script knows of the package's inside: the names that switch each change off, and how to replay a step.


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[list[Any]]:
    yield []


CHANGES: dict[str, dict[str, Any]] = {
    "linear layers and gated MLPs in our kernels": {
        "hf_static_kv.program.step.fused_linears": _nothing,
    },
    "RMS norms with the sums around them": {
        "hf_static_kv.program.step.fused_norms": _nothing,
        "hf_static_kv.program.step.FusedSums": nullcontext,
    },
    "rotary positions, angles from tables": {
        "hf_static_kv.program.step.fused_rotary": _nothing,
        "hf_static_kv.program.step.angles_from_tables": _nothing,
    },
    "PDL (programmatic dependent launch)": {
        "hf_static_kv.kernels.launch_triton._supports_pdl": lambda device: False,
    },
}


def replay_of(decoder: GraphDecoder, workload: Workload) -> Callable[[int], None]:
    """A function that replays the decoder's only captured step a number of times."""
    ((step,),) = (list(kinds.values()) for kinds in decoder._steps.values())
    seq_start = torch.zeros(workload.batch_size, dtype=torch.int64, device=workload.device)

    def replay(times: int) -> None:
        step.set_position(workload.prompt_len, seq_start)
        for _ in range(times):
            step.graph.replay()

    return replay


def attention_call(model: PreTrainedModel, length: int, layers: int, device: str) -> tuple[Callable[[], None], int]:
    """Decode attention of a full layer, over several layers' keys and values, and the bytes that one layer reads."""
    shape = known_shapes(plan_layers(model.config), model.config)[0]
    heads = model.config.get_text_config().num_attention_heads
    query = torch.randn(1, heads, 1, shape.key_head_dim, device=device, dtype=model.dtype)
    indices = torch.arange(layers, device=device)[:, None].repeat(1, 2)
    keys = torch.randn(layers, 1, shape.num_kv_heads, length, shape.key_head_dim, device=device, dtype=model.dtype)
    values, spans = torch.randn_like(keys), torch.tensor([[[0, 0, length]] * layers], device=device)

    def attend() -> None:
        for layer in range(layers):
            decode_attention(query, keys, values, spans, None, indices[layer, 0], scale=shape.key_head_dim**-0.5)

    return attend, 2 * keys[0].numel() * keys.element_size()


# The measurements.


def variants() -> Iterator[tuple[str, list[str]]]:
    """A row's words, and the changes that it does not have."""
    names = list(CHANGES)
    yield "captured, with our attention", names
    for n, name in enumerate(names, start=1):
        yield f"+ {name}", names[n:]


def measure_step(model: PreTrainedModel, workload: Workload) -> Record:
    generate = TimedGenerate(model, "graph", workload)
    generate.seconds(workload.new_tokens)
    decoder = generate.keywords["custom_generate"]
    if decoder.fallback_reason is not None:
        raise BadArgument(f"--model {workload.model}: {decoder.fallback_reason}")
    step_ms = [generate.step_ms() for _ in range(TRIALS)]
    replay = replay_of(decoder, workload)
    replay_ms = seconds(lambda: replay(REPLAYS), workload.device) / REPLAYS * 1e3
    tokens_per_s = workload.batch_size * 1e3 / statistics.median(step_ms)
    return {"tokens_per_s": tokens_per_s, "step_ms": step_ms, "replay_ms": replay_ms, **profiled(replay)}


def profiled(replay: Callable[[int], None]) -> Record:
    """Kernels of a step: how many, how long at least one of them runs, and the five that run longest."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        replay(PROFILED)
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
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
            {"name": row.key, "times": row.count / PROFILED, "us": row.self_device_time_total / PROFILED}
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
        times = [seconds(lambda graph=graph: [graph.replay() for _ in range(20)], device) / 20 for _ in range(7)]
        rows.append({"seq_len": length, "us": statistics.median(times) / layers * 1e6, "bytes": read})
    return rows


def measure_tracing(model: PreTrainedModel, workload: Workload) -> Record:
    """Milliseconds of a step outside `trace_attention`, in turns: of a decoder that once ran in it, and of another."""
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
    model, rows = workload.build_model(), []
    for words, missing in tqdm(list(variants()), disable=None):
        with ExitStack() as patches:
            for change in missing:
                for name, substitute in CHANGES[change].items():
                    patches.enter_context(patch(name, substitute))
            rows.append({"words": words, **measure_step(model, workload)})
    shown = {key: getattr(workload, key) for key in ("model", "dtype", "prompt_len", "new_tokens", "batch_size")}
    return {
        **provenance(workload.device),
        "workload": shown,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "variants": rows,
        "attention": measure_attention(model, workload.device),
        "tracing_ms": measure_tracing(model, workload),
    }


def report(record: Record) -> str:
    """The table, the largest kernels, and a step after `trace_attention`."""
    largest = [
        f"- {row['words']}: busy {row['busy_us'] / 1e3:.3f} ms; "
        + ", ".join(f"{k['times']:.0f} x {kernel_name(k['name'])} {k['us']:.0f} us" for k in row["largest"])
        for row in record["variants"]
    ]
    once, never = (tables.with_range(record["tracing_ms"][when]) for when in ("once", "never"))
    traced = f"A decode step after a run inside `trace_attention`: {once} ms, without one: {never} ms."
    return "\n\n".join([tables.conditions(record), tables.step([record], spread=True), "\n".join(largest), traced])


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
    if not args.device.startswith("cuda"):
        raise BadArgument(f"--device {args.device}: a captured step needs a GPU")
    at_least(prompt_len=(args.prompt_len, 1), new_tokens=(args.new_tokens, REPLAYS))
    capacity = args.prompt_len + args.new_tokens
    check_workload_arguments(args, capacity)
    sizes = (args.prompt_len, args.new_tokens, args.batch_size, capacity, args.real_weights)
    return Workload(args.model, args.device, args.dtype, *sizes)


def main() -> int:
    return run_benchmark(parser(), measure, report)


if __name__ == "__main__":
    sys.exit(main())
