"""`StaticContiguousCache`, the drop-in for `generate`: all ways to build one, and its files."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_static_kv.cache import layout
from hf_static_kv.cache.allocation import PerLayer, for_each_layer
from hf_static_kv.cache.files import CacheFile, header_of, save_cache, tokens_to_save
from hf_static_kv.cache.identity import ModelIdentity
from hf_static_kv.cache.layout import LayerPlan, check_positive
from hf_static_kv.cache.sequences import SequenceCache
from hf_static_kv.cache.storage import LayerShape

_ROOM = 256  # positions after the tokens of a file, where no capacity is given


class StaticContiguousCache(SequenceCache):
    """A KV cache in one contiguous, preallocated pair of tensors: `key_storage` and `value_storage`
    [L, B, H, S, D].

    The first forward pass allocates, from the states themselves; `from_model` allocates at once.
    Keys and values are stored as attention uses them, after QK-norm and RoPE. `StorageGroup` has
    the drawing.

    ```python
    cache = StaticContiguousCache(model.config, max_cache_len=4096) tokens =
    model.generate(**inputs, past_key_values=cache, max_new_tokens=256)
    cache.reset()  # before the next sequence
    ```

    A step (one forward pass) is atomic: every layer writes after the cached tokens, and `seq_len`
    moves once, when all layers have written, in any order. If the pass fails before that, the cache
    reads as before it and the same call can be retried. A pass that fails later (in the last
    layer's MLP, in layers that share earlier keys, in the head) has written all of its tokens:
    remove them with `crop(-n)`.

    Hybrid models keep a recurrent state in some layers, in transformers' own layer objects. A state
    cannot go back: `crop` is refused, and after a pass that failed on the way the cache asks for
    `reset()`.

    A cache holds one sequence, or one batch of them, at a time. Threads may use it in turn: a
    second thread that writes while the first is inside `generate` or a forward pass gets a
    `RuntimeError` (compiled models are not checked). Two loops of one thread that take turns on one
    cache mix their sequences unnoticed.

    With `sliding="compact"` a layer with a sliding window (or the chunks of Llama 4) stores 2 *
    (window + 64) positions at most. `crop` then goes back by 64 tokens at least; what is no longer
    kept is refused with the figure.

    With `cache.grows = True` a full cache doubles its capacity, as `grow` does, and takes more
    batch rows in `batch_select_indices` and `batch_repeat_interleave`, where it would raise
    otherwise.

    A forward pass outside `torch.no_grad()` works, a backward pass through the cache raises. Under
    `torch.compile` use `torch.no_grad()`.
    """

    def __init__(
        self, config: PreTrainedConfig, max_cache_len: int, *, sliding: str = "full"
    ) -> None:
        plans = layout.plan_layers(config, sliding)
        check_positive(max_cache_len=max_cache_len)
        layout.check_positions(config, max_cache_len)
        layout.warn_use_cache_off(config)
        self._build(plans, max_cache_len)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        max_cache_len: int,
        batch_size: int = 1,
        *,
        sliding: str = "full",
    ) -> "StaticContiguousCache":
        """A cache for this model, allocated now: in its dtype, each layer on the device that
        computes it.

        `batch_size` counts beams and return sequences. A smaller batch uses the first batch rows.
        """
        cache = cls(model.config, max_cache_len, sliding=sliding)
        check_positive(batch_size=batch_size)
        cache._place(model, layout.layer_devices(model, len(cache)), batch_size)
        if (generation_config := getattr(model, "generation_config", None)) is not None:
            layout.warn_use_cache_off(model.config, generation_config)
        return cache

    @classmethod
    def for_calls(
        cls, model: PreTrainedModel, max_cache_len: int, batch_size: int, sliding: str = "full"
    ) -> "StaticContiguousCache":
        """A cache that grows, for a pool. The first pass allocates, in the dtype of its states
        (autocast, quantised).

        Only a model on several devices is allocated at once: a pass tells the device of one layer
        at a time.
        """
        cache = cls.__new__(cls)
        cache._build(layout.plan_layers(model.config, sliding), max_cache_len)
        cache.grows = True
        devices = layout.layer_devices(model, len(cache))
        if len(set(devices)) > 1:
            cache._place(model, devices, batch_size)
        return cache

    def _place(self, model: PreTrainedModel, devices: list[torch.device], batch_size: int) -> None:
        shapes = layout.local_shapes(model, layout.known_shapes(self._plans, model.config))
        if shapes is not None:
            keyed = [i for i, plan in enumerate(self._plans) if plan.has_keys]
            places = {i: (shape, devices[i]) for i, shape in zip(keyed, shapes, strict=True)}
            dtypes = model.dtype, model.dtype
            self.allocate_places(places, batch_size, dtypes, model)
            indexes = {
                i: (shape, devices[i])
                for i, plan in enumerate(self._plans)
                if (shape := plan.index_shape)
            }
            self.allocate_places(indexes, batch_size, dtypes, model, self.index_layers)

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_kv_heads: PerLayer,
        head_dim: PerLayer,
        max_cache_len: int,
        *,
        value_head_dim: PerLayer | None = None,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        sliding_windows: Sequence[int | None] | None = None,
        sliding: str = "full",
    ) -> "StaticContiguousCache":
        """A cache from plain numbers; a sequence gives one for each layer. Dtype and device default
        to torch's own.

        >>> cache = StaticContiguousCache.allocate(2, 4, 8, max_cache_len=16, dtype=torch.bfloat16)
        >>> list(cache.key_storage.shape), cache.memory_bytes
        ([2, 1, 4, 16, 8], 4096)
        """
        check_positive(num_layers=num_layers, max_cache_len=max_cache_len, batch_size=batch_size)
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        sizes = {
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "value_head_dim": value_head_dim,
        }
        columns = [for_each_layer(name, size, num_layers) for name, size in sizes.items()]
        windows = list(sliding_windows) if sliding_windows is not None else [None] * num_layers
        if len(windows) != num_layers:
            raise ValueError(
                f"sliding_windows has {len(windows)} entries for {num_layers} layers: give one "
                "for each."
            )
        check_positive(
            **{f"sliding_windows[{i}]": w for i, w in enumerate(windows) if w is not None}
        )
        shapes = [LayerShape(*numbers) for numbers in zip(*columns, strict=True)]
        plans = layout.with_sliding(
            [LayerPlan(*pair) for pair in zip(shapes, windows, strict=True)], sliding
        )
        cache = cls.__new__(cls)
        cache._build(plans, max_cache_len)
        place, dtype = (
            torch.device(device or torch.get_default_device()),
            dtype or torch.get_default_dtype(),
        )
        places = {
            i: (plan.stored(shape), place)
            for i, (plan, shape) in enumerate(zip(plans, shapes, strict=True))
        }
        cache.allocate_places(places, batch_size, (dtype, dtype))
        return cache

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: PreTrainedModel,
        max_cache_len: int | None = None,
        *,
        tokens: int | None = None,
        repeat: int = 1,
        sliding: str = "full",
    ) -> "StaticContiguousCache":
        """A cache with the sequences of a file of `save`; `known_ids` are their tokens.

        `max_cache_len=None` leaves room for 256 tokens more, and the cache grows. `tokens=n` loads
        the first n. Each batch row becomes `repeat` rows. `sliding` is that of the new cache,
        whatever was saved. A file of another model, of another dtype or layout, or that is damaged
        is refused with a `ValueError`; what is checked, and how well, is in docs/files.md.
        """
        with CacheFile(path) as file:
            file.check_model(ModelIdentity.of(model))
            length = file.check_length(tokens, max_cache_len)
            check_positive(repeat=repeat)
            if max_cache_len is None:
                cache = cls.for_calls(model, length + _ROOM, file.header.num_rows * repeat, sliding)
            else:
                cache = cls(model.config, max_cache_len, sliding=sliding)
            cache.fill(file, model, length, repeat)
        return cache

    def fill(self, file: CacheFile, model: PreTrainedModel, length: int, repeat: int = 1) -> None:
        """Replace the sequences by the first tokens of a file of this model. After an error the
        cache is empty.

        A cache that grows does so if it is too short.
        """
        self.reset()
        if self.grows and length > self.max_cache_len:
            self.grow(max(2 * self.max_cache_len, length + _ROOM))
        file.check_length(length, self.max_cache_len)
        file.allocate(self, model, file.header.num_rows * repeat)
        file.read_into(self, length, repeat)
        self.remember(file.tokens[:, :length].repeat_interleave(repeat, dim=0).to(model.device))

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        model: PreTrainedModel,
        tokens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> None:
        """Write the sequences to a file that `load` reads: the tokens that are there, not the
        capacity.

        `tokens` [B, n] are the ids of the first positions, for instance what `generate` returned;
        of more than `seq_len` the first count, with fewer only their positions are saved. By
        default: those that are known, which are all after `GraphDecoder` and those of the prompt
        after plain `generate`. `attention_mask` [B, m], of the prompt or of all, tells the left
        padding. The file is written beside `path`, flushed and renamed: at every moment the old one
        or the new one is whole.
        """
        ids = tokens_to_save(self, self.known_ids, tokens)
        save_cache(self, path, header_of(self, model, ids, attention_mask))
