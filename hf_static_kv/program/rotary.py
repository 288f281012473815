"""Rotary embeddings: cosines and sines from a table, and one kernel that rotates queries and keys."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedConfig

from hf_static_kv.compat import attention_name
from hf_static_kv.kernels import rotary
from hf_static_kv.patching import is_unmodified, original_function, replaced, replaced_function
from hf_static_kv.program.norms import PROBED_DTYPES, PROBED_SCALES
from hf_static_kv.program.shadow import original_of

_FUNCTION = "apply_rotary_pos_emb"
# Captured steps share the tables of a module: one of 32k positions takes about 30 MB.
_TABLES: WeakKeyDictionary[Module, WeakValueDictionary[Any, Tensor]] = WeakKeyDictionary()


def frequencies_depend_on_length(config: PreTrainedConfig) -> bool:
    """Whether the angles of earlier tokens change as the sequence grows, so that cached keys become
    wrong.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [own for own in parameters.values() if isinstance(own, dict)]
    kinds = [own.get("rope_type", own.get("type")) or "" for own in (parameters, *by_layer_type)]
    # As transformers tests them.
    return any(kind == "longrope" or "dynamic" in kind for kind in kinds)


@contextmanager
def one_operation_angles(model: Module) -> Iterator[None]:
    """The model with the cosines and sines of each of its rotary modules as one operation."""
    modules = [
        m for m in model.modules() if "RotaryEmbedding" in type(m).__name__ and is_unmodified(m)
    ]
    # Angles have other bits inside `exact`.
    attention = attention_name(getattr(model, "config", None))
    with replaced("forward", {module: Rotary(module, attention).forward for module in modules}):
        yield


class Rotary:
    """Computes the angles of one rotary module."""

    def __init__(self, module: Module, attention: str | None) -> None:
        self.module = module
        self.attention = attention
        self.original = module.forward

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return angles(position_ids, x, self, *args, **kwargs)


@torch.overrides.wrap_torch_function(lambda position_ids, *args, **kwargs: (position_ids,))
def angles(position_ids: Tensor, x: Tensor, rotary: Rotary, *args: Any, **kwargs: Any) -> Any:
    """Cosines and sines of these positions, as the model's own module computes them."""
    return rotary.original(x, position_ids, *args, **kwargs)


def angle_table(
    length: int, position_ids: Tensor, x: Tensor, rotary: Rotary, *args: Any, **kwargs: Any
) -> Tensor | None:
    """Cosines and sines of `length` positions, [length, 2 D]; None if the output is not a lookup by
    position.
    """
    module = original_of(rotary.module)
    original = rotary.original
    last = torch.full_like(position_ids[:, :1], length - 1)  # at position 0 all angles are 0
    expected = [(at, original(x, at, *args, **kwargs)) for at in (position_ids, last)]
    key = (
        length,
        rotary.attention,
        None if x is None else (x.dtype, x.device),
        *args,
        *kwargs.items(),
    )
    table = _TABLES.setdefault(module, WeakValueDictionary()).get(key)
    if table is None or not _holds(table, expected):
        made = original(x, torch.arange(length, device=position_ids.device)[None], *args, **kwargs)
        is_pair = len(made) == 2 and all(
            isinstance(part, Tensor) and part.ndim == 3 for part in made
        )
        table = torch.cat(made, dim=-1)[0] if is_pair else None
        if table is None or not _holds(table, expected):
            return None
        _TABLES[module][key] = table
    return table


def lookup(position_ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines from a table of `angle_table`."""
    cos, sin = F.embedding(position_ids, table).chunk(2, dim=-1)
    return cos, sin


def _holds(table: Tensor, expected: list[tuple[Tensor, Any]]) -> bool:
    """Whether the table has these angles at these positions."""
    return all(
        torch.equal(F.embedding(at, table), torch.cat(angles, dim=-1)) for at, angles in expected
    )


@contextmanager
def fused_rotary(model: Module, only_here: bool = False) -> Iterator[list[str]]:
    """`apply_rotary_pos_emb` as one kernel, where it can run, in the modules of the model's
    classes; yields these.

    The function is global. `only_here`: other threads still run what they ran.
    """
    function = partial(_rotary_in_thread, get_ident()) if only_here else _rotary
    names = {type(module).__module__ for module in model.modules()}
    names = {name for name in names if _is_rotary(original_function(name, _FUNCTION))}
    with replaced_function(_FUNCTION, dict.fromkeys(names, function)):
        yield sorted(names)


def _is_rotary(function: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    tokens = len(PROBED_SCALES)
    shapes = (
        (2, 4, tokens, 8),
        (2, 2, tokens, 8),
        (2, tokens, 8),
        (2, tokens, 8),
    )  # query, key, cos, sin
    tensors = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
    for states in tensors[:2]:
        states *= torch.tensor(PROBED_SCALES, device="cpu")[:, None]
    with suppress(Exception):  # no function, or another one of that name
        for dtype in PROBED_DTYPES:
            arguments = [tensor.to(dtype) for tensor in tensors]
            pairs = zip(function(*arguments), rotary.rotary_plain(*arguments), strict=True)
            if not all(torch.equal(got, expected) for got, expected in pairs):
                return False
        return True
    return False


def _rotary(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    is_supported = len(args) == 4 and not kwargs and rotary.is_supported(*args)
    return rotary.rotary(*args) if is_supported else original(*args, **kwargs)


def _rotary_in_thread(thread: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (
        _rotary(original, *args, **kwargs) if get_ident() == thread else original(*args, **kwargs)
    )
