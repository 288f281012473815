"""What is in one captured decode step: kernels, time, the largest five, as one change after the other is made to it.

    python benchmarks/bench_step.py --model llama-3.2-1b --json step.json

Needs a GPU. The first row is the step as the model itself computes it, in a CUDA graph with our attention; each row
below has one change more. Then our decode attention alone, against the length of the text; and the step of a decoder
that was once inside `trace_attention`, beside that of one that never was.
  tokens/s  through `generate`, as in bench_generation.py: the median of 3
  replay    milliseconds of the step alone, the mean of 50 in a row
  kernels   that a step runs; 'busy' is the time in which at least one of them runs
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measure import measure_bandwidth, seconds, spread
from outputs import benchmark_parser, check_outputs, save_picture, write_outputs
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm
from transformers import PreTrainedModel
from workload import BadArgument, Workload, check_workload_arguments

from hf_static_kv import GraphDecoder, StaticContiguousCache
from hf_static_kv.kernels.decode_attention import decode_attention
from hf_static_kv.layout import known_shapes, plan_layers
from hf_static_kv.testing import provenance
from hf_static_kv.trace import trace_attention

Record = dict[str, Any]
REPLAYS, TRIALS, PROFILED = 50, 3, 10
LENGTHS = [1024, 8192, 32768]


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[list[Any]]:
    yield []


# Each change, by what switches it off.
CHANGES: dict[str, dict[str, Any]] = {
    "linear layers and gated MLPs in our kernels": {"step.fused_linears": _nothing},
    "RMS norms with the sums around them": {"step.fused_norms": _nothing, "step.FusedSums": nullcontext},
    "rotary positions, angles from tables": {"step.fused_rotary": _nothing, "step.angles_from_tables": _nothing},
    "kernels that begin early": {"kernels.launch_triton._supports_pdl": lambda device: False},
}


def variants() -> Iterator[tuple[str, str, list[str]]]:
    """A row's words, its setting of GraphDecoder, and the changes that it does not have."""
    names = list(CHANGES)
    yield "captured, with our attention", "none", names
    for n, name in enumerate(names, start=1):
        yield f"+ {name}", "none", names[n:]
    yield 'for comparison: GraphDecoder("layers")', "layers", []


class Generation:
    """`generate` with a cache and a decoder of its own."""

    def __init__(self, model: PreTrainedModel, workload: Workload, setting: str) -> None:
        self.model: Any = model
        self.workload, self.prompt, self.decoder = workload, workload.prompt(), GraphDecoder(setting)
        self.cache = StaticContiguousCache.from_model(model, workload.max_cache_len, workload.batch_size)

    def seconds(self, tokens: int) -> float:
        self.cache.reset()
        keywords = {"past_key_values": self.cache, "custom_generate": self.decoder, "do_sample": False}
        call = lambda: self.model.generate(**self.prompt, **keywords, max_new_tokens=tokens)  # noqa: E731
        return seconds(call, self.workload.device)

    def step_ms(self) -> float:
        """Milliseconds of a step, the loop's own cost included."""
        tokens = self.workload.new_tokens
        first, last = self.seconds(1), self.seconds(tokens)
        return (last - first) / (tokens - 1) * 1e3


def measure_step(model: PreTrainedModel, workload: Workload, setting: str) -> Record:
    generation = Generation(model, workload, setting)
    generation.seconds(workload.new_tokens)
    if generation.decoder.fallback_reason is not None:
        raise BadArgument(f"--model {workload.model}: {generation.decoder.fallback_reason}")
    step_ms = [generation.step_ms() for _ in range(TRIALS)]
    ((step,),) = (list(kinds.values()) for kinds in generation.decoder._steps.values())
    origin = torch.zeros(workload.batch_size, dtype=torch.int64, device=workload.device)

    def replay(times: int) -> None:
        step.begin(workload.prompt_len, origin)
        for _ in range(times):
            step.graph.replay()

    replay_ms = seconds(lambda: replay(REPLAYS), workload.device) / REPLAYS * 1e3
    tokens_per_s = workload.batch_size * 1e3 / statistics.median(step_ms)
    return {"tokens_per_s": tokens_per_s, "step_ms": step_ms, "replay_ms": replay_ms, **profiled(replay)}


def measure_tracing(model: PreTrainedModel, workload: Workload) -> Record:
    """Milliseconds of a step outside `trace_attention`, in turns: of a decoder that was in it once, and of another."""
    never, once = (Generation(model, workload, "none") for _ in range(2))
    for generation in (never, once):
        generation.seconds(workload.new_tokens)
    with trace_attention(model, layers=[0]):
        once.seconds(8)
    once.seconds(8)
    times = [{"never": never.step_ms(), "once": once.step_ms()} for _ in range(2 * TRIALS + 1)]
    return {name: spread([trial[name] for trial in times]) for name in times[0]}


