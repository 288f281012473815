"""One contiguous, preallocated KV cache for `model.generate`, and a decode loop that replays one captured step."""

from hf_static_kv.cache import StaticContiguousCache
from hf_static_kv.decode import GraphDecoder
from hf_static_kv.exact import exact
from hf_static_kv.layer import StaticContiguousLayer
from hf_static_kv.layout import cache_bytes
from hf_static_kv.steps import StepRecorder
from hf_static_kv.trace import full_attention, trace_attention

__all__ = [
    "GraphDecoder",
    "StaticContiguousCache",
    "StaticContiguousLayer",
    "StepRecorder",
    "cache_bytes",
    "exact",
    "full_attention",
    "trace_attention",
]
