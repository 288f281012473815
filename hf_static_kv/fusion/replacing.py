"""Another `forward` for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module

TRIED_DTYPES = (torch.float32, torch.bfloat16)  # the second shows where numbers are rounded


@contextmanager
def replaced(forwards: dict[Module, Callable[..., Any]]) -> Iterator[None]:
    """These modules with these forwards, and afterwards with those that they had.

    Where another one has come in their place meanwhile, that one stays.
    """
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, forward in forwards.items():
            if module.__dict__.get("forward") != forward:
                continue
            del module.forward
            if (own := before[module]) is not None:
                module.forward = own


class StandIn:
    """Has a `forward` that computes what the class of its module says, and may itself be replaced."""


def is_itself(module: Module) -> bool:
    """Whether a module computes what its class says: no hook of torch's, and none of accelerate's in its place."""
    forward = module.__dict__.get("forward")
    is_own = forward is None or isinstance(getattr(forward, "__self__", None), StandIn)
    return is_own and not module._forward_hooks and not module._forward_pre_hooks
