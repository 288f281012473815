"""The sequences of a cache:

appended in atomic steps, cropped, rearranged by batch row; one thread at a time.
"""

import logging
from collections.abc import Iterator
from threading import Lock, get_ident
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from hf_static_kv import compat
from hf_static_kv.cache import debug, layout
from hf_static_kv.cache.hybrid import HybridCache, Moment
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.layout import LayerPlan, check_positive
from hf_static_kv.cache.request import (
    PAIR_NEEDED,
    Request,
    check_request,
    is_in_use,
    running_model,
    running_request,
)
from hf_static_kv.cache.states import select_states, warn_of_continuation

logger = logging.getLogger(__name__)
_TAKING_OVER = Lock()  # global: a cache that holds a lock cannot be copied


class SequenceCache(HybridCache):
    """Writes, advances, crops, and knows the tokens as far as `generate` tells.

    See `StaticContiguousCache`.
    """

    def _build(self, plans: list[LayerPlan], max_cache_len: int) -> None:
        self._step_size: tuple[int, int] | None = None  # (batch, tokens) of the step in progress
        self._thread = 0  # the thread that used the cache last
        self.grows = False
        self._known_ids: Tensor | None = (
            None  # [B, k], the first tokens of the sequence as far as they are known
        )
        super()._build(plans, max_cache_len)

    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # `generate` sets this on a user's cache before its first pass (transformers 5.17 to 5.22):
        # check the call here.
        if self.is_unfinished:  # an earlier call has failed
            self._take_over_and_discard()
        if (request := running_request()) is None:
            return
        if isinstance(request.custom_generate, type):
            name = request.custom_generate.__name__
            raise TypeError(f"custom_generate takes an object and not a class: pass {name}().")
        if request.custom_generate is None:  # a custom loop may use the prompt in another way
            self.begin_call(request)

    def begin_call(self, request: Request) -> None:
        """Before a first pass:

        refuse what this cache cannot serve, else remember the tokens of the prompt.
        """
        self._take_over_and_discard()
        known_ids = None if any(layer.was_assigned for layer in self.kv_layers) else self._known_ids
        check_request(request, self.seq_len, None if self.grows else self.max_cache_len, known_ids)
        if (
            self.seq_len
            and self.stateful_layers
            and (new := request.prompt_length - self.seq_len) > 1
        ):
            warn_of_continuation(request.model, new)
        if request.tokens is not None:
            self.remember(request.tokens, request.past)

    def _take_over_and_discard(self) -> None:
        if self._thread != get_ident():
            self._take_over("begins a call")
        if self.is_unfinished:
            self._discard_unfinished()

    @property
    def known_ids(self) -> Tensor | None:
        """The tokens [B, k] of the first k positions, as far as `generate` has told them; None
        where it has not.
        """
        return self._known_ids

    def remember(self, input_ids: Tensor, start: int = 0) -> None:
        """The sequences have these tokens [B, n] from position `start` on; a later prompt with
        others is refused.
        """
        known = self._known_ids
        if start == 0:
            self._known_ids = input_ids.clone()
        elif known is not None and known.shape[1] >= start and len(known) == len(input_ids):
            self._known_ids = torch.cat([known[:, :start], input_ids], dim=1)

    def _take_over(self, doing: str, amid_a_step: bool = False) -> None:
        """Another thread used the cache last: raise if it still does."""
        deadline = (
            monotonic() + 0.5
        )  # it may be about to return: its streamer ends before its call does
        while not amid_a_step and is_in_use(self, self._thread) and monotonic() < deadline:
            sleep(0.005)
        with _TAKING_OVER:
            if self._thread and (amid_a_step or is_in_use(self, self._thread)):
                raise RuntimeError(
                    f"Thread {get_ident()} {doing} while thread {self._thread} uses this cache at "
                    f"seq_len={self.seq_len}. A cache holds one sequence at a time: build one for "
                    "each thread, or let one call end before the next begins."
                )
            self._thread = get_ident()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states [B, H, n, D] after the cached tokens and return views of all that their
        queries may see.

        The views are slices of the storage: [B, H, seq_len + n, D], or for a sliding layer from the
        oldest position that a query may see. States that do not fit are refused before this layer
        writes anything.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"layer_idx={layer_idx} is out of range: this cache has layers 0 to "
                f"{len(self.layers) - 1}. Build it with the config of the model that runs."
            )
        if not self._plans[layer_idx].has_keys:
            raise ValueError(
                f"Layer {layer_idx} brings keys, and by the config of the cache it has none."
            )
        layer = self.layers[layer_idx]
        self._make_room(layer, layer_idx, key_states, value_states)
        if layer_idx in self._unfitted:
            layer.check(key_states, value_states, has_storage=False)
            self._fit_storage(layer_idx, key_states, value_states)
        views = self._append(layer, layer_idx, key_states, value_states)
        if layer_idx == debug.logged_layer:
            end, message = (
                layer.length + layer.pending,
                "layer %d wrote [%d, %d) and returned [%d, %d)",
            )
            debug.logger.debug(message, layer_idx, layer.length, end, end - views[0].shape[2], end)
        self._written.add(layer_idx)
        self._complete_if_all_took_part(layer_idx)
        return views

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Write the index keys [B, n, D] of a layer and return those of all its tokens, [B, seq_len
        + n, D]: a view.
        """
        layer = self.layers[layer_idx] if 0 <= layer_idx < len(self.layers) else None
        if (index := getattr(layer, "index_layer", None)) is None:
            raise ValueError(
                f"Layer {layer_idx} brings index keys, and by the config of the cache it has none."
            )
        keys = indexer_key_states.unsqueeze(1)  # [B, 1, n, D]
        values = keys[..., :0]
        self._make_room(index, layer_idx, keys, values)
        if not index.is_initialized or index.device != keys.device:
            index.check(keys, values, has_storage=False)
            self._allocate_indexes(keys, values)
        view, _ = self._append(index, layer_idx, keys, values)
        self._indexed.add(layer_idx)
        self._complete_if_all_took_part(layer_idx)
        return view[:, 0]

    def _make_room(
        self, layer: StaticContiguousLayer, layer_idx: int, keys: Tensor, values: Tensor
    ) -> None:
        """Before anything is allocated:

        take the cache over from another thread, grow, give up storage of a dtype.
        """
        if (
            not torch.compiler.is_compiling() and self._thread != get_ident()
        ):  # first: only one thread may allocate
            self._take_over(
                f"writes layer {layer_idx}", self._step_size is not None and not layer.pending
            )
        if self.grows and layer.length + keys.shape[2] > self._max_cache_len:
            self.grow(max(2 * self._max_cache_len, layer.length + keys.shape[2]))
        is_reused = (
            self.grows and self._step_size is None and layer.length == 0 and layer.is_initialized
        )
        if is_reused and (keys.dtype, values.dtype) != (layer.dtype, layer.value_dtype):
            # autocast inside a model's `forward` began or ended since the last call
            self._release()

    def _append(
        self, layer: StaticContiguousLayer, layer_idx: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Check the states and write them in the step in progress, or in a new one."""
        layer.check(keys, values)
        size = keys.shape[0], keys.shape[2]
        if layer.pending or size != self._step_size:
            self._begin_step(layer, layer_idx, size)
        return layer.write(keys, values)

    def _begin_step(
        self, layer: StaticContiguousLayer, layer_idx: int, size: tuple[int, int]
    ) -> None:
        if layer.pending:  # the last pass failed, or the model lacks layers
            if (model := running_model()) is not None:
                is_part_of_pair = model.config.is_encoder_decoder and not is_in_use(
                    self, get_ident()
                )
                if model.config.is_encoder_decoder and not is_part_of_pair:
                    raise ValueError(PAIR_NEEDED)
                layout.refuse_missing_layers(model, len(self.layers))
                if (
                    not is_part_of_pair
                ):  # `begin_call` is not called for a part, which may be of a failed call
                    self.refuse_unfinished()
            self._discard_unfinished()
            self._known_ids = None
        if self._step_size is not None and self._step_size != size:
            raise ValueError(
                f"Layer {layer_idx} brings (batch, tokens) = {size} into a step where earlier "
                f"layers brought {self._step_size}. Give every layer the same tokens, or call "
                f"advance({self._step_size[1]}) first."
            )
        known = self._known_ids
        if (
            known is not None
            and not torch.compiler.is_compiling()
            and known.shape[1] > layer.length
        ):
            # Tokens that `generate` has announced belong to its own passes, not to those of another
            # caller.
            self._known_ids = (
                known if compat.generate_locals() is not None else known[:, : layer.length]
            )
        self._step_size = size

    def _discard_unfinished(self) -> None:
        self._refuse_moved_states()
        logger.warning(
            f"The last forward pass wrote layers {sorted(self._written)} of {len(self.layers)} "
            "and did not finish: it is discarded, and writing starts again at position "
            f"{self.seq_len}."
        )
        self._end_step()

    def _complete_step(self) -> None:
        if self._step_size is not None and not torch.compiler.is_compiling():
            debug.log_step(self.seq_len, self._step_size[1], self._step_size[0], self.max_cache_len)
        self._end_step(StaticContiguousLayer.commit)

    def _end_step(self, end: Any = StaticContiguousLayer.discard) -> None:
        super()._end_step(end)
        self._step_size = None

    def return_to(self, moment: Moment) -> None:
        super().return_to(moment)
        if self._known_ids is not None:
            self._known_ids = self._known_ids[:, : self.seq_len]

    def advance(self, n: int) -> None:
        """Complete a step of `n` tokens by hand, when not all layers are written."""
        if self._step_size is None:
            raise ValueError(
                f"advance({n}): no step is in progress. `seq_len` is {self.seq_len} and moves by "
                f"itself when all {self._num_writers} layers have written; call `update` first."
            )
        if n != self._step_size[1]:
            raise ValueError(
                f"advance({n}): the step in progress has {self._step_size[1]} tokens. Advance by "
                "that."
            )
        self._complete_step()

    def mark_written(self, n: int) -> None:
        """Append `n` tokens that a kernel or a captured graph has written to every layer, from
        `seq_len` on.
        """
        free = min(
            min(layer.max_cache_len, layer.offset + layer.num_slots) - layer.length
            for layer in self.kv_layers
        )
        if not 0 <= n <= free or self._step_size is not None:
            raise ValueError(
                f"mark_written({n}): {free} positions are free after the {self.seq_len} cached "
                "tokens" + (", and a step is in progress." if self._step_size else ".")
            )
        for layer in self.kv_layers:
            layer.length += n

    def make_room(self) -> int:
        """How many tokens can be marked as written before this is called again: compact layers move
        together.

        Those of one window get one offset. They differ after a pass that failed when some layers
        had moved.
        """
        compact = [layer for layer in self.kv_layers if layer.is_compact]
        for layer in compact:
            layer.make_room(1)
        offsets = self.offsets
        for layer in compact:
            if layer.offset != offsets[layer.sliding_window]:
                layer.move_together(offsets[layer.sliding_window])
        ends = [layer.offset + layer.num_slots for layer in compact]
        return min([self._max_cache_len, *ends]) - self.seq_len

    @property
    def offsets(self) -> dict[int | None, int]:
        """The position of slot 0 in compact layers, by window."""
        layers = sorted(
            (layer for layer in self.kv_layers if layer.is_compact), key=lambda layer: layer.offset
        )
        return {layer.sliding_window: layer.offset for layer in layers}  # the largest of a window

    @property
    def seq_len(self) -> int:
        """Number of tokens in the cache; the next token has this position."""
        return int(self.get_seq_length())

    @property
    def max_cache_len(self) -> int:
        """The capacity in tokens."""
        return self._max_cache_len

    @property
    def is_initialized(self) -> bool:
        # Model code reads this as 'the prompt has been computed' (prefix-LM masks): storage alone
        # is not enough.
        return self.seq_len > 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: `crop(-n)` removes n, exactly, in sliding layers too. No key or
        value is touched.

        A compact layer goes back as far as it keeps positions, 64 tokens at least. A recurrent
        state cannot go back: refused, but for convolutions that were told to keep their past.
        """
        self.refuse_unfinished()
        filled = [layer for layer in self.kv_layers if layer.length] or self.kv_layers[:1]
        for layer in filled:
            layer.check_crop(int(tokens_to_remove))
        self._crop_states(int(tokens_to_remove))
        for layer in filled:
            layer.crop(tokens_to_remove)
        self._end_step()
        if self._known_ids is not None:
            self._known_ids = self._known_ids[:, : self.seq_len]

    def can_crop_to(self, length: int) -> bool:
        """Whether the sequence can be shortened to this length."""
        removed = self.seq_len - length
        if self.stateful_layers and removed:
            return False
        return length == 0 or all(removed <= layer.num_croppable for layer in self.kv_layers)

    def reset(self) -> None:
        """Remove all tokens, keep the storage and its address.

        No key or value is touched, states become zero.
        """
        self._end_step(StaticContiguousLayer.reset)
        self._reset_states()
        self._known_ids = None

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """(keys, values, window) of each layer as `DynamicCache` gives them:

        of a sliding layer the last window - 1.
        """
        for layer in self.layers:
            keys, values, window = layer.keys, layer.values, layer.sliding_window
            if keys is None or window is None:
                yield keys, values, None if window is None else torch.tensor(window)
            else:
                newest = slice(1 - window, None)
                yield (
                    keys[:, :, newest],
                    values[:, :, newest],
                    torch.tensor(window, device=keys.device),
                )

    @property
    def batch_size(self) -> int:
        """Batch rows of the sequences; of the storage while the cache is empty; -1 before
        allocation.
        """
        filled = [layer.batch_size for layer in self.kv_layers if layer.length]
        allocated = [layer.max_batch_size for layer in self.kv_layers if layer.is_initialized]
        return (filled or allocated or [-1])[0]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Batch row i becomes what row `beam_idx[i]` is now (beam search), in place; as
        `batch_select_indices`.
        """
        if self.seq_len and len(beam_idx) != self.batch_size:
            raise ValueError(
                f"reorder_cache got {len(beam_idx)} indices for a batch of {self.batch_size}. "
                "Give one for each row, or use batch_select_indices to change the number of rows."
            )
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch (indices or a boolean mask), in this order, in place.

        Needs memory for the tokens of one layer; without it nothing is changed. An interrupt or a
        device error while states are copied empties the cache.
        """
        self.refuse_unfinished()
        filled = [layer for layer in self.kv_layers if layer.length]
        if not filled:
            return
        batch_size, max_batch_size = self.batch_size, min(layer.max_batch_size for layer in filled)
        if indices.dtype == torch.bool:
            if len(indices) != batch_size:
                raise ValueError(
                    f"The mask has {len(indices)} entries for a batch of {batch_size}: give one a "
                    "row."
                )
            indices = indices.nonzero().squeeze(1)
        # Read on the host on purpose: an index out of range must not become a device-side assert.
        if bad := [i for i in indices.tolist() if not 0 <= i < batch_size]:
            raise ValueError(
                f"Row {bad[0]} is out of range: the batch has rows 0 to {batch_size - 1}."
            )
        if self.grows and len(indices) > max_batch_size:
            self._move(self._max_cache_len, len(indices))
        elif not 1 <= len(indices) <= max_batch_size:
            raise ValueError(
                f"{len(indices)} rows do not fit: the storage has {max_batch_size}. Build the "
                f"cache with batch_size >= {max(1, len(indices))} and select at least one row."
            )
        self._end_step()
        self._known_ids = None
        length = max(layer.length for layer in filled)
        groups = {id(layer.group): layer.group for layer in filled if layer.group is not None}
        lengths = {key: min(length, group.keys.shape[3]) for key, group in groups.items()}
        indices_on = {group.keys.device: indices.to(group.keys.device) for group in groups.values()}
        # All memory is allocated first, so that running out of it leaves every layer as it was.
        largest = {
            key: group.views(0, len(indices), 0, lengths[key]) for key, group in groups.items()
        }
        scratch = {
            key: (torch.empty_like(keys), torch.empty_like(values))
            for key, (keys, values) in largest.items()
        }
        try:
            for layer in filled:
                layer.select_rows(indices_on[layer.device], scratch[id(layer.group)])
            for layer in self.stateful_layers:
                select_states(layer, indices)
        except BaseException:
            self.reset()  # some layers have the new rows and some the old ones
            raise

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each batch row becomes `repeats` rows in succession, in place; the storage must have that
        many.
        """
        check_positive(repeats=repeats)
        if self.seq_len:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))
