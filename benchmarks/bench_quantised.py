"""Quantised models: decode speed, memory, and distance from the float32 model with the same weights.

    python benchmarks/bench_quantised.py --model llama-3.1-8b --packages /tmp/packages --json quantised.json
    python benchmarks/bench_quantised.py --model llama-3.2-1b --formats nf4,int8 --packages /tmp/packages
    python benchmarks/bench_quantised.py --model llama --device cpu --formats torchao-int8 --new-tokens 8

Every linear layer of the decoder's layers is quantised by a package, which is imported from
`--packages` or from where Python finds it. A package that is not there is a row without figures.
Four ways to generate, in turns:
  eager      transformers' loop with `DynamicCache`: the package's own kernels
  recorded   `GraphDecoder` without our kernel for packed weights: the package's kernels in a graph
  packed     `GraphDecoder` with it; on a CPU its plain twin in a list
  one kernel `GraphDecoder()`, where one kernel computes the step; else as packed
Figures:
  tokens/s   through `generate`: (TN - T1) / (N - 1) of a call for one token and one for N
  bytes      of the model's weights, and the peak while it generates
  error      of the logits after a forced text of --compared-tokens tokens, from a model in float32
             with the unpacked weights: root mean square, relative to that of the logits
Exit status 1 if a decoder fell back or a layer was not packed, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import contenders
import torch
from bench_one_kernel import steps_of
from measure import TimedGenerate, in_turns, spread
from outputs import at_least, benchmark_parser, names_of, run_benchmark
from records import Record
from torch.nn import Linear, Module, Parameter
from tqdm import tqdm
from transformers import LogitsProcessor, PreTrainedModel
from workload import Workload, build_workload

from hf_static_kv.program.takeover import takeover_of

TRIALS = 3
RULE = "packed_weights"

# --- what this script knows of the package's inside

DEVICES = "hf_static_kv.program.quantised.DEVICES"


def packed_weights(model: PreTrainedModel) -> dict[Module, torch.Tensor]:
    """The layers that our kernel reads, each with its unpacked weight in float32."""
    from hf_static_kv.kernels.packed import unpacked
    from hf_static_kv.program import quantised

    found = quantised.packed_weights(model)
    return {
        module: unpacked(weight._replace(dtype=torch.float32)) for module, weight in found.items()
    }


def on_any_device(workload: Workload) -> AbstractContextManager[Any]:
    return nullcontext() if workload.on_gpu else patch(DEVICES, ("cpu",))


# --- the formats: a function of one linear layer, or of the whole model


def bitsandbytes_4bit(kind: str, nested: bool, linear: Linear) -> Module:
    package = import_module("bitsandbytes")
    dtype = linear.weight.dtype
    layer = package.nn.Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None, dtype, nested, kind
    )
    layer.weight = package.nn.Params4bit(
        linear.weight.data, False, compress_statistics=nested, quant_type=kind, module=layer
    )
    layer.bias = linear.bias
    layer = layer.to(linear.weight.device)
    layer.support_avx512bf16_for_cpu = False  # it would repack the weight for the CPU
    return layer  # type: ignore[no-any-return]


def bitsandbytes_8bit(linear: Linear) -> Module:
    package = import_module("bitsandbytes")
    sizes = linear.in_features, linear.out_features, linear.bias is not None
    layer = package.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
    own = linear.weight.data.cpu()  # quantised on its way from the CPU
    layer.weight = package.nn.Int8Params(own, False, has_fp16_weights=False)
    layer.bias = linear.bias
    return layer.to(linear.weight.device)  # type: ignore[no-any-return]


def torchao(config: str, settings: dict[str, Any], linear: Linear) -> Module:
    package = import_module("torchao.quantization")
    package.quantize_(linear, getattr(package, config)(**settings))
    return linear


def quanto(linear: Linear) -> Module:
    package = import_module("optimum.quanto")
    layer = package.QLinear.from_module(linear, weights=package.qint8)
    layer.freeze()
    return layer  # type: ignore[no-any-return]


def hqq(linear: Linear) -> Module:
    package = import_module("hqq.core.quantize")
    config = package.BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    place = {"compute_dtype": linear.weight.dtype, "device": str(linear.weight.device)}
    return package.HQQLinear(linear, config, **place)  # type: ignore[no-any-return]


TILES = {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}
FORMATS: dict[str, Callable[[Linear], Module]] = {
    "nf4": partial(bitsandbytes_4bit, "nf4", False),
    "nf4-nested": partial(bitsandbytes_4bit, "nf4", True),
    "fp4": partial(bitsandbytes_4bit, "fp4", False),
    "int8": bitsandbytes_8bit,
    "torchao-int8": partial(torchao, "Int8WeightOnlyConfig", {}),
    "torchao-int4": partial(torchao, "Int4WeightOnlyConfig", TILES),
    "quanto-int8": quanto,
    "hqq-4bit": hqq,
}


def quantise(model: PreTrainedModel, make: Callable[[Linear], Module]) -> None:
    """Replace every linear layer but the head; each is freed before the next is made."""
    head = model.get_output_embeddings()
    places = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is Linear and child is not head
    ]
    for module, name in tqdm(places, desc="quantising", disable=None, leave=False):
        with torch.no_grad():
            setattr(module, name, make(getattr(module, name)).eval())


# --- the measurements


WAYS = {
    "eager": ("dynamic", None),
    "recorded": ("graph", partial(contenders.graph, without=(RULE,))),
    "packed": ("graph", partial(contenders.graph, persistent=False)),
    "one kernel": ("graph", partial(contenders.graph, persistent=True)),
}


class Forced(LogitsProcessor):
    """Only the token of a given text may follow."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self.text[:, input_ids.shape[1] % self.text.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


