"""Every private name of transformers, torch and Triton that this package uses, in one file.

Seen in transformers 5.17 and 5.22, torch 2.11 and 2.13, Triton 3.6 and 3.7. Names are looked up when they are used, so
the package imports without them. Each function says what happens when its name is gone.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig, GenerationMixin

# --- transformers: generate


def generate_locals() -> dict[str, Any] | None:
    """The local variables of the innermost `generate` of this thread. Without it: calls are checked pass by pass."""
    code = getattr(inspect.unwrap(GenerationMixin.generate), "__code__", None)  # below `torch.no_grad`
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals


def mask_length(config: GenerationConfig) -> int:
    """The length of a mask of ones that `generate` has left out; -1 where it does not say."""
    return int(getattr(config, "_mask_length", -1))


def pad_token(config: GenerationConfig) -> torch.Tensor | None:
    """The padding token as a tensor. Without `_pad_token_tensor`: made from `pad_token_id`."""
    if hasattr(config, "_pad_token_tensor"):
        return config._pad_token_tensor  # type: ignore[no-any-return]
    return None if config.pad_token_id is None else torch.tensor(config.pad_token_id)


def prefill(model: Any) -> Callable[..., Any] | None:
    """The method that reads a prompt. Without it: GraphDecoder falls back."""
    return getattr(model, "_prefill", None)


def sampling_loop(model: Any) -> Callable[..., Any]:
    """The loop of `generate` for greedy decoding and sampling. Without it: an error that names the remedy."""
    if not hasattr(model, "_sample"):
        raise RuntimeError("GraphDecoder cannot run this call with this version of transformers: omit custom_generate.")
    return model._sample  # type: ignore[no-any-return]


def optimized_for_decode(model: Any) -> AbstractContextManager[Any]:
    """What `generate` does to a model while it decodes. Without it: nothing."""
    context = getattr(model, "_optimize_model_for_decode", None)
    return nullcontext() if context is None else context()  # type: ignore[no-any-return]


# --- transformers: attention


def can_set_attention(model: Any) -> bool:
    """Whether attention can be chosen by name. Without these names: GraphDecoder falls back, exact and traces refuse."""
    is_able = getattr(model, "_can_set_attn_implementation", None)
    return is_able is not None and hasattr(model.config, "_attn_implementation") and bool(is_able())


def attention_name(config: Any) -> str | None:
    """The attention implementation that a config names."""
    return getattr(config, "_attn_implementation", None)


def clear_attention_name(config: Any) -> None:
    """Name no attention, as in the config of a part that has none."""
    config._attn_implementation = None


# --- torch: modules and tensors


def all_modules(model: Module) -> list[Module]:
    """`model.modules()` in a third of its time: this runs before every prompt."""
    if not hasattr(model, "_modules"):
        return list(model.modules())
    found: list[Module] = [model]
    for module in found:  # grows meanwhile
        found += [part for part in module._modules.values() if part is not None]
    return found


def own_parameters(module: Module) -> list[torch.Tensor]:
    """The parameters of this module alone."""
    if not hasattr(module, "_parameters"):
        return list(module.parameters(recurse=False))
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def own_buffers(module: Module) -> list[torch.Tensor]:
    """The buffers of this module alone."""
    if not hasattr(module, "_buffers"):
        return list(module.buffers(recurse=False))
    return [buffer for buffer in module._buffers.values() if buffer is not None]


def copy_with_submodules(module: Module, **parts: Module) -> Module:
    """A shallow copy of a module with other submodules of these names. Without `_modules`: a deep copy."""
    if not hasattr(module, "_modules"):
        clone = copy.deepcopy(module)
        for name, part in parts.items():
            setattr(clone, name, part)
        return clone
    clone = copy.copy(module)
    clone._modules = {**module._modules, **parts}
    return clone


def forward_hooks(module: Module) -> list[Any]:
    """The hooks that a call of this module runs. Without these names: none are seen."""
    stores = (getattr(module, name, {}) for name in ("_forward_hooks", "_forward_pre_hooks"))
    return [hook for store in stores for hook in store.values()]


def has_global_hooks() -> bool:
    """Whether hooks run around every module. Without these names: none are seen."""
    return any(getattr(torch_module, f"_global_forward_{kind}", None) for kind in ("hooks", "pre_hooks"))


def collects_outputs(hook: Any) -> bool:
    """Whether transformers left this hook behind to collect outputs; it does nothing in other calls."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def planned_device(module: Module) -> torch.device | None:
    """Where accelerate's hook has the module compute. Without it: the device of the parameters counts."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return None if device is None else torch.device(device)


def write_count(tensor: torch.Tensor) -> int | object:
    """How often the tensor was written in place. Without it: a new object, equal to no earlier count."""
    return 0 if tensor.is_inference() else getattr(tensor, "_version", object())


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors that a wrapper subclass consists of, such as a quantised weight; None for an ordinary tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return None if flatten is None else [getattr(tensor, name) for name in flatten()[0]]


# --- torch: dispatch and compiling

try:
    from torch.utils._python_dispatch import TorchDispatchMode

    class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Base of `exact`'s mode."""

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # dynamo is disabled for the whole pass; torch would disable it again in every operation

