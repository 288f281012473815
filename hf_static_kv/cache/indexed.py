"""Layers of sparse attention: an index of keys selects the tokens to attend to."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_static_kv.cache.layer import StaticContiguousLayer


class IndexedLayer(StaticContiguousLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Keys and values, and the index keys of the same tokens in `index_layer`.

    That layer has one head and no values. Names as in transformers' own layer.
    """

    def __init__(self, max_cache_len: int, sliding_window: int | None = None) -> None:
        super().__init__(max_cache_len, sliding_window)
        self.index_layer = StaticContiguousLayer(max_cache_len)
        # [P, B, n], with those of an open or failed pass
        self._positions: Tensor | None = None

    def __copy__(self) -> "IndexedLayer":
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__, index_layer=copy.copy(self.index_layer))
        return copied

    @property
    def indexer_keys(self) -> Tensor | None:
        """The index keys [B, length, D], a view; None before allocation."""
        keys = self.index_layer.keys
        return None if keys is None else keys[:, 0]

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions [P, B, length] that a model keeps here for its index (Qwen4)."""
        if self._positions is None or not self.length:
            return None
        return self._positions[..., : self.length]

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        self._positions = positions

    def select_rows(self, indices: Tensor, scratch: Sequence[Tensor]) -> None:
        super().select_rows(indices, scratch)
        if self._positions is not None:
            self._positions = self._positions.index_select(1, indices)


def stored_layers(layers: list[Any]) -> list[StaticContiguousLayer]:
    """All that layers store by position: keys and values, and index keys."""
    stored = []
    for layer in layers:
        if isinstance(layer, StaticContiguousLayer):
            stored.append(layer)
        if "index_layer" in vars(
            layer
        ):  # `isinstance` takes ten times as long for an abstract class
            stored.append(layer.index_layer)
    return stored
