"""RMS norms as kernels, and the sums before them."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from hf_static_kv.compat import write_count
from hf_static_kv.kernels.rms_norm import STYLES, Norm, NormStyle, add_rms_norm, rms_norm, rms_norm_plain
from hf_static_kv.patching import is_unmodified, replaced

PROBED_DTYPES = (torch.float32, torch.bfloat16)  # bfloat16 shows where values are rounded
_EPS_NAMES = ("variance_epsilon", "eps")
_THIS_THREAD = local()  # its `sums` are the FusedSums of the current pass


@contextmanager
def fused_norms(model: Module) -> Iterator[list[Module]]:
    """The model with its RMS norms as kernels; yields these norms."""
    styles: dict[Any, NormStyle | None] = {}
    forwards: dict[Module, Callable[..., Any]] = {}
    for module in filter(_looks_like_a_norm, model.modules()):
        settings = {k: v for k, v in module.__dict__.items() if isinstance(v, bool | int | float | str)}
        kind = (type(module), tuple(sorted(settings.items())))
        if kind not in styles:
            styles[kind] = norm_style(module)
        if (style := styles[kind]) is not None:
            forwards[module] = _FusedNorm(module, style).forward
    with replaced("forward", forwards):
        yield list(forwards)


def _looks_like_a_norm(module: Module) -> bool:
    if "RMSNorm" not in type(module).__name__ or not is_unmodified(module):
        return False
    weight, has_eps = getattr(module, "weight", None), any(hasattr(module, name) for name in _EPS_NAMES)
    return isinstance(weight, Parameter) and weight.ndim == 1 and getattr(module, "bias", None) is None and has_eps


def _eps(module: Module) -> float:
    return float(next(getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)))


def norm_style(module: Module) -> NormStyle | None:
    """How this module multiplies by its weight, found on random inputs; None if it is not a known RMS norm."""
    with suppress(Exception), torch.device("cpu"):  # it takes other arguments, has no eps, or does not run on a CPU
        generator, dim, eps = torch.Generator().manual_seed(0), next(module.parameters()).shape[0], _eps(module)
        tensors = torch.randn(dim, generator=generator), torch.randn(3, dim, generator=generator)
        cases = []
        for dtype in PROBED_DTYPES:
            (weight, x), probe = (tensor.to(dtype) for tensor in tensors), copy.deepcopy(module).to("cpu", dtype)
            probe.weight = Parameter(weight, requires_grad=False)
            cases.append((x, weight, probe(x)))
        for style in STYLES:
            if all(torch.equal(output, rms_norm_plain(x, weight, eps, style)) for x, weight, output in cases):
                return style
    return None


class _FusedNorm:
    def __init__(self, module: Any, style: NormStyle) -> None:
        self.module, self.eps, self.style = module, _eps(module), style
        self.computed: tuple[Tensor, Tensor, object] | None = None  # a sum, its norm, the write count of the sum

    @property
    def parts(self) -> Norm:
        return Norm(self.module.weight, self.eps, self.style)

    def forward(self, hidden_states: Tensor) -> Tensor:
        sums: FusedSums | None = None if torch.compiler.is_compiling() else getattr(_THIS_THREAD, "sums", None)
        if sums is None:
            return rms_norm(hidden_states, *self.parts)
        computed, self.computed = self.computed, None
        if computed is not None and hidden_states is computed[0] and write_count(hidden_states) == computed[2]:
            return computed[1]
        return sums.norm_of(hidden_states, self)

    def of_sum(self, x: Tensor, other: Tensor, before: Norm | None = None) -> Tensor:
        total, output = add_rms_norm(x, other, *self.parts, before)
        self.computed = total, output, write_count(total)
        return total


class FusedSums(TorchFunctionMode):
    """Around each pass of a model with fused norms: computes a residual sum together with the norms next to it.

        h = x + attention(...)      n-th sum of the pass          h, y = add_rms_norm(x, attention(...))
        y = norm(h)                 the norm after it             y, computed already
        h = x + norm(mlp(...))      a norm before it (Gemma)      in the same kernel as well

    The first pass records the norms next to its n-th sum; later passes assume that their n-th sum has the same ones.
    A wrong assumption costs time only: the norm after a sum checks that its input is that sum. The norm before a sum
    returns a lazy output, and any operation but that sum gets the computed tensor in its place. Side effects that torch
    does not see must be the same in every pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first_pass: _FirstPass | None = _FirstPass()  # None after a first pass without an error
        # Of the n-th sum: the norm after it, and the norm before it whose output goes nowhere else.
        self.norms: list[tuple[_FusedNorm | None, _FusedNorm | None]] = []
        self.lazy: dict[int, _NormOutput] = {}  # of this pass, by the id of the placeholder

    def __enter__(self) -> "FusedSums":
        _THIS_THREAD.sums, self.norms_left = self, iter(self.norms)
        return super().__enter__()  # type: ignore[no-untyped-call,no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.first_pass is not None and error[0] is None:
            self.norms, self.first_pass = self.first_pass.norms_of_sums(), None
        elif self.first_pass is not None:
            self.first_pass = _FirstPass()
        _THIS_THREAD.sums, self.lazy = None, {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # compiled code is not changed
            return func(*args, **kwargs)
        lazy = [self.lazy.get(id(arg)) for arg in args]
        inputs = [arg if output is None else output.x for arg, output in zip(args, lazy, strict=True)]
        is_sum = func in (Tensor.add, Tensor.__add__, torch.add) and not kwargs and _are_alike(inputs)
        if self.first_pass is not None:
            return self.first_pass.call(func, args, kwargs, is_sum)
        after, before = next(self.norms_left, (None, None)) if is_sum else (None, None)
        if after is None or not (inputs[0].shape[-1:] == after.module.weight.shape and inputs[0].is_floating_point()):
            return func(*self._computed(list(args)), **self._computed(kwargs))
        for i, output in enumerate(lazy):
            if output is not None and output.norm is before and output.value is None:
                return after.of_sum(self._computed(args[1 - i]), output.unwritten_input, output.parts)
        return after.of_sum(*self._computed(list(args)))

    def norm_of(self, x: Tensor, norm: _FusedNorm) -> Tensor:
        """The output of a norm, lazy where its sum computes it."""
        if self.first_pass is not None:
            return self.first_pass.norm_of(x, norm)
        x = self._computed(x)
        if not any(norm is before for _, before in self.norms):
            return rms_norm(x, *norm.parts)
        output = _NormOutput(x, norm, torch.empty_like(x, device="meta"))
        self.lazy[id(output.tensor)] = output
        return output.tensor

    def _computed(self, value: Any) -> Any:
        """The value with the computed tensor in place of each lazy output, also in nested lists."""
        if not (outputs := self.lazy):
            return value
        return _map_leaves(lambda leaf: outputs[id(leaf)].compute() if id(leaf) in outputs else leaf, value)


class _NormOutput:
    """The output of a norm: the tensor itself in the first pass, later a meta tensor in place of a lazy value."""

    def __init__(self, x: Tensor, norm: _FusedNorm, tensor: Tensor) -> None:
        self.x, self.norm, self.parts, self.tensor, self.writes = x, norm, norm.parts, tensor, write_count(x)
        self.value: Tensor | None = None
        self.uses: list[int | None] = []  # numbers of the sums that it went into, None for any other operation

    @property
    def unwritten_input(self) -> Tensor:
        if write_count(self.x) != self.writes:
            raise RuntimeError("The input of a norm was written before its output was used, unlike in the first pass.")
        return self.x

    def compute(self) -> Tensor:
        """The value, computed once: writes in place must reach every user."""
        if self.value is None:
            self.value = rms_norm(self.unwritten_input, *self.parts)
        return self.value


class _FirstPass:
    """Records the sums of a pass, the norm after each, and where the output of each norm goes."""

    def __init__(self) -> None:
        self.sums: dict[int, tuple[int, Tensor]] = {}  # by id; the tensor is kept
        self.norms_after: list[_FusedNorm | None] = []  # by the number of the sum
        self.outputs: dict[int, _NormOutput] = {}  # by id

    def call(self, func: Any, args: Any, kwargs: Any, is_sum: bool) -> Any:
        number = len(self.norms_after)
        _map_leaves(lambda leaf: self._use(leaf, number if is_sum else None), (args, kwargs))
        result = func(*args, **kwargs)
        if is_sum:
            self.sums[id(result)] = number, result
            self.norms_after.append(None)
        return result

    def norm_of(self, x: Tensor, norm: _FusedNorm) -> Tensor:
        self._use(x, None)
        if (found := self.sums.get(id(x))) is not None:
            self.norms_after[found[0]] = norm
        output = _NormOutput(x, norm, rms_norm(x, *norm.parts))
        self.outputs[id(output.tensor)] = output
        return output.tensor

    def _use(self, value: Any, sum_number: int | None) -> Any:
        """Note where the output of a norm goes; returns the value."""
        if (output := self.outputs.get(id(value))) is not None:
            # Inference tensors do not count writes.
            can_be_lazy = not output.x.is_inference() and write_count(output.x) == output.writes
            output.uses.append(sum_number if can_be_lazy else None)
        return value

    def norms_of_sums(self) -> list[tuple[_FusedNorm | None, _FusedNorm | None]]:
        before: list[_FusedNorm | None] = [None] * len(self.norms_after)
        calls = Counter(output.norm for output in self.outputs.values())
        for output in self.outputs.values():
            is_used_once = len(output.uses) == 1 and calls[output.norm] == 1
            if is_used_once and (number := output.uses[0]) is not None and self.norms_after[number] is not None:
                before[number] = output.norm
        return list(zip(self.norms_after, before, strict=True))


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of every leaf of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: _map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a named tuple, or not
    return function(value)


def _are_alike(inputs: list[Any]) -> bool:
    kinds = [(x.shape, x.dtype, x.device) for x in inputs if isinstance(x, Tensor)]
    return len(inputs) == len(kinds) == 2 and kinds[0] == kinds[1]
