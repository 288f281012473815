"""RMS norms as kernels, and the sums before them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from hf_static_kv.compat import write_count
from hf_static_kv.kernels.rms_norm import STYLES, Norm, NormStyle, add_rms_norm, rms_norm, rms_norm_plain
from hf_static_kv.patching import is_unmodified, replaced

_PROBED_DTYPES = (torch.float32, torch.bfloat16)  # bfloat16 shows where values are rounded
_EPS_NAMES = ("variance_epsilon", "eps")


@contextmanager
def fused_norms(model: Module) -> Iterator[list[Module]]:
    """The model with its RMS norms as kernels; yields these norms."""
    styles: dict[Any, NormStyle | None] = {}
    norms: dict[Module, _FusedNorm] = {}
    for module in model.modules():
        if not _looks_like_a_norm(module):
            continue
        settings = {k: v for k, v in module.__dict__.items() if isinstance(v, bool | int | float | str)}
        kind = (type(module), tuple(sorted(settings.items())))
        if kind not in styles:
            styles[kind] = norm_style(module)
        if (style := styles[kind]) is not None:
            norms[module] = _FusedNorm(module, _eps(module), style)
    with replaced("forward", {module: norm.forward for module, norm in norms.items()}):
        yield list(norms)


class _ThisThread(local):
    sums: FusedSums | None = None  # of the current pass


_THIS_THREAD = _ThisThread()


class _FusedNorm:
    def __init__(self, module: Module, eps: float, style: NormStyle) -> None:
        self.module: Any = module
        self.eps, self.style = eps, style
        self.sum: torch.Tensor | None = None
        self.output: torch.Tensor | None = None  # computed together with the sum
        self.writes: object = 0

    @property
    def parts(self) -> Norm:
        return Norm(self.module.weight, self.eps, self.style)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or (sums := _THIS_THREAD.sums) is None:
            return rms_norm(hidden_states, *self.parts)
        output = self.output
        is_computed = hidden_states is self.sum and write_count(hidden_states) == self.writes
        self.sum = self.output = None
        return output if is_computed and output is not None else sums.norm_of(hidden_states, self)

    def of_sum(self, x: torch.Tensor, other: torch.Tensor, before: Norm | None = None) -> torch.Tensor:
        self.sum, self.output = add_rms_norm(x, other, *self.parts, before)
        self.writes = write_count(self.sum)
        return self.sum

    def fits(self, x: torch.Tensor) -> bool:
        return x.shape[-1:] == self.module.weight.shape and x.is_floating_point()


def norm_style(module: Module) -> NormStyle | None:
    """How this module multiplies by its weight, found on random inputs; None if it is not a known RMS norm."""
    try:
        with torch.device("cpu"):
            return _matching_style(module)
    except Exception:  # it takes other arguments, or has no eps, or does not run on a CPU
        return None


def _matching_style(module: Module) -> NormStyle | None:
    generator = torch.Generator().manual_seed(0)
    dim = next(module.parameters()).shape[0]
    weight, x = torch.randn(dim, generator=generator), torch.randn(3, dim, generator=generator)
    probes = [(dtype, _with_weight(module, weight.to(dtype))) for dtype in _PROBED_DTYPES]
    for style in STYLES:
        if all(
            torch.equal(probe(x.to(dtype)), rms_norm_plain(x.to(dtype), weight.to(dtype), _eps(module), style))
            for dtype, probe in probes
        ):
            return style
    return None


def _with_weight(module: Module, weight: torch.Tensor) -> Module:
    """A copy on the CPU with this weight."""
    probe = copy.deepcopy(module).to("cpu", weight.dtype)
    probe.weight = Parameter(weight, requires_grad=False)
    return probe


def _looks_like_a_norm(module: Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        "RMSNorm" in type(module).__name__
        and isinstance(weight, Parameter)
        and weight.ndim == 1
        and getattr(module, "bias", None) is None
        and any(hasattr(module, name) for name in _EPS_NAMES)
        and is_unmodified(module)
    )


def _eps(module: Module) -> float:
    return float(next(getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)))


class FusedSums(TorchFunctionMode):
    """Around each pass of a model with fused norms: a sum and the norms before and after it run as one kernel.

        s = x + before(other), after(s)        without `before` where no norm precedes the sum

    The first pass records which norms belong to which sum. A later pass assumes that its n-th sum is the n-th recorded
    one. The norm after a sum checks that its input is that sum. The norm before a sum returns a deferred output if
    nothing but the sum used it in the first pass; any other operation that receives the deferred output gets the
    computed tensor. So a wrong assumption costs only time, as long as side effects that torch does not see stay the
    same. Compiled code is not changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[_SumNorms] = []  # of the n-th sum; known after the first pass
        self.norms_before: set[_FusedNorm | None] = set()
        self.is_known = False
        self.first_pass: _FirstPass | None = None
        self.deferred: dict[int, _DeferredOutput] = {}  # of this pass, by the id of the placeholder
        self.count = 0

    def __enter__(self) -> FusedSums:
        self.count, self.first_pass = 0, None if self.is_known else _FirstPass()
        _THIS_THREAD.sums = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.first_pass is not None and error[0] is None:
            self.norms, self.is_known = self.first_pass.norms_of_sums(), True
            self.norms_before = {norms.before for norms in self.norms}
        _THIS_THREAD.sums, self.first_pass, self.deferred = None, None, {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        deferred = [self.deferred.get(id(arg)) for arg in args]
        inputs = [arg if output is None else output.x for arg, output in zip(args, deferred, strict=True)]
        is_sum = func in _SUMS and not kwargs and _are_alike(*inputs)
        if self.first_pass is not None:
            return self.first_pass.call(func, args, kwargs, is_sum)
        after, before = self._next_norms() if is_sum else _SumNorms(None, None)
        if after is not None and not after.fits(inputs[0]):
            after = None
        for i, output in enumerate(deferred):
            if after is not None and output is not None and output.norm is before and output.value is None:
                return after.of_sum(self._computed(args[1 - i]), output.unwritten_input, output.parts)
        args, kwargs = self._computed(list(args)), self._computed(kwargs)
        return func(*args, **kwargs) if after is None else after.of_sum(*args)

    def _next_norms(self) -> _SumNorms:
        self.count += 1
        return self.norms[self.count - 1] if self.count <= len(self.norms) else _SumNorms(None, None)

    def norm_of(self, x: torch.Tensor, norm: _FusedNorm) -> torch.Tensor:
        """The output of a norm, deferred where its sum computes it."""
        if self.first_pass is not None:
            return self.first_pass.norm_of(x, norm)
        x = self._computed(x)
        if norm not in self.norms_before:
            return rms_norm(x, *norm.parts)
        output = _DeferredOutput(x, norm)
        self.deferred[id(output.placeholder)] = output
        return output.placeholder

    def _computed(self, value: Any) -> Any:
        """The value with the computed tensor in place of each deferred output, also in nested lists."""

        def computed(leaf: Any) -> Any:
            output = self.deferred.get(id(leaf))
            return leaf if output is None else output.compute()

        return _map_leaves(computed, value) if self.deferred else value


class _DeferredOutput:
    """The output of a norm that is not computed yet: a meta tensor as placeholder, and the input."""

    def __init__(self, x: torch.Tensor, norm: _FusedNorm) -> None:
        self.placeholder = torch.empty_like(x, device="meta")
        self.x, self.norm, self.parts, self.writes = x, norm, norm.parts, write_count(x)
        self.value: torch.Tensor | None = None

    @property
    def unwritten_input(self) -> torch.Tensor:
        if write_count(self.x) != self.writes:
            raise RuntimeError("The input of a norm was written before its output was used, unlike in the first pass.")
        return self.x

    def compute(self) -> torch.Tensor:
        """The output, computed once: writes in place must reach every user."""
        if self.value is None:
            self.value = rms_norm(self.unwritten_input, *self.parts)
        return self.value


class _SumNorms(NamedTuple):
    """The norm after a sum, and the norm before it whose output goes nowhere else."""

    after: _FusedNorm | None
    before: _FusedNorm | None


class _FirstPass:
    """Records the sums of a pass, the norm after each, and where the output of each norm goes."""

    def __init__(self) -> None:
        self.sums: dict[int, tuple[int, torch.Tensor]] = {}  # by id; the tensor is kept
        self.norms_after: list[_FusedNorm | None] = []  # by the number of the sum
        self.outputs: dict[int, _Output] = {}  # by id

    def call(self, func: Any, args: Any, kwargs: Any, is_sum: bool) -> Any:
        number = len(self.norms_after)
        _map_leaves(lambda leaf: self._use(leaf, number if is_sum else None), (args, kwargs))
        result = func(*args, **kwargs)
        if is_sum:
            self.sums[id(result)] = number, result
            self.norms_after.append(None)
        return result

    def norm_of(self, x: torch.Tensor, norm: _FusedNorm) -> torch.Tensor:
        self._use(x, None)
        if (found := self.sums.get(id(x))) is not None:
            self.norms_after[found[0]] = norm
        output = _Output(rms_norm(x, *norm.parts), x, write_count(x), norm, [])
        self.outputs[id(output.value)] = output
        return output.value

    def _use(self, value: Any, sum_number: int | None) -> Any:
        """Note where the output of a norm goes; returns the value."""
        if (output := self.outputs.get(id(value))) is not None:
            output.uses.append(sum_number if output.can_be_deferred() else None)
        return value

    def norms_of_sums(self) -> list[_SumNorms]:
        before: list[_FusedNorm | None] = [None] * len(self.norms_after)
        calls = Counter(output.norm for output in self.outputs.values())
        for *_, norm, uses in self.outputs.values():
            if len(uses) == 1 and uses[0] is not None and self.norms_after[uses[0]] and calls[norm] == 1:
                before[uses[0]] = norm
        return [_SumNorms(*norms) for norms in zip(self.norms_after, before, strict=True)]


class _Output(NamedTuple):
    """The output of a norm in the first pass."""

    value: torch.Tensor
    x: torch.Tensor
    writes: object  # write count of x when the output was computed
    norm: _FusedNorm
    uses: list[int | None]  # numbers of the sums that it went into, None for any other operation

    def can_be_deferred(self) -> bool:
        """Whether the input was not written since; inference tensors do not count writes."""
        return not self.x.is_inference() and write_count(self.x) == self.writes


_SUMS = (torch.Tensor.add, torch.Tensor.__add__, torch.add)


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of every leaf of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: _map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a named tuple, or not
    return function(value)


def _are_alike(x: Any, other: Any = None, *rest: Any) -> bool:
    return (
        not rest
        and isinstance(x, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (x.shape, x.dtype, x.device) == (other.shape, other.dtype, other.device)
    )
