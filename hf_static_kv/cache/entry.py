"""A cache of the pool, and whose tokens it has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from hf_static_kv import compat
from hf_static_kv.cache import blocks
from hf_static_kv.cache.blocks import BLOCK
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.ranks import num_ranks
from hf_static_kv.cache.request import Request


@dataclass(eq=False)
class Entry:
    cache: StaticContiguousCache
    kind: Any  # equal for two calls whose states one cache can hold
    planned_bytes: int
    # Of the model that computed its tokens; None: no other call may use them.
    identity: Any = None
    num_reused: int = 0  # tokens that the present call does not compute
    is_hit: bool = False  # an earlier call had this cache
    starts: Sequence[int] = ()  # where the sequences of its batch rows begin
    prompt: list[list[int]] | None = None  # its first tokens, of each row; None: they are unknown
    modules: Sequence[Module] = ()  # of the model, during a call
    # `storage_users` before a caller was given the cache.
    own_users: list[int | None] | None = None

    @property
    def storage_users(self) -> list[int | None]:
        groups = self.cache.storage_groups
        tensors = [tensor for group in groups for tensor in (group.keys, group.values)]
        return [compat.storage_users(tensor) for tensor in tensors]

    @property
    def num_bytes(self) -> int:
        return self.cache.memory_bytes or self.planned_bytes

    def common_prefix(self, request: Request) -> int:
        """How many tokens of the prompt the cache can keep: not the last one."""
        if self.starts != request.starts:
            return 0
        pairs = zip(self.ids, request.host_ids, strict=False)  # none, if its tokens are unknown
        length = min([blocks.common_length(known, ids[:-1]) for known, ids in pairs], default=0)
        return length if self.cache.can_crop_to(length) else 0

    @property
    def ids(self) -> list[list[int]]:
        """The tokens of each row, as far as they are known. Of an answer it waits for the device."""
        known = self.cache.known_ids
        if known is None or self.prompt is None:
            return []
        length = min(self.cache.seq_len, known.shape[1])
        if length > min(map(len, self.prompt)):
            self.prompt = known[:, :length].tolist()
        return [row[:length] for row in self.prompt]

    @property
    def origin(self) -> Any:
        """Equal for two calls that may use each other's states."""
        return self.identity, self.kind

    @property
    def may_be_copied(self) -> bool:
        """Whether its tokens can be kept elsewhere."""
        cache = self.cache
        known = cache.known_ids
        has_more = cache.stateful_layers or cache.index_layers or num_ranks(self.kind[0]()) > 1
        is_known = known is not None and known.shape[1] >= cache.seq_len
        is_long = cache.seq_len - min(self.starts, default=cache.seq_len) >= BLOCK
        return self.identity is not None and is_known and is_long and not has_more
