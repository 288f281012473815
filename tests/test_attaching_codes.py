"""`attach(model, kv_dtype="int8")`: the tokens of a cache with codes that is passed by hand, in half
of the memory.
"""

import copy
import logging
from threading import Thread

import pytest
import torch
from transformers import GenerationConfig

from hf_static_kv import (
    StaticContiguousCache,
    attach,
    attached,
    attaching_loaded_models,
    attachment,
    cache_bytes,
    detach,
    exact,
    served,
)
from hf_static_kv.decoding.loop import Loop
from hf_static_kv.decoding.turns import Turns
from hf_static_kv.program import quantised
from tests.conftest import COMMON
from tests.decoding.conftest import BATCH, DEVICE, PROMPT, padded, toy_model
from tests.quantised_layers import quantise

CODES = {"kv_dtype": "int8"}
ON_GPU = DEVICE == "cuda"
MODES = {
    "greedy": {},
    "sampled": {"ids": BATCH, "do_sample": True, "top_k": 20},
    "padded": padded(),
    "beams": {"ids": BATCH, "num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}


@pytest.fixture
def in_steps(monkeypatch):
    """On a CPU without a graph."""
    monkeypatch.setattr(served, "_DECODER_DEVICES", (DEVICE,))


@pytest.fixture
def model():
    model = toy_model("llama")
    yield model
    detach(model)


def generate(model, ids=PROMPT, **how):
    torch.manual_seed(0)
    return model.generate(ids, **{**COMMON, "attention_mask": torch.ones_like(ids), **how})


def by_hand(model, ids=PROMPT, **how):
    """With a cache of codes that the caller brings."""
    cache = StaticContiguousCache(model.config, 300, **CODES)
    cache.grows = True
    return generate(model, ids, past_key_values=cache, **how)


def kinds(info):
    return {cache.kv_dtype for cache in info.caches}


@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_tokens_are_those_of_a_cache_by_hand(name, mode):
    model = toy_model(name)
    expected = by_hand(model, **MODES[mode])
    with attached(model, **CODES) as info:
        for _ in range(2):
            assert torch.equal(generate(model, **MODES[mode]), expected)
        assert (info.calls, info.hits, kinds(info)) == (2, 1, {"int8"})


def test_memory(model):
    """Of a head of 16 numbers: 16 codes and a scale of 4 bytes, in the place of 64 bytes."""
    memory = {}
    for kv_dtype in (None, "int8"):
        with attached(model, reuse_prefix=True, kv_dtype=kv_dtype) as info:
            generate(model)
            memory[kv_dtype] = info.pool.num_bytes
    assert memory["int8"] == cache_bytes(model.config, 256, **CODES)
    assert memory["int8"] * 64 == memory[None] * 20


@pytest.mark.usefixtures("either_loop")
def test_max_bytes_holds_more_tokens(model):
    most = 300 * cache_bytes(model.config, 1, **CODES)
    expected = by_hand(model, max_new_tokens=400)
    with attached(model, max_bytes=most, **CODES) as info:
        assert torch.equal(generate(model, max_new_tokens=400), expected)
        assert info.caches == []  # it grew beyond the bound, and is not kept
        generate(model, max_new_tokens=200)
        assert [cache.max_cache_len for cache in info.caches] == [256]
        assert info.pool.num_bytes <= most
    with attached(model, max_bytes=most, reuse_prefix=True) as info:
        generate(model, max_new_tokens=80)
        assert [cache.max_cache_len for cache in info.caches] == [300 * 20 // 64]


@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_chats_compute_new_tokens_only(name):
    """Two by turns, so that tokens are copied to histories and back."""
    model = toy_model(name)
    chats = [torch.arange(3, 60, device=DEVICE)[None], torch.arange(60, 117, device=DEVICE)[None]]
    with attached(model, reuse_prefix=True, **CODES) as info:
        for turn in range(3):
            for number, ids in enumerate(chats):
                before = info.reused_tokens
                tokens = generate(model, ids)
                assert torch.equal(tokens, by_hand(model, ids))
                assert info.reused_tokens - before == (ids.shape[1] - 4 if turn else 0)
                chats[number] = torch.cat([tokens, ids[:, :3]], dim=1)
        assert len(info.pool.histories)
        assert {history.cache.kv_dtype for history in info.pool.histories} == {"int8"}


def saved(model, folder, ids, **settings):
    with attached(model, reuse_prefix=folder, **settings) as info:
        generate(model, ids)
        return info.save(ids)


def test_a_folder_may_have_prefixes_of_both_kinds(model, tmp_path, caplog):
    ids = torch.arange(3, 103, device=DEVICE)[None]
    longer = torch.cat([ids, PROMPT], dim=1)
    for kind, other in (({}, CODES), (CODES, {})):
        path = saved(model, tmp_path / str(kind), ids, **kind)
        for settings, number in ((other, 0), (kind, 100)):
            with attached(model, reuse_prefix=path.parent, **settings) as info:
                generate(model, longer)
                assert info.reused_tokens == number
        assert saved(model, path.parent, ids, **other) != path
        with attached(model, reuse_prefix=path.parent, **kind) as info:
            generate(model, longer)
            assert info.reused_tokens == 100
    assert caplog.text == ""


@pytest.mark.usefixtures("in_steps")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_calls_of_several_threads_decode_together(name, monkeypatch):
    model = toy_model(name)
    prompts = [PROMPT + number for number in range(5)]
    expected = [by_hand(model, ids, max_new_tokens=40) for ids in prompts]
    results = {}
    kinds_of_rows = set()
    seat = Loop._seat

    def noting(self, *args):
        seat(self, *args)
        kinds_of_rows.add(self._cache.kv_dtype)

    def run(number, ids):
        results[number] = generate(model, ids, max_new_tokens=40)

    monkeypatch.setattr(Loop, "_seat", noting)
    monkeypatch.setattr(Turns, "is_wanted", True)  # no call goes on by itself
    with attached(model, **CODES) as info:
        threads = [Thread(target=run, args=pair) for pair in enumerate(prompts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert kinds(info) == kinds_of_rows == {"int8"}
    assert all(torch.equal(results[number], tokens) for number, tokens in enumerate(expected))


@pytest.mark.usefixtures("in_steps")
def test_generate_batch(model):
    inputs = [[17, 93, 5, 64], [88, 121, 40]]
    config = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0)
    rows = [torch.tensor([ids], device=DEVICE) for ids in inputs]
    expected = [by_hand(model, ids, max_new_tokens=20)[0].tolist() for ids in rows]
    info = attach(model, **CODES)
    results = model.generate_batch(inputs, config).values()
    assert [[*result.prompt_ids, *result.generated_tokens] for result in results] == expected
    assert (info.calls, kinds(info)) == (2, {"int8"})


@pytest.mark.usefixtures("in_steps")
def test_an_assistant_has_codes_too(model):
    expected = by_hand(model, max_new_tokens=40)
    info = attach(model, assistant=copy.deepcopy(model), **CODES)
    assert torch.equal(generate(model, max_new_tokens=40), expected)
    assert (info.draft_reason, kinds(info)) == (None, {"int8"})
    assert len(info.caches) == 2
    assert info.drafted_passes > 0


@pytest.mark.usefixtures("in_steps")
def test_beside_packed_weights(monkeypatch):
    """Both in one step."""
    model = quantise(toy_model("llama", hidden_size=64, intermediate_size=128))
    expected = by_hand(model)
    found = []
    packed_weights = quantised.packed_weights

    def noting(model):
        found.append(packed_weights(model))
        return found[-1]

    monkeypatch.setattr(quantised, "DEVICES", (DEVICE,))
    monkeypatch.setattr(quantised, "packed_weights", noting)
    with attached(model, **CODES) as info:
        assert torch.equal(generate(model), expected)
        assert (info.fallback_reason, kinds(info)) == (None, {"int8"})
    assert len(found[0]) == 14  # all of two layers


def test_a_cache_that_is_returned_has_codes(model):
    attach(model, **CODES)
    output = generate(model, return_dict_in_generate=True)
    cache = output.past_key_values
    longer = torch.cat([output.sequences, PROMPT], dim=1)
    assert cache.kv_dtype == "int8"
    assert torch.equal(generate(model, longer, past_key_values=cache), by_hand(model, longer))


@pytest.mark.usefixtures("either_loop")
def test_inside_exact_keys_and_values_are_as_they_are(model):
    """The bits of a run without a cache; afterwards there are codes again."""
    expected = by_hand(model)
    info = attach(model, reuse_prefix=True, **CODES)
    assert torch.equal(generate(model), expected)
    how = {"output_logits": True, "return_dict_in_generate": True}
    with exact(model):
        got = generate(model, **how)
        uncached = generate(model, use_cache=False, **how)
    assert got.past_key_values.kv_dtype is None
    assert torch.equal(got.sequences, uncached.sequences)
    assert all(map(torch.equal, got.logits, uncached.logits))
    assert info.reused_tokens == 0
    assert torch.equal(generate(model), expected)
    assert kinds(info) == {"int8"}


def test_short_prompts_on_a_cpu_have_codes_too(model):
    info = attach(model, **CODES)
    generate(model, PROMPT[:, :2])
    assert kinds(info) == {"int8"}


class TestRefused:
    def test_another_name(self, model):
        with pytest.raises(ValueError, match="kv_dtype='fp4': choose \"int8\", or None"):
            attach(model, kv_dtype="fp4")
        with pytest.raises(ValueError, match="kv_dtype='fp4'"):
            attaching_loaded_models(kv_dtype="fp4").__enter__()
        with pytest.raises(ValueError, match="not attached"):
            attachment(model)

    def test_every_call_inside_exact(self, model):
        with pytest.raises(ValueError, match="exact=True and kv_dtype='int8': omit one of both"):
            attach(model, exact=True, **CODES)

    def test_a_head_whose_dim_is_no_multiple_of_4(self, caplog):
        model = toy_model("llama", head_dim=14)
        expected = generate(model)
        with caplog.at_level(logging.WARNING), attached(model, **CODES) as info:
            assert torch.equal(generate(model), expected)
        assert "multiple of 4, got 14: leave it out" in info.fallback_reason
        assert "multiple of 4, got 14: leave it out" in caplog.text
