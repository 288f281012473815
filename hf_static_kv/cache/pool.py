"""Caches that calls of `generate` take and give back, bounded in bytes."""

import os
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from hf_static_kv import compat
from hf_static_kv.cache.blocks import BLOCK
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.entry import Entry
from hf_static_kv.cache.histories import Histories, History
from hf_static_kv.cache.layout import (
    cache_bytes,
    compute_device,
    plan_layers,
    refuse_missing_layers,
)
from hf_static_kv.cache.prefixes import PrefixStore, common_length
from hf_static_kv.cache.ranks import least, num_ranks
from hf_static_kv.cache.request import Fallback, Request, is_exact
from hf_static_kv.cache.rows import Row, fill
from hf_static_kv.cache.storage import free_bytes, is_out_of_memory
from hf_static_kv.cache.unserved import positions_of_table

_MIN_CAPACITY = 256
_MAX_FREE = 4  # caches that wait for a call
_SHARE_OF_GPU = 0.5  # of its free memory
_SHARE_OF_HOST = 0.25  # of its physical memory


class CachePool:
    """Caches that calls take and give back.

    A free cache has the tokens of its last call. Before another call overwrites
    them they are copied to the histories, and a prompt that begins like one of
    these is given a copy: any number of chats share a few caches.

    The least recently used of the free caches goes first. The ranks of a
    tensor-parallel model must decide alike: a rank that falls back alone keeps
    the others waiting. So they agree once on the least of their bounds, and all
    else follows from numbers that they share.

    Args:
        max_cache_len: The least capacity. Capacities are powers of two, so that
            calls of like size share storage and captured steps.
        max_bytes: Bounds all caches, free and in use, and histories; by default
            half of the free memory of a GPU, or a quarter of the memory of the
            host. A call that may need more begins with less, and its cache grows.
        store: Has prefixes of earlier processes.
        kv_dtype: Of all caches, but not inside `exact`: there keys and values
            are stored as they are.
    """

    def __init__(
        self,
        max_cache_len: int | None = None,
        max_bytes: int | None = None,
        store: PrefixStore | None = None,
        kv_dtype: str | None = None,
    ) -> None:
        self.max_cache_len = max_cache_len
        self.max_bytes = max_bytes
        self.store = store
        self.kv_dtype = kv_dtype
        self.free: list[Entry] = []  # least recently used first
        self.in_use: list[Entry] = []
        self.histories = Histories()
        # Callers of earlier calls may still use their storage.
        self.taken: list[Entry] = []
        self.hits = 0
        self.reused_tokens = 0
        # What the last call has kept.
        self.last: weakref.ref[Entry] | weakref.ref[History] | None = None
        # That `max_bytes` counts, too: of rows of several calls.
        self.bytes_beside: Callable[[], int] = lambda: 0
        self.free_beside: Callable[[], bool] = lambda: False  # whether some of them were given up
        self._lock = Lock()
        self._complete: list[Any] = []  # the modules of a model that lacks no layer, by `id`

    @property
    def num_bytes(self) -> int:
        caches = _sum_of_bytes([*self.free, *self.in_use, *self.taken])
        return caches + self.histories.num_bytes

    @contextmanager
    def cache_for(self, request: Request, identity: Any = None) -> Iterator[StaticContiguousCache]:
        """A cache for one call: empty, or with a prefix of its prompt by the same `identity`.

        A call that returns its cache keeps it, unless `hand_over` gives the
        caller another one. Raises `Fallback`.
        """
        self.last = None
        entry: Entry | None = None
        is_callers = False
        returns_cache = bool(request.config.return_dict_in_generate) and not request.is_assistants
        try:
            entry = self._take(request, identity)
            self._begin(entry, request)
            yield entry.cache
            is_callers = returns_cache
        except BaseException:
            if entry is not None:
                entry.identity = None
            raise
        finally:
            with self._lock:
                if entry is not None and entry in self.in_use:
                    self._end(entry, is_kept=entry.own_users is not None or not is_callers)

    def _end(self, entry: Entry, is_kept: bool) -> None:
        self.in_use.remove(entry)
        self.reused_tokens += entry.num_reused
        entry.num_reused = 0
        entry.modules = ()
        if is_kept:
            # A new one: the call may still know the old one, and the next call is not its own.
            self._keep(replace(entry))

    def give_back(self, entry: Entry) -> None:
        """The call of `entry` goes on without its cache, which other calls may take."""
        entry.cache.disown()
        with self._lock:
            self._end(entry, is_kept=True)

    def free_bound(self, device: torch.device) -> int:
        """How many bytes are left beside the caches in use."""
        return self._bound(device) - _sum_of_bytes(self.in_use)

    def hand_over(self, output: Any) -> Any:
        """Give the caller of a call another cache on the storage of the one in use.

        The one in use stays, with its captured steps, until nobody else uses
        its storage.
        """
        entry = self.entry_of(getattr(output, "past_key_values", None))
        if entry is not None and None not in (users := entry.storage_users):
            entry.own_users = users
            entry.identity = None
            output.past_key_values = entry.cache.shared()
        return output

    def exchange(self, entry: Entry, request: Request, identity: Any) -> None:
        """Give the call of `entry` another cache: its prefix is of the model in another state.

        That prefix stays for calls of the model as it was, if memory allows.
        """
        with self._lock:
            kept = replace(entry, num_reused=0, modules=())
            if kept.cache.can_crop_to(entry.num_reused):
                kept.cache.crop(entry.num_reused - kept.cache.seq_len)
            else:
                kept.identity = None
            entry.identity = identity
            entry.num_reused = 0
            request.starts = list(entry.starts)  # it may be another object than that of `_take`
            self.hits -= entry.is_hit
            try:
                other = self._find(request, identity, entry.kind)
            except Fallback:
                entry.cache.reset()
            else:
                entry.cache = other.cache
                entry.planned_bytes = other.planned_bytes
                entry.num_reused = other.num_reused
                entry.is_hit = other.is_hit
                kept.cache.disown()  # `generate` still has it
                self._keep(kept)
        self._begin(entry, request)

    def entry_of(self, cache: Any) -> Entry | None:
        with self._lock:
            return next((entry for entry in self.in_use if entry.cache is cache), None)

    def _begin(self, entry: Entry, request: Request) -> None:
        """Load what the store has of the prompt, and tell the cache of the call."""
        is_kept = entry.identity is not None and not any(request.starts)
        if self.store is not None and is_kept and request.tokens is not None:
            before = entry.cache.seq_len
            self.store.fill(entry.cache, request.model, request.tokens, entry.identity)
            entry.num_reused += entry.cache.seq_len - before
        entry.cache.begin_call(request, is_prefix=True)

    def save(self, model: PreTrainedModel, identity: Any, input_ids: Tensor | None) -> Path:
        """Write the tokens of the last call, or what is kept of `input_ids`, to the store."""
        if self.store is None:
            raise ValueError("There is no folder: call attach(model, reuse_prefix=folder).")
        if input_ids is not None and input_ids.ndim == 1:
            input_ids = input_ids[None]
        with self._lock:
            last = self.last() if self.last is not None else None
            ids = input_ids if input_ids is not None or last is None else last.cache.known_ids
            if ids is None:
                raise ValueError(
                    "Nothing is kept of a last call: call generate with input_ids alone (no "
                    "padding, no beams, no return_dict_in_generate), or save(input_ids)."
                )
            entries = {entry.cache: entry for entry in self.free}
            caches = [entry for entry in self.free if not any(entry.starts)]
            kept = [own.cache for own in (*caches, *self.histories) if own.origin[0] == identity]
            held = {cache: _num_held(cache, ids) for cache in kept}
            cache = max(kept, key=lambda cache: held[cache], default=None)
            if cache is None or not held[cache]:
                raise ValueError(
                    "No cache holds these tokens: call generate with them, on the model as it is "
                    "now."
                )
            entry = entries.get(cache)  # None: a copy, which no call is given
            if entry is not None:
                self.free.remove(entry)
                self.in_use.append(entry)
        try:
            return self.store.add(cache, model, ids[:, : held[cache]])
        finally:
            if entry is not None:
                with self._lock:
                    self.in_use.remove(entry)
                    self.free.append(entry)

    def clear(self) -> None:
        with self._lock:
            self.free.clear()
            self.taken.clear()
            self.histories.clear()

    def _take(self, request: Request, identity: Any) -> Entry:
        with self._lock:
            # Callers have dropped these caches.
            for entry in [entry for entry in self.taken if entry.storage_users == entry.own_users]:
                self.taken.remove(entry)
                entry.own_users = None
                self.free.append(entry)
            modules = compat.all_modules(request.model)
            entry = self._find(request, identity, self._kind(request, modules))
            entry.modules = modules
            entry.identity = identity
            entry.starts = request.starts
            entry.prompt = request.host_ids if identity is not None else None
            self.in_use.append(entry)
            return entry

    def _find(self, request: Request, identity: Any, kind: Any) -> Entry:
        """A cache with the longest prefix that there is: its own, or a copy."""
        own, length = self._with_prefix(request, identity, kind)
        histories, copied = self._longest_histories(request, (identity, kind))
        if copied > length or own is None:
            own, length = self._free_entry(request, kind), 0
        if own is None:
            own = self._new_entry(request, kind)
        else:
            self._crop(own, length)
            self.free.remove(own)
            own.is_hit = not request.is_assistants
            self.hits += own.is_hit
            if not length:  # the prompt may begin like a row of that cache
                histories, copied = self._longest_histories(request, (identity, kind))
        own.num_reused = length
        if copied > length:
            own.num_reused = self._fill(own.cache, histories, request.starts, copied)
        return own

    def _crop(self, entry: Entry, length: int) -> None:
        """Leave so many tokens in a free cache, and keep the others if possible."""
        cache = entry.cache
        if cache.seq_len > length and entry.may_be_copied:
            for row, (ids, start) in enumerate(zip(entry.ids, entry.starts, strict=True)):
                self._copy(Row(cache, row, start), ids[start:], entry.origin)
        if length:
            cache.crop(length - cache.seq_len)
        else:
            cache.reset()

    def _longest_histories(self, request: Request, origin: Any) -> tuple[list[History | None], int]:
        """For each row that with the longest beginning of its prompt: not its last token. And the
        position to which all rows have them.
        """
        if origin[0] is None or request.tokens is None or not len(self.histories):
            return [], 0
        found: list[History | None] = []
        ends = []
        for ids, start in zip(request.host_ids, request.starts, strict=True):
            history, length = self.histories.longest(ids[start:-1], origin)
            found.append(history)
            ends.append(start + length)
        end = min(ends)
        for row, (history, start) in enumerate(zip(found, request.starts, strict=True)):
            if end <= start:
                found[row] = None  # it has padding only
            elif history is None or not history.cache.can_crop_to(end - start):
                return [], 0
        is_long = end - min(request.starts) >= BLOCK
        return (found, end) if is_long else ([], 0)

    def _fill(
        self,
        cache: StaticContiguousCache,
        histories: Sequence[History | None],
        starts: Sequence[int],
        length: int,
    ) -> int:
        """Copy the beginnings of histories to the rows of a cache; up to which position."""
        like = next(history.cache for history in histories if history is not None)
        if not cache.is_allocated:
            try:
                cache.allocate_like(like, len(histories))
            except RuntimeError as error:
                if is_out_of_memory(error):
                    return 0  # the call tells
                raise
        if not cache.is_like(like):
            return 0  # it had states of another dtype: a pass must tell that this has changed
        rows = [None if history is None else Row(history.cache) for history in histories]
        fill(cache, rows, starts, length)
        return length

    def keep_row(self, row: Row, ids: list[int], origin: Any) -> None:
        """Keep a copy of the first tokens of a batch row, which are `ids`."""
        with self._lock:
            if (history := self._copy(row, ids, origin)) is not None:
                self.last = weakref.ref(history)

    def _copy(self, row: Row, ids: list[int], origin: Any) -> History | None:
        others = _sum_of_bytes([*self.free, *self.in_use, *self.taken])
        bound = self._bound(row.cache.kv_layers[0].device) - others
        return self.histories.add(row, ids, origin, bound)

    def _with_prefix(self, request: Request, identity: Any, kind: Any) -> tuple[Entry | None, int]:
        """The free cache with the longest prefix of the prompt: if that is half of the prompt or of
        its tokens, or if these can be copied.
        """
        if identity is None:
            return None, 0
        alike = [entry for entry in self.free if (entry.identity, entry.kind) == (identity, kind)]
        lengths = {entry: entry.common_prefix(request) for entry in alike}
        entry = max(alike, key=lambda entry: lengths[entry], default=None)
        length = 0 if entry is None else lengths[entry]
        if num_ranks(request.model) > 1:
            length = least(request.model, length)
        if entry is None or length == 0:
            return None, 0
        is_half = 2 * length >= min(entry.cache.seq_len, request.prompt_length - 1)
        if is_half or (length >= BLOCK and entry.may_be_copied):
            return entry, length
        return None, 0  # two chats with the same beginning keep a cache each

    def _free_entry(self, request: Request, kind: Any) -> Entry | None:
        """The smallest free cache that serves the call, without tokens if possible."""
        is_full = len(self.free) >= _MAX_FREE
        serving = [
            entry
            for entry in self.free
            if entry.kind == kind
            and entry.cache.max_cache_len >= request.max_positions
            and entry.cache.kv_layers[0].max_batch_size >= len(request.input_ids)
            and (entry.identity is None or is_full or entry.may_be_copied)
        ]
        # The one that was used last has captured passes; only what would be lost goes by its age.
        kept = [entry for entry in serving if entry.identity is None or entry.may_be_copied]
        return min(
            reversed(kept or serving[:1]),
            key=lambda entry: (entry.identity is not None, entry.num_bytes),
            default=None,
        )

    def _new_entry(self, request: Request, kind: Any) -> Entry:
        model = request.model
        rows = len(request.input_ids)
        ranks = num_ranks(model)
        needed = max(_MIN_CAPACITY, self.max_cache_len or 0, request.max_positions)
        capacity = 1 << (needed - 1).bit_length()
        # Passes read positions up to the capacity: behind the end of a row, and in trials.
        if (table := positions_of_table(model.config)) is not None:
            capacity = min(capacity, max(table, request.max_positions))
        kv_dtype = self._kv_dtype_for(model)

        def num_bytes(length: int) -> int:
            how = {"sliding": sliding, "kv_dtype": kv_dtype, "tp": ranks, "tp_plan": model.tp_plan}
            return cache_bytes(model.config, length, rows, model.dtype, **how)

        windows = [plan.sliding_window for plan in plan_layers(model.config) if plan.sliding_window]
        is_long = windows and capacity > 4 * max(windows)
        sliding = "compact" if is_long and not request.keeps_all_positions else "full"
        try:
            wanted_bytes = num_bytes(capacity)
        except ValueError as unserved:
            raise Fallback(str(unserved)) from unserved
        if self.max_bytes is None and ranks > 1:
            self.max_bytes = least(model, self._bound(compute_device(model)))
        bound = self._bound(compute_device(model)) - _sum_of_bytes(self.in_use)
        if wanted_bytes > bound and self.free_beside():
            bound = self._bound(compute_device(model)) - _sum_of_bytes(self.in_use)
        if wanted_bytes > bound:  # take the longest that fits
            capacity = bisect_right(range(1, capacity), bound, key=num_bytes)
        if capacity < request.prompt_length:
            raise Fallback(
                f"a prompt of {request.prompt_length} tokens in {rows} rows takes "
                f"{num_bytes(request.prompt_length):,} bytes of cache, and {max(0, bound):,} of "
                "max_bytes are left"
            )
        planned_bytes = num_bytes(capacity)
        self._evict(bound - planned_bytes, _MAX_FREE - 1)
        cache = StaticContiguousCache.for_calls(model, capacity, rows, sliding, kv_dtype)
        return Entry(cache, kind, planned_bytes)

    def _kv_dtype_for(self, model: PreTrainedModel) -> str | None:
        return None if is_exact(model) else self.kv_dtype

    def _kind(self, request: Request, modules: list[Module]) -> Any:
        """Equal for two calls whose states one cache can hold. Raises `Fallback`."""
        model = request.model
        device = compute_device(model).type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        try:
            plans = plan_layers(model.config, kv_dtype=self._kv_dtype_for(model))
            # As long as the modules are the same, none is missing.
            numbers = [module.__dict__.get("layer_idx") for module in modules]
            if self._complete != (seen := [len(plans), *map(id, modules), *numbers]):
                refuse_missing_layers(model, len(plans))
                self._complete = seen
        except ValueError as unserved:
            raise Fallback(str(unserved)) from unserved
        keeps_all = request.keeps_all_positions
        return weakref.ref(model), model.dtype, model.device, autocast, plans, keeps_all

    def _keep(self, entry: Entry) -> None:
        cache = entry.cache
        if cache.is_unfinished:
            entry.identity = None  # the model skips layers
        if entry.identity is None:
            cache.reset()
        elif not any(entry.starts):
            self.last = weakref.ref(entry)
        if not cache.is_allocated:
            # Its first pass failed; the rest would have the rows of another call.
            return
        (self.free if entry.own_users is None else self.taken).append(entry)
        bound = sys.maxsize
        if self.max_bytes is not None or entry.num_bytes > entry.planned_bytes:
            bound = self._bound(cache.kv_layers[0].device)
        self._evict(bound - _sum_of_bytes(self.in_use), _MAX_FREE)

    def _evict(self, max_bytes: int, max_number: int) -> None:
        self.histories.evict(max_bytes - _sum_of_bytes([*self.free, *self.taken]))
        # Those of callers first: they serve no call now.
        for entries in (self.taken, self.free):
            while len(entries) > max_number or (
                entries and _sum_of_bytes([*self.free, *self.taken]) > max_bytes
            ):
                del entries[0]

    def _bound(self, device: torch.device) -> int:
        if self.max_bytes is not None:
            return max(0, self.max_bytes - self.bytes_beside())
        if device.type != "cuda":
            return int(_SHARE_OF_HOST * host_bytes())
        return int(_SHARE_OF_GPU * (free_bytes(device) + self.num_bytes))


def _num_held(cache: StaticContiguousCache, ids: Tensor) -> int:
    """How many of the tokens [B, n] the cache holds."""
    known = cache.known_ids
    if known is None or len(known) != len(ids):
        return 0
    return common_length(known[:, : cache.seq_len].to(ids.device), ids)


def _sum_of_bytes(entries: list[Entry]) -> int:
    return sum(entry.num_bytes for entry in entries)


def host_bytes() -> int:
    """The physical memory of this machine; 8 GiB if it is not known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # on Windows
        return 8 << 30
