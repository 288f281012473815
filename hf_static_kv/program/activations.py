"""Activations by their names, for a recording."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch.nn import Module
from transformers import activations

from hf_static_kv.kernels import linear
from hf_static_kv.patching import is_unmodified, replaced
from hf_static_kv.program.norms import PROBED_SCALES


@contextmanager
def named_activations(model: Module) -> Iterator[None]:
    """The model with each activation that has a formula of its own as one operation (GPT-2's GELU
    is eight).
    """
    modules = [
        module for module in model.modules() if type(module).__module__ == activations.__name__
    ]
    found = {module: _activation_name(module) for module in modules if is_unmodified(module)}
    with replaced(
        "forward",
        {module: Activation(module, name).forward for module, name in found.items() if name},
    ):
        yield


class Activation:
    """An activation and its name among `linear.ACTIVATIONS`."""

    def __init__(self, module: Module, name: str) -> None:
        self.original = module.forward
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return activated(x, self)


@torch.overrides.wrap_torch_function(lambda x, activation: (x,))
def activated(x: Tensor, activation: Activation) -> Tensor:
    """The model's own operations, with its own roundings."""
    return activation.original(x)  # type: ignore[no-any-return]


def _activation_name(module: Module) -> str:
    """The activation that this module computes, found in float64; "" if it is none of the known
    ones.
    """
    x = torch.linspace(-6, 6, 97, dtype=torch.float64, device="cpu")
    scales = x.new_tensor(PROBED_SCALES)
    x = torch.cat([x, scales, -scales])
    with suppress(Exception):  # it takes other arguments
        expected = ((name, linear.activate(x, name)) for name in linear.ACTIVATIONS)
        return next(
            (name for name, y in expected if torch.allclose(module(x), y, rtol=0, atol=1e-8)), ""
        )
    return ""
