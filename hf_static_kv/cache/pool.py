"""Caches that calls of `generate` take and give back: sized by the call, kept between calls, bounded in bytes."""

import os
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_static_kv import compat
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.layout import (
    cache_bytes,
    compute_device,
    missing_layers,
    plan_layers,
    refuse_missing_layers,
)
from hf_static_kv.cache.prefixes import PrefixStore
from hf_static_kv.cache.ranks import least, num_ranks
from hf_static_kv.cache.request import Request
from hf_static_kv.cache.storage import free_bytes

_MIN_CAPACITY = 256
_MAX_FREE = 4  # caches that wait for a call
_SHARE_OF_GPU, _SHARE_OF_HOST = 0.5, 0.25  # of the free memory of the GPU, of the physical memory of the host


class NotPooled(Exception):
    """Why the pool has no cache for a call."""


@dataclass(eq=False)
class Lease:
    """A cache of the pool."""

    cache: StaticContiguousCache
    kind: Any  # equal for two calls whose states one cache can hold
    planned_bytes: int
    content: Any = None  # what its states depend on beside the tokens; None: it holds none that another call may use
    num_reused: int = 0  # tokens of the present call that are not computed again
    own_users: list[int | None] | None = None  # of the storage, without its caller's; None: no caller was given it
    pool: Any = None  # the `CachePool` that has lent it

    @property
    def storage_users(self) -> list[int | None]:
        """How many tensors share each tensor of the storage."""
        groups = self.cache.storage_groups
        return [compat.storage_users(tensor) for group in groups for tensor in (group.keys, group.values)]

    @property
    def num_bytes(self) -> int:
        return self.cache.memory_bytes or self.planned_bytes

    def common_prefix(self, request: Request) -> int:
        """How many tokens of the prompt the cache can keep; at least one is left to compute."""
        if request.tokens is None:
            return 0
        length = min(self.num_held(request.tokens), request.tokens.shape[1] - 1)
        return length if self.cache.can_crop_to(length) else 0

    def num_held(self, ids: Tensor) -> int:
        """How many of the tokens [B, n] the cache holds, from the first on."""
        known = self.cache.known_ids
        if known is None or len(known) != len(ids) or known.device != ids.device:
            return 0
        length = min(known.shape[1], ids.shape[1], self.cache.seq_len)
        is_common = (known[:, :length] == ids[:, :length]).all(dim=0)
        return int(is_common.cumprod(dim=0).sum())


