"""Fewer kernels in a captured step without a compiler: a model's RMS norms, each as one kernel for a while.

No list of models: a module is taken for an RMS norm when, given random weights, it computes one to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from hf_static_kv.kernels.rms_norm import STYLES, NormStyle, rms_norm, rms_norm_plain

_EPS_NAMES = ("variance_epsilon", "eps")


@contextmanager
def fused_norms(model: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """The model with its RMS norms as kernels, and afterwards with its own `forward` again; gives those norms."""
    styles: dict[type, NormStyle | None] = {}
    norms: list[torch.nn.Module] = []
    try:
        for module in model.modules():
            if not _looks_like_a_norm(module):
                continue
            if type(module) not in styles:
                styles[type(module)] = norm_style(module)
            if (style := styles[type(module)]) is not None:
                norms.append(module)
                module.forward = partial(_forward, module, _eps(module), style)
        yield norms
    finally:
        for module in norms:
            del module.forward


def norm_style(module: torch.nn.Module) -> NormStyle | None:
    """How this module multiplies by its weight, found by trying; None where it is no RMS norm that we know."""
    generator = torch.Generator().manual_seed(0)
    dim = next(module.parameters()).shape[0]
    weight, x = torch.randn(dim, generator=generator), torch.randn(3, dim, generator=generator)
    # In float32 it shows whether this is an RMS norm and what is added to the weight, in bfloat16 where it is rounded.
    trials = [(dtype, _with_weight(module, weight.to(dtype))) for dtype in (torch.float32, torch.bfloat16)]
    for style in STYLES:
        if all(
            torch.equal(trial(x.to(dtype)), rms_norm_plain(x.to(dtype), weight.to(dtype), _eps(module), style))
            for dtype, trial in trials
        ):
            return style
    return None


def _with_weight(module: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    """A copy on the CPU, with this weight."""
    trial = copy.deepcopy(module).to("cpu", weight.dtype)
    trial.weight = torch.nn.Parameter(weight, requires_grad=False)
    return trial


def _looks_like_a_norm(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        "RMSNorm" in type(module).__name__
        and isinstance(weight, torch.nn.Parameter)
        and weight.ndim == 1
        and getattr(module, "bias", None) is None
        and any(hasattr(module, name) for name in _EPS_NAMES)
        and "forward" not in module.__dict__  # a hook stands there
    )


def _eps(module: torch.nn.Module) -> float:
    return float(next(getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)))


def _forward(module: torch.nn.Module, eps: float, style: NormStyle, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states, module.weight, eps, style)  # type: ignore[arg-type]
