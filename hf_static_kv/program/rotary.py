"""Rotary positions: angles from a table, and one kernel that turns queries and keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.nn.functional as F
from torch.nn import Module

from hf_static_kv.kernels import rotary
from hf_static_kv.patching import is_unmodified, replaced

TRIED_DTYPES = (torch.float32, torch.bfloat16)  # the second shows where numbers are rounded
_ROTARY_NAME = "apply_rotary_pos_emb"
# Tables of the modules that steps were captured with, for other steps: at 32k positions one takes some 30 MB.
_TABLES: WeakKeyDictionary[Module, WeakValueDictionary[Any, torch.Tensor]] = WeakKeyDictionary()
_OWN: dict[str, tuple[Callable[..., Any], int]] = {}  # of each file: its function, and how many contexts replace it


@contextmanager
def angles_from_tables(model: Module, length: int) -> Iterator[list[torch.Tensor]]:
    """The modules that compute cosines and sines, reading them from tables of `length` positions; gives the tables.

    They are filled at the first pass, and must live as long as a graph that was captured with them.
    """
    modules = [m for m in model.modules() if "RotaryEmbedding" in type(m).__name__ and is_unmodified(m)]
    tables: list[torch.Tensor] = []
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)  # inside `exact` angles have own bits
    with replaced("forward", {module: _Angles(module, length, name, tables).forward for module in modules}):
        yield tables


class _Angles:
    def __init__(self, module: Module, length: int, attention: str | None, tables: list[torch.Tensor]) -> None:
        self.module, self.own, self.tables = module, module.forward, tables
        self.length, self.attention = length, attention
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
        last = torch.full_like(position_ids[:, :1], self.length - 1)  # at position 0 all angles are alike
        expected = [(at, self.own(x, at, *args, **kwargs)) for at in (position_ids, last)]
        kind = None if x is None else (x.dtype, x.device)
        key = (self.length, self.attention, kind, *args, *kwargs.items())
        table = _TABLES.setdefault(self.module, WeakValueDictionary()).get(key)
        if table is None or not _holds(table, expected):
            positions = torch.arange(self.length, device=position_ids.device)[None]
            made = self.own(x, positions, *args, **kwargs)
            if len(made) != 2 or not all(isinstance(part, torch.Tensor) and part.ndim == 3 for part in made):
                return None
            table = torch.cat(made, dim=-1)[0]
            if not _holds(table, expected):
                return None
            _TABLES[self.module][key] = table
        self.tables.append(table)
        return table


def _holds(table: torch.Tensor, expected: list[tuple[torch.Tensor, Any]]) -> bool:
    """Whether the rows of the table are these angles, position by position."""
    return all(torch.equal(F.embedding(at, table), torch.cat(angles, dim=-1)) for at, angles in expected)


@contextmanager
def fused_rotary(model: Module) -> Iterator[list[str]]:
    """The function that turns queries and keys, as one kernel in the files of this model's classes; gives their names.

    What the kernel does not take still runs in the function that stood there.
    """
    names = {type(module).__module__ for module in model.modules()}
    homes = {name: sys.modules[name] for name in names if hasattr(sys.modules[name], _ROTARY_NAME)}
    homes = {name: home for name, home in homes.items() if name in _OWN or _is_rotary(getattr(home, _ROTARY_NAME))}
    for name, home in homes.items():
        own, users = _OWN.get(name, (getattr(home, _ROTARY_NAME), 0))
        _OWN[name] = (own, users + 1)
        setattr(home, _ROTARY_NAME, partial(_rotary, own))
    try:
        yield list(homes)
    finally:
        for name, home in homes.items():
            own, users = _OWN.pop(name)
            if users > 1:  # another model of this file still uses it
                _OWN[name] = (own, users - 1)
            else:
                setattr(home, _ROTARY_NAME, own)


def replaced_function(function: Any) -> Any:
    """What stood where `fused_rotary` has put this function, or the function itself."""
    return function.args[0] if isinstance(function, partial) and function.func is _rotary else function


def _is_rotary(function: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, heads, 3, 8, generator=generator, device="cpu") for heads in (4, 2)]
    angles = [torch.randn(2, 3, 8, generator=generator, device="cpu") for _ in range(2)]
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
    return (
        rotary.rotary(*args) if len(args) == 4 and not kwargs and rotary.is_supported(*args) else own(*args, **kwargs)
    )


def frequencies_depend_on_length(config: Any) -> bool:
    """Whether a longer sequence turns earlier tokens by other angles, so that cached keys would be wrong."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return any(kind.get("rope_type") in ("longrope", "dynamic") for kind in kinds)
