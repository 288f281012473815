"""`exact(model)`: cached equals uncached, bit for bit.

    with exact(model):
        model.generate(**inputs, past_key_values=cache)        the bits of `use_cache=False`, in bfloat16 too

In half precision a library picks its kernel by the number of rows, and every kernel rounds in its own way: so a pass
over one new token does not give the bits of a pass over the whole text. Inside the context each operation of the model
runs in a kernel whose result for a row does not depend on how many rows there are, or it is refused by its name.

What runs is decided operation by operation, as torch dispatches them, so there is no list of models:

    of single numbers, or a moving of them      as it is (on a CPU in blocks of one shape where a function is involved)
    linear layers, means, sums, softmax, norms  by rows
    attention                                   by rows, under an attention name of its own
    anything else                               refused
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._dynamo import OptimizedModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_static_kv.attention import EXACT_ATTENTION_NAME, TRACED_ATTENTION_NAME
from hf_static_kv.exactness.invariant_operations import is_harmless, row_operation
from hf_static_kv.patching import attention_implementation, attention_of, require_attention_interface, unwrapped
from hf_static_kv.program.linears import gated_mlps, single_linears
from hf_static_kv.program.norms import fused_norms
from hf_static_kv.program.rotary import frequencies_depend_on_length, fused_rotary

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def exact(model: torch.nn.Module) -> Iterator[None]:
    """Inside, a row of the model's output has the same bits whatever else is computed with it.

    Cached or not, in one pass or in chunks, alone or in a batch, padded to the left or not, in a cache of any capacity.
    It takes time: most for prompts. `GraphDecoder()` works inside. Numbers are taken to be finite: an infinity in a
    layer's values reaches tokens before it. Do not change or copy the model inside; it is as it was afterwards, also
    after an exception.

    `model` may be wrapped by `torch.compile`, or by PEFT around adapters inside the model; calls of the wrapper are
    exact too, and compiled code is not used in them. Hooks on the model itself run around its pass, not by rows.

    >>> from hf_static_kv import StaticContiguousCache
    >>> from hf_static_kv.testing import random_model, tiny_config
    >>> model, ids = random_model(tiny_config("llama"), dtype=torch.bfloat16), torch.tensor([[5, 6, 7, 8]])
    >>> cache = StaticContiguousCache.from_model(model, max_cache_len=16)
    >>> with exact(model), torch.no_grad():
    ...     whole = model(ids, use_cache=False).logits
    ...     steps = [model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)]
    >>> torch.equal(torch.cat(steps, dim=1), whole)
    True
    """
    inner = unwrapped(model, "exact")
    _refuse_compiled(model, inner)
    _refuse(inner)
    with ExitStack() as changes:
        changes.enter_context(attention_implementation(inner, EXACT_ATTENTION_NAME))
        changes.enter_context(fused_norms(inner))
        changes.enter_context(fused_rotary(inner))
        changes.enter_context(gated_mlps(inner))
        changes.enter_context(single_linears(inner))
        changes.enter_context(_by_rows(inner))
        yield


def _refuse_compiled(wrapper: torch.nn.Module, model: PreTrainedModel) -> None:
    """The whole model is kept from the compiler (`_by_rows`); a part of it would be compiled again inside."""
    if isinstance(wrapper, OptimizedModule) and getattr(wrapper.dynamo_ctx, "fullgraph", False):
        raise ValueError(
            "Nothing is compiled inside exact, and this model is compiled with fullgraph=True, which makes that an "
            "error: pass the model that is not compiled, and call that one."
        )
    for name, part in model.named_modules():
        if part is not model and (isinstance(part, OptimizedModule) or part._compiled_call_impl is not None):
            raise ValueError(
                f"{name} is compiled by torch, whose code for a row may depend on the other rows: load the model "
                "without compiling its parts. Compiled as a whole it can be exact."
            )


def _refuse(model: PreTrainedModel) -> None:
    if EXACT_ATTENTION_NAME in str(attention_of(model)):
        raise RuntimeError("This model is exact already: exact cannot be entered twice for one model.")
    if TRACED_ATTENTION_NAME in str(attention_of(model)):
        raise RuntimeError("The model is traced, and exact has an attention of its own: leave trace_attention first.")
    if any(module.training for module in model.modules()):  # an adapter trains until it is told otherwise
        raise ValueError("exact is for inference: call model.eval() first.")
    if model.dtype not in _DTYPES:
        raise ValueError(f"exact has kernels for float32, bfloat16 and float16, and the model is {model.dtype}.")
    if frequencies_depend_on_length(model.config.get_text_config()):
        raise ValueError("The rotary frequencies of this model depend on the length: what was kept cannot be exact.")
    require_attention_interface(model, "Its attention has no kernel by rows: it cannot be exact.")
    if any(hasattr(module, "prepare_dynamic_mask") for module in model.modules()):
        raise ValueError(
            f"The layers of {type(model).__name__} compute attention masks of their own, for which exact has no kernel "
            "by rows: it cannot be exact."
        )


@contextmanager
def _by_rows(model: PreTrainedModel) -> Iterator[None]:
    """The model with a `forward` in which every operation runs by rows."""
    own, before = model.forward, model.__dict__.get("forward")  # a hook of accelerate may stand there

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled(model.device.type):
            raise ValueError("exact does not run under autocast: load the model in the dtype that it should have.")
        with _ByRows():  # type: ignore[no-untyped-call]
            return own(*args, **kwargs)

    # A compiler would look into what runs by rows, and choose other code for it.
    model.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before


class _ByRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would keep its compiler off each call of what follows; it is kept off the whole pass."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation: Callable[..., Any] | None = row_operation(func)
        if operation is not None:
            return operation(*args, **kwargs)
        if is_harmless(func, args, kwargs):
            return func(*args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise RuntimeError(
                f"{func} could give a row other bits when other rows are computed with it, and exact has no kernel by "
                "rows for it. Where the model needs it, it cannot be exact; a loss can be computed from the logits, "
                "outside of exact."
            )
        return result
