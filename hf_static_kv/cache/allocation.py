"""The layers of a cache and the storage that they share: allocation, groups, pickling."""

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
from hf_static_kv.cache.layout import LayerPlan, check_positive
from hf_static_kv.cache.ranks import are_connected, on_all_ranks
from hf_static_kv.cache.request import running_model
from hf_static_kv.cache.states import StatefulLayer, state_tensors
from hf_static_kv.cache.storage import Dtypes, LayerShape, Members, StorageGroup, allocate_groups

logger = logging.getLogger(__name__)
PerLayer = int | Sequence[int]  # one number for all layers, or one for each
Place = tuple[LayerShape, torch.device]  # what a layer stores, and where


class AllocatedCache(Cache):
    """Layers in groups:

    those of one shape on one device share one pair of tensors. See `StaticContiguousCache`.
    """

    layers: list[Any]  # `StaticContiguousLayer`, or transformers' own where a layer has no keys

    def _build(self, plans: list[LayerPlan], max_cache_len: int) -> None:
        self._plans, self._max_cache_len = plans, max_cache_len
        self._groups: list[StorageGroup] = []
        # Layers that have no storage, or storage of the shape of another layer's states.
        # `_fit_storage` sees to them.
        self._unfitted = {i for i, plan in enumerate(plans) if plan.has_keys}
        super().__init__(layers=[_new_layer(plan, max_cache_len) for plan in plans])

    @property
    def kv_layers(self) -> list[StaticContiguousLayer]:
        """The layers that have keys and values; those of index keys, too."""
        return stored_layers(self.layers)

    @property
    def index_layers(self) -> dict[int, StaticContiguousLayer]:
        """By `layer_idx` the index keys of sparse attention, in layers of one head without values."""
        return {
            i: layer.index_layer
            for i, layer in enumerate(self.layers)
            if isinstance(layer, IndexedLayer)
        }

    @property
    def stateful_layers(self) -> list[Any]:
        """The layers that have a recurrent state; none but in hybrid models."""
        pairs = zip(self.layers, self._plans, strict=True)
        return [layer for layer, plan in pairs if plan.num_states]

    def allocate_places(
        self,
        places: dict[int, Place],
        batch_size: int,
        dtypes: Dtypes,
        model: Any = None,
        layers: Any = None,
    ) -> None:
        """Storage for layers of the cache that have none, or for those of its `index_layers`."""
        alike: dict[Place, list[int]] = {}
        for layer_idx, place in places.items():
            alike.setdefault(place, []).append(layer_idx)
        members: list[Members] = [(*place, indices) for place, indices in alike.items()]
        self._allocate_groups(members, batch_size, dtypes, model, layers)
        self._unfitted -= set(places)

    def _allocate_groups(
        self,
        members: list[Members],
        batch_size: int,
        dtypes: Dtypes,
        model: Any,
        layers: Any = None,
    ) -> None:
        # A list and no dict: under `torch.compile` a shape may hold symbols, which have no hash.
        groups = on_all_ranks(
            model, lambda: allocate_groups(members, self._max_cache_len, batch_size, dtypes)
        )
        for group, (_, _, layer_indices) in zip(groups, members, strict=True):
            for index, layer_idx in enumerate(layer_indices):
                (layers or self.layers)[layer_idx].use_storage(group, index)
        self._groups.extend(groups)

    def planned_shape(self, layer_idx: int, default: LayerShape) -> LayerShape:
        """The shape of a layer, from its storage or else the config; the default where the config
        does not tell.
        """
        layer, plan = self.layers[layer_idx], self._plans[layer_idx]
        return layer.shape if layer.is_initialized else plan.shape or plan.stored(default)

    def _fit_storage(self, layer_idx: int, key_states: Tensor, value_states: Tensor) -> None:
        """Before an unfitted layer writes: storage of the shape and on the device of its states.

        Other unfitted layers share it if they are planned alike. Each is checked in turn, by its
        own first states.
        """
        layer, plan = self.layers[layer_idx], self._plans[layer_idx]
        shape, device = (
            LayerShape.of(key_states, value_states, plan.compact_window),
            key_states.device,
        )
        alike = []
        if not layer.is_initialized:
            alike = [i for i in self._without_storage() if self._plans[i].stores_like(plan)]
        elif (layer.shape, layer.device) != (shape, device):
            logger.warning(
                f"Layer {layer_idx} has {shape} on {device}, unlike the config and the first "
                "layer: new storage is allocated for it and the layers with the same plan, and "
                "their old storage stays unused."
                + (" `from_model` places every layer at once." if shape == layer.shape else "")
            )
            alike = [i for i in sorted(self._unfitted) if self._plans[i] == plan]
        if alike:
            dtypes = key_states.dtype, value_states.dtype
            self._allocate_groups(
                [(shape, device, alike)], key_states.shape[0], dtypes, _running_model()
            )
        self._unfitted.discard(layer_idx)

    def _allocate_indexes(self, keys: Tensor, values: Tensor) -> None:
        """Storage like these states for all empty index layers beside keys on the same device."""
        indexes, device = self.index_layers, keys.device
        beside = {i: self.layers[i] for i, index in indexes.items() if not index.length}
        alike = [
            i for i, layer in beside.items() if not layer.is_initialized or layer.device == device
        ]
        rows = max(
            [len(keys), *(layer.max_batch_size for layer in self.kv_layers if layer.is_initialized)]
        )
        dtypes = keys.dtype, values.dtype
        self._allocate_groups(
            [(LayerShape.of(keys, values), device, alike)], rows, dtypes, _running_model(), indexes
        )

    def _without_storage(self) -> list[int]:
        keyed = ((i, layer) for i, layer in enumerate(self.layers) if self._plans[i].has_keys)
        return [i for i, layer in keyed if not layer.is_initialized]

    def _release(self) -> None:
        """Give up the storage of an empty cache:

        the next pass allocates, in the dtype of its states.
        """
        for layer in self.kv_layers:
            layer.group, layer.is_initialized = None, False
        self._groups, self._unfitted = [], set(self._without_storage())

    def grow(self, max_cache_len: int) -> None:
        """Raise the capacity:

        all states move to longer storage. Old and new storage are both in memory meanwhile.
        """
        check_positive(max_cache_len=max_cache_len)
        if max_cache_len <= self._max_cache_len:
            raise ValueError(
                f"grow({max_cache_len}): the capacity is {self._max_cache_len} already. Give a "
                "larger one."
            )
        self._move(max_cache_len)

    def _move(self, max_cache_len: int, batch_size: int = 1) -> None:
        """All states to larger storage: of this capacity, and of at least this many batch rows."""
        moved = on_all_ranks(
            _running_model(),
            lambda: {
                id(group): group.copy_with_capacity(max_cache_len, batch_size)
                for group in self._groups
            },
        )
        for layer in self.kv_layers:
            layer.max_cache_len, layer.group = max_cache_len, moved.get(id(layer.group))
            if layer.group is not None:
                layer.max_batch_size, layer.num_slots = (
                    layer.group.keys.shape[1],
                    layer.group.keys.shape[3],
                )
        self._groups, self._max_cache_len = list(moved.values()), max_cache_len

    def early_initialization(
        self,
        batch_size: int,
        num_heads: PerLayer,
        head_dim: PerLayer,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """transformers' way to allocate in advance; layers that have storage already keep it."""
        check_positive(batch_size=batch_size)
        heads = for_each_layer("num_heads", num_heads, len(self))
        dims = for_each_layer("head_dim", head_dim, len(self))
        sizes = {
            i: self._plans[i].stored(LayerShape(heads[i], dims[i], dims[i]))
            for i in self._without_storage()
        }
        places = {i: (shape, torch.device(device)) for i, shape in sizes.items()}
        self.allocate_places(places, batch_size, (dtype, dtype))

    @property
    def storage_groups(self) -> tuple[StorageGroup, ...]:
        """The pairs of tensors:

        one pair for each shape and device, so one for most models; none before allocation.
        """
        return tuple(self._groups)

    @property
    def key_storage(self) -> Tensor:
        """All keys, [L, B, H, S, D]; a `ValueError` where there is not exactly one group."""
        return self._only_group().keys

    @property
    def value_storage(self) -> Tensor:
        """All values, [L, B, H, S, D]; as `key_storage`."""
        return self._only_group().values

    def _only_group(self) -> StorageGroup:
        if not self._groups:
            raise ValueError(
                "Nothing is allocated before the first forward pass; `from_model` allocates at "
                "once."
            )
        if len(self._groups) > 1:
            shapes = "; ".join(f"{group.shape} on {group.keys.device}" for group in self._groups)
            raise ValueError(
                f"The layers form {len(self._groups)} groups ({shapes}): read `storage_groups`."
            )
        return self._groups[0]

    @property
    def is_allocated(self) -> bool:
        """Whether every layer that has keys has storage of its own shape."""
        return not self._unfitted

    @property
    def memory_bytes(self) -> int:
        """Bytes of the allocated storage and of recurrent states; `cache_bytes` tells the first
        before allocation.
        """
        states = [tensor for layer in self.layers for tensor in state_tensors(layer)]
        return sum(group.num_bytes for group in self._groups) + sum(
            tensor.nbytes for tensor in states
        )

    def __getstate__(self) -> dict[str, Any]:
        """For a pickle:

        the cached tokens without the free positions. Loaded, the cache has its capacity again.
        """
        used = [
            sizes for layer in self.kv_layers if layer.is_initialized for sizes in layer.used()
        ] or [(0, 0)]
        rows, length = map(max, zip(*used, strict=True))
        groups = {id(group): group.to_pickle(rows, length) for group in self._groups}
        layers = [copy.copy(layer) for layer in self.layers]
        for layer in stored_layers(layers):
            layer.group = groups.get(id(layer.group))
        return {**self.__dict__, "_groups": list(groups.values()), "layers": layers}


def _new_layer(plan: LayerPlan, max_cache_len: int) -> Any:
    if not plan.has_keys:
        return LinearAttentionLayer(number_of_states=max(1, plan.num_states))
    sizes = max_cache_len, plan.sliding_window, plan.compact_window is not None
    if plan.num_states:
        return StatefulLayer(*sizes, plan.num_states)
    return StaticContiguousLayer(*sizes) if plan.index_shape is None else IndexedLayer(*sizes[:2])


def _running_model() -> Any:
    """The model whose pass allocates, where there may be other ranks; a compiled pass has no frames
    to find it in.
    """
    return running_model() if are_connected() and not torch.compiler.is_compiling() else None


def for_each_layer(name: str, number: PerLayer, num_layers: int) -> list[int]:
    numbers = [number] * num_layers if isinstance(number, int) else list(number)
    if len(numbers) != num_layers:
        raise ValueError(
            f"{name} has {len(numbers)} entries for {num_layers} layers: give one, or one for each."
        )
    check_positive(
        **{name if isinstance(number, int) else f"{name}[{i}]": n for i, n in enumerate(numbers)}
    )
    return numbers
