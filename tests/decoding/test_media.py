"""Prompts with images or sounds: the model reads them as it does, and a captured step decodes."""

import inspect
from collections.abc import Iterator

import pytest
import torch
from transformers import DynamicCache

from hf_static_kv import GraphDecoder, StaticContiguousCache, attached, served
from tests.conftest import COMMON
from tests.decoding.conftest import CAPACITY, DEVICE
from tests.decoding.media_models import FAMILIES, FIRST, LAST, MEDIA, media_model, media_prompt

SAMPLED = {**COMMON, "do_sample": True, "top_k": 20}


def tokens(model, prompt, seed=0, **how):
    torch.manual_seed(seed)
    return model.generate(**prompt, **{**COMMON, **how})


@pytest.fixture
def attach_on_any_device(monkeypatch):
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)
    monkeypatch.setattr(served, "_DECODER_DEVICES", (DEVICE,))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image_changes_the_tokens(name):
    """Else the tests below would pass for a prompt without its image."""
    model, prompt = media_model(name), media_prompt(name)
    other = media_prompt(name, seed=1)
    assert not torch.equal(
        tokens(model, prompt), tokens(model, {**other, "input_ids": prompt["input_ids"]})
    )


@pytest.mark.parametrize(
    ("lengths", "how"), [((6,), COMMON), ((3, 6), SAMPLED)], ids=["greedy", "padded, sampled"]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_are_those_of_generate(name, lengths, how):
    model, decoder = media_model(name), GraphDecoder()
    cache = StaticContiguousCache(model.config, CAPACITY)
    for seed in (1, 2):  # another image on the same cache
        cache.reset()
        prompt = media_prompt(name, lengths, seed)
        got = tokens(model, prompt, past_key_values=cache, custom_generate=decoder, **how)
        assert torch.equal(got, tokens(model, prompt, **how))
        assert decoder.fallback_reason is None
    assert decoder.num_steps == 1
    assert all(step.is_recorded for step in decoder.steps.by_cache[cache].values())


@pytest.mark.parametrize("name", FAMILIES)
def test_attach(name, attach_on_any_device):
    model, prompt = media_model(name), media_prompt(name, (3, 6))
    expected = tokens(model, prompt)
    with attached(model) as info:
        for _ in range(2):
            assert torch.equal(tokens(model, prompt), expected)
            assert info.fallback_reason is None
    assert (info.calls, info.hits, info.captured_steps) == (2, 1, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_that_is_full_at_the_end(name):
    """Positions that begin at 1 are beyond a table of angles that is as long as the cache."""
    model, prompt, decoder = media_model(name), media_prompt(name), GraphDecoder()
    cache = StaticContiguousCache(
        model.config, prompt["input_ids"].shape[1] + COMMON["max_new_tokens"] - 1
    )
    got = tokens(model, prompt, past_key_values=cache, custom_generate=decoder)
    assert torch.equal(got, tokens(model, prompt))
    assert decoder.fallback_reason is None


@pytest.mark.parametrize("name", ["qwen2_5_vl", "paligemma"])
def test_positions_go_on_where_a_cache_grows(name):
    model, prompt, decoder = media_model(name), media_prompt(name, (3, 6)), GraphDecoder()
    cache = StaticContiguousCache(model.config, prompt["input_ids"].shape[1] + 2)
    cache.grows = True
    got = tokens(model, prompt, past_key_values=cache, custom_generate=decoder)
    assert torch.equal(got, tokens(model, prompt))
    assert decoder.fallback_reason is None
    assert cache.max_cache_len >= 2 * (prompt["input_ids"].shape[1] + 2)


@pytest.mark.parametrize("height", [4, 16])
def test_one_step_serves_images_of_other_sizes(height):
    """A large image takes 32 tokens and 9 positions."""
    name, decoder = "qwen3_vl", GraphDecoder()
    model, cache = media_model(name), StaticContiguousCache(media_model(name).config, CAPACITY)
    for width in (8, 2):
        cache.reset()
        prompt = media_prompt(name, height=height, width=width)
        ids, count = prompt["input_ids"], height * width // 4
        image = ids.new_full((1, count), MEDIA)
        prompt["input_ids"] = torch.cat([ids[:, :3], image, ids[:, 11:]], dim=1)
        prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
        prompt["mm_token_type_ids"] = (prompt["input_ids"] == MEDIA).long()
        got = tokens(model, prompt, past_key_values=cache, custom_generate=decoder)
        assert torch.equal(got, tokens(model, prompt))
        assert decoder.fallback_reason is None
    assert decoder.num_steps == 1


@pytest.mark.parametrize(("seconds", "offset"), [(0.5, -12), (9.0, 17)])
def test_a_video_whose_positions_count_seconds(seconds, offset):
    """Two frames of 8 tokens, up to 36 positions apart: those of the text may be beyond the number
    of tokens.
    """
    model, decoder, video = media_model("qwen2_5_vl"), GraphDecoder(), [123] * 16
    ids = torch.tensor([[5, 6, FIRST, *video, LAST, 7, 8, 9]], device=DEVICE)
    prompt = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values_videos": torch.randn(64, 96, device=DEVICE),
        "video_grid_thw": torch.tensor([[2, 4, 8]], device=DEVICE),
        "second_per_grid_ts": torch.tensor([seconds], device=DEVICE),
        "mm_token_type_ids": 2 * (ids == 123).long(),
    }
    expected = tokens(model, prompt)
    assert model.model.rope_deltas.tolist() == [[offset]]
    cache = StaticContiguousCache(model.config, expected.shape[1] - 1)
    assert torch.equal(
        tokens(model, prompt, past_key_values=cache, custom_generate=decoder), expected
    )
    assert decoder.fallback_reason is None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_of_text_alone(name):
    model, decoder = media_model(name), GraphDecoder()
    ids = torch.tensor([[17, 93, 5, 64, 5, 88]], device=DEVICE)
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cache = StaticContiguousCache(model.config, CAPACITY)
    got = tokens(model, prompt, past_key_values=cache, custom_generate=decoder)
    assert torch.equal(got, tokens(model, prompt))
    assert decoder.fallback_reason is None


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "llava"])
def test_a_second_turn_of_text_about_the_image(name):
    model, decoder, prompt = media_model(name), GraphDecoder(), media_prompt(name)
    turns = []
    for cache, how in (
        (StaticContiguousCache(model.config, CAPACITY), {"custom_generate": decoder}),
        (DynamicCache(config=model.config), {}),
    ):
        first = tokens(model, prompt, past_key_values=cache, **how)
        ids = torch.cat([first, first.new_tensor([[7, 8, 9]])], dim=1)
        second = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        turns.append(tokens(model, second, past_key_values=cache, **how))
        assert decoder.fallback_reason is None
    assert torch.equal(*turns)


