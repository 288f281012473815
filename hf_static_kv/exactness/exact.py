"""`exact(model)`: a cached run gives the bits of an uncached one, in bfloat16 too.

Libraries choose a kernel by the number of tokens in a pass, and in half precision every kernel
rounds differently. Inside the context every operation is batch-invariant: its result for a token
does not depend on what else is computed in the same call. A dispatch mode decides for each
operation, so there is no list of models:

    elementwise, copies, comparisons            torch's own (on a CPU, in blocks of one shape)
    linear layers, mean, sum, softmax, norms    batch-invariant (invariant_operations.py)
    attention, mixtures of experts              batch-invariant, under names of their own
    anything else                               refused by name
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from itertools import count
from typing import Any

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from hf_static_kv import compat, patching
from hf_static_kv.cache.identity import random_rates
from hf_static_kv.cache.ranks import is_part
from hf_static_kv.exactness.experts import (
    EXACT_EXPERTS_NAME,
    IS_BALANCING_LOSS,
    ordinary_balancing_loss,
    parameter_adapters,
    refuse_active,
)
from hf_static_kv.exactness.invariant_operations import (
    invariant_operation,
    is_batch_invariant,
    no_kernel,
)
from hf_static_kv.exactness.linears import gated_mlps, single_linears
from hf_static_kv.exactness.self_check import refuse_other_logits, trial_logits
from hf_static_kv.patching import EXACT_ATTENTION_NAME, TRACED_ATTENTION_NAME
from hf_static_kv.program.norms import fused_norms
from hf_static_kv.program.rotary import frequencies_depend_on_length, fused_rotary


@contextmanager
def exact(model: Module) -> Iterator[None]:
    """Inside, the model's output for a token has the same bits whatever else is computed with it.

    Cached or not, in one pass or in chunks, alone or in a batch, left-padded or not, in a cache of
    any capacity. It is slower, most of all for prompts. `GraphDecoder()` works inside. Values must
    be finite: an infinite value also reaches the tokens before it. Do not copy the model inside,
    and change no more than the values of its weights. On exit, also on an error, it is restored.

    A pass with gradients has these bits too. Its backward pass is ordinary; with gradient
    checkpointing it must run inside. Every dropout and jitter must be 0, or the model in eval mode.

    `model` may be wrapped by `torch.compile` or by PEFT (adapters inside the model). Calls of the
    wrapper are exact too, and do not use compiled code. Hooks on the model itself run outside of
    the batch-invariant operations.

    Before the first use of a model a few tokens run in an ordinary pass and inside: a model whose
    logits differ by more than rounding explains is refused.

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
    inner = patching.unwrapped(model, "exact")
    _refuse(model, inner)
    ordinary = trial_logits(inner)
    with ExitStack() as changes:
        changes.enter_context(patching.attention_implementation(inner, EXACT_ATTENTION_NAME))
        changes.enter_context(patching.experts_implementation(inner, EXACT_EXPERTS_NAME))
        parts = fused_norms, fused_rotary, gated_mlps, single_linears
        for change in (*parts, ordinary_balancing_loss, _batch_invariant):
            changes.enter_context(change(inner))
        refuse_other_logits(inner, ordinary)
        yield


def _refuse(wrapper: Module, model: PreTrainedModel) -> None:
    if compat.is_fullgraph(wrapper):
        raise ValueError(
            "exact does not run compiled code, and this model is compiled with fullgraph=True, which "
            "makes that an error: pass and call the model that is not compiled."
        )
    modules = dict(model.named_modules())
    for name, part in list(modules.items())[1:]:  # dynamo can be disabled for the whole model only
        if compat.inside_compiled(part) is not None or compat.is_compiled_in_place(part):
            raise ValueError(
                f"{name} is compiled by torch, and compiled code is not batch-invariant: load the "
                "model without compiling its parts, or compile it as a whole."
            )
    attention = patching.attention_of(model).values()
    if EXACT_ATTENTION_NAME in attention:
        raise RuntimeError(
            "This model is exact already: exact cannot be entered twice for one model."
        )
    if TRACED_ATTENTION_NAME in attention:
        raise RuntimeError(
            "The model is traced, and exact has its own attention: leave trace_attention first."
        )
    for name, part in modules.items():
        for rate, value in random_rates(part).items():
            raise ValueError(
                f"{name} has {rate} = {value}, which draws random numbers in training, and exact "
                "draws none: set it to 0, or call model.eval()."
            )
    if any(map(is_part, model.parameters())):
        raise ValueError(
            "This model is split over processes (tensor parallelism, FSDP), and exact has no "
            "batch-invariant sum over them. Load it on one device."
        )
    if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"exact has kernels for float32, bfloat16 and float16, and the model is {model.dtype}."
        )
    if frequencies_depend_on_length(model.config.get_text_config()):
        raise ValueError(
            "The rotary frequencies of this model depend on the length: cached keys cannot be "
            "exact."
        )
    patching.require_attention_interface(
        model, "exact has no batch-invariant kernel for its attention."
    )
    if any(hasattr(module, "prepare_dynamic_mask") for module in modules.values()):
        raise ValueError(
            f"The layers of {type(model).__name__} compute attention masks of their own, for which "
            "exact has no batch-invariant kernel."
        )


def _batch_invariant(model: PreTrainedModel) -> AbstractContextManager[None]:
    original = model.forward
    adapters = parameter_adapters(model)

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # In each pass: an adapter may be merged or disabled for some of them.
        refuse_active(adapters)
        if torch.is_autocast_enabled(model.device.type):
            raise ValueError(
                "exact does not run under autocast: load the model in the dtype that it should "
                "have."
            )
        with BatchInvariantMode(), _invariant_checkpointing(model):  # type: ignore[no-untyped-call]
            return original(*args, **kwargs)

    # Dynamo would trace through the dispatch mode and compile other kernels.
    invariant: Any = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    invariant.pass_context = BatchInvariantMode
    return patching.replaced("forward", {model: invariant})


def _invariant_checkpointing(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Layers that gradient checkpointing computes again have the bits of this pass."""
    functions = compat.checkpoint_functions(model) if model.training else {}
    return patching.replaced(
        compat.CHECKPOINT_FUNCTION,
        {module: partial(_checkpoint, model, own) for module, own in functions.items()},
    )


def _checkpoint(
    model: PreTrainedModel, checkpoint: Callable[..., Any], layer: Callable[..., Any], *args: Any
) -> Any:
    passes = count()

    def invariant_layer(*args: Any) -> Any:
        if next(passes) == 0:  # inside the mode already
            return layer(*args)
        if EXACT_ATTENTION_NAME not in patching.attention_of(model).values():
            raise RuntimeError(
                "Gradient checkpointing computes layers again in the backward pass, and this pass "
                "was made inside exact: call backward() inside exact, too."
            )
        with BatchInvariantMode():  # type: ignore[no-untyped-call]
            return layer(*args)

    return checkpoint(invariant_layer, *args)


class BatchInvariantMode(compat.DispatchMode):  # type: ignore[no-untyped-call]
    """Every operation of torch that runs inside is batch-invariant, or is refused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if IS_BALANCING_LOSS.get():
            return func(*args, **kwargs)
        if (operation := invariant_operation(func)) is not None:
            return operation(*args, **kwargs)
        if is_batch_invariant(func, args, kwargs):
            return func(*args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise no_kernel(str(func))
        return result
