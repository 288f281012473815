"""A call that has a row among others, and which calls may have one."""

from queue import SimpleQueue
from threading import get_ident
from typing import Any

import torch

from hf_static_kv.cache.entry import Entry
from hf_static_kv.cache.rows import oldest_of
from hf_static_kv.cache.unserved import positions_of_table
from hf_static_kv.decoding.call import Call
from hf_static_kv.decoding.selection import Selection
from hf_static_kv.decoding.tokens import Tokens
from hf_static_kv.patching import TRACED_ATTENTION_NAME

TAKES_THE_LARGEST = Selection()
_ROOM_OF_TRIALS = 8  # positions behind the longest row


class Cancelled(Exception):
    """The owner of a call has no more use for it."""


class Seat:
    """A call and its row. `selection` None: its own thread selects the tokens."""

    def __init__(self, call: Call, tokens: Tokens, selection: Selection | None) -> None:
        self.call = call
        self.tokens = tokens
        # Passes know no n-grams of their rows.
        self.selection = None if selection is not None and selection.ngram else selection
        # By the kernels of sampling, which also know a least length.
        self.is_sampled = self.selection is not None and self.selection != TAKES_THE_LARGEST
        self.draws = self.is_sampled and bool(tokens.config.do_sample)
        self.length = int(call.cache.seq_len)  # tokens in the row
        # Compact layers have dropped what is before; the rows do not know.
        self.oldest = oldest_of(call.cache)
        self.row = -1
        self.is_running = False  # it takes part in passes
        self.selected: list[int] = []
        self.unsent: list[int] = []  # of a stream
        self.sent = 0.0  # when the last piece was
        self.inbox: SimpleQueue[Any] = SimpleQueue()  # what its thread waits for
        self.thread = get_ident()
        self.owner = call.owner
        self.returns_cache = bool(call.config.return_dict_in_generate)
        # Of a call whose sequence is kept; it goes on without this cache.
        is_kept = call.entry is not None and call.entry.identity is not None
        self.kept: Entry | None = call.entry if is_kept else None

    @property
    def keeps_row(self) -> bool:
        """Whether the sequence is read from the row after its last token."""
        return self.returns_cache or self.kept is not None

    @property
    def last(self) -> int:
        """The position of its last token; of the next one, if its thread selects."""
        following = self.length + 1
        if self.selection is None:
            return following
        return following + self.tokens.max_length - self.tokens.length - 1

    def received(self) -> Any:
        message = self.inbox.get()
        if isinstance(message, BaseException):
            raise message
        return message


def refusal(call: Call) -> str | None:
    """Why a call has no row among others; None: it may have one."""
    if call.entry is None:
        return "it brings its own cache"
    if len(call.input_ids) != 1 or len(call.seq_start) != 1:
        return "it has several rows"
    if call.cache.stateful_layers or call.cache.index_layers:
        return "a layer keeps more than keys and values"
    if call.own_attention == TRACED_ATTENTION_NAME or call.has_hooks:
        return "the model is watched"
    table = positions_of_table(call.model.config)
    if table is not None and call.request.max_positions + _ROOM_OF_TRIALS > table:
        return "its positions end with their table"
    if torch.is_autocast_enabled(call.device.type):
        return "autocast belongs to one thread"
    inputs = call.step_inputs
    if inputs.tensors or inputs.position_ids.ndim != 2 or not call.has_usual_positions:
        return "its steps are given more than tokens"
    return None


def kind_of(call: Call) -> Any:
    """Equal for two calls that one pass can serve."""
    return call.own_attention, repr(sorted(call.step_inputs.settings.items()))
