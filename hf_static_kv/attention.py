"""The attention functions for transformers' `AttentionInterface`, and their masks.

    model.set_attn_implementation("static_contiguous")

A prompt runs in SDPA without cuDNN, which would build a plan for every new length. One new token on
a GPU runs in the decode kernel, over the cache's own memory. If neither can (a soft cap or sinks
over a prompt), plain PyTorch runs.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_static_kv.kernels.decode_attention import attend, decode_attention, invariant_attention
from hf_static_kv.kernels.gradients import differentiable
from hf_static_kv.patching import ATTENTION_NAME, EXACT_ATTENTION_NAME, without_cudnn

Scoring = tuple[float, float | None, Tensor | None]  # scale, softcap, sinks
_READ = {"position_bias", "s_aux", "scaling", "softcap"}
# Tensors that a model passes to every attention function, and that neither 'sdpa' nor ours needs.
_UNUSED = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "mm_token_type_ids",
    "num_items_in_batch", "position_ids", "seq_idx", "token_type_ids",
}  # fmt: skip


class StepLayer:
    """One layer in a captured pass, in place of the `layer_idx` of its modules.

    Not an int: `torch.compile` takes an int for a constant and would compile every layer again.
    """

    def __init__(self, index: int, offset: Tensor, slots: Tensor, spans: Tensor) -> None:
        self.index = index
        self.offset = offset  # [1], the position in slot 0
        self.slots = slots  # [B, q], of the new tokens
        self.spans = spans  # [B, q, 3], in slots

    def __index__(self) -> int:
        return self.index

    def __add__(self, number: int) -> "StepLayer":
        # A module that runs several times has a layer of the cache for each time (HRM).
        return StepLayer(self.index + number, self.offset, self.slots, self.spans)

    def __ge__(self, number: int) -> bool:  # transformers compares it with the number of layers
        return self.index >= number

    def __eq__(self, other: object) -> bool:  # and layers that share keys find them by it in a dict
        return self.index == other

    def __hash__(self) -> int:
        return hash(self.index)


def step_layer(module: torch.nn.Module) -> StepLayer | None:
    """The layer of a captured step that this attention module belongs to; else None."""
    layer = getattr(module, "layer_idx", None)
    return layer if isinstance(layer, StepLayer) else None


def scoring_of(query: Tensor, kwargs: Mapping[str, Any]) -> Scoring:
    """How scores are computed, from the keywords of an attention function; refuses unknown ones."""
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and name not in _READ | _UNUSED:
            raise ValueError(
                f"This model controls its attention by `{name}`, a tensor that ours does not "
                "read. It may tell 'sdpa' and 'eager' the same by a mask: call "
                "`model.set_attn_implementation('sdpa')`."
            )
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return scale, kwargs.get("softcap"), kwargs.get("s_aux")


def static_contiguous_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it; [B, q, Hq, Dv] and no weights.

    query: [B, Hq, q, D]   key: [B, H, n, D]   value: [B, H, n, Dv]
    attention_mask: [B, 1, q, n], true for a key that is seen
    """
    scale, softcap, sinks = scoring = scoring_of(query, kwargs)
    if (layer := step_layer(module)) is not None:
        if kwargs.get("position_bias") is not None:
            raise ValueError("the scores have a position bias")
        window = kwargs.get("sliding_window") or key.shape[2]
        return attend(query, key, value, layer.spans, scale, window, softcap, sinks), None
    if kernel_serves(query, key, value, attention_mask) and kwargs.get("position_bias") is None:
        return one_token_attention(query, key, value, attention_mask, scoring), None
    if softcap is not None or sinks is not None:
        return plain_attention(query, key, value, attention_mask, scoring)[0], None
    # Dynamo cannot trace the context.
    with nullcontext() if torch.compiler.is_compiling() else without_cudnn():
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, **{**kwargs, "scaling": scale}
        )
    return output, None


