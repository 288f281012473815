"""The attention name "static_contiguous": a function for transformers' `AttentionInterface`, and its mask.

    model.set_attn_implementation("static_contiguous")

A prompt runs in SDPA without cuDNN, which would build a plan for every length that it has not seen. One new token on a
GPU runs in the decode kernel, over the cache's own memory. Where neither serves (a soft cap or sinks over a prompt) the
same is computed in plain PyTorch.

A captured step (step.py) passes the spans of every layer in the place of the mask, int64 of [B, 4 L, 1, 1]:
transformers hands a mask of four dims to every layer as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_static_kv.kernels.decode_attention import SPAN, decode_attention
from hf_static_kv.kernels.invariant_attention import invariant_attention

ATTENTION_NAME = "static_contiguous"
EXACT_ATTENTION_NAME = "static_contiguous_exact"
TRACED_ATTENTION_NAME = "static_contiguous_traced"  # in trace.py
OWN_NAMES = (ATTENTION_NAME, EXACT_ATTENTION_NAME, TRACED_ATTENTION_NAME)
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KERNEL_MAX_DIM = 256


def static_contiguous_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' models call it; [B, q, Hq, Dv] and no weights.

    query: [B, Hq, q, D]   key: [B, H, n, D]   value: [B, H, n, Dv]   attention_mask: [B, 1, q, n], true where seen
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        options: Any = {
            "softcap": softcap,
            "sinks": s_aux,
            "max_span": kwargs.get("sliding_window"),
            "spans_ready": True,
        }
        spans = step_spans(attention_mask)[:, module.layer_idx]
        return decode_attention(query, key, value, spans, scale=scale, **options), None
    if kernel_serves(query, key, value, attention_mask) and kwargs.get("position_bias") is None:
        return one_token_attention(query, key, value, attention_mask, scale, softcap, s_aux), None
    if softcap is not None or s_aux is not None:
        return plain_attention(query, key, value, attention_mask, scale, softcap, s_aux)[0], None
    with nullcontext() if torch.compiler.is_compiling() else without_cudnn():  # a compiler cannot look into it
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **kwargs
        )
    return output, None


def step_spans(mask: torch.Tensor) -> Any:
    """The spans [B, L, 3] of a captured step, which stand in the place of its mask [B, 4 L, 1, 1]."""
    return mask.view(len(mask), -1, 4)[..., : len(SPAN)]


_TRIAL_PASS: ContextVar[bool] = ContextVar("trial_pass", default=False)


def is_trial_pass() -> bool:
    """Whether the pass that runs is no part of a text: one that is compared with another, say."""
    return _TRIAL_PASS.get()


@contextmanager
def trial_pass() -> Iterator[None]:
    """Inside, passes of a model are trials."""
    before = _TRIAL_PASS.set(True)
    try:
        yield
    finally:
        _TRIAL_PASS.reset(before)


_CUDNN_LOCK, _cudnn_users, _cudnn_before = Lock(), 0, True


@contextmanager
def without_cudnn() -> Iterator[None]:
    """SDPA by any implementation that is allowed but cuDNN's. The switch is one for all threads, so they share this."""
    global _cudnn_users, _cudnn_before
    cuda: Any = torch.backends.cuda
    if not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.math_sdp_enabled()):
        yield  # cuDNN's alone is wanted
        return
    with _CUDNN_LOCK:
        if _cudnn_users == 0:
            _cudnn_before = cuda.cudnn_sdp_enabled()
            cuda.enable_cudnn_sdp(False)
        _cudnn_users += 1
    try:
        yield
    finally:
        with _CUDNN_LOCK:
            _cudnn_users -= 1
            if _cudnn_users == 0:
                cuda.enable_cudnn_sdp(_cudnn_before)


def kernel_serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether the decode kernel can do this: one new token without gradients, on a GPU, under a mask for whole rows."""
    return (
        query.is_cuda
        and query.shape[2] == 1
        and query.dtype in _KERNEL_DTYPES
        and query.dtype == key.dtype == value.dtype
        and max(query.shape[-1], value.shape[-1]) <= _KERNEL_MAX_DIM
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and (mask is None or (mask.dtype == torch.bool and mask.shape[:2] == (query.shape[0], 1)))
        and not (torch.is_grad_enabled() and query.requires_grad)
    )


def one_token_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The decode kernel over all keys that the mask [B, 1, 1, n] lets see; fills `weights` [B, Hq, n] where given."""
    spans = _whole_spans(query.shape[0], key.shape[2], query.device)
    seen = None if mask is None else mask[:, 0, 0]
    return decode_attention(query, key, value, spans, seen, scale=scale, softcap=softcap, sinks=sinks, weights=weights)


@lru_cache(maxsize=8)  # all layers of a step ask for the same one or two
def _whole_spans(batch_size: int, length: int, device: torch.device) -> torch.Tensor:
    """Spans that cover all keys of a view: origin 0, first 0, end `length`."""
    return torch.tensor([[0, 0, length]] * batch_size, device=device)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every score at once, softmax in float32; for what neither SDPA nor the kernel computes. Output and weights."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    scores = (query @ key.transpose(2, 3)) * scale  # [B, Hq, q, n]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and query.shape[2] > 1:  # transformers leaves out the mask of a whole causal pass
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), weights


def exact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention inside `exact`: every query as a row of its own. Its mask is what `exact_mask` makes."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is None or attention_mask.dtype != torch.int64 or kwargs.get("position_bias") is not None:
        raise ValueError(
            "Inside exact the mask is made from attention_mask [B, n] alone: no mask or bias of one's own."
        )
    is_step = attention_mask.shape[1] != len(SPAN)
    if is_step and query.is_cuda:  # a captured step, whose kernel is the same
        return static_contiguous_attention(
            module, query, key, value, attention_mask, scaling, softcap=softcap, s_aux=s_aux, **kwargs
        )
    spans = step_spans(attention_mask)[:, module.layer_idx, None] if is_step else attention_mask[..., 0].mT
    return invariant_attention(query, key, value, spans, scale, softcap, s_aux), None


def exact_mask(*, kv_offset: int = 0, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    """The span of every query, int64 of [B, 3, q, 1]: where its row's text begins, the first and the end of its keys.

    Positions are counted from the first key that the cache hands out, so a row may begin before it.
    """
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Any = sdpa_mask(kv_offset=kv_offset, attention_mask=attention_mask, **kwargs)
    seen = mask[:, 0]  # [B, q, n]
    count, keys = seen.sum(dim=-1), seen.shape[-1]
    first, end = seen.to(torch.uint8).argmax(dim=-1), keys - seen.flip(-1).to(torch.uint8).argmax(dim=-1)
    if not bool(((count == end - first) | (count == 0)).all()):
        raise ValueError("Inside exact a query must see keys that stand side by side, and this mask has holes.")
    begin = torch.zeros_like(count[:, 0])
    if attention_mask is not None:
        begin = attention_mask.to(torch.uint8).argmax(dim=-1).expand(len(count))
    origin = (begin - kv_offset)[:, None].expand_as(count)
    first, end = (torch.where(count > 0, edge, origin) for edge in (first, end))
    return torch.stack([origin, first, end], dim=1)[..., None]


AttentionInterface.register(ATTENTION_NAME, static_contiguous_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
AttentionInterface.register(EXACT_ATTENTION_NAME, exact_attention)
AttentionMaskInterface.register(EXACT_ATTENTION_NAME, exact_mask)