# --- what a step cannot be given


@pytest.fixture
def model_with_a_scale(monkeypatch):
    """LLaVA with one keyword more, by which its logits are multiplied in every pass."""
    model = media_model("llava")
    own, keyword = model.forward, inspect.Parameter("scale", inspect.Parameter.KEYWORD_ONLY)

    def forward(*args, scale=(1.0,), **kwargs):
        outputs = own(*args, **kwargs)
        (scale,) = (next(scale),) if isinstance(scale, Iterator) else scale
        outputs.logits = outputs.logits * scale
        return outputs

    *known, others = inspect.signature(own).parameters.values()
    forward.__signature__ = inspect.Signature([*known, keyword, others])
    monkeypatch.setitem(model.__dict__, "forward", forward)
    return model


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (lambda: [-torch.ones(128, device=DEVICE)], "it needs scale, which belongs to one call"),
        (lambda: iter([-1.0] * 14), "the model is given scale, a list_iterator, which may change"),
        (lambda: [-1.0], None),  # a plain number is a part of the step
    ],
    ids=["tensor", "object", "number"],
)
def test_a_keyword_that_every_step_needs(model_with_a_scale, scale, reason):
    model, decoder, prompt = model_with_a_scale, GraphDecoder(), media_prompt("llava")
    cache, expected = (
        StaticContiguousCache(model.config, CAPACITY),
        tokens(model, {**prompt, "scale": scale()}),
    )
    for _ in range(3):  # the third time it is known not to work
        cache.reset()
        got = tokens(
            model, {**prompt, "scale": scale()}, past_key_values=cache, custom_generate=decoder
        )
        assert torch.equal(got, expected)
        assert reason in decoder.fallback_reason if reason else decoder.fallback_reason is None


def test_a_tensor_that_a_call_leaves_on_the_model(monkeypatch):
    model, decoder, prompt = media_model("qwen2_5_vl"), GraphDecoder(), media_prompt("qwen2_5_vl")
    own = model.model.language_model.forward

    def forward(*args, **kwargs):
        outputs = own(*args, **kwargs)
        outputs.last_hidden_state = outputs.last_hidden_state + model.model.rope_deltas
        return outputs

    monkeypatch.setitem(model.model.language_model.__dict__, "forward", forward)
    cache = StaticContiguousCache(model.config, CAPACITY)
    got = tokens(model, prompt, past_key_values=cache, custom_generate=decoder)
    assert torch.equal(got, tokens(model, prompt))
    assert "it needs rope_deltas, which belongs to one call" in decoder.fallback_reason