except ImportError:

    class DispatchMode:  # type: ignore[no-redef]
        """Without it: exact cannot run."""

        def __init__(self) -> None:
            raise RuntimeError("exact needs TorchDispatchMode, which this version of torch does not have.")


def schema(operation: Any) -> Any:
    """Arguments and results of an operation. Without it: an error, and exact refuses the operation."""
    if not hasattr(operation, "_schema"):
        raise RuntimeError(f"This version of torch does not describe {operation}: it cannot run inside exact.")
    return operation._schema


def inside_compiled(module: Any) -> Any:
    """The module inside the wrapper of `torch.compile`; None for any other. Without it: wrappers are refused."""
    return module.__dict__.get("_modules", {}).get("_orig_mod") if isinstance(module, Module) else None


def is_compiled_in_place(module: Module) -> bool:
    """Whether `module.compile()` was called. Without it: not seen."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_fullgraph(wrapper: Any) -> bool:
    """Whether a compiled module makes a graph break an error. Without it: torch raises its own error."""
    return bool(getattr(getattr(wrapper, "dynamo_ctx", None), "fullgraph", False))


def many_compilations(limit: int) -> AbstractContextManager[Any]:
    """Let dynamo compile up to `limit` variants and raise beyond. Without it: dynamo's own limit holds."""
    limits = {"recompile_limit": limit, "accumulated_recompile_limit": limit, "fail_on_recompile_limit_hit": True}
    with suppress(ImportError, AttributeError):
        import torch._dynamo.config as config

        if all(hasattr(config, name) for name in limits):
            return config.patch(limits)  # type: ignore[attr-defined,no-any-return]
    return nullcontext()


def inductor_options() -> dict[str, Any]:
    """Options of `torch.compile` for PDL in Inductor's kernels. Without it: no PDL there."""
    with suppress(ImportError, AttributeError):
        import torch._inductor.config as config

        if hasattr(config.triton, "enable_pdl"):
            return {"options": {"triton.enable_pdl": True}}
    return {}


def load_inductor() -> None:
    """Import Inductor and start its compile processes. Without it: they start at the first compilation."""
    with suppress(ImportError, AttributeError):
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.use_process_pool()  # type: ignore[no-untyped-call]


# --- Triton


def pdl_instructions() -> tuple[Any, Any]:
    """Device functions (wait for the previous kernel, launch the next). Without them: (None, None) and no PDL."""
    try:
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    except ImportError:
        return None, None
    return gdc_wait, gdc_launch_dependents


@contextmanager
def parallel_compiling(pool: Any) -> Iterator[bool]:
    """Triton compiles in this thread pool. Without it: gives False, and kernels are compiled one after the other."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        yield False
        return
    try:
        with AsyncCompileMode(pool):
            yield True
    finally:
        active_mode.set(None)  # Triton leaves it set where a kernel failed, and could then compile no other


def load_kernel(kernel: Any) -> None:
    """Load a compiled kernel onto the current device. Without it: its first launch does so."""
    if hasattr(kernel, "_init_handles"):
        kernel._init_handles()


def build_triton_driver() -> None:
    """Build Triton's C module. Without it: the first launch does so."""
    with suppress(ImportError, AttributeError):
        from triton.runtime import driver

        driver.active.utils  # noqa: B018  # built on access


def hash_triton() -> None:
    """Compute the hash of Triton's sources that every kernel is stored under. Without it: the first compile does so."""
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def import_gluon() -> None:
    """Import Triton's second language, which some versions do at the first launch."""
    with suppress(ImportError):
        import triton.experimental.gluon  # noqa: F401
