"""RMS norms as one operation each, found by trial."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from hf_static_kv.kernels.norm import STYLES, Norm, NormStyle, norm, norm_plain
from hf_static_kv.patching import is_unmodified, replaced

PROBED_DTYPES = (torch.float32, torch.bfloat16)  # bfloat16 shows where values are rounded
# Of inputs: a clamp at any limit in between shows.
PROBED_SCALES = tuple(10.0**n for n in range(-4, 7))
_EPS_NAMES = ("variance_epsilon", "eps")


@contextmanager
def fused_norms(model: Module) -> Iterator[list[Module]]:
    """The model with its RMS norms as one operation each; yields these norms."""
    styles: dict[Any, NormStyle | None] = {}
    forwards: dict[Module, Callable[..., Any]] = {}
    for module in filter(_looks_like_a_norm, model.modules()):
        settings = {
            k: v for k, v in module.__dict__.items() if isinstance(v, bool | int | float | str)
        }
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
    weight = getattr(module, "weight", None)
    has_eps = any(hasattr(module, name) for name in _EPS_NAMES)
    return (
        isinstance(weight, Parameter)
        and weight.ndim == 1
        and getattr(module, "bias", None) is None
        and has_eps
    )


def _eps(module: Module) -> float:
    return float(next(getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)))


def norm_style(module: Module) -> NormStyle | None:
    """How this module multiplies by its weight, found on random inputs; None if it is not a known
    RMS norm.
    """
    # It takes other arguments, has no eps, or does not run on a CPU.
    with (
        suppress(Exception),
        torch.device("cpu"),
    ):
        generator = torch.Generator().manual_seed(0)
        dim = next(module.parameters()).shape[0]
        eps = _eps(module)
        x = (
            torch.randn(len(PROBED_SCALES), dim, generator=generator)
            * torch.tensor(PROBED_SCALES)[:, None]
        )
        tensors = torch.randn(dim, generator=generator), x
        cases = []
        for dtype in PROBED_DTYPES:
            weight, x = (tensor.to(dtype) for tensor in tensors)
            probe = copy.deepcopy(module).to("cpu", dtype)
            probe.weight = Parameter(weight, requires_grad=False)
            cases.append((x, weight, probe(x)))
        for style in STYLES:
            if all(
                torch.equal(output, norm_plain(x, Norm(weight, eps, style)))
                for x, weight, output in cases
            ):
                return style
    return None


class _FusedNorm:
    def __init__(self, module: Any, style: NormStyle) -> None:
        self.module = module
        self.eps = _eps(module)
        self.style = style

    def forward(self, hidden_states: Tensor) -> Tensor:
        return norm(hidden_states, Norm(self.module.weight, self.eps, self.style))
