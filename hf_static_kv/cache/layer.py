"""One layer of the cache: checks new states, writes them after its tokens, returns views."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_static_kv.cache.request import CONTINUE_OR_RESET, cache_is_full
from hf_static_kv.cache.slots import LayerSlots
from hf_static_kv.cache.storage import LayerShape, allocate_groups


class StaticContiguousLayer(LayerSlots, CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Keys and values of one layer, in the first `length` positions of its storage.

    A `StaticContiguousCache` moves all lengths together when a step is
    complete: `write` leaves the new tokens `pending`, `commit` appends them,
    `discard` drops them. In a layer that is used alone, `update` does both.

    ```
    position      0   1   2   3   4   5   6   7        length = 4, pending = 2, sliding_window = 3
    storage      [k] [k] [k] [k] [p] [p] [ ] [ ]
    keys         <------------->                       the tokens of the sequence
    view                 <------------->               what `write` returned for queries 4 and 5
    ```
    """

    is_croppable = True

    def __init__(
        self, max_cache_len: int, sliding_window: int | None = None, is_compact: bool = False
    ) -> None:
        LayerSlots.__init__(self, max_cache_len, sliding_window, is_compact)
        self.pending = 0
        # The last keys and values of a step that is longer than the storage.
        self._tail: list[Tensor] = []
        self.was_assigned = False  # keys or values, since the last reset
        self._had_grad = False  # states, since the last reset
        # The missing half of an assignment, and its old (batch, length).
        self._old_half: dict[str, tuple[int, int]] = {}
        CacheLayerMixin.__init__(self)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        window = f", sliding_window={self.sliding_window}" if self.is_sliding else ""
        compact = ", compact" if self.is_compact else ""
        return f"{type(self).__name__}({self.length}/{self.max_cache_len}{window}{compact})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        window = self.sliding_window if self.is_compact else None
        shape = LayerShape.of(key_states, value_states, window, self.kv_dtype)
        members = [(shape, key_states.device, [0])]
        dtypes = key_states.dtype, value_states.dtype
        (group,) = allocate_groups(members, self.max_cache_len, len(key_states), dtypes)
        self.use_storage(group, index=0)

    def used(self) -> list[tuple[int, int]]:
        """(batch rows, slots) in use, also by half an assignment."""
        return [(self.batch_size, self.length + self.pending), *self._old_half.values()]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the states to a layer that is used alone; return the views."""
        self.check(key_states, value_states, has_storage=self.is_initialized)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        views = self.write(key_states, value_states)
        self.commit()
        return views

    # --- a step

    def check(self, key_states: Tensor, value_states: Tensor, has_storage: bool = True) -> None:
        """Refuse states that cannot be written."""
        size = key_states.shape
        value_size = value_states.shape
        if len(size) != 4 or len(value_size) != 4 or size[:3] != value_size[:3]:
            raise ValueError(
                f"key_states {list(size)} and value_states {list(value_size)} must both be "
                "[batch, kv_heads, tokens, head_dim] and agree in the first three."
            )
        if key_states.device != value_states.device:
            raise ValueError(
                f"key_states are on {key_states.device} and value_states on "
                f"{value_states.device}: move one of them."
            )
        if not 0 < size[2] <= self.max_cache_len - self.length:
            self._refuse_tokens(size[2])
        if has_storage:
            self._check_fits(key_states, value_states)

    def _check_fits(self, key_states: Tensor, value_states: Tensor) -> None:
        batch_size, heads, _, head_dim = key_states.shape
        shape = self.shape
        dims = shape.num_kv_heads, shape.key_head_dim, shape.value_head_dim
        if (heads, head_dim, value_states.shape[3]) != dims:
            raise ValueError(
                f"The states have {LayerShape.of(key_states, value_states)}, this layer was "
                f"allocated for {shape}. Build the cache with the `model.config` that runs."
            )
        kind = key_states.dtype, value_states.dtype, key_states.device
        own_kind = self.dtype, self.value_dtype, self.device
        if kind != own_kind:
            raise ValueError(
                f"The states (keys, values) are {kind}, the storage is {own_kind}: nothing is cast "
                "silently. `StaticContiguousCache(model.config, max_cache_len)` learns both."
            )
        if self.length and batch_size != self.batch_size:
            raise ValueError(
                f"The states have batch {batch_size}, the cached sequences have batch "
                f"{self.batch_size}. Call reset() or batch_select_indices first."
            )
        if batch_size > self.max_batch_size:
            raise ValueError(
                f"The states have batch {batch_size}, the storage has {self.max_batch_size} batch "
                f"rows. Build the cache with batch_size={batch_size} (beams count)."
            )

    def _refuse_tokens(self, tokens: int) -> None:
        if tokens:
            raise cache_is_full(self.length, self.max_cache_len, tokens)
        raise ValueError(
            f"There are no new tokens: the cache holds {self.length} already. {CONTINUE_OR_RESET}"
        )

    def write(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Copy checked states [B, H, n, D] after the tokens; return what their queries may see."""
        needs_grad = key_states.requires_grad or value_states.requires_grad
        if torch.is_grad_enabled() and (self._had_grad or needs_grad):
            with torch.no_grad():
                views = self.write(key_states, value_states)
            self._had_grad = True
            # For states that require no grad, after some that did.
            anchor = torch.empty(0, requires_grad=True)
            return _ForwardOnly.apply(anchor, key_states, value_states, *views)  # type: ignore[no-any-return,no-untyped-call]
        self.batch_size, _, tokens, _ = key_states.shape
        if not self.reserve(tokens):
            return self._hold(key_states, value_states)
        keys, values = self._views(self.length, self.length + tokens)
        keys.copy_(self.as_stored(key_states))
        values.copy_(self.as_stored(value_states))
        self.pending = tokens
        return self.as_read(self._views(self._first_visible(), self.length + tokens))

    def _hold(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Hold a step that is longer than the storage; `commit` keeps its last positions."""
        self.pending = keys.shape[2]
        first = self._first_visible()
        held = [self.as_stored(states) for states in (keys, values)]
        if first < self.length:
            past = self._views(first, self.length)
            held = [torch.cat(pair, dim=2) for pair in zip(past, held, strict=True)]
        self._tail = [states[:, :, -self.num_slots :].clone() for states in held]
        return self.as_read(held)

    def commit(self) -> None:
        """Append the pending tokens."""
        if self.pending:
            self.length += self.pending
            if self._tail:
                self._replace(self._tail)
            self.discard()

    def discard(self) -> None:
        """Drop the pending tokens."""
        self.pending = 0
        self._tail = []
        self._old_half = {}

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_length, kv_offset): how many keys the next tokens see, and from where on."""
        if query_length == 0:
            self._refuse_tokens(0)
        first = self._first_visible()
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.max_cache_len

    # --- back

    def newest(self) -> list[Tensor]:
        """Copies of states that longer sequences overwrite; none in a full layer."""
        if not self.is_compact or self.length == 0:
            return []
        return [states.clone() for states in self._views(self._first_to_keep(), self.length)]

    def restore(self, length: int, newest: list[Tensor]) -> None:
        """Go back to this length, when the layer had these `newest` states."""
        self.discard()
        if newest and self.oldest > length - newest[0].shape[2]:  # some were dropped
            self.length = length
            self._replace(newest)
        else:
            self.crop(min(0, length - self.length))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. No state moves."""
        self.check_crop(tokens_to_remove)
        self.discard()
        self.length += tokens_to_remove
        if self.length == 0:
            self.offset = self.oldest = 0

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse what `crop` cannot remove."""
        held = self.length
        if tokens_to_remove > 0:
            remedy = f"To keep {tokens_to_remove} of {held} tokens, call crop({tokens_to_remove - held})."
            if tokens_to_remove >= held:
                remedy = f"There are only {held} tokens: nothing to remove."
            raise ValueError(
                f"crop takes a negative count of tokens to remove, got {tokens_to_remove}. {remedy}"
            )
        if -tokens_to_remove > held:
            raise ValueError(f"crop({tokens_to_remove}): there are {held} tokens to remove.")
        if self.num_croppable < -tokens_to_remove < held:
            raise ValueError(
                f"crop({tokens_to_remove}): a layer with a window of {self.sliding_window} keeps "
                f"the positions from {self.oldest} on, of {held}. Remove at most "
                f'{self.num_croppable}, or build the cache with sliding="full".'
            )

    def reset(self) -> None:
        """Remove all tokens, keep the storage. No tensor is touched."""
        self.crop(-self.length)
        self.was_assigned = False
        self._had_grad = False
        if self.is_initialized:
            self.batch_size = self.max_batch_size

    # --- reading and assigning

    @property
    def keys(self) -> Tensor | None:
        """The keys [B, H, length, D] of the sequence, a view; None before allocation.

        With a `kv_dtype` they are decoded copies. A compact layer has those from
        position `oldest` on. Assigning replaces them, and sets the length: assign
        `values` of the same length as well. A prefix of this very view is not
        copied. None empties the layer.
        """
        return self._states("keys")

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._assign("keys", states)

    @property
    def values(self) -> Tensor | None:
        """As `keys`."""
        return self._states("values")

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._assign("values", states)

    def _states(self, name: str) -> Tensor | None:
        if self.group is None:
            return None
        batch_size, length = self._old_half.get(name, (self.batch_size, self.length))
        return self.as_read(self._views(self.oldest, length, batch_size))[name == "values"]

    def _assign(self, name: str, states: Tensor | None) -> None:
        if states is None:
            self.crop(-self.length)
            return
        own = self._assignable(name, states)
        batch_size, _, length, _ = states.shape
        if (states.data_ptr(), states.stride()) != (own.data_ptr(), own.stride()):
            shares_memory = states.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
            # The storage stays out of autograd's graph.
            with torch.no_grad():
                states_of_own = states.clone() if shares_memory else states
                own[:batch_size, :, :length].copy_(self.as_stored(states_of_own))
        old_half = {"values" if name == "keys" else "keys": (self.batch_size, self.length)}
        is_second = name in self._old_half
        self.discard()
        self._old_half = {} if is_second else old_half
        self._had_grad |= states.requires_grad
        self.was_assigned = True
        self.batch_size = batch_size
        self.length = self.oldest + length

    def _assignable(self, name: str, states: Tensor) -> Tensor:
        """The storage [B, H, S, D] from position `oldest` on, for states that fit."""
        if self.group is None:
            raise ValueError(
                f"This layer has no storage yet for the assigned {name}: call `cache.update`, or "
                "build the cache with `from_model`."
            )
        own = self.storage[name == "values"][:, :, self.oldest - self.offset :]
        is_value = name == "values"
        dim = self.shape.value_head_dim if is_value else self.shape.key_head_dim
        dtype = self.value_dtype if is_value else self.dtype
        most = [*own.shape[:3], dim]
        kind = states.dtype, states.device
        own_kind = dtype, own.device
        fits = states.ndim == 4 and list(states.shape[1::2]) == most[1::2] and kind == own_kind
        if not fits or states.shape[0] > most[0] or states.shape[2] > most[2]:
            raise ValueError(
                f"The assigned {name} are {list(states.shape)} {kind}; this layer holds up to "
                f"{most} {own_kind}. Convert them, or build a larger cache."
            )
        if self.oldest and states.shape[2] != self.length - self.oldest:
            raise ValueError(
                f"This layer keeps the positions {self.oldest} to {self.length - 1}: the assigned "
                f"{name} have {states.shape[2]} and must have as many. To shorten it call crop."
            )
        return own


class _ForwardOnly(torch.autograd.Function):
    """The views as a function of the states. A backward pass would lack those of older tokens."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *states_and_views: Tensor) -> tuple[Tensor, Tensor]:
        return states_and_views[2].detach(), states_and_views[3].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "Gradients cannot flow through a StaticContiguousCache, which is written in place. "
            "Use `DynamicCache` or no cache, or wrap the call in `torch.no_grad()`."
        )
