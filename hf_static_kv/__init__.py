"""One contiguous, preallocated KV cache for `model.generate`."""

from hf_static_kv.cache import StaticContiguousCache
from hf_static_kv.layer import StaticContiguousLayer
from hf_static_kv.layout import cache_bytes

__all__ = ["StaticContiguousCache", "StaticContiguousLayer", "cache_bytes"]
