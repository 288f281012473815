"""Random sequences of every operation against a naive cache: one Python list of tokens for each
layer.

Compact layers run against the same lists, with a longer capacity. There `seen` counts how far a
layer has ever been, as positions that were dropped do not come back. A cache in 8 bits runs against
lists of what its codes say.
"""

import pickle

import pytest
import torch

from hf_static_kv import StaticContiguousCache
from hf_static_kv.cache import storage
from hf_static_kv.cache.codes import decoded, encoded

pytest.importorskip("hypothesis", reason="hypothesis is not installed")
import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

LAYERS, HEADS, DIM, ROWS = 3, 2, 4, 4
WINDOWS = [None, 2, 4]
SLACK = 1  # of compact layers: they have 6 and 10 slots


class CacheMachine(RuleBasedStateMachine):
    """`self.text[layer]` lists the tokens of a layer, each a pair of key and value [batch, heads,
    dim].
    """

    SLIDING, ROOM, MAX_STEP = "full", 9, 4
    KV_DTYPE = None

    @initialize(order=st.permutations(range(LAYERS)))
    def start(self, order):
        self.order = order  # in which the layers of this model run
        self.seen = [0] * LAYERS
        before, storage.SLACK = storage.SLACK, SLACK
        self.cache = StaticContiguousCache.allocate(
            LAYERS, HEADS, DIM, self.ROOM, batch_size=ROWS, dtype=torch.float32, device="cpu",
            sliding_windows=WINDOWS, sliding=self.SLIDING, kv_dtype=self.KV_DTYPE,
        )  # fmt: skip
        storage.SLACK = before
        self.address = self.addresses()
        self.text = [[] for _ in range(LAYERS)]
        self.batch = None
        self.serial = 0

    def addresses(self):
        return [
            (group.keys.data_ptr(), group.values.data_ptr()) for group in self.cache.storage_groups
        ]

    def new_states(self, tokens):
        """Numbers that were never used before, so that no two tokens are alike."""
        size = self.batch * HEADS * tokens * DIM
        keys = (torch.arange(size) + self.serial).float().view(self.batch, HEADS, tokens, DIM)
        self.serial += size
        return keys, -keys

    def as_read(self, states):
        """States as the cache gives them back."""
        return states

    def write(self, layer_idx, tokens):
        """Write one layer, check the views against the naive text and return that text as it will
        be.
        """
        keys, values = self.new_states(tokens)
        past = self.text[layer_idx]
        known = self.as_read(keys), self.as_read(values)
        grown = past + [(known[0][:, :, i], known[1][:, :, i]) for i in range(tokens)]
        window = WINDOWS[layer_idx]
        visible = grown if window is None else grown[max(0, len(past) - window + 1) :]
        views = self.cache.update(keys, values, layer_idx)
        for view, side in zip(views, (0, 1), strict=True):
            assert torch.equal(view, torch.stack([token[side] for token in visible], dim=2))
        return grown

    def has_room(self, tokens):
        return all(len(text) + tokens <= self.ROOM for text in self.text)

    def empty(self):
        return not any(self.text)

    def choose_batch(self, batch):
        if self.empty():
            self.batch = batch

    @rule(
        data=st.data(),
        batch=st.integers(1, ROWS),
        layers=st.integers(1, LAYERS),
        finish=st.booleans(),
    )
    def step(self, data, batch, layers, finish):
        """A forward pass that reaches `layers` layers; if not all, it failed there or is finished
        by `advance`.
        """
        tokens = data.draw(st.integers(1, self.MAX_STEP))
        if not self.has_room(tokens):
            return
        self.choose_batch(batch)
        grown = {layer_idx: self.write(layer_idx, tokens) for layer_idx in self.order[:layers]}
        if layers == LAYERS or finish:
            for layer_idx, text in grown.items():
                self.text[layer_idx] = text
            if layers < LAYERS:
                self.cache.advance(tokens)

    @rule(data=st.data(), batch=st.integers(1, ROWS))
    def too_long(self, data, batch):
        tokens = data.draw(st.integers(1, self.ROOM + 2))
        if self.has_room(tokens):
            return
        self.choose_batch(batch)
        layer_idx = max(range(LAYERS), key=lambda i: len(self.text[i]))
        with pytest.raises(ValueError, match="cache is full"):
            self.cache.update(*self.new_states(tokens), layer_idx)

    @rule(data=st.data())
    def crop(self, data):
        count = data.draw(st.integers(0, min((len(text) for text in self.text if text), default=0)))
        if not all(self.can_crop(layer, count) for layer in self.cache.layers):
            before = [(layer.length, layer.oldest) for layer in self.cache.layers]
            with pytest.raises(ValueError, match="keeps the positions from"):
                self.cache.crop(-count)
            assert [(layer.length, layer.oldest) for layer in self.cache.layers] == before
            return
        self.cache.crop(-count)
        self.text = [text[: len(text) - count] if text else [] for text in self.text]

    def can_crop(self, layer, count):
        return True

    @rule()
    def reset(self):
        self.cache.reset()
        self.text = [[] for _ in range(LAYERS)]

    def take(self, indices):
        self.text = [[(key[indices], value[indices]) for key, value in text] for text in self.text]
        self.batch = len(indices)

    @precondition(lambda self: self.text[0])
    @rule(data=st.data())
    def reorder(self, data):
        rows = st.integers(0, self.batch - 1)
        indices = torch.tensor(data.draw(st.lists(rows, min_size=self.batch, max_size=self.batch)))
        self.cache.reorder_cache(indices)
        self.take(indices)

    @precondition(lambda self: self.text[0])
    @rule(data=st.data())
    def select(self, data):
        indices = torch.tensor(
            data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=ROWS))
        )
        self.cache.batch_select_indices(indices)
        self.take(indices)

    @precondition(lambda self: self.text[0])
    @rule(repeats=st.integers(1, ROWS))
    def repeat(self, repeats):
        if self.batch * repeats <= ROWS:
            self.cache.batch_repeat_interleave(repeats)
            self.take(torch.arange(self.batch).repeat_interleave(repeats))

    @invariant()
    def reads_as_the_naive_text(self):
        if not hasattr(self, "cache"):
            return
        assert self.addresses() == self.address
        assert self.cache.seq_len == len(self.text[0])
        for layer, text in zip(self.cache.layers, self.text, strict=True):
            assert layer.get_seq_length() == len(text)
            if text:
                kept = self.kept(layer, text)
                assert torch.equal(layer.keys, torch.stack([key for key, _ in kept], dim=2))
                assert torch.equal(layer.values, torch.stack([value for _, value in kept], dim=2))

    def kept(self, layer, text):
        return text

    def as_stored(self, states):
        return states


