"""Every private name of transformers, torch, Triton and CUDA that this package uses, in this order.

Seen in transformers 5.17, 5.22 and 5.23, torch 2.11 and 2.13, Triton 3.6 and 3.7. Names are looked up
when they are used, so the package imports without them. Each function says what happens when its
name is gone.

One name is not here: `generate` sets `_is_user_defined` on a user's cache, and cache/cache.py
checks the call. Without it: as for `generate_locals`.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from operator import itemgetter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig, GenerationMixin, cache_utils


def _reader(name: str, default: Any = None) -> Callable[[Any], Any]:
    """A function that reads an attribute of its argument, or returns the default."""
    return lambda thing: getattr(thing, name, default)


# Of a mask of ones that `generate` has left out. Without it: not known.
mask_length = _reader("_mask_length", -1)
prefill = _reader("_prefill")  # the method that reads a prompt. Without it: GraphDecoder falls back
# The method with what a pass changes. As above.
next_model_kwargs = _reader("_update_model_kwargs_for_generation")
# Of a config. Without it: None, and `can_set_attention` is False.
attention_name = _reader("_attn_implementation")
# True after `module.compile()`. Without it: not seen.
is_compiled_in_place = _reader("_compiled_call_impl")


def checkpoints_activations(model: Any) -> bool:
    """Whether a model in train mode computes its layers again for gradients.

    Before transformers 5.23 the property had another name, which warns since.
    """
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    name = next((name for name in names if hasattr(type(model), name)), "")
    return bool(getattr(model, name, False))


def kept_by(layer_type: str) -> tuple[bool, bool]:
    """Whether a type of layer keeps keys and values, and a recurrent state; an unknown one neither.

    Without `DYNAMIC_LAYER_TYPE_MAPPING`: only types that are attention by name are known.
    """
    plain = {"full_attention", "sliding_attention", "chunked_attention"}
    kind = _layer_class(layer_type)
    has_state = issubclass(kind, cache_utils.LinearAttentionCacheLayerMixin)
    has_both = has_state and issubclass(kind, cache_utils.CacheLayerMixin)
    return layer_type in plain or has_index(layer_type) or has_both, has_state


def has_index(layer_type: str) -> bool:
    """Whether a type of layer keeps index keys too. Without `DynamicIndexedLayer`: none does."""
    return _layer_class(layer_type) is getattr(cache_utils, "DynamicIndexedLayer", None)


def index_keeps_positions() -> bool:
    """Whether a layer keeps its index's positions. Before transformers 5.21: the cache does."""
    layer = getattr(cache_utils, "DynamicIndexedLayer", object)()
    return hasattr(layer, "indexer_position_ids")


def keeps_latents(layer_type: str) -> bool:
    """Whether latent attention caches latents. In 5.17 one type keeps their expansion."""
    return layer_type != "deepseek_sparse_attention"


def _layer_class(layer_type: str) -> Any:
    return getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {}).get(layer_type, object)


def makes_masks(frame: FrameType) -> bool:
    """Whether a frame is of the module that makes masks. Without it: no pass is seen to begin."""
    return frame.f_globals.get("__name__") == "transformers.masking_utils"


