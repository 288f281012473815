"""Rows of unlike lengths in one pass, and lengths that are set back."""

import pytest
import torch

from hf_static_kv import StaticContiguousCache, exact
from hf_static_kv.program.positions import Positions
from hf_static_kv.program.selecting import SelectingStep
from hf_static_kv.program.step import DecodeStep
from tests.conftest import toy_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [3, 11, 1, 7, 20, 5, 16, 2]
NEW_TOKENS = 6
CAPACITY = 40


def prompts(vocabulary):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocabulary, (1, n), generator=generator).to(DEVICE) for n in LENGTHS]


def filled_cache(model, texts, sliding="full"):
    """A cache whose row b holds the states of text b without its last token, from slot 0 on."""
    cache = StaticContiguousCache.from_model(model, CAPACITY, len(texts), sliding=sliding)
    for b, ids in enumerate(texts):
        if ids.shape[1] == 1:
            continue
        alone = StaticContiguousCache.from_model(model, CAPACITY, sliding=sliding)
        model(ids[:, :-1], past_key_values=alone)
        for group, own in zip(cache.storage_groups, alone.storage_groups, strict=True):
            group.keys[:, b].copy_(own.keys[:, 0])
            group.values[:, b].copy_(own.values[:, 0])
    return cache


def greedy_tokens(model, texts, step):
    lengths = torch.tensor([ids.shape[1] - 1 for ids in texts], device=DEVICE)
    step.set_position(lengths, torch.zeros_like(lengths))
    tokens = torch.cat([ids[:, -1] for ids in texts])
    found = []
    for _ in range(NEW_TOKENS):
        tokens = step.run(tokens).argmax(dim=-1)
        found.append(tokens)
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2"])
@torch.no_grad()
def test_rows_of_unlike_lengths_without_padding(name):
    """Each row has the tokens that it has alone."""
    model = toy_model(name).to(DEVICE)
    texts = prompts(model.config.vocab_size)
    step = DecodeStep(model, filled_cache(model, texts), len(texts))
    with step.on_shadow("static_contiguous"):
        got = greedy_tokens(model, texts, step)
    for row, ids in zip(got, texts, strict=True):
        alone = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
        )
        assert row.tolist() == alone[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_the_bits_of_a_row_are_its_own(name):
    model = toy_model(name).to(DEVICE, torch.bfloat16)
    texts = prompts(model.config.vocab_size)
    tokens = torch.cat([ids[:, -1] for ids in texts])
    with exact(model):
        step = DecodeStep(model, filled_cache(model, texts), len(texts))
        lengths = torch.tensor([ids.shape[1] - 1 for ids in texts], device=DEVICE)
        with step.on_shadow("static_contiguous_exact"):
            step.set_position(lengths, torch.zeros_like(lengths))
            got = step.run(tokens)
        for logits, ids in zip(got, texts, strict=True):
            assert torch.equal(logits, model(ids).logits[0, -1].float())


@torch.no_grad()
def test_a_selecting_step_writes_each_row_at_its_own_position():
    model = toy_model("llama").to(DEVICE)
    texts = prompts(model.config.vocab_size)
    step = SelectingStep(model, filled_cache(model, texts), len(texts), kinds=None)
    lengths = torch.tensor([ids.shape[1] - 1 for ids in texts], device=DEVICE)
    step.set_position(lengths, torch.zeros_like(lengths))
    step.token.copy_(torch.cat([ids[:, -1:] for ids in texts]))
    with step.on_shadow("static_contiguous"):
        for _ in range(3):
            step.replay()
    for b, ids in enumerate(texts):
        alone = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            do_sample=False,
            max_new_tokens=3,
            min_new_tokens=3,
        )
        length = ids.shape[1]
        assert step.state.sequences[b, length : length + 3].tolist() == alone[0, length:].tolist()


def test_lengths_that_are_set_back():
    windows = [None, 4]
    positions = Positions(windows, [False, False], [4], 2, 3, (), torch.device(DEVICE))
    start = torch.tensor([0, 2], device=DEVICE)
    positions.set(torch.tensor([5, 9], device=DEVICE), start, None)
    positions.set_offsets({4: 1})
    positions.place()
    assert positions.lengths.tolist() == [8, 12]
    assert positions.full.slots.tolist() == [[5, 6, 7], [9, 10, 11]]
    assert positions.compact[4].slots.tolist() == [[4, 5, 6], [8, 9, 10]]
    assert positions.position_ids.tolist() == [[5, 6, 7], [7, 8, 9]]
    assert positions.full.spans[0, 1].tolist() == [[0, 2, 6], [0, 3, 7], [0, 4, 8]]
    positions.set_back(torch.tensor([3, 1], device=DEVICE))
    positions.place()
    assert positions.full.slots.tolist() == [[5, 6, 7], [11, 12, 13]]
    assert positions.position_ids.tolist() == [[5, 6, 7], [9, 10, 11]]


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("sliding", ["full", "compact"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2"])
@torch.no_grad()
def test_a_pass_of_many_tokens(name, sliding, is_recorded):
    """In parts of any size: logits, keys and values are those of one ordinary pass."""
    model = toy_model(name).to(DEVICE)
    if sliding == "compact" and name != "gemma3":
        pytest.skip("no layer slides")
    ids = torch.randint(1, model.config.vocab_size, (2, 37), device=DEVICE)
    expected = StaticContiguousCache.from_model(model, 64, 2)
    model(ids, past_key_values=expected)
    cache = StaticContiguousCache.from_model(model, 64, 2, sliding=sliding)
    for group in cache.storage_groups:
        group.keys.fill_(7.0)  # padding that is written, or seen, shows
        group.values.fill_(7.0)
    step = DecodeStep(model, cache, 2, num_tokens=20)
    start = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with step.on_shadow("static_contiguous"):
        if is_recorded:
            step.record(0, start, token=ids[:, :3])
        for part in ids.split([20, 1, 13, 3], dim=1):
            cache.reserve(part.shape[1])
            step.set_position(cache.seq_len, start)
            logits = step.run(part)
            cache.mark_written(part.shape[1])
            whole = model(ids[:, : cache.seq_len]).logits[:, -1]
            torch.testing.assert_close(logits, whole, rtol=1e-5, atol=1e-5)
    for layer, other in zip(cache.kv_layers, expected.kv_layers, strict=True):
        first = max(layer.oldest, other.oldest)
        for got, states in zip(layer._views(first, 37), other._views(first, 37), strict=True):
            torch.testing.assert_close(got, states, rtol=1e-5, atol=1e-5)
        rest = layer.storage[0][:, :, 37 - layer.offset :]
        assert layer.is_compact or (rest == 7.0).all()
