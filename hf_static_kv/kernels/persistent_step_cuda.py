"""Compiles the kernel of persistent_step.cu for a plan, in a thread, and launches it.

NVRTC compiles it in two to four seconds for each shape of a model (H200, 2026-11-18). The launch is
cooperative: all blocks run at the same time, or none starts.
"""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_static_kv.kernels import launch_cuda
from hf_static_kv.kernels.launch_cuda import Compilation, Grid
from hf_static_kv.kernels.persistent_step import (
    Plan,
    check_plan,
    exchanged_bytes,
    macros,
    used_shared_bytes,
)

_SOURCE = Path(__file__).with_name("persistent_step.cu")
_NAME = "persistent_step"
_THREADS = 288  # of a block: eight warps that compute, and one that reads
_HEAD_STRIDE = 18  # where `struct Layer` has it among the tensors


def refusal(plan: Plan) -> str:
    """Why no kernel serves this plan on its device; "" if one does."""
    if reason := launch_cuda.refusal(plan.token.device):
        return reason
    try:
        check_plan(plan)
        _macros(plan)
    except ValueError as error:
        return str(error)
    return ""


class Build:
    """The kernel of a plan, while a thread compiles it. One with marks notes its times."""

    def __init__(self, plan: Plan, has_marks: bool = False) -> None:
        self.plan = plan
        self._has_marks = has_marks
        own = _macros(plan) | {"PROFILE": int(has_marks)}
        self._compilation = _compilation(tuple(own.items()))

    @property
    def is_ready(self) -> bool:
        return self._compilation.is_ready

    def step(self) -> "PersistentStep":
        """The kernel, loaded. Raises what the compiler has raised."""
        return PersistentStep(self.plan, self._compilation.result(), self._has_marks)


class PersistentStep:
    """The kernel of one plan on one device. Its launch gives the logits [1, V].

    It holds every tensor that the kernel reads. `marks` [blocks, layers + 1, 16] are the cycles at
    which each block came to each MARK of the source.
    """

    def __init__(self, plan: Plan, cubin: bytes, has_marks: bool = False) -> None:
        device = plan.token.device
        blocks = _blocks(device)
        own = _macros(plan)
        self.plan = plan
        self._grid = Grid(blocks, _THREADS, used_shared_bytes(own), is_cooperative=True)
        self._function = launch_cuda.loaded(cubin, _NAME, self._grid.shared_bytes, device)
        if launch_cuda.resident_blocks(self._function, self._grid) < 1:
            raise RuntimeError("a block of the kernel does not fit on a multiprocessor")
        words = torch.full((exchanged_bytes(own),), -1, dtype=torch.int8, device=device)
        step = torch.zeros(1, dtype=torch.int32, device=device)
        self.error = torch.zeros_like(step)  # 1: a block has waited in vain
        self.logits = plan.head.new_zeros(1, len(plan.head))
        maxima = torch.zeros(blocks, device=device)
        tokens = torch.zeros(blocks, dtype=torch.int32, device=device)
        layers = _table_of_layers(plan)
        inputs = [plan.embedding, plan.norm, plan.head, plan.token, plan.position]
        self.buffers = [layers, words, step, self.error, self.logits, maxima, tokens]
        pointers = [t.data_ptr() for t in (layers, *inputs, *self.buffers[1:])]
        self.marks = step.new_zeros(blocks if has_marks else 0, len(plan.layers) + 1, 16).long()
        self._args = (ctypes.c_uint64 * (len(pointers) + 1))(*pointers, self.marks.data_ptr())

    def __call__(self) -> Tensor:
        """Launch the kernel on the current stream; `logits` are there when it has run."""
        from hf_static_kv.kernels.launch_triton import is_launching

        if is_launching():  # else positions are not placed
            launch_cuda.launch_cuda(self._function, self._grid, self._args, self.logits.device)
        return self.logits

    def has_failed(self) -> bool:
        """Whether a launch has given up. Waits for the device."""
        return bool(self.error.item())


def _macros(plan: Plan) -> dict[str, int | str]:
    device = plan.token.device
    properties: Any = torch.cuda.get_device_properties(device)
    return macros(plan, _blocks(device), properties.shared_memory_per_block_optin)


def _blocks(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _table_of_layers(plan: Plan) -> Tensor:
    """Every `struct Layer`, as one tensor of addresses."""
    rows = []
    for layer in plan.layers:
        row = [0 if tensor is None else tensor.data_ptr() for tensor in layer]
        row.insert(_HEAD_STRIDE, layer.keys.stride(0))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64, device=plan.token.device)


@lru_cache(maxsize=32)  # the steps of a model share one
def _compilation(own: tuple[tuple[str, int | str], ...]) -> Compilation:
    return Compilation(_SOURCE, dict(own))
