"""Rotary positions: angles from a table, and one kernel that turns queries and keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Module

from hf_static_kv.fusion.replacing import TRIED_DTYPES, is_itself, replaced
from hf_static_kv.kernels import rotary

_ROTARY_NAME = "apply_rotary_pos_emb"


@contextmanager
def angles_from_tables(model: Module, length: int) -> Iterator[list[torch.Tensor]]:
    """The modules that compute cosines and sines, reading them from tables of `length` positions; gives the tables.

    They are filled at the first pass, and must live as long as a graph that was captured with them.
    """
    modules = [m for m in model.modules() if "RotaryEmbedding" in type(m).__name__ and is_itself(m)]
    tables: list[torch.Tensor] = []
    with replaced({module: _Angles(module, length, tables).forward for module in modules}):
        yield tables


class _Angles:
    def __init__(self, module: Module, length: int, tables: list[torch.Tensor]) -> None:
        self.own, self.length, self.tables = module.forward, length, tables
        self.by_arguments: dict[tuple[Any, ...], torch.Tensor | None] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        key = (*args, *kwargs.items())
        if key not in self.by_arguments:
            self.by_arguments[key] = self._table(x, position_ids, *args, **kwargs)
        table = self.by_arguments[key]
        if table is None:
            return self.own(x, position_ids, *args, **kwargs)
        return F.embedding(position_ids, table).chunk(2, dim=-1)

    def _table(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """[length, 2 D] of cosines and sines side by side; None where these are not its rows."""
        expected = self.own(x, position_ids, *args, **kwargs)
        positions = torch.arange(self.length, device=position_ids.device)[None]
        made = self.own(x, positions, *args, **kwargs)
        if not all(isinstance(part, torch.Tensor) and part.ndim == 3 for part in (*expected, *made)) or len(made) != 2:
            return None
        table = torch.cat(made, dim=-1)[0]
        if not torch.equal(F.embedding(position_ids, table), torch.cat(expected, dim=-1)):
            return None
        self.tables.append(table)
        return table


@contextmanager
def fused_rotary(model: Module) -> Iterator[list[str]]:
    """The function that turns queries and keys, as one kernel in the files of this model's classes; gives their names.

    For one new token; anything else still runs in the function that stood there.
    """
    homes = {type(module).__module__: sys.modules[type(module).__module__] for module in model.modules()}
    own = {name: getattr(home, _ROTARY_NAME) for name, home in homes.items() if hasattr(home, _ROTARY_NAME)}
    own = {name: function for name, function in own.items() if _is_rotary(function)}
    try:
        for name, function in own.items():
            setattr(homes[name], _ROTARY_NAME, partial(_rotary, function))
        yield list(own)
    finally:
        for name, function in own.items():
            setattr(homes[name], _ROTARY_NAME, function)


def _is_rotary(function: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, heads, 1, 8, generator=generator) for heads in (3, 2)]
    angles = [torch.randn(2, 1, 8, generator=generator) for _ in range(2)]
    for dtype in TRIED_DTYPES:
        arguments = [tensor.to(dtype) for tensor in (*states, *angles)]
        try:
            got = function(*arguments)
        except Exception:  # another function of that name, with other arguments
            return False
        expected = rotary.rotary_plain(*arguments)
        if len(got) != 2 or not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
            return False
    return True


def _rotary(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return rotary.rotary(*args) if len(args) == 4 and not kwargs and rotary.is_served(*args) else own(*args, **kwargs)
