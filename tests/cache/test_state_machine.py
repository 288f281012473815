"""Random sequences of every operation against a naive cache: one Python list of tokens for each layer."""

import pytest
import torch

from hf_static_kv import StaticContiguousCache

pytest.importorskip("hypothesis", reason="hypothesis is not installed")
import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

LAYERS, HEADS, DIM, ROOM, ROWS = 3, 2, 2, 9, 4
WINDOWS = [None, 2, 4]


class CacheMachine(RuleBasedStateMachine):
    """`self.text[layer]` lists the tokens of a layer, each a pair of key and value [batch, heads, dim]."""

    @initialize(order=st.permutations(range(LAYERS)))
    def start(self, order):
        self.order = order  # in which the layers of this model run
        self.cache = StaticContiguousCache.allocate(
            LAYERS, HEADS, DIM, ROOM, batch_size=ROWS, dtype=torch.float32, device="cpu", sliding_windows=WINDOWS
        )
        self.address = self.cache.key_storage.data_ptr(), self.cache.value_storage.data_ptr()
        self.text = [[] for _ in range(LAYERS)]
        self.batch = None
        self.serial = 0

    def new_states(self, tokens):
        """Numbers that were never used before, so that no two tokens are alike."""
        size = self.batch * HEADS * tokens * DIM
        keys = (torch.arange(size) + self.serial).float().view(self.batch, HEADS, tokens, DIM)
        self.serial += size
        return keys, -keys

    def write(self, layer_idx, tokens):
        """Write one layer, check the views against the naive text and return that text as it will be."""
        keys, values = self.new_states(tokens)
        past = self.text[layer_idx]
        grown = past + [(keys[:, :, i], values[:, :, i]) for i in range(tokens)]
        window = WINDOWS[layer_idx]
        visible = grown if window is None else grown[max(0, len(past) - window + 1) :]
        views = self.cache.update(keys, values, layer_idx)
        for view, side in zip(views, (0, 1), strict=True):
            assert torch.equal(view, torch.stack([token[side] for token in visible], dim=2))
        return grown

    def has_room(self, tokens):
        return all(len(text) + tokens <= ROOM for text in self.text)

    def empty(self):
        return not any(self.text)

    def choose_batch(self, batch):
        if self.empty():
            self.batch = batch

    @rule(tokens=st.integers(1, 4), batch=st.integers(1, ROWS), layers=st.integers(1, LAYERS), finish=st.booleans())
    def step(self, tokens, batch, layers, finish):
        """A forward pass that reaches `layers` layers; if not all, it failed there or is finished by `advance`."""
        if not self.has_room(tokens):
            return
        self.choose_batch(batch)
        grown = {layer_idx: self.write(layer_idx, tokens) for layer_idx in self.order[:layers]}
        if layers == LAYERS or finish:
            for layer_idx, text in grown.items():
                self.text[layer_idx] = text
            if layers < LAYERS:
                self.cache.advance(tokens)

    @rule(tokens=st.integers(1, ROOM + 2), batch=st.integers(1, ROWS))
    def too_long(self, tokens, batch):
        if self.has_room(tokens):
            return
        self.choose_batch(batch)
        layer_idx = max(range(LAYERS), key=lambda i: len(self.text[i]))
        with pytest.raises(ValueError, match="cache is full"):
            self.cache.update(*self.new_states(tokens), layer_idx)

    @rule(data=st.data())
    def crop(self, data):
        count = data.draw(st.integers(0, min((len(text) for text in self.text if text), default=0)))
        self.cache.crop(-count)
        self.text = [text[: len(text) - count] if text else [] for text in self.text]

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
        indices = torch.tensor(data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=ROWS)))
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
        assert (self.cache.key_storage.data_ptr(), self.cache.value_storage.data_ptr()) == self.address
        assert self.cache.seq_len == len(self.text[0])
        for layer, text in zip(self.cache.layers, self.text, strict=True):
            assert layer.get_seq_length() == len(text)
            if text:
                assert torch.equal(layer.keys, torch.stack([key for key, _ in text], dim=2))
                assert torch.equal(layer.values, torch.stack([value for _, value in text], dim=2))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
