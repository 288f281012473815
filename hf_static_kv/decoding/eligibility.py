"""Why a call cannot run as a captured step.

It then falls back to transformers' loop, with the reason in a warning.
"""

import inspect
from collections.abc import Iterable

from torch import Tensor

from hf_static_kv import compat
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.identity import draws_random_numbers
from hf_static_kv.cache.layout import plan_layers
from hf_static_kv.cache.ranks import is_part, num_ranks
from hf_static_kv.cache.request import Fallback
from hf_static_kv.decoding.call import Call, is_plain, kind_of
from hf_static_kv.program.rotary import frequencies_depend_on_length

# A step has one shape: it expands the latents of the whole capacity, where an ordinary pass expands
# those of the text. DeepSeek V2 Lite (27 layers, 16 heads) at 16384 positions: 1.9 TFLOP a token,
# so about 3 ms on an H200 (not measured).
_MAX_LATENTS = 16384


def check_request(call: Call) -> None:
    """Raise `Fallback` if what is asked for cannot be a captured step."""
    if (reason := _refused_request(call)) is not None:
        raise Fallback(reason)


def check_model(call: Call) -> None:
    """Raise `Fallback` if a pass of this model cannot be captured."""
    if (reason := _refused_model(call)) is not None:
        raise Fallback(reason)


def check_mask(call: Call) -> None:
    if call.has_holes:
        raise Fallback("the attention mask has holes")


def _refused_request(call: Call) -> str | None:
    if not isinstance(call.cache, StaticContiguousCache):
        return f"past_key_values is {kind_of(call.cache)}, not a StaticContiguousCache"
    if call.config.output_attentions or call.config.output_hidden_states:
        return "attention weights or hidden states are asked for"
    for name, value in call.given.items():
        if not is_plain(value):
            given = f"{name}, {kind_of(value)}"
            return f"the model is given {given}, which may change while the prompt is read"
    return "synced_gpus is asked for" if call.request.synced_gpus else None


def _refused_model(call: Call) -> str | None:
    model = call.model
    name = type(model).__name__
    config = model.config.get_text_config()
    parameters = [p for module in call.modules for p in compat.own_parts(module, "parameters")]
    devices = sorted({str(parameter.device) for parameter in parameters})
    if draws_random_numbers(call.modules):
        return "the model is in train mode, where dropout draws random numbers"
    if compat.prefill(model) is None or compat.next_model_kwargs(model) is None:
        return "this version of transformers has no prefill of its own to call"
    if num_ranks(model) > 1 or any(map(is_part, parameters)):
        split = "the model is split over processes (tensor parallelism, FSDP)"
        return f"{split}, whose exchanges a step does not record"
    if "meta" in devices:
        offloaded = "a part of the model is offloaded to the CPU or the disk"
        return f"{offloaded}, and is not at a fixed address"
    if len(devices) > 1:
        return f"the model is spread over {', '.join(devices)} (device_map=0 keeps it on one)"
    if (kind := type_without_address(parameters)) is not None:
        return f"weights of type {kind} have no address of their own"
    if not compat.can_set_attention(model):
        return f"{name} does not use transformers' attention interface"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no position_ids"
    if call.device.type == "cuda" and call.has_hooks:
        return "a replayed graph would not call the model's hooks"
    if call.cache.index_layers:
        return "layers attend to the tokens that an index selects"
    if call.cache.kv_dtype is not None and getattr(config, "kv_lora_rank", None):
        return "the model expands latents, and these are stored in 8 bits"
    if frequencies_depend_on_length(config):
        return "the rotary frequencies depend on the length"
    windows = [plan.sliding_window for plan in plan_layers(model.config) if plan.has_keys]
    if windows != [layer.sliding_window for layer in call.cache.kv_layers]:
        return "the windows of the cache are not those of the model"
    capacity = call.cache.max_cache_len
    if getattr(config, "kv_lora_rank", None) and capacity > _MAX_LATENTS:
        latents = f"a step would expand the latents of all {capacity} positions"
        return f"{latents} (max_cache_len={_MAX_LATENTS} is served)"
    return None


def type_without_address(tensors: Iterable[Tensor]) -> str | None:
    """The type of the first tensor that does not tell where its memory is; None if all do."""
    for tensor in tensors:
        if compat.inner_tensors(tensor) is None and tensor.numel() and tensor.data_ptr() == 0:
            return type(tensor).__name__
    return None
