"""Tokens that may not come next: the kernel and the plain function against transformers' processors."""

import pytest
import torch
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)

from hf_static_kv.kernels.ban_tokens import MAX_NGRAM, ban_tokens, ban_tokens_plain
from hf_static_kv.kernels.select_greedy import GreedyState
from tests.conftest import given, settings, st, triton_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def state_of(ids, capacity, eos):
    """The state after `ids` [B, n]; later positions hold what earlier calls have left there."""
    sequences = torch.randint(0, 4, (len(ids), capacity), generator=torch.Generator())
    sequences[:, : ids.shape[1]] = ids
    ends = torch.full((len(ids), 16), -1)
    ends[:, : len(eos)] = torch.tensor(eos)
    others = [torch.zeros(1)] * 2
    return GreedyState(*(t.to(DEVICE) for t in (sequences, *others, ends, *others * 2, others[0])))


def kernel(logits, positions, state, min_length, ngram):
    logits = logits.clone()
    module = triton_module("hf_static_kv.kernels.ban_tokens_triton")
    module.ban_tokens_triton(logits, positions, state.sequences, state.eos, min_length, ngram)
    return logits


@pytest.mark.parametrize("implementation", [kernel, ban_tokens_plain], ids=["triton", "plain"])
class TestBans:
    @given(
        length=st.integers(1, 40),
        ngram=st.integers(0, 5),
        min_length=st.integers(0, 42),
        vocabulary=st.integers(2, 6),
        seed=st.integers(0, 1000),
    )
    @settings(max_examples=40, deadline=None)
    def test_as_transformers(self, implementation, length, ngram, min_length, vocabulary, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, vocabulary, (3, length), generator=generator)
        logits = torch.randn(3, vocabulary, generator=generator).to(DEVICE)
        eos = [0, vocabulary - 1]
        least = MinLengthLogitsProcessor(min_length, torch.tensor(eos, device=DEVICE))
        expected = least(ids.to(DEVICE), logits.clone())
        if ngram:
            expected = NoRepeatNGramLogitsProcessor(ngram)(ids.to(DEVICE), expected)
        positions = torch.full((3,), length - 1, device=DEVICE)
        state = state_of(ids, 50, eos)
        least = torch.full((3,), min_length, device=DEVICE)
        assert torch.equal(implementation(logits, positions, state, least, ngram), expected)

    def test_rows_of_unlike_lengths(self, implementation):
        ids = torch.tensor([[1, 2, 1, 0, 0], [3, 1, 2, 3, 1]])
        logits = torch.zeros(2, 4, device=DEVICE)
        positions = torch.tensor([2, 4], device=DEVICE)
        least = torch.tensor([5, 5], device=DEVICE)
        got = implementation(logits, positions, state_of(ids, 9, [3]), least, 2)
        banned = [(0, 2), (0, 3), (1, 2)]  # the end token of the row that is short, and 2 after 1
        assert {tuple(at) for at in got.isinf().nonzero().tolist()} == set(banned)

    def test_a_sequence_of_several_tiles(self, implementation):
        ids = torch.arange(600)[None] % 300
        logits = torch.zeros(1, 300, device=DEVICE)
        positions = torch.tensor([599], device=DEVICE)
        least = torch.tensor([0], device=DEVICE)
        got = implementation(logits, positions, state_of(ids, 700, []), least, 3)
        assert got.isinf().nonzero().tolist() == [[0, 0]]

    def test_tokens_without_a_logit(self, implementation):
        """Ids may be larger than the vocabulary of the head."""
        ids = torch.tensor([[9, 9, 9]])
        logits = torch.zeros(1, 4, device=DEVICE)
        positions = torch.tensor([2], device=DEVICE)
        least = torch.tensor([9], device=DEVICE)
        got = implementation(logits, positions, state_of(ids, 5, [7]), least, 2)
        assert torch.equal(got, logits)


def test_the_logits_stay():
    logits = torch.zeros(1, 4, device=DEVICE)
    state = state_of(torch.tensor([[1, 1]]), 5, [2])
    at, least = (torch.tensor([n], device=DEVICE) for n in (1, 9))
    assert ban_tokens(logits, at, state, least, 1).isinf().sum() == 2
    assert not logits.isinf().any()
    with pytest.raises(ValueError, match=f"ngram must be 0 to {MAX_NGRAM}, got 17"):
        ban_tokens(logits, at, state, least, 17)
