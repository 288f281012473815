"""One layer of the cache:

checks new states, writes them after its tokens, returns views; crops, takes assignments.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_static_kv.cache.request import CONTINUE_OR_RESET, cache_is_full
from hf_static_kv.cache.slots import LayerSlots
from hf_static_kv.cache.storage import LayerShape, allocate_groups


class StaticContiguousLayer(LayerSlots, CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Keys and values of one layer, in the first `length` of `max_cache_len` positions of its
    storage.

    A `StaticContiguousCache` gives each layer a part of its shared storage and moves all lengths
    together when a step is complete: `write` leaves the new tokens `pending`, `commit` appends
    them, `discard` drops them. In a layer that is used alone, `update` does both. `LayerSlots` has
    the drawing of a compact layer.

    ```
    position      0   1   2   3   4   5   6   7        length = 4, pending = 2, sliding_window = 3
    storage      [k] [k] [k] [k] [p] [p] [ ] [ ]
    keys         <------------->                       the tokens of the sequence
    view                 <------------->               what `write` returned for queries 4 and 5: 4 may see 2, 3 and 4
    ```
    """

    is_croppable = True

    def __init__(
        self, max_cache_len: int, sliding_window: int | None = None, is_compact: bool = False
    ) -> None:
        LayerSlots.__init__(self, max_cache_len, sliding_window, is_compact)
        self.pending = 0
        self._tail: list[
            Tensor
        ] = []  # keys and values that `commit` keeps of a step that is longer than the storage
        self.was_assigned = self._had_grad = (
            False  # since the last reset: keys or values; states that require grad
        )
        # After `layer.keys = ...` alone {"values": (batch, length)}, as values still are; after
        # `values`, of keys.
        self._old_half: dict[str, tuple[int, int]] = {}
        CacheLayerMixin.__init__(self)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        window = f", sliding_window={self.sliding_window}" if self.is_sliding else ""
        return f"{type(self).__name__}({self.length}/{self.max_cache_len}{window}{', compact' * self.is_compact})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate storage for this layer alone; the layers of a cache use shared storage instead."""
        shape = LayerShape.of(
            key_states, value_states, self.sliding_window if self.is_compact else None
        )
        members = (shape, key_states.device, [0])
        dtypes = key_states.dtype, value_states.dtype
        self.use_storage(
            allocate_groups([members], self.max_cache_len, len(key_states), dtypes)[0], index=0
        )

    def used(self) -> list[tuple[int, int]]:
        """(batch rows, slots at most) of the storage that hold tokens, pending tokens or half an
        assignment.
        """
        return [(self.batch_size, self.length + self.pending), *self._old_half.values()]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the states and return the views that attention reads, for a layer that is used
        alone.
        """
        self.check(key_states, value_states, has_storage=self.is_initialized)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        views = self.write(key_states, value_states)
        self.commit()
        return views

    def check(self, key_states: Tensor, value_states: Tensor, has_storage: bool = True) -> None:
        """Refuse states that cannot be written; `has_storage=False` compares nothing with the
        storage.
        """
        size, value_size = key_states.shape, value_states.shape
        if len(size) != 4 or len(value_size) != 4 or size[:3] != value_size[:3]:
            raise ValueError(
                f"key_states {list(size)} and value_states {list(value_size)} must both be "
                "[batch, kv_heads, tokens, head_dim] and agree in the first three."
            )
        device = key_states.device
        if device != value_states.device:
            raise ValueError(
                f"key_states are on {device} and value_states on {value_states.device}: move one "
                "of them."
            )
        batch_size, heads, tokens, head_dim = size
        if not 0 < tokens <= self.max_cache_len - self.length:
            self._refuse_tokens(tokens)
        if not has_storage:
            return
        shape = self.shape
        if (heads, head_dim, value_size[3]) != (
            shape.num_kv_heads,
            shape.key_head_dim,
            shape.value_head_dim,
        ):
            raise ValueError(
                f"The states have {LayerShape.of(key_states, value_states)}, this layer was "
                f"allocated for {shape}. Build the cache with the config of the model that runs: "
                "`StaticContiguousCache(model.config, max_cache_len)` learns the shape itself."
            )
        if (
            key_states.dtype != self.dtype
            or value_states.dtype != self.value_dtype
            or device != self.device
        ):
            kinds = (key_states.dtype, value_states.dtype, device)
            raise ValueError(
                f"The states (keys, values) are {kinds}, the storage is "
                f"{(self.dtype, self.value_dtype, self.device)}: nothing is cast silently. "
                "`StaticContiguousCache(model.config, max_cache_len)` takes the dtype and device "
                "of the states, under autocast too; `from_model` takes those of the model."
            )
        if self.length and batch_size != self.batch_size:
            raise ValueError(
                f"The states have batch {batch_size}, the cached sequences have batch "
                f"{self.batch_size}. Call reset() to start new ones, or batch_select_indices / "
                "batch_repeat_interleave to change the batch."
            )
        if batch_size > self.max_batch_size:
            raise ValueError(
                f"The states have batch {batch_size}, the storage has {self.max_batch_size} batch "
                f"rows. Build the cache with `from_model(model, {self.max_cache_len}, "
                f"batch_size={batch_size})` (beams count)."
            )

    def _refuse_tokens(self, tokens: int) -> None:
        if tokens == 0:
            raise ValueError(
                f"There are no new tokens: the cache holds {self.length} already. "
                f"{CONTINUE_OR_RESET}"
            )
        raise cache_is_full(self.length, self.max_cache_len, tokens)

    def write(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Copy checked states [B, H, n, D] after the tokens and return the views that their queries
        may see.
        """
        if torch.is_grad_enabled() and (
            self._had_grad or key_states.requires_grad or value_states.requires_grad
        ):
            with torch.no_grad():
                views = self.write(key_states, value_states)
            self._had_grad = True
            anchor = torch.empty(
                0, requires_grad=True
            )  # for states that require no grad, after some that did
            return _ForwardOnly.apply(anchor, key_states, value_states, *views)  # type: ignore[no-any-return,no-untyped-call]
        self.batch_size, _, tokens, _ = key_states.shape
        if not self.reserve(tokens):
            return self._hold(key_states, value_states)
        keys, values = self._views(self.length, self.length + tokens)
        keys.copy_(key_states)
        values.copy_(value_states)
        self.pending = tokens
        return self._views(self._first_visible(), self.length + tokens)

    def _hold(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """A step that is longer than the storage:

        its queries see all of it, `commit` keeps its last positions.
        """
        past = self._views(first := self._first_visible(), self.length)
        views = key_states, value_states
        if first < self.length:
            views = (
                torch.cat([past[0], key_states], dim=2),
                torch.cat([past[1], value_states], dim=2),
            )
        self._tail = [states[:, :, -self.num_slots :].clone() for states in views]
        self.pending = key_states.shape[2]
        return views

    def commit(self) -> None:
        """Append the pending tokens."""
        if self.pending:
            self.length += self.pending
            if self._tail:
                self._replace(self._tail)
            self.discard()

    def discard(self) -> None:
        """Drop the pending tokens; their positions are free again."""
        self.pending, self._tail, self._old_half = 0, [], {}

    def newest(self) -> list[Tensor]:
        """Copies of keys and values that longer sequences may overwrite, for `restore`; none in a
        full layer.
        """
        if not self.is_compact or self.length == 0:
            return []
        return [states.clone() for states in self._views(self._first_to_keep(), self.length)]

    def restore(self, length: int, newest: list[Tensor]) -> None:
        """Remove the tokens that were appended since the layer had this length, and these `newest`
        states.
        """
        self.discard()
        if newest and self.oldest > length - newest[0].shape[2]:  # some of them were dropped
            self.length = length
            self._replace(newest)
        else:
            self.crop(min(0, length - self.length))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_length, kv_offset):

        the number of keys in the view of the next `query_length` tokens, and the first.
        """
        if query_length == 0:  # a model asks for these before it computes any states
            self._refuse_tokens(0)
        first = self._first_visible()
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.max_cache_len

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        No state moves: the positions before them are still there.
        """
        tokens_to_remove = int(tokens_to_remove)  # some versions of generate pass a tensor
        self.check_crop(tokens_to_remove)
        self.discard()
        self.length += tokens_to_remove
        if self.length == 0:
            self.offset = self.oldest = 0

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse what `crop` cannot remove."""
        if tokens_to_remove > 0:
            remedy = f"To keep {tokens_to_remove} of {self.length} tokens, call crop({tokens_to_remove - self.length})."
            if tokens_to_remove >= self.length:
                remedy = f"There are only {self.length} tokens: nothing to remove."
            raise ValueError(
                f"crop takes a negative count of tokens to remove, got {tokens_to_remove}. {remedy}"
            )
        if -tokens_to_remove > self.length:
            raise ValueError(
                f"crop({tokens_to_remove}) reaches beyond the start: there are {self.length} "
                f"tokens. Remove at most {self.length}, or call reset()."
            )
        if self.num_croppable < -tokens_to_remove < self.length:
            raise ValueError(
                f"crop({tokens_to_remove}): a layer with a window of {self.sliding_window} keeps "
                f"the positions from {self.oldest} on, of {self.length}. Remove at most "
                f"{self.num_croppable}, or call reset() and compute "
                'the shorter sequence. A cache with sliding="full" keeps all positions.'
            )

    def reset(self) -> None:
        """Remove all tokens, keep the storage. No tensor is touched."""
        self.crop(-self.length)
        self.was_assigned = self._had_grad = False
        if self.is_initialized:
            self.batch_size = self.max_batch_size

    @property
    def keys(self) -> Tensor | None:
        """The keys [B, H, length, D] of the sequence, a view; None before allocation. Pending
        tokens are not in it.

        A compact layer has those from position `oldest` on. Assigning replaces them: a prefix of
        this very view only sets the length (and batch), anything else is copied into the storage;
        None empties the layer. Assign `values` of the same length as well.
        """
        return self._states("keys")

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._assign("keys", states)

    @property
    def values(self) -> Tensor | None:
        """The values [B, H, length, D] of the sequence; as `keys`."""
        return self._states("values")

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._assign("values", states)

    def _states(self, name: str) -> Tensor | None:
        if self.group is None:
            return None
        batch_size, length = self._old_half.get(name, (self.batch_size, self.length))
        return self._views(self.oldest, length, batch_size)[0 if name == "keys" else 1]

    def _assign(self, name: str, states: Tensor | None) -> None:
        if states is None:
            self.crop(-self.length)
            return
        self.was_assigned = True
        own = self._assignable(name, states)
        batch_size, length = states.shape[0], states.shape[2]
        if (
            states.data_ptr() != own.data_ptr() or states.stride() != own.stride()
        ):  # no prefix of the own view
            shares_memory = states.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
            with torch.no_grad():  # the storage stays out of autograd's graph
                own[:batch_size, :, :length].copy_(states.clone() if shares_memory else states)
        self._had_grad |= states.requires_grad
        other = "values" if name == "keys" else "keys"
        self._old_half = {} if name in self._old_half else {other: (self.batch_size, self.length)}
        self.batch_size, self.length = batch_size, self.oldest + length
        self.pending, self._tail = 0, []

    def _assignable(self, name: str, states: Tensor) -> Tensor:
        """The storage [B, H, S, D] of keys or values from position `oldest` on; refuses states that
        do not fit in.
        """
        if self.group is None:
            raise ValueError(
                f"This layer has no storage yet to hold the assigned {name} {list(states.shape)}. "
                "Write them with `cache.update(keys, values, layer_idx)`, or build the cache "
                "with `from_model`."
            )
        own = self.storage[0 if name == "keys" else 1][:, :, self.oldest - self.offset :]
        kind, own_kind = (states.dtype, states.device), (own.dtype, own.device)
        fits = states.ndim == 4 and states.shape[1::2] == own.shape[1::2]
        if (
            not fits
            or states.shape[0] > own.shape[0]
            or states.shape[2] > own.shape[2]
            or kind != own_kind
        ):
            raise ValueError(
                f"The assigned {name} are {list(states.shape)} {kind}; this layer holds up to "
                f"{list(own.shape)} {own_kind}. Convert them, or build a larger cache."
            )
        if self.oldest and states.shape[2] != self.length - self.oldest:
            raise ValueError(
                f"This layer keeps the positions {self.oldest} to {self.length - 1}: the assigned "
                f"{name} have {states.shape[2]} and must have as many. To shorten the sequence "
                "call crop."
            )
        return own


class _ForwardOnly(torch.autograd.Function):
    """The views as a function of the states:

    a backward pass raises, as gradients of older tokens would be missing.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *states_and_views: Tensor) -> tuple[Tensor, Tensor]:
        return states_and_views[2].detach(), states_and_views[3].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "Gradients cannot flow through a StaticContiguousCache: it is written in place. For "
            "training use `DynamicCache` or no cache; where no gradients are wanted, wrap the "
            "call in `torch.no_grad()`."
        )
