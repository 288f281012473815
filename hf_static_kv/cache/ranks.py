"""The ranks of a tensor-parallel model, which must decide alike.

Every pass sums parts over all ranks: if one decides alone, the others wait for
ever. So they share what a rank alone can know (its free memory, a failed
allocation). Every rank must reach `least` and `on_all_ranks`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import distributed

from hf_static_kv.cache.storage import is_out_of_memory

_Result = TypeVar("_Result")


class OutOfMemoryOnAllRanks(torch.OutOfMemoryError):
    """An allocation failed on at least one rank, and all have given it up."""


def are_connected() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def num_ranks(model: Any) -> int:
    """The processes that share the heads of this model, by tensor parallelism."""
    return getattr(model, "tp_size", None) or 1


def is_part(parameter: torch.Tensor) -> bool:
    """Whether a weight is a DTensor of several processes (tensor parallelism, FSDP)."""
    return hasattr(type(parameter), "device_mesh")


def least(model: Any, number: int) -> int:
    """The least of the numbers that the ranks bring."""
    if (group := _group(model)) is None:
        return number
    box = torch.tensor(number, dtype=torch.int64, device=model.device)
    distributed.all_reduce(box, distributed.ReduceOp.MIN, group)
    return int(box)


def on_all_ranks(model: Any, allocate: Callable[[], _Result]) -> _Result:
    """What `allocate()` returns. If one rank is out of memory, all raise `OutOfMemoryOnAllRanks`.

    Args:
        model: A model, a part of one, or None.
    """
    if model is None or _group(model) is None:
        return allocate()
    result = None
    error = None
    try:
        result = allocate()
    except RuntimeError as failure:
        if not is_out_of_memory(failure):
            raise
        error = failure
    if least(model, int(error is None)):
        return result  # type: ignore[return-value]
    del result  # the traceback keeps this frame alive
    message = str(error or "Another rank is out of memory for the cache.")
    raise OutOfMemoryOnAllRanks(message) from error


def _group(model: Any) -> Any:
    """The processes that share its heads; None without tensor parallelism."""
    # By the weights: only a whole model has `tp_size`.
    meshes = (weight.device_mesh for weight in model.parameters() if is_part(weight))
    if (mesh := next(meshes, None)) is None:
        return None
    names = mesh.mesh_dim_names
    if names is None:  # the mesh of tensor parallelism in transformers 5.17
        return mesh.get_group() if mesh.ndim == 1 else None
    return mesh.get_group("tp") if "tp" in names else None
