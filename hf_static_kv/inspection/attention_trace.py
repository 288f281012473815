"""The attention weights of the newest token, from the computation that made the output."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from hf_static_kv import attention, patching
from hf_static_kv.cache.codes import states_of
from hf_static_kv.kernels.decode_attention import decode_attention

_NAME = patching.TRACED_ATTENTION_NAME
_TRACE = "_attention_trace"  # the attribute of a traced module: (trace, layer)
_REMEDY = (
    'Load it with attn_implementation="eager" and call it with output_attentions=True to get its '
    "weights."
)


class AttentionRow(NamedTuple):
    """The weights of the newest token of each sequence in one layer and pass."""

    layer: int
    positions: Tensor  # [keys]; those of a sliding window do not start at 0
    weights: Tensor  # [B, heads, keys], float32; sum to 1 (to less with sinks), 0 for padding


class AttentionTrace:
    """The recorded rows, in the order in which they were computed."""

    def __init__(self, layers: Sequence[int], heads: Sequence[int] | None) -> None:
        self.layers = tuple(layers)
        self.heads = None if heads is None else list(heads)
        self.rows: list[AttentionRow] = []
        # [B, heads, queries, keys] of each pass, if `full_attention` asks.
        self.full: list[Tensor] | None = None

    def of_layer(self, layer: int) -> list[AttentionRow]:
        """The rows of one layer, one for each pass."""
        if layer not in self.layers:
            raise ValueError(
                f"Layer {layer} was not traced: {', '.join(map(str, self.layers))} were."
            )
        return [row for row in self.rows if row.layer == layer]

    def matrix(self, layer: int, batch_row: int = 0) -> Tensor:
        """The rows of one layer by position, [heads, passes, positions]; 0 where none attends."""
        if not (rows := self.of_layer(layer)):
            raise ValueError(
                f"Nothing was recorded for layer {layer}: the model did not run inside the context, "
                "or the layer does not call transformers' attention interface."
            )
        length = max(int(row.positions[-1]) + 1 for row in rows)
        matrix = torch.zeros(rows[0].weights.shape[1], len(rows), length)
        for n, row in enumerate(rows):
            matrix[:, n, row.positions.cpu()] = row.weights[batch_row].cpu()
        return matrix

    def record(self, layer: int, first: int, weights: Tensor) -> None:
        """Keep weights [B, heads, keys] of the keys from position `first` on."""
        if not patching.IS_VERIFICATION.get():
            weights = weights if self.heads is None else weights[:, self.heads]
            positions = torch.arange(first, first + weights.shape[-1], device=weights.device)
            self.rows.append(AttentionRow(layer, positions, weights.float().clone()))


@contextmanager
def trace_attention(
    model: Module, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Iterator[AttentionTrace]:
    """Record the weights of these layers and heads (default: all) in every pass of the model.

    On exit the model has its own attention again. It may be wrapped by `torch.compile` or PEFT
    (adapters inside it).

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
    chosen = sorted(modules) if layers is None else list(layers)
    if absent := [layer for layer in chosen if layer not in modules]:
        known = ", ".join(map(str, sorted(modules)))
        raise ValueError(f"Layer {absent[0]} has no attention to trace: layers {known} have.")
    count = getattr(inner.config.get_text_config(), "num_attention_heads", None)
    if heads is not None and count is not None and any(not 0 <= head < count for head in heads):
        raise ValueError(f"heads are 0 to {count - 1}, got {list(heads)}.")
    if not {patching.EXACT_ATTENTION_NAME, _NAME}.isdisjoint(patching.attention_of(inner).values()):
        raise RuntimeError("The model is traced or exact already: leave that context first.")
    trace = AttentionTrace(chosen, heads)
    traced = {modules[layer]: (trace, layer) for layer in chosen}
    with patching.attention_implementation(inner, _NAME), patching.replaced(_TRACE, traced):
        yield trace


@torch.no_grad()
def full_attention(model: Module, input_ids: Tensor, layer: int) -> Tensor:
    """The attention weights of one layer for every token of a sequence: [1, heads, n, n].

    >>> from hf_static_kv.testing import random_model, tiny_config
    >>> full_attention(random_model(tiny_config("llama")), torch.tensor([[5, 6, 7]]), layer=0).shape
    torch.Size([1, 4, 3, 3])
    """
    if input_ids.ndim != 2 or len(input_ids) != 1:
        raise ValueError(f"full_attention takes one sequence, [1, n], got {list(input_ids.shape)}.")
    with trace_attention(model, [layer]) as trace:
        trace.full = []
        inner = patching.unwrapped(model, "full_attention")
        inner(input_ids, use_cache=False)
    if not trace.full:
        kind = type(_attention_modules(inner)[layer]).__name__
        raise ValueError(
            f"{kind} of layer {layer} did not call transformers' attention interface. {_REMEDY}"
        )
    return trace.full[-1]


def traced_attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`static_contiguous_attention` that records the weights of traced layers."""
    states = query, key, value, attention_mask
    if _TRACE not in module.__dict__:
        return attention.static_contiguous_attention(module, *states, **kwargs)
    if kwargs.get("position_bias") is not None:
        kind = type(module).__name__
        raise ValueError(
            f"{kind} adds a bias to its scores, which trace_attention does not compute. {_REMEDY}"
        )
    trace, layer = module.__dict__[_TRACE]
    scale, softcap, sinks = scoring = attention.scoring_of(query, kwargs)
    step = attention.step_layer(module)
    first = getattr(attention_mask, "first_key", 0)
    is_whole = trace.full is not None  # the decode kernel gives the weights of one query only
    if step is None and (is_whole or not attention.kernel_serves(*states)):
        output, weights = attention.plain_attention(*states, scoring)
        trace.record(layer, first, weights[:, :, -1])
        if is_whole:
            trace.full.append(weights)
        return output, weights
    weights = torch.zeros(*query.shape[:2], key.shape[2], device=query.device)
    if step is None:
        output = attention.one_token_attention(*states, scoring, weights)
    else:
        output = decode_attention(
            query, states_of(key, query), states_of(value, query), step.spans,
            scale=scale, softcap=softcap, sinks=sinks, weights=weights,
        )  # fmt: skip
        first = int(step.spans[..., 1].min())
        end = int(step.spans[..., 2].max())
        weights = weights[..., first:end]
        first += int(step.offset)
    trace.record(layer, first, weights)
    return output, None


def traced_mask(**kwargs: Any) -> Tensor:
    """The mask for SDPA, with the position of its first key as an attribute."""
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Any = sdpa_mask(**kwargs)
    mask.first_key = int(kwargs.get("kv_offset", 0))
    return mask  # type: ignore[no-any-return]


def _attention_modules(model: PreTrainedModel) -> dict[int, Module]:
    """The decoder's modules that call the attention function, by layer number."""
    found: dict[int, Module] = {}
    for module in model.get_decoder().modules():  # type: ignore[no-untyped-call]  # without vision and audio towers
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and "Attention" in type(module).__name__:
            found.setdefault(layer, module)  # self-attention comes before cross-attention
    if not found:
        raise ValueError(
            f"No attention layers were found in {type(model).__name__}: no module has a layer_idx."
        )
    return found


# Dynamo would share one layer's trace among all layers, and lose the attribute of the mask.
AttentionInterface.register(_NAME, torch.compiler.disable(traced_attention))  # type: ignore[no-untyped-call]
AttentionMaskInterface.register(_NAME, torch.compiler.disable(traced_mask))  # type: ignore[no-untyped-call]
