"""Who runs: every way to cache that a user of `generate` can pick, by name.

A contender is set up once for a model and then asked before each call of `generate` for the keywords of that call, so
that a cache that can be used again is. A new one is one more entry of `CONTENDERS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from workload import BadArgument

from hf_static_kv import GraphDecoder, StaticContiguousCache
from hf_static_kv.attention import ATTENTION_NAME

Keywords = dict[str, Any]
SetUp = Callable[[PreTrainedModel, int, int], Callable[[], Keywords]]
OURS = "contiguous"


@dataclass(frozen=True)
class Contender:
    """`set_up(model, max_cache_len, batch_size)` gives a function that gives the keywords of one call of `generate`.

    `why_ahead` is said in reports wherever this contender is faster than every one of ours, and is empty for ours;
    `color` is its own in every picture; `gpu_only` says why it cannot run on a CPU.
    """

    set_up: SetUp
    words: str
    color: str
    why_ahead: str = ""
    cached: bool = True
    gpu_only: str = ""

    @property
    def is_ours(self) -> bool:
        return not self.why_ahead


def _no_cache(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> Callable[[], Keywords]:
    return lambda: {"use_cache": False}


def _dynamic(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> Callable[[], Keywords]:
    return lambda: {"past_key_values": DynamicCache(config=model.config)}


def _static(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> Callable[[], Keywords]:
    return _used_again(StaticCache(config=model.config, max_cache_len=max_cache_len), disable_compile=True)


def _static_compiled(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> Callable[[], Keywords]:
    return _used_again(StaticCache(config=model.config, max_cache_len=max_cache_len))


def _contiguous(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> Callable[[], Keywords]:
    return _used_again(StaticContiguousCache.from_model(model, max_cache_len, batch_size))


def _contiguous_kernel(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> Callable[[], Keywords]:
    model.set_attn_implementation(ATTENTION_NAME)
    return _contiguous(model, max_cache_len, batch_size)


def _graph(compile: str) -> SetUp:
    def set_up(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> Callable[[], Keywords]:
        cache = StaticContiguousCache.from_model(model, max_cache_len, batch_size)
        return _used_again(cache, custom_generate=GraphDecoder(compile))

    return set_up


def _used_again(cache: Cache, **keywords: Any) -> Callable[[], Keywords]:
    def call() -> Keywords:
        cache.reset()
        return {"past_key_values": cache, **keywords}

    return call


_PACE = (
    "both send the same kind of step from Python, and its pace changed from contender to contender in this run by more "
    "than the caches differ"
)
_NO_GRAPH = "a CUDA graph needs a GPU"
CONTENDERS = {
    "no-cache": Contender(
        _no_cache,
        "`use_cache=False`",
        "tab:gray",
        "at this length a whole pass takes no longer than a pass over one token",
        cached=False,
    ),
    "dynamic": Contender(
        _dynamic,
        "`DynamicCache`, the default",
        "tab:blue",
        _PACE,
    ),
    "static": Contender(
        _static,
        "`StaticCache`, eager",
        "tab:orange",
        _PACE,
    ),
    "static-compiled": Contender(
        _static_compiled,
        "`StaticCache`, compiled by `generate`",
        "tab:red",
        "its step is compiled and replayed as one CUDA graph, where ours, run eagerly, sends every kernel from Python "
        "and the GPU waits; it pays with its cold start, and again for every new room",
        gpu_only="generate compiles on a GPU only",
    ),
    OURS: Contender(_contiguous, "`StaticContiguousCache` (ours), eager", "tab:green"),
    "contiguous-kernel": Contender(
        _contiguous_kernel, "the same with our attention", "tab:olive", gpu_only="on a CPU it is SDPA"
    ),
    "graph": Contender(_graph("none"), "`GraphDecoder()`", "tab:cyan", gpu_only=_NO_GRAPH),
    "graph-layers": Contender(_graph("layers"), '`GraphDecoder("layers")`', "tab:purple", gpu_only=_NO_GRAPH),
}


def fastest_of_ours(times: dict[str, float]) -> str | None:
    """The name with the least time among those that are ours."""
    return min((name for name in times if CONTENDERS[name].is_ours), key=times.__getitem__, default=None)


def contender_names(text: str) -> list[str]:
    """The names in a list by commas; the argument type of `--contenders`."""
    names = text.split(",")
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}: choose from {', '.join(CONTENDERS)}")
    return names


def refuse_gpu_only(names: list[str], device: str) -> None:
    """Raise `BadArgument` where none of these can run on this device."""
    if device.startswith("cpu") and all(CONTENDERS[name].gpu_only for name in names):
        reasons = "; ".join(f"{name}: {CONTENDERS[name].gpu_only}" for name in names)
        raise BadArgument(f"nothing can run on {device} ({reasons}). Choose other --contenders")


def bytes_held(cache: Cache | None) -> int:
    """Bytes of a cache's keys and values, written or not."""
    if cache is None:
        return 0
    if isinstance(cache, StaticContiguousCache):
        return cache.memory_bytes
    states = [states for layer in cache.layers if layer.is_initialized for states in (layer.keys, layer.values)]
    return sum(state.untyped_storage().nbytes() for state in states)