class CompactMachine(CacheMachine):
    SLIDING, ROOM, MAX_STEP = "compact", 40, 14

    @precondition(
        lambda self: (
            self.text[0] and len({len(text) for text in self.text}) == 1 and self.has_room(1)
        )
    )
    @rule()
    def replay(self):
        """A captured step: room is made between the steps, and the device writes to slots."""
        self.cache.crop(0)  # a step that failed is discarded
        self.cache.reserve()
        keys, values = self.new_states(1)
        for layer in self.cache.layers:
            slot = layer.length - layer.offset
            for stored, states in ((layer.group.keys, keys), (layer.group.values, values)):
                stored[layer.index, : self.batch, :, slot] = self.as_stored(states)[:, :, 0]
        self.cache.mark_written(1)
        new = tuple(self.as_read(states)[:, :, 0] for states in (keys, values))
        self.text = [[*text, new] for text in self.text]

    @precondition(lambda self: self.text[0] and len({len(text) for text in self.text}) == 1)
    @rule(data=st.data())
    def undo(self, data):
        """Any number of steps, undone, where `crop` could not."""
        self.cache.crop(0)
        snapshot, text = self.cache.snapshot(), self.text
        self.text = list(text)
        for _ in range(data.draw(st.integers(1, 3))):
            if self.has_room(tokens := data.draw(st.integers(1, self.MAX_STEP))):
                self.text = [self.write(layer_idx, tokens) for layer_idx in range(LAYERS)]
        self.cache.restore(snapshot)
        self.text = text

    @rule()
    def pickle(self):
        self.cache = pickle.loads(pickle.dumps(self.cache))
        self.address = self.addresses()

    def can_crop(self, layer, count):
        window = layer.sliding_window
        return (
            window is None
            or layer.oldest <= max(0, layer.length - count - window + 1)
            or count == layer.length
        )

    def kept(self, layer, text):
        return text[layer.oldest :]

    @invariant()
    def keeps_enough(self):
        if not hasattr(self, "cache"):
            return
        self.seen = [
            max(seen, len(text)) if text else 0
            for seen, text in zip(self.seen, self.text, strict=True)
        ]
        for layer, seen, window in zip(self.cache.layers, self.seen, WINDOWS, strict=True):
            assert layer.num_slots == (self.ROOM if window is None else 2 * (window + SLACK))
            assert layer.oldest <= (0 if window is None else max(0, layer.length - window + 1))
            assert layer.oldest <= max(0, seen - (window or seen) + 1 - SLACK)


class CodedMachine(CompactMachine):
    KV_DTYPE = "int8"

    def as_stored(self, states):
        return encoded(states)

    def as_read(self, states):
        return decoded(encoded(states), states.dtype)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestCompactMachine = CompactMachine.TestCase
TestCompactMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestCodedMachine = CodedMachine.TestCase
TestCodedMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
