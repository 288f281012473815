"""The ranks of a tensor-parallel model. Where one of them decides alone, the others wait for it for
ever.

Every pass of such a model sums parts over all ranks. So what a rank alone can know (its free
memory, an allocation that failed) is made known to all before any of them goes on. `least` and
`on_all_ranks` must be reached by every rank.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import distributed

from hf_static_kv.cache.storage import is_out_of_memory

_Result = TypeVar("_Result")


class OutOfMemoryOnAllRanks(torch.OutOfMemoryError):
    """An allocation that failed on at least one rank and that all ranks have given up."""


def are_connected() -> bool:
    """Whether this process has joined others."""
    return distributed.is_available() and distributed.is_initialized()


def num_ranks(model: Any) -> int:
    """The processes that share the heads of this model, by tensor parallelism; 1 without it."""
    return getattr(model, "tp_size", None) or 1


def is_part(parameter: torch.Tensor) -> bool:
    """Whether several processes hold this weight together, as a DTensor (tensor parallelism, FSDP)."""
    return hasattr(type(parameter), "device_mesh")


def least(model: Any, number: int) -> int:
    """The least of the numbers that the ranks bring."""
    if (group := _group(model)) is None:
        return number
    box = torch.tensor(number, dtype=torch.int64, device=model.device)
    distributed.all_reduce(box, distributed.ReduceOp.MIN, group)
    return int(box)


def on_all_ranks(model: Any, allocate: Callable[[], _Result]) -> _Result:
    """What `allocate()` returns. Where one rank is out of memory, all raise
    `OutOfMemoryOnAllRanks`.

    `model` may be the part of a model that runs, or None where none does.
    """
    if model is None or _group(model) is None:
        return allocate()
    result, error = None, None
    try:
        result = allocate()
    except RuntimeError as failure:
        if not is_out_of_memory(failure):
            raise
        error = failure
    if least(model, int(error is None)):
        return result  # type: ignore[return-value]
    del result  # the traceback keeps this frame alive
    raise OutOfMemoryOnAllRanks(
        str(error or "Another rank is out of memory for the cache.")
    ) from error


def _group(model: Any) -> Any:
    """The processes that share its heads; None without tensor parallelism."""
    # By the weights: only a whole model has `tp_size`, and in a forward pass it is a part that is
    # known to run.
    mesh = next(
        (parameter.device_mesh for parameter in model.parameters() if is_part(parameter)), None
    )
    if mesh is None:
        return None
    names = mesh.mesh_dim_names
    if names is None:  # the mesh of tensor parallelism in transformers 5.17
        return mesh.get_group() if mesh.ndim == 1 else None
    return mesh.get_group("tp") if "tp" in names else None
