"""How far keys and values in 8 bits move the next token, against a cache that has them as they are.

    python benchmarks/bench_codes.py --model smollm2 --device cpu --json codes.json
    python benchmarks/bench_codes.py --model gemma3 --device cpu --prompt-len 64 --new-tokens 64

A prompt of the corpus passes at once, and the text after it token by token. Figures are over these
passes: the KL divergence of the next token's probabilities, in nats, and how often the most likely
token is the same.

  int8          StaticContiguousCache(..., kv_dtype="int8")
  quanto-4      transformers' QuantizedCache("quanto", nbits=4), which keeps the newest 128 tokens as
                they are; left out where optimum-quanto is not installed, and with sliding layers
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_drafts import text_of
from outputs import benchmark_parser, run_benchmark
from records import Record
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache
from workload import BadArgument, Workload, build_workload

from hf_static_kv import StaticContiguousCache


def caches(workload: Workload, config: Any) -> dict[str, Callable[[], Cache]]:
    """How each contender makes its cache; the reference first."""
    length = workload.max_cache_len
    made: dict[str, Callable[[], Cache]] = {
        "dynamic": lambda: DynamicCache(config=config),
        "int8": lambda: StaticContiguousCache(config, length, kv_dtype="int8"),
    }
    has_windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if not has_windows and importlib.util.find_spec("optimum") is not None:
        made["quanto-4"] = lambda: QuantizedCache("quanto", config, nbits=4)
    return made


@torch.no_grad()
def next_tokens(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, prompt_len: int
) -> Iterator[torch.Tensor]:
    """The log probabilities [V] of the next token after each pass."""
    for tokens in (ids[:, :prompt_len], *ids[:, prompt_len:].split(1, dim=1)):
        logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        yield logits[0, -1].double().log_softmax(dim=-1)


def compared(expected: list[torch.Tensor], got: Iterator[torch.Tensor]) -> Record:
    divergences, same = [], []
    for own, other in zip(expected, got, strict=True):
        divergences.append(float((own.exp() * (own - other)).sum()))
        same.append(int(own.argmax()) == int(other.argmax()))
    mean = sum(divergences) / len(divergences)
    return {"kl_mean": mean, "kl_max": max(divergences), "same_token": sum(same) / len(same)}


def measure(args: argparse.Namespace) -> Record:
    workload = build_workload(args)
    if workload.has_random_weights or workload.batch_size > 1:
        raise BadArgument(f"--model {args.model}: one row of a model that was trained")
    model = workload.build_model()
    ids = text_of(workload, workload.prompt_len + workload.new_tokens)
    made = caches(workload, model.config)
    expected = list(next_tokens(model, made.pop("dynamic")(), ids, workload.prompt_len))
    rows = []
    for name, make in made.items():
        got = next_tokens(model, make(), ids, workload.prompt_len)
        rows.append({"contender": name, **compared(expected, got)})
    return {**workload.origin(), "rows": rows}


def problems(record: Record) -> list[str]:
    return [
        f"{row['contender']}: not finite"
        for row in record["rows"]
        if not math.isfinite(row["kl_max"])
    ]


def main() -> int:
    return run_benchmark(benchmark_parser(__doc__), measure, problems)


if __name__ == "__main__":
    sys.exit(main())