def generate_locals() -> dict[str, Any] | None:
    """The local variables of this thread's innermost `generate`. Without it: checks by pass."""
    # Below `torch.no_grad`.
    code = getattr(inspect.unwrap(GenerationMixin.generate), "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals


def pad_token(config: GenerationConfig) -> Tensor | None:
    """The padding token as a tensor. Without `_pad_token_tensor`: made from `pad_token_id`."""
    made = None if config.pad_token_id is None else torch.tensor(config.pad_token_id)
    return getattr(config, "_pad_token_tensor", made)


def is_callers(cache: Any) -> bool:
    """Whether the caller of `generate` gave this cache. Without it: none counts as the caller's."""
    return bool(getattr(cache, "_is_user_defined", False))


class Hooked:
    """Marks the classes that `hooked_class` makes."""

    def __init_subclass__(cls) -> None:
        """In the place of the model's own, which may ask for arguments, or keep a list of its classes."""


def hooked_class(base: type[Any], hooks: Any) -> type[Any]:
    """A subclass of a model's class, under its name, whose `generate` goes through `hooks`.

    `hooks.generate(model, original, args, kwargs)` and `hooks.loop(...)` run in place of `generate`
    and of its loops for greedy decoding, sampling and drafted tokens, `hooks.batching(...)` in place of
    `init_continuous_batching`, `hooks.config(model, original, kwargs)` in place
    of preparing a config that the call does not bring. `hooks.cache(model, model_kwargs, kind)` runs
    when `generate` has made a cache of this kind for a call that brings none; or, if
    `hooks.knows_cache(model)`, in the place of making a `DynamicCache`. Without these private
    names: `generate` does not call the hooks. Copies and pickles of the model are of the class
    itself. No `super()` in a call: another thread may detach the model meanwhile.
    """

    class HookedModel(Hooked, base):  # type: ignore[misc]
        @wraps(base.generate)
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return hooks.generate(self, partial(base.generate, self), args, kwargs)

        def _prepare_generation_config(self, generation_config: Any, **kwargs: Any) -> Any:
            original = partial(base._prepare_generation_config, self)
            is_common = _is_common(base, "_prepare_generation_config")
            if generation_config is None and is_common:
                return hooks.config(self, original, kwargs)
            return original(generation_config, **kwargs)

        def _prepare_cache_for_generation(
            self, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            config = generation_config
            is_callers = model_kwargs.get("past_key_values") is not None
            is_plain = config.cache_implementation is None and not config.is_assistant
            is_ours = is_plain and not is_callers
            # To make a cache takes time, and it is of one kind in every call.
            is_known = is_ours and config.use_cache and hooks.knows_cache(self)
            if is_known:
                hooks.cache(self, model_kwargs, cache_utils.DynamicCache)
                if model_kwargs.get("past_key_values") is not None:
                    return None
            result = base._prepare_cache_for_generation(self, config, model_kwargs, *args, **kwargs)
            if is_ours and not is_known:
                hooks.cache(self, model_kwargs, type(model_kwargs.get("past_key_values")))
            return result

        def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
            original = partial(base.init_continuous_batching, self)
            return hooks.batching(self, original, args, kwargs)

        _sample = _hooked_loop(base, hooks, "_sample")
        _assisted_decoding = _hooked_loop(base, hooks, "_assisted_decoding")

        def __reduce_ex__(self, protocol: Any) -> Any:
            _, _, *state = super().__reduce_ex__(protocol)
            return object.__new__, (base,), *state

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(HookedModel, name, getattr(base, name))
    return HookedModel


def _hooked_loop(base: type[Any], hooks: Any, name: str) -> Callable[..., Any]:
    @wraps(getattr(base, name, None))  # type: ignore[arg-type]  # `generate` reads its signature
    def loop(model: Any, *args: Any, **kwargs: Any) -> Any:
        own_loop = partial(getattr(base, name), model)
        if _is_common(base, "_sample") and _is_common(base, name):
            return hooks.loop(model, own_loop, args, kwargs)
        return own_loop(*args, **kwargs)

    return loop


@cache
def continuous_batching() -> Any:
    """The results of `generate_batch`, and where they go. Without it: transformers serves it."""
    try:
        from transformers.generation.continuous_batching import continuous_api, requests
    except ImportError:
        return None
    names = {
        "OutputRouter": continuous_api,
        "GenerationOutput": requests,
        "RequestStatus": requests,
    }
    if not all(hasattr(module, name) for name, module in names.items()):
        return None
    return SimpleNamespace(**{name: getattr(module, name) for name, module in names.items()})


def _is_common(kind: type[Any], name: str) -> bool:
    """Whether a method of `generate` is that of all models. Without it: no."""
    own = getattr(GenerationMixin, name, None)
    return own is not None and getattr(kind, name, None) is own


class _WithPrefill:
    """A model as the loop of `generate` sees it, with another function in place of its prefill."""

    def __init__(self, model: Any, prefill: Callable[..., Any]) -> None:
        self._model = model
        self._prefill = prefill

    def __getattr__(self, name: str) -> Any:  # `__call__` too, which the loop takes from here
        return getattr(self._model, name)


def has_common_loop(model: Any) -> bool:
    """Whether greedy decoding and sampling run in the loop of all models. Without it: no."""
    own = next(kind for kind in type(model).__mro__ if not issubclass(kind, Hooked))
    return _is_common(own, "_sample")


def sampling_loop(model: Any, prefill: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The loop of `generate` for greedy decoding and sampling, with another `prefill`.

    A model with a loop of its own keeps its own prefill. Without the loop: an error.
    """
    if not hasattr(model, "_sample"):
        raise RuntimeError(
            "GraphDecoder cannot run this call with this version of transformers: omit "
            "custom_generate."
        )
    if prefill is None or not has_common_loop(model):
        return model._sample  # type: ignore[no-any-return]
    return partial(GenerationMixin._sample, _WithPrefill(model, prefill))


def assisted_loop(model: Any) -> Callable[..., Any] | None:
    """The loop of `generate` for drafted tokens. Without it: calls fall back to `sampling_loop`."""
    return getattr(model, "_assisted_decoding", None)


def optimized_for_decode(model: Any) -> AbstractContextManager[Any]:
    """What `generate` does to a model while it decodes. Without it: nothing."""
    return getattr(model, "_optimize_model_for_decode", nullcontext)()


def has_own_positions(names: dict[str, Any]) -> bool:
    """Whether the caller of `generate`, with these local variables, gives positions. Without it:
    they are looked at, which waits for the device.
    """
    return bool(names.get("kwargs_has_position_ids", True))


def has_common_positions(model: Any) -> bool:
    """Whether `generate` makes positions from the mask, and gives them to the model. Without it: as
    above.
    """
    common = ("prepare_inputs_for_generation", "_prepare_position_ids_for_generation")
    return all(
        name not in model.__dict__
        and getattr(type(model), name, None) is getattr(GenerationMixin, name, model)
        for name in common
    )


def can_set_attention(model: Any) -> bool:
    """Whether attention is set by name. Without it: GraphDecoder falls back, exact refuses."""
    is_able = getattr(model, "_can_set_attn_implementation", lambda: False)
    return hasattr(model.config, "_attn_implementation") and bool(is_able())


def clear_attention_name(config: Any) -> None:
    """Name no attention, as for a part that has none. Without it: nothing reads what this sets."""
    config._attn_implementation = None


# Of a module whose parts are computed again in a backward pass.
CHECKPOINT_FUNCTION = "_gradient_checkpointing_func"


def checkpoint_functions(model: Module) -> dict[Module, Callable[..., Any]]:
    """The functions of gradient checkpointing that is on. Without them: layers that are
    computed again are not exact.
    """
    return {
        module: getattr(module, CHECKPOINT_FUNCTION)
        for module in all_modules(model)
        if getattr(module, "gradient_checkpointing", False) and hasattr(module, CHECKPOINT_FUNCTION)
    }


def is_expert_parallel(module: Any) -> bool:
    """Whether the experts of a layer are on several processes. Without the attribute (5.17): no."""
    return bool(getattr(module, "_is_expert_parallel", False))


def apply_gate(module: Any, states: Tensor) -> Tensor:
    """The activation of the gate times up, [M, 2 N] to [M, N], as a model's experts compute it."""
    return module._apply_gate(states)  # type: ignore[no-any-return]


def planned_device(module: Module) -> torch.device | None:
    """Where accelerate's hook has the module compute. Without it: where the parameters are."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return None if device is None else torch.device(device)


def own_parts(module: Module, kind: str) -> list[Any]:
    """The "modules", "parameters" or "buffers" of a module itself.

    Without its dicts: by the slower public methods.
    """
    if (store := getattr(module, f"_{kind}", None)) is not None:
        return [part for part in store.values() if part is not None]
    return list(module.children() if kind == "modules" else getattr(module, kind)(recurse=False))


def own_tensors(module: Module) -> list[Tensor]:
    """The parameters and buffers of a module itself. Without its dicts: as `own_parts`."""
    own = module.__dict__
    if "_parameters" not in own or "_buffers" not in own:
        return [*own_parts(module, "parameters"), *own_parts(module, "buffers")]
    return [t for t in (*own["_parameters"].values(), *own["_buffers"].values()) if t is not None]


def named_tensors(modules: Iterable[Module]) -> tuple[list[str], list[Tensor | None]]:
    """Names and tensors of `own_tensors` of all these modules, with None where one is absent."""
    both = itemgetter("_parameters", "_buffers")
    try:
        stores = list(chain.from_iterable([both(module.__dict__) for module in modules]))
    except KeyError:
        tensors: list[Any] = [tensor for module in modules for tensor in own_tensors(module)]
        return [""] * len(tensors), tensors
    filled: list[Any] = list(filter(None, stores))
    values = (store.values() for store in filled)
    return list(chain.from_iterable(filled)), list(chain.from_iterable(values))


def all_modules(model: Module) -> list[Module]:
    """`model.modules()` in a tenth of its time, repetitions included: this runs before every prompt."""
    found: list[Module] = []
    level = [model]
    while level:
        found += level
        stores = [module.__dict__.get("_modules") for module in level]
        if None in stores:
            parts = [part for module in level for part in own_parts(module, "modules")]
        else:
            parts = [part for store in stores if store for part in store.values()]
        level = [part for part in parts if part is not None]
    return found


def copy_with_submodules(module: Module, **parts: Module) -> Module:
    """A shallow copy with other submodules of these names. Without `_modules`: a deep copy."""
    if hasattr(module, "_modules"):
        clone = copy.copy(module)
        clone._modules = {**module._modules, **parts}
        return clone
    clone = copy.deepcopy(module)
    for name, part in parts.items():
        setattr(clone, name, part)
    return clone


def has_plain_stores(module: Module) -> bool:
    """Whether submodules are in a dict, unlike a scripted module's. Without it: none is copied."""
    return isinstance(vars(module).get("_modules"), dict)


def shared_stores(module: Module) -> dict[str, Any]:
    """The dict of parameters, which FSDP writes into in each pass. Without it: it is copied."""
    return {"_parameters": module._parameters} if "_parameters" in vars(module) else {}


def copied_stores(module: Module) -> dict[str, Any]:
    """Copies of torch's dicts of a module: buffers, hooks. Without their names: they are shared."""
    attributes = vars(module)
    return {name: attributes[name].copy() for name in _stores() if name in attributes}


@cache
def _stores() -> list[str]:
    dicts = [name for name, value in vars(Module()).items() if isinstance(value, dict)]
    return [name for name in dicts if name not in ("_parameters", "_modules")]


def forward_hooks(module: Module) -> list[Any]:
    """The hooks that a call of this module runs. Without these names: none are seen."""
    stores = (getattr(module, name, {}) for name in ("_forward_hooks", "_forward_pre_hooks"))
    return [hook for store in stores for hook in store.values()]


def has_hooks(modules: Iterable[Module]) -> bool:
    """Whether a pass calls hooks, of these modules or of all. Without these names: none seen."""
    # transformers leaves hooks that collect outputs. Without their module: GraphDecoder falls back.
    harmless = "transformers.utils.output_capturing"
    names = "_forward_hooks", "_forward_pre_hooks"
    own = [module.__dict__ for module in modules]
    stores = [store for name in names for part in own if (store := part.get(name))]
    hooks = [hook for store in stores for hook in store.values()]
    of_all = ("_global_forward_hooks", "_global_forward_pre_hooks")
    has_global = any(getattr(torch_module, name, None) for name in of_all)
    return has_global or any(getattr(hook, "__module__", None) != harmless for hook in hooks)


def write_count(tensor: Tensor) -> int | object:
    """How often a tensor was written in place, 0 in inference mode.

    Without it: an object equal to no earlier count.
    """
    return 0 if tensor.is_inference() else getattr(tensor, "_version", object())


def storage_users(tensor: Tensor) -> int | None:
    """How many tensors share this one's memory, itself included. Without it: pools keep nothing."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    handle = getattr(tensor.untyped_storage(), "_cdata", None)
    return None if count is None or handle is None else int(count(handle))


def inner_tensors(tensor: Tensor) -> list[Tensor] | None:
    """The tensors inside a wrapper (a quantised weight); None without `__tensor_flatten__`."""
    if (flatten := getattr(tensor, "__tensor_flatten__", None)) is None:
        return None
    parts = (getattr(tensor, name) for name in flatten()[0])
    return [part for part in parts if isinstance(part, Tensor)]  # a DTensor lists its mesh too


try:
    from torch.utils._python_dispatch import TorchDispatchMode

    class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Base of `exact`'s mode. Without it: exact cannot run."""

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # dynamo is disabled for the whole pass; torch would disable it again in every operation
            return False

except ImportError:

    class DispatchMode:  # type: ignore[no-redef]
        def __init__(self) -> None:
            raise RuntimeError(
                "exact needs TorchDispatchMode, which this version of torch does not have."
            )


def schema(operation: Any) -> Any:
    """Arguments and results of an operation. Without it: exact refuses the operation."""
    if not hasattr(operation, "_schema"):
        raise RuntimeError(
            f"This version of torch does not describe {operation}: it cannot run inside exact."
        )
    return operation._schema


def inside_compiled(module: Any) -> Any:
    """The module inside the wrapper of `torch.compile`. Without it: wrappers are refused."""
    stores = module.__dict__ if isinstance(module, Module) else {}
    return stores.get("_modules", {}).get("_orig_mod")


def is_fullgraph(wrapper: Any) -> bool:
    """Whether a compiled module makes a graph break an error. Without it: torch raises its own."""
    return bool(getattr(getattr(wrapper, "dynamo_ctx", None), "fullgraph", False))


# --- Triton. What preload.py calls may raise: it drops errors, and the compiler raises them again
# when it is used.


def pdl_instructions() -> tuple[Any, Any]:
    """Device functions (wait for the previous kernel, launch the next). Without them: no PDL."""
    with suppress(ImportError):
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

        return gdc_wait, gdc_launch_dependents
    return None, None


@contextmanager
def parallel_compiling(pool: Any) -> Iterator[None]:
    """Triton compiles in this thread pool. Without it: kernels are compiled one after the other."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        yield
        return
    try:
        with AsyncCompileMode(pool):
            yield
    finally:
        # Triton leaves it set where a kernel failed, and could then compile no other.
        active_mode.set(None)


def build_launcher(compilation: Any) -> None:
    """Build the C launcher of a kernel that is compiled meanwhile. Without it: built afterwards.

    Triton 3.6 runs a C compiler for 0.3 to 0.5 s. Later versions have one launcher for all kernels.
    """
    with suppress(Exception):  # one is raised at the end: nobody knows the kernel's metadata yet
        source = inspect.getclosurevars(compilation).nonlocals["src"]
        import_module("triton.runtime").driver.active.launcher_cls(source, None)


def load_kernel(kernel: Any) -> None:
    """Load a compiled kernel onto the current device. Without it: its first launch does so."""
    getattr(kernel, "_init_handles", lambda: None)()


def load_triton_driver() -> None:
    """Build Triton's C module. Without it: the first launch does so."""
    import_module("triton.runtime").driver.active.utils  # noqa: B018  # built on access


def hash_triton() -> None:
    """Hash Triton's sources, a part of each kernel's key. Without it: compiling does so."""
    import_module("triton.runtime.cache").triton_key()


def load_gluon() -> None:
    """Import Triton's second language, as the first launch does. Without it: nothing."""
    import_module("triton.experimental.gluon")


def triton_cache_dir() -> Path:
    """Where Triton keeps compiled kernels. Without the name: its default place."""
    with suppress(Exception):
        return Path(import_module("triton.knobs").cache.dir)
    return Path.home() / ".triton" / "cache"


# --- CUDA. A CUDA build of torch brings the package, and does not promise it.


def has_cuda_bindings() -> bool:
    """Whether there is that package; to load it takes a tenth of a second."""
    with suppress(ImportError, ValueError):
        return find_spec("cuda.bindings.nvrtc") is not None
    return False


def cuda_bindings() -> tuple[Any, Any] | None:
    """The driver and NVRTC. Without them: steps stay graphs, and no kernel computes all of one."""
    with suppress(ImportError):
        from cuda.bindings import driver, nvrtc

        return driver, nvrtc
    return None
