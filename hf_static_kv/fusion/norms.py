"""RMS norms as kernels, and the sums before them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from hf_static_kv.fusion.replacing import TRIED_DTYPES, is_itself, replaced
from hf_static_kv.kernels.rms_norm import STYLES, NormStyle, rms_norm, rms_norm_plain, sum_and_rms_norm

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
    with replaced({module: norm.forward for module, norm in norms.items()}):
        yield list(norms)


class _Norm:
    watcher: FusedSums | None = None

    def __init__(self, module: Module, eps: float, style: NormStyle) -> None:
        self.module: Any = module
        self.eps, self.style = eps, style
        self.sum: torch.Tensor | None = None
        self.output: torch.Tensor | None = None
        self.version = 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if _Norm.watcher is not None:
            _Norm.watcher.saw_norm_of(hidden_states, self)
        output, known = self.output, hidden_states is self.sum and _version(hidden_states) == self.version
        self.sum = self.output = None
        if known and output is not None:
            return output
        return rms_norm(hidden_states, self.module.weight, self.eps, self.style)

    def of_sum(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.module.weight.shape[0] or not x.is_floating_point():
            return x + other
        self.sum, self.output = sum_and_rms_norm(x, other, self.module.weight, self.eps, self.style)
        self.version = _version(self.sum)
        return self.sum


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
        and is_itself(module)
    )


def _eps(module: Module) -> float:
    return float(next(getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)))


class FusedSums(TorchFunctionMode):
    """Around each pass of a model with fused norms: a sum that a norm follows is computed together with it.

    The first pass shows which sums these are; in a later one the n-th sum is taken for the n-th sum of the first. A
    norm looks whether its input is the tensor that it was computed for, so a guess that fails costs time alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.followers: list[_Norm | None] | None = None  # of the n-th sum, known after the first pass
        self.sums: list[torch.Tensor] = []
        self.count = 0

    def __enter__(self) -> FusedSums:
        self.count = 0
        _Norm.watcher = self if self.followers is None else None
        if self.followers is None:
            self.followers, self.sums = [], []
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _Norm.watcher, self.sums = None, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SUMS or kwargs or not _are_alike(*args):
            return func(*args, **(kwargs or {}))
        assert self.followers is not None
        self.count += 1
        if _Norm.watcher is self:
            self.followers.append(None)
            self.sums.append(func(*args))
            return self.sums[-1]
        follower = self.followers[self.count - 1] if self.count <= len(self.followers) else None
        return func(*args) if follower is None else follower.of_sum(*args)

    def saw_norm_of(self, x: torch.Tensor, norm: _Norm) -> None:
        assert self.followers is not None
        for n, total in enumerate(self.sums):
            if total is x:
                self.followers[n] = norm


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
