"""The attention weights of the newest token, from the computation that made the output.

    with trace_attention(model, layers=[0, 5]) as trace:
        model.generate(**inputs, past_key_values=cache, max_new_tokens=20)
    trace.matrix(layer=5)        [heads, passes, positions]: one row for each pass of the model

Inside, the model has an attention implementation that keeps its weights. The decode kernel writes them on a GPU; plain
attention computes them anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from hf_static_kv import patching
from hf_static_kv.attention import (
    EXACT_ATTENTION_NAME,
    TRACED_ATTENTION_NAME,
    is_verification_pass,
    kernel_serves,
    one_token_attention,
    plain_attention,
    static_contiguous_attention,
    step_layer,
)
from hf_static_kv.kernels.decode_attention import decode_attention

_TRACE = "_attention_trace"  # the attribute of a traced module: (trace, layer)
_REMEDY = 'Load it with attn_implementation="eager" and call it with output_attentions=True to get its weights.'


class AttentionRow(NamedTuple):
    """One row of the attention matrix for each sequence: the weights of its newest token in one layer and pass.

    They sum to 1 over the keys (to less in a model with sinks); padding has weight 0.
    """

    layer: int
    positions: torch.Tensor  # [keys]; those of a sliding window do not start at 0
    weights: torch.Tensor  # [B, heads, keys], float32


class AttentionTrace:
    """The recorded rows, in the order in which they were computed."""

    def __init__(self, layers: Sequence[int], heads: Sequence[int] | None) -> None:
        self.layers, self.heads = tuple(layers), None if heads is None else list(heads)
        self.rows: list[AttentionRow] = []
        self.full: torch.Tensor | None = None  # [B, heads, queries, keys] of the last pass
        self.keeps_full = False

    def of_layer(self, layer: int) -> list[AttentionRow]:
        """The rows of one layer, one for each pass."""
        if layer not in self.layers:
            raise ValueError(f"Layer {layer} was not traced: {', '.join(map(str, self.layers))} were.")
        return [row for row in self.rows if row.layer == layer]

    def matrix(self, layer: int, batch_row: int = 0) -> torch.Tensor:
        """The rows of one layer by position, [heads, passes, positions]; 0 where a query does not attend."""
        rows = self.of_layer(layer)
        if not rows:
            raise ValueError(
                f"Nothing was recorded for layer {layer}: the model did not run inside the context, or the layer does "
                "not call transformers' attention interface."
            )
        length = max(int(row.positions[-1]) + 1 for row in rows)
        matrix = torch.zeros(rows[0].weights.shape[1], len(rows), length)
        for n, row in enumerate(rows):
            matrix[:, n, row.positions.cpu()] = row.weights[batch_row].cpu()
        return matrix

    def record(self, layer: int, first: int, weights: torch.Tensor) -> None:
        """Keep weights [B, heads, keys] of the keys from position `first` on."""
        if is_verification_pass():
            return
        weights = weights if self.heads is None else weights[:, self.heads]
        positions = torch.arange(first, first + weights.shape[-1], device=weights.device)
        self.rows.append(AttentionRow(layer, positions, weights.float().clone()))


@contextmanager
def trace_attention(
    model: torch.nn.Module, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Iterator[AttentionTrace]:
    """Record the weights of these layers and heads (default: all) in every pass of the model.

    On exit, also after an exception, the model has its own attention again. `model` may be wrapped by `torch.compile`
    or by PEFT (adapters inside the model).

    >>> from hf_static_kv.testing import random_model, tiny_config
    >>> model = random_model(tiny_config("llama"))
    >>> with trace_attention(model, layers=[1]) as trace:
    ...     tokens = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
    >>> [tuple(row.weights.shape) for row in trace.rows]
    [(1, 4, 3), (1, 4, 4), (1, 4, 5), (1, 4, 6)]
    """
    inner = patching.unwrapped(model, "trace_attention")
    patching.require_attention_interface(inner, _REMEDY)
    modules = _attention_modules(inner)
    trace = AttentionTrace(_chosen(layers, modules), heads)
    _check_heads(inner, heads)
    if not {EXACT_ATTENTION_NAME, TRACED_ATTENTION_NAME}.isdisjoint(patching.attention_of(inner).values()):
        raise RuntimeError("The model is traced or exact already: leave that context first.")
    traced = {modules[layer]: (trace, layer) for layer in trace.layers}
    with patching.attention_implementation(inner, TRACED_ATTENTION_NAME), patching.replaced(_TRACE, traced):
        yield trace


@torch.no_grad()
def full_attention(model: torch.nn.Module, input_ids: torch.Tensor, layer: int) -> torch.Tensor:
    """The attention weights of one layer for every token of a sequence, [1, heads, n, n], from one pass.

    >>> from hf_static_kv.testing import random_model, tiny_config
    >>> full_attention(random_model(tiny_config("llama")), torch.tensor([[5, 6, 7]]), layer=0).shape
    torch.Size([1, 4, 3, 3])
    """
    if input_ids.ndim != 2 or len(input_ids) != 1:
        raise ValueError(f"full_attention takes one sequence, [1, n], got {list(input_ids.shape)}.")
    with trace_attention(model, [layer]) as trace:
        trace.keeps_full = True
        inner = patching.unwrapped(model, "full_attention")
        inner(input_ids, use_cache=False)
    if trace.full is None:
        kind = type(_attention_modules(inner)[layer]).__name__
        raise ValueError(f"{kind} of layer {layer} did not call transformers' attention interface. {_REMEDY}")
    return trace.full


def traced_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`static_contiguous_attention` that records the weights of traced layers."""
    if _TRACE not in module.__dict__:
        return static_contiguous_attention(module, query, key, value, attention_mask, scaling, **kwargs)
    if kwargs.get("position_bias") is not None:
        kind = type(module).__name__
        raise ValueError(f"{kind} adds a bias to its scores, which trace_attention does not compute. {_REMEDY}")
    trace, layer = module.__dict__[_TRACE]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if (step := step_layer(module)) is not None:
        return _traced_step(trace, layer, step.spans, query, key, value, scale, softcap, sinks), None
    first = getattr(attention_mask, "first_key", 0)
    if kernel_serves(query, key, value, attention_mask):
        weights = torch.zeros(*query.shape[:2], key.shape[2], device=query.device)
        output = one_token_attention(query, key, value, attention_mask, scale, softcap, sinks, weights)
        trace.record(layer, first, weights)
        return output, None
    output, weights = plain_attention(query, key, value, attention_mask, scale, softcap, sinks)
    trace.record(layer, first, weights[:, :, -1])
    if trace.keeps_full:
        trace.full = weights
    return output, weights


