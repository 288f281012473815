"""One contiguous, preallocated KV cache for `model.generate`, and a decode loop that replays one
captured step.
"""

from hf_static_kv.attaching import (
    attach,
    attached,
    attaching_loaded_models,
    attachment,
    detach,
)
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.files import CacheFile
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.layout import cache_bytes
from hf_static_kv.cache.prefixes import PrefixStore
from hf_static_kv.decoding.decoder import GraphDecoder
from hf_static_kv.exactness.exact import exact
from hf_static_kv.exactness.logprobs import selected_logprobs, token_logprobs
from hf_static_kv.inspection.attention_trace import full_attention, trace_attention
from hf_static_kv.inspection.step_recorder import StepRecorder
from hf_static_kv.served import Attachment

__version__ = "0.2.0"
__all__ = [
    "Attachment", "CacheFile", "GraphDecoder", "PrefixStore", "StaticContiguousCache",
    "StaticContiguousLayer", "StepRecorder", "__version__", "attach", "attached",
    "attaching_loaded_models", "attachment", "cache_bytes", "detach", "exact",
    "full_attention", "selected_logprobs", "token_logprobs", "trace_attention",
]  # fmt: skip
