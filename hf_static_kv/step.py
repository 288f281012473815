"""One decode step with every input at a fixed address, so that a CUDA graph can hold it.

    token -> model -> logits                 in between, each layer writes its keys and values straight into the storage
    slot, positions, spans   count on by themselves: nothing on the host changes from step to step

On a CPU the same step runs without a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_static_kv.cache import StaticContiguousCache
from hf_static_kv.layer import StaticContiguousLayer

_WARM_UPS = 3  # runs before the capture: they compile the kernels and let libraries allocate what they need


class DecodeStep:
    """One new token for each row: `begin` says where the text ends, every `run` appends a token and gives its logits.

    Holds the cache's storage and not the cache, whose lengths the caller moves.
    """

    def __init__(self, model: PreTrainedModel, cache: StaticContiguousCache, batch_size: int) -> None:
        self.model, self.batch_size, self.max_cache_len = model, batch_size, cache.max_cache_len
        device, num_layers = cache.layers[0].device, len(cache.layers)
        whole = torch.iinfo(torch.int64).max // 2
        self.windows = torch.tensor([layer.sliding_window or whole for layer in cache.layers], device=device)  # [L]
        self.token = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.origin = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)  # the last position that was written
        self.spans = torch.zeros(batch_size, num_layers, 3, dtype=torch.int64, device=device)
        self.cache = Cache(layers=[_StepLayer(layer, batch_size, self.slot) for layer in cache.layers])
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: torch.Tensor | None = None

    def begin(self, length: int, origin: torch.Tensor) -> None:
        """The next token comes to position `length`; the text of row b begins at `origin[b]`."""
        if length >= self.max_cache_len:
            raise ValueError(f"The cache is full: it holds {length} of {self.max_cache_len} tokens.")
        self.slot.fill_(length - 1)
        self.origin.copy_(origin[:, None])
        self.spans[:, :, 0].copy_(self.origin.expand(-1, self.spans.shape[1]))

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append `tokens` [B] and give the logits [B, V] of what follows: float32, overwritten by the next run."""
        self.token.copy_(tokens[:, None])
        if self.graph is None:
            return self._forward()
        self.graph.replay()
        assert self.logits is not None
        return self.logits

    def capture(self, length: int, origin: torch.Tensor) -> None:
        """Record the step as a graph. Writes at position `length`, which the first `run` writes again."""
        stream = torch.cuda.Stream(self.slot.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.slot.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self.begin(length, origin)
                self._forward()
        torch.cuda.current_stream(self.slot.device).wait_stream(stream)
        self.begin(length, origin)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self._forward()
        self.graph = graph

    def _forward(self) -> torch.Tensor:
        self.slot += 1
        end = self.slot + 1
        torch.maximum(self.origin, end - self.windows, out=self.spans[:, :, 1])
        self.spans[:, :, 2].copy_(end.expand(self.spans.shape[:2]))
        output = self.model(
            input_ids=self.token,
            position_ids=self.slot - self.origin,
            attention_mask=self.spans.view(self.batch_size, -1, 1, 1),
            past_key_values=self.cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


class _StepLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """A layer's storage [B, H, S, D], written at a position that is read on the device."""

    is_compileable = False
    is_sliding = False

    def __init__(self, layer: StaticContiguousLayer, batch_size: int, slot: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = self.keys, self.values = layer.room(batch_size)
        self.slot, self.is_initialized = slot, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room.index_copy_(2, self.slot, states)
        return self.room

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("a step's layers have their storage from the start")

    # A graph must not hold a length. Whatever a model computes from this one is wrong at every step, and so it is seen
    # when the captured step is compared with an ordinary one.
    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_max_length(self) -> int:
        return self.room[0].shape[2]

    get_max_cache_shape = get_max_length
