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

from hf_static_kv import StaticContiguousCache

Keywords = dict[str, Any]
SetUp = Callable[[PreTrainedModel, int, int], Callable[[], Keywords]]
OURS = "contiguous"


class Unavailable(Exception):
    """This contender cannot run here, for a reason that is no fault."""


@dataclass(frozen=True)
class Contender:
    """`set_up(model, max_cache_len, batch_size)` gives a function that gives the keywords of one call of `generate`."""

    set_up: SetUp
    words: str
    cached: bool = True


def _no_cache(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> Callable[[], Keywords]:
    return lambda: {"use_cache": False}


def _dynamic(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> Callable[[], Keywords]:
    return lambda: {"past_key_values": DynamicCache(config=model.config)}


def _static(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> Callable[[], Keywords]:
    return _used_again(StaticCache(config=model.config, max_cache_len=max_cache_len), disable_compile=True)


def _static_compiled(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> Callable[[], Keywords]:
    if model.device.type != "cuda":
        raise Unavailable(f"generate compiles on a GPU only, and this is {model.device.type}")
    return _used_again(StaticCache(config=model.config, max_cache_len=max_cache_len))


def _contiguous(model: PreTrainedModel, max_cache_len: int, batch_size: int) -> Callable[[], Keywords]:
    return _used_again(StaticContiguousCache.from_model(model, max_cache_len, batch_size))


def _used_again(cache: Cache, **keywords: Any) -> Callable[[], Keywords]:
    def call() -> Keywords:
        cache.reset()
        return {"past_key_values": cache, **keywords}

    return call


CONTENDERS = {
    "no-cache": Contender(_no_cache, "`use_cache=False`", cached=False),
    "dynamic": Contender(_dynamic, "`DynamicCache`, the default"),
    "static": Contender(_static, "`StaticCache`, eager"),
    "static-compiled": Contender(_static_compiled, "`StaticCache`, compiled by `generate`"),
    OURS: Contender(_contiguous, "`StaticContiguousCache` (ours), eager"),
}


def contender_names(text: str) -> list[str]:
    """The names in a list by commas; the argument type of `--contenders`."""
    names = text.split(",")
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}: choose from {', '.join(CONTENDERS)}")
    return names


def bytes_held(cache: Cache | None) -> int:
    """Bytes of a cache's keys and values, written or not."""
    if cache is None:
        return 0
    if isinstance(cache, StaticContiguousCache):
        return cache.memory_bytes
    states = [states for layer in cache.layers if layer.is_initialized for states in (layer.keys, layer.values)]
    return sum(state.untyped_storage().nbytes() for state in states)