def profiled(replay: Any) -> Record:
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
    """Decode attention of a full layer alone, over layers whose keys together are more than a cache of the chip."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    shape = known_shapes(plan_layers(model.config), model.config)[0]
    query = torch.randn(1, heads, 1, shape.key_head_dim, device=device, dtype=model.dtype)
    numbers = torch.arange(layers, device=device)[:, None].repeat(1, 2)
    rows = []
    for length in LENGTHS:
        keys = torch.randn(layers, 1, shape.num_kv_heads, length, shape.key_head_dim, device=device, dtype=model.dtype)
        values, spans = torch.randn_like(keys), torch.tensor([[[0, 0, length]] * layers], device=device)

        def attend(keys: torch.Tensor = keys, values: torch.Tensor = values, spans: torch.Tensor = spans) -> None:
            for layer in range(layers):
                decode_attention(query, keys, values, spans, None, numbers[layer, 0], scale=shape.key_head_dim**-0.5)

        attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        times = [seconds(lambda graph=graph: [graph.replay() for _ in range(20)], device) / 20 for _ in range(7)]
        us = statistics.median(times) / layers * 1e6
        rows.append({"text": length, "us": us, "bytes": 2 * keys[0].numel() * keys.element_size()})
    return rows


def measure_all(workload: Workload) -> Record:
    bandwidth = measure_bandwidth(workload.device)
    model = workload.build_model()
    rows = []
    for words, setting, missing in tqdm(list(variants()), disable=None):
        with ExitStack() as patches:
            for change in missing:
                for name, substitute in CHANGES[change].items():
                    patches.enter_context(patch(f"hf_static_kv.{name}", substitute))
            torch._dynamo.reset()
            rows.append({"words": words, **measure_step(model, workload, setting)})
    shown = {key: getattr(workload, key) for key in ("model", "dtype", "prompt_len", "new_tokens", "batch_size")}
    return {
        **provenance(workload.device),
        "workload": shown,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "variants": rows,
        "attention": measure_attention(model, workload.device),
        "tracing_ms": measure_tracing(model, workload),
    }


def markdown(record: Record) -> str:
    w = record["workload"]
    lines = [
        f"{w['model']}, {w['dtype']}, batch {w['batch_size']}, {w['prompt_len']} -> {w['new_tokens']} tokens, "
        f"{record['hardware']}, commit {record['commit']}.",
        "",
        "| step | tokens/s | replay, ms | kernels | busy, ms | the largest five, us |",
        "|---" * 6 + "|",
    ]
    for row in record["variants"]:
        largest = ", ".join(f"{k['times']:.0f} x {_short(k['name'])} {k['us']:.0f}" for k in row["largest"])
        lines.append(
            f"| {row['words']} | {row['tokens_per_s']:,.0f} | {row['replay_ms']:.3f} | {row['kernels']:.0f} "
            f"| {row['busy_us'] / 1e3:.3f} | {largest} |"
        )
    lines += [
        "",
        "A kernel that begins early waits for the one before it, and that is in its time: the largest five can be more "
        "than the step.",
        "",
        "| our attention over one layer, text of | us | share of the bandwidth |",
        "|---|---|---|",
    ]
    for row in record["attention"]:
        share = row["bytes"] / (row["us"] * 1e-6) / (record["bandwidth_gb_per_s"] * 1e9)
        lines.append(f"| {row['text']:,} | {row['us']:.1f} | {share:.0%} |")
    if "tracing_ms" in record:
        times = [record["tracing_ms"][name] for name in ("once", "never")]
        cells = [f"{t['median']:.3f} ms ({t['min']:.3f} to {t['max']:.3f})" for t in times]
        lines += [
            "",
            f"A step after a run inside `trace_attention` takes {cells[0]}, without one {cells[1]}, in turns.",
        ]
    return "\n".join(lines)


def _short(name: str) -> str:
    """A kernel's name without its template arguments.

    >>> _short("void at::native::reduce_kernel<512, 1>(int)")
    'reduce_kernel'
    """
    return name.removeprefix("void ").split("<")[0].split("(")[0].split("::")[-1][:40]


def plot(record: Record, path: Path) -> None:
    import matplotlib.pyplot as plt

    rows = record["variants"][::-1]
    figure, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
    axis.barh([row["words"] for row in rows], [row["replay_ms"] for row in rows], color="tab:cyan")
    axis.set(xlabel="one step, ms", title=f"{record['workload']['model']}, {record['hardware']}")
    save_picture(figure, path)


def parse_args() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> Workload:
    check_outputs(args)
    if not args.device.startswith("cuda"):
        raise BadArgument(f"--device {args.device}: a captured step needs a GPU")
    if args.prompt_len < 1 or args.new_tokens < REPLAYS:
        raise BadArgument(f"--prompt-len must be at least 1 and --new-tokens at least {REPLAYS}")
    room = args.prompt_len + args.new_tokens
    check_workload_arguments(args, room)
    sizes = (args.prompt_len, args.new_tokens, args.batch_size, room, args.real_weights)
    return Workload(args.model, args.device, args.dtype, *sizes)


def main() -> int:
    args = parse_args()
    try:
        record = measure_all(chosen(args))
    except BadArgument as error:
        print(f"bench_step.py: {error}", file=sys.stderr)
        return 2
    write_outputs(args, record, markdown, plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
