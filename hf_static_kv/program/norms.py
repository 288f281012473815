"""RMS norms as kernels, and the sums before them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from hf_static_kv.kernels.rms_norm import STYLES, Norm, NormStyle, add_rms_norm, rms_norm, rms_norm_plain
from hf_static_kv.patching import is_unmodified, replaced

TRIED_DTYPES = (torch.float32, torch.bfloat16)  # the second shows where numbers are rounded
_EPS_NAMES = ("variance_epsilon", "eps")


@contextmanager
def fused_norms(model: Module) -> Iterator[list[Module]]:
    """The model with its RMS norms as kernels, and afterwards with its own `forward` again; gives those norms."""
    styles: dict[Any, NormStyle | None] = {}
    norms: dict[Module, _Norm] = {}
    for module in model.modules():
        if not _looks_like_a_norm(module):
            continue
        settings = {k: v for k, v in module.__dict__.items() if isinstance(v, bool | int | float | str)}
        kind = (type(module), tuple(sorted(settings.items())))
        if kind not in styles:
            styles[kind] = norm_style(module)
        if (style := styles[kind]) is not None:
            norms[module] = _Norm(module, _eps(module), style)
    with replaced("forward", {module: norm.forward for module, norm in norms.items()}):
        yield list(norms)


class _ThisThread(local):
    sums: FusedSums | None = None  # what is around the pass that runs


_THIS_THREAD = _ThisThread()


class _Norm:
    def __init__(self, module: Module, eps: float, style: NormStyle) -> None:
        self.module: Any = module
        self.eps, self.style = eps, style
        self.sum: torch.Tensor | None = None
        self.output: torch.Tensor | None = None
        self.version = 0

    @property
    def parts(self) -> Norm:
        return Norm(self.module.weight, self.eps, self.style)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or (sums := _THIS_THREAD.sums) is None:
            return rms_norm(hidden_states, *self.parts)
        output = self.output
        known = hidden_states is self.sum and _version(hidden_states) == self.version
        self.sum = self.output = None
        return output if known and output is not None else sums.norm_of(hidden_states, self)

    def of_sum(self, x: torch.Tensor, other: torch.Tensor, first: Norm | None = None) -> torch.Tensor:
        self.sum, self.output = add_rms_norm(x, other, *self.parts, first)
        self.version = _version(self.sum)
        return self.sum

    def fits(self, x: torch.Tensor) -> bool:
        return x.shape[-1:] == self.module.weight.shape and x.is_floating_point()


def norm_style(module: Module) -> NormStyle | None:
    """How this module multiplies by its weight, found by trying; None where it is no RMS norm that we know."""
    try:
        with torch.device("cpu"):
            return _tried_style(module)
    except Exception:  # it takes other arguments, or has no eps, or does not run on a CPU
        return None


def _tried_style(module: Module) -> NormStyle | None:
    generator = torch.Generator().manual_seed(0)
    dim = next(module.parameters()).shape[0]
    weight, x = torch.randn(dim, generator=generator), torch.randn(3, dim, generator=generator)
    # In float32 it shows whether this is an RMS norm and what is added to the weight, in bfloat16 where it is rounded.
    trials = [(dtype, _with_weight(module, weight.to(dtype))) for dtype in TRIED_DTYPES]
    for style in STYLES:
        if all(
            torch.equal(trial(x.to(dtype)), rms_norm_plain(x.to(dtype), weight.to(dtype), _eps(module), style))
            for dtype, trial in trials
        ):
            return style
    return None


def _with_weight(module: Module, weight: torch.Tensor) -> Module:
    """A copy on the CPU, with this weight."""
    trial = copy.deepcopy(module).to("cpu", weight.dtype)
    trial.weight = Parameter(weight, requires_grad=False)
    return trial


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
    """Around each pass of a model with fused norms: a sum is computed together with the norms around it.

        s = x + first(other), then follower(s)        in one kernel, or without the first where there is none

    The first pass shows which these are; in a later one the n-th sum is taken for the n-th sum of the first. A follower
    looks whether its input is the tensor that it was computed for. A first norm whose output goes nowhere but into its
    sum gives a promise in its place, and any other operation that is handed the promise is given what it stands for. So
    a guess that fails costs time alone, as long as what torch does not see (what a pass keeps for later, say) stays the
    same. What a compiler looks into is left to it.
    """

    def __init__(self) -> None:
        super().__init__()
        # Of the n-th sum: its follower and its first norm. Known after the first pass.
        self.norms: list[tuple[_Norm | None, _Norm | None]] = []
        self.firsts: set[_Norm | None] = set()
        self.is_known = False
        self.watched: _Watched | None = None
        self.promises: dict[int, _Promise] = {}  # of this pass, by the identity of what stands in
        self.count = 0

    def __enter__(self) -> FusedSums:
        self.count, self.watched = 0, None if self.is_known else _Watched()
        _THIS_THREAD.sums = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.watched is not None and error[0] is None:
            self.norms, self.is_known = self.watched.around_sums(), True
            self.firsts = {first for _, first in self.norms}
        _THIS_THREAD.sums, self.watched, self.promises = None, None, {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        promised = [self.promises.get(id(arg)) for arg in args]
        meant = [arg if promise is None else promise.x for arg, promise in zip(args, promised, strict=True)]
        is_sum = func in _SUMS and not kwargs and _are_alike(*meant)
        if self.watched is not None:
            return self.watched.call(func, args, kwargs, is_sum)
        follower, first = self._next_norms() if is_sum else (None, None)
        if follower is not None and not follower.fits(meant[0]):
            follower = None
        for i, promise in enumerate(promised):
            if follower is not None and promise is not None and promise.norm is first and promise.value is None:
                return follower.of_sum(self._kept(args[1 - i]), promise.untouched, promise.parts)
        args, kwargs = [self._kept(arg) for arg in args], {name: self._kept(arg) for name, arg in kwargs.items()}
        return func(*args, **kwargs) if follower is None else follower.of_sum(*args)

    def _next_norms(self) -> tuple[_Norm | None, _Norm | None]:
        self.count += 1
        return self.norms[self.count - 1] if self.count <= len(self.norms) else (None, None)

    def norm_of(self, x: torch.Tensor, norm: _Norm) -> torch.Tensor:
        """What a norm gives in this pass: a promise where its sum computes it."""
        if self.watched is not None:
            return self.watched.norm_of(x, norm)
        x = self._kept(x)
        if norm not in self.firsts:
            return rms_norm(x, *norm.parts)
        promise = _Promise(x, norm)
        self.promises[id(promise.stand_in)] = promise
        return promise.stand_in

    def _kept(self, value: Any) -> Any:
        """The value, or what was promised by it; lists of such too."""
        if isinstance(value, list | tuple | dict) and self.promises:
            return tree_map(self._kept_one, value)
        return self._kept_one(value)

    def _kept_one(self, value: Any) -> Any:
        promise = self.promises.get(id(value))
        return value if promise is None else promise.keep()


class _Promise:
    """The output of a norm that has not been computed: a tensor without numbers, and what they would be made from."""

    def __init__(self, x: torch.Tensor, norm: _Norm) -> None:
        self.stand_in = torch.empty_like(x, device="meta")
        self.x, self.norm, self.parts, self.version = x, norm, norm.parts, _version(x)
        self.value: torch.Tensor | None = None

    @property
    def untouched(self) -> torch.Tensor:
        if _version(self.x) != self.version:
            raise RuntimeError("The input of a norm was written before its output was used, which it was not at first.")
        return self.x

    def keep(self) -> torch.Tensor:
        """The numbers, computed once: whoever writes into them means the same ones."""
        if self.value is None:
            self.value = rms_norm(self.untouched, *self.parts)
        return self.value


class _Watched:
    """The first pass: which sums there are, which norms are taken of them, and where the output of a norm goes."""

    def __init__(self) -> None:
        self.sums: dict[int, tuple[int, torch.Tensor]] = {}  # their numbers, by identity as well
        self.followers: list[_Norm | None] = []  # by the number of their sum
        self.outputs: dict[int, _Output] = {}  # by the identity of the tensor, which is kept

    def call(self, func: Any, args: Any, kwargs: Any, is_sum: bool) -> Any:
        number = len(self.followers)
        self._used(tree_leaves((args, kwargs)), number if is_sum else None)
        result = func(*args, **kwargs)
        if is_sum:
            self.sums[id(result)] = number, result
            self.followers.append(None)
        return result

    def norm_of(self, x: torch.Tensor, norm: _Norm) -> torch.Tensor:
        self._used([x], None)
        if (found := self.sums.get(id(x))) is not None:
            self.followers[found[0]] = norm
        output = _Output(rms_norm(x, *norm.parts), x, _version(x), norm, [])
        self.outputs[id(output.value)] = output
        return output.value

    def _used(self, values: list[Any], by: int | None) -> None:
        for value in values:
            if (output := self.outputs.get(id(value))) is not None:
                output.uses.append(by if output.follows_from_its_input() else None)

    def around_sums(self) -> list[tuple[_Norm | None, _Norm | None]]:
        """Of each sum: the norm that follows, and the one whose output goes into it and nowhere else."""
        firsts: list[_Norm | None] = [None] * len(self.followers)
        runs = Counter(output.norm for output in self.outputs.values())
        for *_, norm, uses in self.outputs.values():
            if len(uses) == 1 and uses[0] is not None and self.followers[uses[0]] and runs[norm] == 1:
                firsts[uses[0]] = norm
        return list(zip(self.followers, firsts, strict=True))


class _Output(NamedTuple):
    """What a norm gave in the first pass."""

    value: torch.Tensor
    x: torch.Tensor
    version: int  # of x, when this was made of it
    norm: _Norm
    uses: list[int | None]  # the numbers of the sums that it went into, None for anything else

    def follows_from_its_input(self) -> bool:
        """Whether it could be made now: its input was not written meanwhile."""
        return not self.x.is_inference() and _version(self.x) == self.version


_SUMS = (torch.Tensor.add, torch.Tensor.__add__, torch.add)


def _version(x: torch.Tensor) -> int:
    """How often a tensor was written in place."""
    return 0 if x.is_inference() else x._version


def _are_alike(x: Any, other: Any = None, *rest: Any) -> bool:
    return (
        not rest
        and isinstance(x, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (x.shape, x.dtype, x.device) == (other.shape, other.dtype, other.device)
    )