def reason_for_list(side: TimedGenerate) -> str:
    """Why no kernel computes the whole step; "": one does."""
    takeovers = [takeover_of(step) for step in steps_of(side)]
    reasons = [own.reason for own in takeovers if own is not None and own.kernel is None]
    return ", ".join(dict.fromkeys(reasons))


def forced_logits(generate: TimedGenerate, tokens: int) -> torch.Tensor:
    """The logits [N, B, V] before each token but the first, which a prompt gives."""
    workload = generate.workload
    text = workload.prompt(tokens)["input_ids"]
    kept: list[Any] = []
    own = generate.model.generate

    def keep(**keywords: Any) -> None:
        kept.append(own(**keywords, output_logits=True, return_dict_in_generate=True))

    with patch.object(generate.model, "generate", keep):
        generate.seconds(tokens, logits_processor=[Forced(text)])
    return torch.stack(kept[0].logits[1:]).float()


@contextmanager
def reference(workload: Workload, weights: dict[str, torch.Tensor]) -> Iterator[PreTrainedModel]:
    """The model in float32 with these weights of its layers."""
    model = workload.build_model().float()
    for name, weight in weights.items():
        linear = model.get_submodule(name)
        linear.weight = Parameter(weight, requires_grad=False)
    yield model


def error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def measure_format(name: str, workload: Workload, compared_tokens: int) -> Record:
    """One row; `unavailable` without the package."""
    model = workload.build_model()
    try:
        quantise(model, FORMATS[name])
    except Exception as reason:  # a package may be absent, need another, or refuse the device
        return {"format": name, "unavailable": f"{type(reason).__name__}: {reason}"[:200]}
    sides = {way: TimedGenerate(model, by, workload, set_up) for way, (by, set_up) in WAYS.items()}
    with on_any_device(workload):
        for generate in sides.values():  # the second call captures the pass of the prompt
            for _ in range(2):
                generate.seconds(workload.new_tokens)
        one_kernel = sides["one kernel"]
        forced_logits(one_kernel, compared_tokens)
        one_kernel.seconds(workload.new_tokens)
        forced_logits(one_kernel, compared_tokens)
        for generate in sides.values():  # a call for one token, too
            generate.step_ms()
        if workload.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = in_turns({way: side.step_ms for way, side in sides.items()}, TRIALS)
        peak = torch.cuda.max_memory_allocated() if workload.on_gpu else None
        logits = {way: forced_logits(side, compared_tokens) for way, side in sides.items()}
        reason = reason_for_list(one_kernel)
        unpacked = packed_weights(model)
    names = {module: path for path, module in model.named_modules()}
    row: Record = {"format": name, "packed_layers": len(unpacked), "model_bytes": bytes_of(model)}
    row["reason_for_list"] = reason
    weights = {names[module]: weight for module, weight in unpacked.items()}
    del model
    with reference(workload, weights) as exact:
        expected = forced_logits(TimedGenerate(exact, "dynamic", workload), compared_tokens)
    row["layers"] = sum(type(module) is Linear for module in exact.modules()) - 1
    row |= {"peak_bytes": peak, "ways": {}}
    for way, side in sides.items():
        row["ways"][way] = {
            "tokens_per_s": spread([workload.batch_size * 1e3 / ms for ms in times[way]]),
            "error": error(logits[way], expected),
            "fallback_reason": getattr(
                side.keywords.get("custom_generate"), "fallback_reason", None
            ),
        }
    return row


def bytes_of(model: PreTrainedModel) -> int:
    """Of the parameters, with the parts of those that are wrapped; what packages keep beside them is
    not counted.
    """
    from hf_static_kv.cache.values import unwrapped

    parts = {part.data_ptr(): part.nbytes for one in model.parameters() for part in unwrapped(one)}
    return sum(parts.values())


def measure(args: argparse.Namespace) -> Record:
    at_least(args, prompt_len=1, new_tokens=3, compared_tokens=3)
    if args.packages:
        sys.path.insert(0, str(args.packages))
    workload = build_workload(args)
    rows = [measure_format(name, workload, args.compared_tokens) for name in args.formats]
    return {**workload.origin(), "rows": rows}


def problems(record: Record) -> list[str]:
    lines = []
    for row in record["rows"]:
        for way, figures in row.get("ways", {}).items():
            if figures["fallback_reason"]:
                lines.append(f"{row['format']}, {way} fell back: {figures['fallback_reason']}")
        if row.get("packed_layers") != row.get("layers"):
            lines.append(
                f"{row['format']}: {row['packed_layers']} of {row['layers']} layers are packed"
            )
    return lines


def main() -> int:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add(
        "--packages",
        type=Path,
        help="a folder with the packages, as `pip install --target` makes it",
    )
    add(
        "--formats",
        type=names_of(FORMATS),
        default=list(FORMATS),
        help=f"default: {','.join(FORMATS)}",
    )
    add("--compared-tokens", type=int, default=16, help="%(default)s")
    return run_benchmark(parser, measure, problems)


if __name__ == "__main__":
    sys.exit(main())
