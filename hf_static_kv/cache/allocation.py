"""The layers of a cache and the storage that they share."""

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from hf_static_kv.cache.indexed import IndexedLayer, stored_layers
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.layout import LayerPlan, PerLayer, check_positive, for_each_layer
from hf_static_kv.cache.ranks import are_connected, on_all_ranks
from hf_static_kv.cache.request import running_model
from hf_static_kv.cache.states import StatefulLayer, select_states, state_tensors
from hf_static_kv.cache.storage import Dtypes, LayerShape, Members, StorageGroup, allocate_groups

logger = logging.getLogger(__name__)
Place = tuple[LayerShape, torch.device]  # what a layer stores, and where


class AllocatedCache(Cache):
    """The layers of a cache. Those of one shape on one device share a `StorageGroup`."""

    # `StaticContiguousLayer`, or transformers' own if a layer has no keys.
    layers: list[Any]

    def _build(self, plans: list[LayerPlan], max_cache_len: int) -> None:
        self._plans = plans
        self._max_cache_len = max_cache_len
        self._groups: list[StorageGroup] = []
        # Layers without storage, or with storage of another layer's shape.
        self._unfitted = {i for i, plan in enumerate(plans) if plan.has_keys}
        super().__init__(layers=[_new_layer(plan, max_cache_len) for plan in plans])

    @property
    def kv_layers(self) -> list[StaticContiguousLayer]:
        """The layers that have keys and values, or index keys."""
        return stored_layers(self.layers)

    @property
    def index_layers(self) -> dict[int, StaticContiguousLayer]:
        numbered = enumerate(self.layers)
        return {i: layer.index_layer for i, layer in numbered if isinstance(layer, IndexedLayer)}

    @property
    def stateful_layers(self) -> list[Any]:
        pairs = zip(self.layers, self._plans, strict=True)
        return [layer for layer, plan in pairs if plan.num_states]

    # --- allocation

    def allocate_places(
        self,
        places: dict[int, Place],
        batch_size: int,
        dtypes: Dtypes,
        model: Any = None,
        layers: Any = None,
    ) -> None:
        alike: dict[Place, list[int]] = {}
        for layer_idx, place in places.items():
            alike.setdefault(place, []).append(layer_idx)
        members: list[Members] = [(*place, indices) for place, indices in alike.items()]
        self._allocate(members, batch_size, dtypes, model, layers)
        self._unfitted -= set(places)

    def _allocate(
        self, members: Sequence[Members], rows: int, dtypes: Dtypes, model: Any, layers: Any = None
    ) -> None:
        # A list and no dict: under `torch.compile` a shape may hold symbols, which have no hash.
        groups = on_all_ranks(
            model, lambda: allocate_groups(members, self._max_cache_len, rows, dtypes)
        )
        for group, (_, _, layer_indices) in zip(groups, members, strict=True):
            for index, layer_idx in enumerate(layer_indices):
                (layers or self.layers)[layer_idx].use_storage(group, index)
        self._groups.extend(groups)

    def planned_shape(self, layer_idx: int, default: LayerShape) -> LayerShape:
        """The shape of a layer: of its storage, else by its config, else the default."""
        layer: StaticContiguousLayer = self.layers[layer_idx]
        if layer.is_initialized:
            return layer.shape
        plan = self._plans[layer_idx]
        return plan.shape or plan.stored(default)

    def _fit_storage(self, layer_idx: int, key_states: Tensor, value_states: Tensor) -> None:
        """Give a layer storage of the shape and on the device of its first states.

        Unfitted layers that are planned alike share it until their own states come.
        """
        layer = self.layers[layer_idx]
        plan = self._plans[layer_idx]
        shape = plan.stored(LayerShape.of(key_states, value_states))
        device = key_states.device
        alike = []
        if not layer.is_initialized:
            alike = [i for i in self._without_storage() if self._plans[i].stores_like(plan)]
        elif (layer.shape, layer.device) != (shape, device):
            logger.warning(
                f"Layer {layer_idx} has {shape} on {device}, unlike the config and the first "
                "layer: it gets storage of its own. `from_model` places every layer at once."
            )
            alike = [i for i in sorted(self._unfitted) if self._plans[i] == plan]
        if alike:
            dtypes = key_states.dtype, value_states.dtype
            members = [(shape, device, alike)]
            self._allocate(members, len(key_states), dtypes, _running_model())
        self._unfitted.discard(layer_idx)

    def _allocate_indexes(self, keys: Tensor, values: Tensor) -> None:
        """Allocate storage like these states for the empty index layers on their device."""
        indexes = self.index_layers
        device = keys.device
        beside = {i: self.layers[i] for i, index in indexes.items() if not index.length}
        alike = [i for i, own in beside.items() if not own.is_initialized or own.device == device]
        rows = [layer.max_batch_size for layer in self.kv_layers if layer.is_initialized]
        members = [(LayerShape.of(keys, values), device, alike)]
        dtypes = keys.dtype, values.dtype
        self._allocate(members, max([len(keys), *rows]), dtypes, _running_model(), indexes)

    def _without_storage(self) -> list[int]:
        keyed = (i for i, plan in enumerate(self._plans) if plan.has_keys)
        return [i for i in keyed if not self.layers[i].is_initialized]

    def _release(self) -> None:
        """Drop the storage of an empty cache: the next pass allocates in its own dtype."""
        for layer in self.kv_layers:
            layer.group = None
            layer.is_initialized = False
        self._groups = []
        self._unfitted = set(self._without_storage())

    def early_initialization(
        self,
        batch_size: int,
        num_heads: PerLayer,
        head_dim: PerLayer,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        check_positive(batch_size=batch_size)
        heads = for_each_layer("num_heads", num_heads, len(self))
        dims = for_each_layer("head_dim", head_dim, len(self))
        places = {}
        for i in self._without_storage():
            shape = LayerShape(heads[i], dims[i], dims[i])
            places[i] = self._plans[i].stored(shape), torch.device(device)
        self.allocate_places(places, batch_size, (dtype, dtype))

    # --- growth

    def grow(self, max_cache_len: int) -> None:
        """Move all states to longer storage. Old and new storage are both in memory meanwhile."""
        check_positive(max_cache_len=max_cache_len)
        if max_cache_len <= self._max_cache_len:
            raise ValueError(
                f"grow({max_cache_len}): the capacity is {self._max_cache_len} already."
            )
        self._move(max_cache_len)

    def _move(self, max_cache_len: int, batch_size: int = 1) -> None:
        moved = on_all_ranks(
            _running_model(),
            lambda: {g: g.copy_with_capacity(max_cache_len, batch_size) for g in self._groups},
        )
        for layer in self.kv_layers:
            layer.max_cache_len = max_cache_len
            if layer.group is not None:
                layer.group = moved[layer.group]
                _, layer.max_batch_size, _, layer.num_slots, _ = layer.group.keys.shape
        self._groups = list(moved.values())
        self._max_cache_len = max_cache_len

    def reserve(self, num_tokens: int = 1) -> int:
        """Return how many tokens fit until the next call.

        Compact layers without slots for `num_tokens` are compacted.

        Layers of one window get one offset: a failed pass may have left several.
        """
        compact = [layer for layer in self.kv_layers if layer.is_compact]
        for layer in compact:
            layer.reserve(num_tokens)
        offsets = self.offsets
        for layer in compact:
            if layer.offset != offsets[layer.sliding_window]:
                layer.compact(offsets[layer.sliding_window])
        ends = [layer.offset + layer.num_slots for layer in compact]
        return min([self._max_cache_len, *ends]) - int(self.get_seq_length())

    @property
    def offsets(self) -> dict[int | None, int]:
        """The position of slot 0 in compact layers, by window; the highest if they differ."""
        compact = [layer for layer in self.kv_layers if layer.is_compact]
        compact.sort(key=lambda layer: layer.offset)
        return {layer.sliding_window: layer.offset for layer in compact}

    # --- batch rows

    def _select_rows(self, indices: Tensor) -> None:
        """Batch row i becomes what row `indices[i]` is now, in place.

        All memory is allocated first, so that a lack of it changes nothing.
        """
        filled = [layer for layer in self.kv_layers if layer.length]
        length = max(layer.length for layer in filled)
        scratch = {}
        for layer in filled:
            if layer.group not in scratch:
                rows = [own[: len(indices), :, :length] for own in layer.storage]
                buffers = [torch.empty_like(states) for states in rows]
                scratch[layer.group] = indices.to(layer.device), buffers
        try:
            for layer in filled:
                layer.select_rows(*scratch[layer.group])
            for layer in self.stateful_layers:
                select_states(layer, indices)
        except BaseException:
            # Some layers have the new rows and some the old ones.
            self.reset()  # type: ignore[no-untyped-call]
            raise

    # --- what is allocated

    @property
    def storage_groups(self) -> tuple[StorageGroup, ...]:
        """The pairs of tensors: one for each shape and device."""
        return tuple(self._groups)

    @property
    def key_storage(self) -> Tensor:
        """All keys, [L, B, H, S, D], if there is one group."""
        return self._only_group().keys

    @property
    def value_storage(self) -> Tensor:
        """All values, [L, B, H, S, D], if there is one group."""
        return self._only_group().values

    def _only_group(self) -> StorageGroup:
        if not self._groups:
            raise ValueError("The first forward pass allocates; `from_model` allocates at once.")
        if len(self._groups) > 1:
            raise ValueError(
                f"The layers form {len(self._groups)} groups, by shape and device: read "
                "`storage_groups`."
            )
        return self._groups[0]

    @property
    def is_allocated(self) -> bool:
        """Whether every layer that has keys has storage of its own shape."""
        return not self._unfitted

    @property
    def max_cache_len(self) -> int:
        """The capacity in tokens."""
        return self._max_cache_len

    @property
    def kv_dtype(self) -> str | None:
        """Of codes in the place of keys and values; None: they are stored as they are."""
        return self._plans[0].kv_dtype

    @property
    def memory_bytes(self) -> int:
        """Bytes of storage and recurrent states."""
        states = [tensor.nbytes for layer in self.layers for tensor in state_tensors(layer)]
        return sum(group.num_bytes for group in self._groups) + sum(states)

    def allocate_like(self, other: "AllocatedCache", rows: int) -> None:
        """Storage for states like those of `other`; as compact as the layers are here."""
        keyed = [i for i, plan in enumerate(self._plans) if plan.has_keys]
        like = [other.layers[i] for i in keyed]
        places = {
            i: (self._plans[i].stored(layer.shape), layer.device)
            for i, layer in zip(keyed, like, strict=True)
        }
        self.allocate_places(places, rows, (like[0].dtype, like[0].value_dtype))

    def bytes_of_rows(self, max_cache_len: int, rows: int, is_compact: bool = False) -> int:
        """Of what `for_rows` gives."""
        return sum(
            (layer.shape if is_compact else layer.shape.of_a_token).num_bytes(
                max_cache_len, rows, (layer.dtype, layer.value_dtype)
            )
            for layer in self.kv_layers
        )

    def is_like(self, other: "AllocatedCache") -> bool:
        """Whether both can hold the same states."""
        kinds = (
            [(own.shape.of_a_token, own.dtype, own.value_dtype, own.device) for own in layers]
            for layers in (self.kv_layers, other.kv_layers)
        )
        return next(kinds) == next(kinds)

    # --- copies

    def __getstate__(self) -> dict[str, Any]:
        """For a pickle: without the free positions, which are there again when it is loaded."""
        stored = (layer for layer in self.kv_layers if layer.is_initialized)
        used = [sizes for layer in stored for sizes in layer.used()] or [(0, 0)]
        rows, length = map(max, zip(*used, strict=True))
        return self._state_on({group: group.to_pickle(rows, length) for group in self._groups})

    def _state_on(self, groups: dict[Any, StorageGroup]) -> dict[str, Any]:
        layers = [copy.copy(layer) for layer in self.layers]
        for layer in stored_layers(layers):
            layer.group = groups.get(layer.group)
        return {**self.__dict__, "_groups": list(groups.values()), "layers": layers}


def _new_layer(plan: LayerPlan, max_cache_len: int) -> Any:
    if not plan.has_keys:
        return LinearAttentionLayer(number_of_states=max(1, plan.num_states))
    layer = _new_keyed_layer(plan, max_cache_len)
    layer.kv_dtype = plan.kv_dtype
    return layer


def _new_keyed_layer(plan: LayerPlan, max_cache_len: int) -> StaticContiguousLayer:
    if plan.index_shape is not None and not plan.num_states:
        return IndexedLayer(max_cache_len, plan.sliding_window)
    sizes = max_cache_len, plan.sliding_window, plan.compact_window is not None
    if plan.num_states:
        return StatefulLayer(*sizes, plan.num_states)
    return StaticContiguousLayer(*sizes)


def _running_model() -> Any:
    """The model whose pass allocates, if there may be other ranks."""
    if are_connected() and not torch.compiler.is_compiling():
        return running_model()
    return None