class CachePool:
    """Caches that calls take and give back.

    A capacity is rounded up to a power of two, so that calls of like size share storage and captured steps;
    `max_cache_len` is the least capacity. `max_bytes` bounds free and lent caches together; by default it is half of
    the free memory of a GPU, or a quarter of the memory of the host. A call that may need more begins with less, and
    its cache grows as the tokens come. The least recently used of the free caches goes first. `store` has prefixes of
    earlier processes.

    The ranks of a tensor-parallel model must decide alike: a rank that falls back alone keeps the others waiting. So
    they agree once on the least of their bounds. All else follows from numbers that they share.
    """

    def __init__(
        self, max_cache_len: int | None = None, max_bytes: int | None = None, store: PrefixStore | None = None
    ) -> None:
        self.max_cache_len, self.max_bytes, self.store = max_cache_len, max_bytes, store
        self.free: list[Lease] = []  # least recently used first
        self.lent: list[Lease] = []
        self.taken: list[Lease] = []  # whose storage the callers of earlier calls may still use
        self.hits = self.reused_tokens = 0
        self.last: weakref.ref[Lease] | None = None  # what the last call has kept, unless it was evicted
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        return sum(lease.num_bytes for lease in (*self.free, *self.lent, *self.taken))

    @contextmanager
    def cache_for(self, request: Request, content: Any = None) -> Iterator[StaticContiguousCache]:
        """A cache for one call: empty, or with a prefix of its prompt where a free cache has the same `content`.

        It goes back to the pool, after `hand_over` once its caller has dropped it. A call that returns its cache in any
        other way keeps it. Raises `NotPooled`.
        """
        self.last = None
        lease = self._take(request, content)
        is_callers = False
        try:
            self._load_prefix(lease, request)
            yield lease.cache
            is_callers = bool(request.config.return_dict_in_generate)
        except BaseException:
            lease.content = None
            raise
        finally:
            with self._lock:
                self.lent.remove(lease)
                self.reused_tokens += lease.num_reused
                lease.num_reused = 0
                if lease.own_users is not None or not is_callers:
                    self._keep(lease)

    def hand_over(self, output: Any) -> Any:
        """What a call returns, with a cache for the caller in the place of a lent one: on the same storage.

        The lent one stays, with its captured steps. It serves another call when nobody else uses its storage.
        """
        cache = getattr(output, "past_key_values", None)
        lease = self.lease_of(cache)
        if lease is not None and None not in (users := lease.storage_users):
            lease.own_users, lease.content = users, None
            output.past_key_values = lease.cache.shared()
        return output

    def exchange(self, lease: Lease, request: Request, content: Any) -> None:
        """Give the call of `lease` another cache: the model has the state `content`, and the prefix is of another.

        That prefix stays, for calls of the model as it was. Where memory is short it is given up instead.
        """
        with self._lock:
            kept = Lease(lease.cache, lease.kind, lease.planned_bytes, lease.content)
            if kept.cache.can_crop_to(lease.num_reused):
                kept.cache.crop(lease.num_reused - kept.cache.seq_len)
            else:
                kept.content = None
            lease.content, lease.num_reused = content, 0
            self.hits -= 1
            try:
                other = self._find(request, content, lease.kind)
            except NotPooled:
                lease.cache.reset()
                return
            lease.cache, lease.planned_bytes, lease.num_reused = other.cache, other.planned_bytes, other.num_reused
            self._keep(kept)
        self._load_prefix(lease, request)

    def lease_of(self, cache: Any) -> Lease | None:
        """The lease of a cache that is in the hands of a call; None if it is not of this pool."""
        with self._lock:
            return next((lease for lease in self.lent if lease.cache is cache), None)

    def _load_prefix(self, lease: Lease, request: Request) -> None:
        if self.store is not None and lease.content is not None and request.tokens is not None:
            before = lease.cache.seq_len
            self.store.fill(lease.cache, request.model, request.tokens, lease.content)
            lease.num_reused += lease.cache.seq_len - before

    def save(self, model: PreTrainedModel, content: Any, input_ids: Tensor | None) -> Path:
        """Write the tokens of the last call, or what a free cache has of the `input_ids` [B, n], to the store."""
        if self.store is None:
            raise ValueError("There is no folder to save to: call attach(model, reuse_prefix=folder).")
        if input_ids is not None and input_ids.ndim == 1:
            input_ids = input_ids[None]
        with self._lock:
            last = self.last() if self.last is not None else None
            ids = input_ids if input_ids is not None or last is None else last.cache.known_ids
            if ids is None:
                raise ValueError(
                    "Nothing is kept of a last call: call generate with input_ids alone (no padding, no beams, no "
                    "return_dict_in_generate, within max_bytes), or name tokens of an earlier call: save(input_ids)."
                )
            kept = [lease for lease in self.free if lease.content == content]
            held = {lease: lease.num_held(ids) for lease in kept}
            lease = max(kept, key=lambda lease: held[lease], default=None)
            if lease is None or not held[lease]:
                raise ValueError("No cache holds these tokens: call generate with them, on the model as it is now.")
            self.free.remove(lease)
            self.lent.append(lease)
        try:
            return self.store.add(lease.cache, model, ids[:, : held[lease]])
        finally:
            with self._lock:
                self.lent.remove(lease)
                self.free.append(lease)

    def clear(self) -> None:
        """Drop the caches that no call uses."""
        with self._lock:
            self.free.clear()
            self.taken.clear()

    def _take(self, request: Request, content: Any) -> Lease:
        with self._lock:
            self._take_back()
            lease = self._find(request, content, _kind(request))
            lease.content, lease.pool = content, self
            self.lent.append(lease)
            return lease

    def _find(self, request: Request, content: Any, kind: Any) -> Lease:
        lease = self._with_prefix(request, content, kind) or self._free_lease(request, kind)
        if lease is None:
            return self._new_lease(request, kind)
        self.free.remove(lease)
        self.hits += 1
        return lease

    def _take_back(self) -> None:
        """The caches whose callers have dropped them, and all views of them, are free."""
        for lease in [lease for lease in self.taken if lease.storage_users == lease.own_users]:
            self.taken.remove(lease)
            lease.own_users = None
            self.free.append(lease)

    def _with_prefix(self, request: Request, content: Any, kind: Any) -> Lease | None:
        """The free cache with the longest prefix of the prompt, if that is half of the prompt or half of its tokens."""
        if content is None:
            return None
        alike = [lease for lease in self.free if lease.content == content and lease.kind == kind]
        lengths = {lease: lease.common_prefix(request) for lease in alike}
        lease = max(alike, key=lambda lease: lengths[lease], default=None)
        length = 0 if lease is None else lengths[lease]
        if num_ranks(request.model) > 1:
            length = least(request.model, length)
        if lease is None or length == 0 or 2 * length < min(lease.cache.seq_len, request.prompt_length - 1):
            return None  # two chats with the same beginning keep a cache each
        lease.cache.crop(length - lease.cache.seq_len)
        lease.num_reused = length
        return lease

    def _free_lease(self, request: Request, kind: Any) -> Lease | None:
        """The smallest free cache that serves the call. Kept tokens are given up only when there are enough caches."""
        rows, length = len(request.input_ids), request.max_positions
        serving = [
            lease
            for lease in self.free
            if lease.kind == kind
            and rows <= lease.cache.kv_layers[0].max_batch_size
            and length <= lease.cache.max_cache_len
            and (lease.content is None or len(self.free) >= _MAX_FREE)
        ]
        lease = min(serving, key=lambda lease: (lease.content is not None, lease.num_bytes), default=None)
        if lease is not None:
            lease.cache.reset()
        return lease

    def _new_lease(self, request: Request, kind: Any) -> Lease:
        model, rows = request.model, len(request.input_ids)
        needed = max(_MIN_CAPACITY, self.max_cache_len or 0, request.max_positions)
        capacity = 1 << (needed - 1).bit_length()
        config, dtype, ranks = model.config, model.dtype, num_ranks(model)

        def num_bytes(length: int) -> int:
            return cache_bytes(config, length, rows, dtype, sliding=sliding, tp=ranks, tp_plan=model.tp_plan)

        try:
            sliding = _sliding(model, capacity)
            wanted_bytes = num_bytes(capacity)
            refuse_missing_layers(model, len(plan_layers(config)))
        except ValueError as unserved:
            raise NotPooled(str(unserved)) from unserved
        if self.max_bytes is None and ranks > 1:
            self.max_bytes = least(model, self._bound(compute_device(model)))
        bound = self._bound(compute_device(model)) - sum(lease.num_bytes for lease in self.lent)
        if wanted_bytes > bound:
            capacity = bisect_right(range(1, capacity), bound, key=num_bytes)  # the longest that fits
        if capacity < request.prompt_length:
            raise NotPooled(
                f"a prompt of {request.prompt_length} tokens in {rows} rows takes "
                f"{num_bytes(request.prompt_length):,} bytes of cache, and {max(0, bound):,} of max_bytes are left"
            )
        planned_bytes = num_bytes(capacity)
        self._evict(bound - planned_bytes, _MAX_FREE - 1)
        cache = StaticContiguousCache.for_calls(model, capacity, rows, sliding)
        return Lease(cache, kind, planned_bytes)

    def _keep(self, lease: Lease) -> None:
        """Put a cache beside the free ones, clean or with tokens that a later call may use."""
        if lease.cache.is_unfinished:
            lease.content = None  # the model skips layers
        if lease.content is None:
            lease.cache.reset()
        else:
            self.last = weakref.ref(lease)
        if not lease.cache.is_allocated:  # its first pass failed; the rest would have the rows of another call
            return
        (self.free if lease.own_users is None else self.taken).append(lease)
        has_grown = lease.num_bytes > lease.planned_bytes
        bound = self._bound(lease.cache.kv_layers[0].device) if self.max_bytes is not None or has_grown else sys.maxsize
        self._evict(bound - sum(other.num_bytes for other in self.lent), _MAX_FREE)

    def _evict(self, max_bytes: int, max_number: int) -> None:
        for leases in (self.taken, self.free):  # those of callers first: they serve no call now
            while leases and (len(leases) > max_number or self._unlent_bytes > max_bytes):
                del leases[0]

    @property
    def _unlent_bytes(self) -> int:
        return sum(lease.num_bytes for lease in (*self.free, *self.taken))

    def _bound(self, device: torch.device) -> int:
        if self.max_bytes is not None:
            return self.max_bytes
        if device.type != "cuda":
            return int(_SHARE_OF_HOST * host_bytes())
        return int(_SHARE_OF_GPU * (free_bytes(device) + self.num_bytes))


def _sliding(model: PreTrainedModel, capacity: int) -> str:
    """Compact layers where the capacity is more than four windows: with less they save little."""
    windows = [plan.sliding_window for plan in plan_layers(model.config) if plan.sliding_window]
    return "compact" if windows and capacity > 4 * max(windows) else "full"


def host_bytes() -> int:
    """The physical memory of this machine; 8 GiB where the system does not tell."""
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    if any(name not in getattr(os, "sysconf_names", {}) for name in names):
        return 8 << 30
    return os.sysconf(names[0]) * os.sysconf(names[1])


def _kind(request: Request) -> Any:
    """Equal for two calls whose states have the same layers, shapes, dtype and devices."""
    model, device = request.model, compute_device(request.model).type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    try:
        plans = plan_layers(model.config)
    except ValueError as unserved:
        raise NotPooled(str(unserved)) from unserved
    missing = missing_layers(model, len(plans))
    return weakref.ref(model), model.dtype, model.device, autocast, plans, missing
