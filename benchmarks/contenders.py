"""The contenders: every cache that a user of `generate` can choose, by name.

A contender is set up once for a model. Before each call of `generate` it gives the keyword
arguments of that call, so that a cache and a decoder are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from workload import BadArgument

from hf_static_kv import GraphDecoder, StaticContiguousCache
from hf_static_kv.attention import ATTENTION_NAME

Keywords = dict[str, Any]
NextKeywords = Callable[[], Keywords]
SetUp = Callable[[PreTrainedModel, int, int], NextKeywords]


@dataclass(frozen=True)
class Contender:
    """`set_up(model, max_cache_len, batch_size)` returns a function that returns the keywords of
    one `generate` call.

    `gpu_only` gives the reason why it cannot run on a CPU. `in_all=False`: it runs only if it is
    named, because it differs from another one in models with sliding windows alone.
    """

    set_up: SetUp
    label: str
    ours: bool = False
    cached: bool = True
    in_all: bool = True
    gpu_only: str = ""


def _no_cache(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> NextKeywords:
    return lambda: {"use_cache": False}


def _dynamic(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> NextKeywords:
    return lambda: {"past_key_values": DynamicCache(config=model.config)}


def _static(
    model: PreTrainedModel, max_cache_len: int, batch_size: int, **keywords: Any
) -> NextKeywords:
    cache = StaticCache(config=model.config, max_cache_len=max_cache_len)
    return _reused(cache, **keywords)


def _contiguous(
    model: PreTrainedModel, max_cache_len: int, batch_size: int, sliding: str = "full"
) -> NextKeywords:
    cache = StaticContiguousCache.from_model(model, max_cache_len, batch_size, sliding=sliding)
    return _reused(cache)


def _contiguous_kernel(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> NextKeywords:
    model.set_attn_implementation(ATTENTION_NAME)
    return _contiguous(model, max_cache_len, batch_size)


def graph(
    model: PreTrainedModel,
    max_cache_len: int,
    batch_size: int,
    without: Collection[str] = (),
    persistent: bool = True,
    **how: Any,
) -> NextKeywords:
    """The decoder with its cache; `without` names rules to leave out, which leaves the kernel of a
    whole step out, too.
    """
    cache = StaticContiguousCache.from_model(model, max_cache_len, batch_size, **how)
    return _reused(cache, custom_generate=GraphDecoder(without=without, persistent=persistent))


def _reused(cache: Cache, **keywords: Any) -> NextKeywords:
    def call() -> Keywords:
        cache.reset()
        return {"past_key_values": cache, **keywords}

    return call


_OURS = "`StaticContiguousCache`"
_COMPACT = '`sliding="compact"`'
_CODED = '`kv_dtype="int8"`'
_KERNEL = {"ours": True, "gpu_only": "on a CPU this attention is SDPA"}
_GRAPH = {"ours": True, "gpu_only": "a CUDA graph needs a GPU"}
CONTENDERS = {
    "no-cache": Contender(_no_cache, "`use_cache=False`", cached=False),
    "dynamic": Contender(_dynamic, "`DynamicCache` (the default)"),
    "static": Contender(partial(_static, disable_compile=True), "`StaticCache`"),
    "static-compiled": Contender(
        _static, "`StaticCache` compiled", gpu_only="generate compiles on a GPU only"
    ),
    "contiguous": Contender(_contiguous, _OURS, ours=True),
    "contiguous-kernel": Contender(
        _contiguous_kernel, f"{_OURS}, attention `static_contiguous`", **_KERNEL
    ),
    "graph": Contender(graph, "`GraphDecoder()`", **_GRAPH),
    "contiguous-compact": Contender(
        partial(_contiguous, sliding="compact"), f"{_OURS}, {_COMPACT}", ours=True, in_all=False
    ),
    "graph-compact": Contender(
        partial(graph, sliding="compact"), f"`GraphDecoder()`, {_COMPACT}", in_all=False, **_GRAPH
    ),
    "graph-alone": Contender(
        partial(graph, persistent=False), "`GraphDecoder(persistent=False)`", in_all=False, **_GRAPH
    ),
    "graph-int8": Contender(
        partial(graph, kv_dtype="int8"), f"`GraphDecoder()`, {_CODED}", in_all=False, **_GRAPH
    ),
}


def refuse_gpu_only(names: list[str], device: str) -> None:
    """Raise `BadArgument` if none of these can run on this device."""
    if device.startswith("cpu") and all(CONTENDERS[name].gpu_only for name in names):
        reasons = "; ".join(f"{name}: {CONTENDERS[name].gpu_only}" for name in names)
        raise BadArgument(f"nothing can run on {device} ({reasons}). Choose other --contenders")


def bytes_held(cache: Cache | None) -> int:
    """Bytes of a cache's keys and values, written or not."""
    if cache is None:
        return 0
    if isinstance(cache, StaticContiguousCache):
        return cache.memory_bytes
    layers = [layer for layer in cache.layers if layer.is_initialized]
    states = [states for layer in layers for states in (layer.keys, layer.values)]
    return sum(state.untyped_storage().nbytes() for state in states)
