"""A few elements of each weight, on the host: a write into a weight shows there."""

from collections.abc import Iterable
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hf_static_kv.cache.storage import CAPTURING

NUM_SAMPLED = 16  # elements of each weight


def sample(tensor: Tensor) -> Tensor:
    """At most 16 elements, evenly spread, without a copy of the tensor."""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # torch cannot list a float8
    size = min(NUM_SAMPLED, tensor.numel())
    step = max(1, tensor.numel() // NUM_SAMPLED)
    if tensor.is_contiguous():
        return tensor.as_strided((size,), (step,))
    return tensor.flatten()[::step][:size]


class Samples:
    """The samples of one model's weights.

    Hundreds of views take milliseconds. A GPU's are read by a graph once the weights are where they
    were before: it has their addresses, and keeps none of them alive.
    """

    def __init__(self) -> None:
        self._places: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._parts: list[Tensor] = []  # that a replay writes
        self._lock = Lock()

    def read(self, tensors: list[Tensor], places: Any) -> tuple[Any, ...]:
        """`places` are equal for tensors of the same shape at the same addresses."""
        with self._lock, torch.no_grad():
            return self._read(tensors, places)

    def _read(self, tensors: list[Tensor], places: Any) -> tuple[Any, ...]:
        if places != self._places:
            self._places = places
            self._graph = None
            return _listed(_sampled(tensors))
        if self._graph is None:
            devices = {tensor.device for tensor in tensors}
            if [device.type for device in devices] != ["cuda"]:
                return _listed(_sampled(tensors))
            self._capture(tensors, devices.pop())
        assert self._graph is not None
        self._graph.replay()
        return _listed(self._parts)

    def _capture(self, tensors: list[Tensor], device: torch.device) -> None:
        graph = torch.cuda.CUDAGraph()
        # Tensors made in inference mode cannot be written outside of it.
        with CAPTURING, torch.cuda.device(device), torch.inference_mode(False):
            # `stream`: a failed capture leaves its own one current. "thread_local": other threads
            # may use the device.
            stream = torch.cuda.stream(torch.cuda.current_stream())
            with stream, torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._parts = _sampled(tensors)
        self._graph = graph


def _sampled(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The samples, those of one device and type in one tensor."""
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type != "meta":
            sampled = sample(tensor)
            samples.setdefault((sampled.device, sampled.dtype), []).append(sampled)
    return [torch.cat(parts) for parts in samples.values()]


def _listed(parts: list[Tensor]) -> tuple[Any, ...]:
    return tuple(tuple(part.tolist()) for part in parts)