def _traced_step(
    trace: AttentionTrace,
    layer: int,
    spans: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    weights = torch.zeros(*query.shape[:2], keys.shape[2], device=query.device)
    output = decode_attention(query, keys, values, spans, scale=scale, softcap=softcap, sinks=sinks, weights=weights)
    first, end = int(spans[:, 1].min()), int(spans[0, 2])
    trace.record(layer, first, weights[..., first:end])
    return output


def traced_mask(**kwargs: Any) -> torch.Tensor:
    """The mask for SDPA, with the position of its first key as an attribute."""
    mask: Any = sdpa_mask(**kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    mask.first_key = int(kwargs.get("kv_offset", 0))
    return mask  # type: ignore[no-any-return]


def _attention_modules(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """The decoder's modules that call the attention function, by layer number."""
    found: dict[int, torch.nn.Module] = {}
    decoder: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    for module in decoder.modules():  # without vision and audio towers
        number = getattr(module, "layer_idx", None)
        if isinstance(number, int) and "Attention" in type(module).__name__:
            found.setdefault(number, module)  # self-attention comes before cross-attention
    if not found:
        raise ValueError(f"No attention layers were found in {type(model).__name__}: no module has a layer_idx.")
    return found


def _chosen(layers: Sequence[int] | None, modules: dict[int, torch.nn.Module]) -> list[int]:
    if layers is None:
        return sorted(modules)
    if absent := [layer for layer in layers if layer not in modules]:
        known = ", ".join(map(str, sorted(modules)))
        raise ValueError(f"Layer {absent[0]} has no attention to trace: layers {known} have.")
    return list(layers)


def _check_heads(model: PreTrainedModel, heads: Sequence[int] | None) -> None:
    count = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if heads is not None and count is not None and any(not 0 <= head < count for head in heads):
        raise ValueError(f"heads are 0 to {count - 1}, got {list(heads)}.")


# Dynamo would share one layer's trace among all layers, and lose the attribute of the mask.
AttentionInterface.register(TRACED_ATTENTION_NAME, torch.compiler.disable(traced_attention))  # type: ignore[no-untyped-call]
AttentionMaskInterface.register(TRACED_ATTENTION_NAME, torch.compiler.disable(traced_mask))  # type: ignore[no-untyped-call]