def kernel_serves(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the decode kernel can run: one new token on a GPU, no gradients, one mask for all
    heads.
    """
    return (
        query.is_cuda
        and query.shape[2] == 1
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and max(query.shape[-1], value.shape[-1]) <= 256
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and (mask is None or (mask.dtype == torch.bool and mask.shape[:2] == (query.shape[0], 1)))
        and not (torch.is_grad_enabled() and query.requires_grad)
    )


def one_token_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    weights: Tensor | None = None,
) -> Tensor:
    """The decode kernel over the keys that the mask [B, 1, 1, n] allows; weights: [B, Hq, n]."""
    spans = _whole_spans(query.shape[0], key.shape[2], query.device)
    seen = None if mask is None else mask[:, 0, 0]
    scale, softcap, sinks = scoring
    return decode_attention(
        query, key, value, spans, seen, scale=scale, softcap=softcap, sinks=sinks, weights=weights
    )


@lru_cache(maxsize=8)  # all layers of a step ask for the same one or two
def _whole_spans(batch_size: int, length: int, device: torch.device) -> Tensor:
    return torch.tensor([[[0, 0, length]]] * batch_size, device=device)  # [B, 1, 3]


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Output and weights, softmax in float32; for what neither SDPA nor the kernel computes."""
    scale, softcap, sinks = scoring
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    scores = (query @ key.transpose(2, 3)) * scale  # [B, Hq, q, n]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # Transformers leaves out the mask of a whole causal pass.
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand_as(scores[..., :1])
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), weights


def exact_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Batch-invariant attention inside `exact`. Its mask comes from `exact_mask`."""
    layer = step_layer(module)
    scale, softcap, sinks = scoring_of(query, kwargs)
    # Other masks are bool or floating.
    is_packed = attention_mask is not None and attention_mask.dtype == torch.int64
    if kwargs.get("position_bias") is not None or (layer is None and not is_packed):
        raise ValueError(
            "Inside exact the mask is made from attention_mask [B, n] only: pass no 4-dim mask "
            "or bias."
        )
    if layer is not None and query.is_cuda:
        window = kwargs.get("sliding_window") or key.shape[2]
        return attend(query, key, value, layer.spans, scale, window, softcap, sinks, True), None
    packed: Any = attention_mask  # [B, 3, q, 1]
    spans = packed[..., 0].transpose(1, 2) if layer is None else layer.spans  # [B, q, 3]
    if kwargs.get("dropout"):
        raise ValueError(
            f"exact has no dropout, and attention drops out {kwargs['dropout']}: set "
            "attention_dropout to 0."
        )

    def operation(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return invariant_attention(query, key, value, spans, scale, softcap, sinks)  # type: ignore[no-any-return]

    def plain(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return attention_over_spans(query, key, value, spans, (scale, softcap, sinks))

    return differentiable(operation, plain, query, key, value, sinks), None


def attention_over_spans(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scoring: Scoring
) -> Tensor:
    """`invariant_attention` in torch's own operations, for its gradients; SDPA if it can."""
    scale, softcap, sinks = scoring
    _, first, end = spans[:, None, :, :, None].unbind(3)  # [B, 1, q, 1]
    positions = torch.arange(key.shape[2], device=key.device)
    is_empty = first >= end
    # [B, 1, q, n]; a softmax over no keys is NaN
    mask = (positions >= first) & (positions < end) | is_empty
    if softcap is None and sinks is None:
        causal = torch.ones(mask.shape[2:], dtype=torch.bool, device=mask.device).tril()
        is_causal = torch.equal(mask, causal.expand_as(mask))  # flash attention takes no mask
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        output = F.scaled_dot_product_attention(
            query, key, value, None if is_causal else mask, is_causal=is_causal, scale=scale
        ).transpose(1, 2)
    else:
        output, _ = plain_attention(query, key, value, mask, scoring)
    return output.masked_fill(is_empty.transpose(1, 2), 0)


def exact_mask(
    *, kv_offset: int = 0, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """The span of every query in the form of a mask, [B, 3, q, 1].

    Positions count from the first key of the cache's view, so `seq_start` may be negative.
    """
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Any = sdpa_mask(kv_offset=kv_offset, attention_mask=attention_mask, **kwargs)
    seen = mask[:, 0]  # [B, q, n]
    count = seen.sum(dim=-1)
    keys = seen.shape[-1]
    first = seen.to(torch.uint8).argmax(dim=-1)
    end = keys - seen.flip(-1).to(torch.uint8).argmax(dim=-1)
    if not bool(((count == end - first) | (count == 0)).all()):
        raise ValueError(
            "Inside exact a query must attend to consecutive keys, and this mask has holes."
        )
    left_padding = torch.zeros_like(count[:, 0])
    if attention_mask is not None:
        left_padding = attention_mask.to(torch.uint8).argmax(dim=-1).expand(len(count))
    seq_start = (left_padding - kv_offset)[:, None].expand_as(count)
    first, end = (torch.where(count > 0, edge, seq_start) for edge in (first, end))
    return torch.stack([seq_start, first, end], dim=-1).transpose(1, 2)[..., None]


AttentionInterface.register(ATTENTION_NAME, static_contiguous_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
AttentionInterface.register(EXACT_ATTENTION_NAME, exact_attention)
AttentionMaskInterface.register(EXACT_ATTENTION_NAME, exact_mask)
