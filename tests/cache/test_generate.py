"""`generate` gives the tokens of `use_cache=False`: architectures x modes x attention
implementations.

Every case compares whole runs in float32 with eos off, so that lengths are full. Prompts are longer
than every window.
"""

import copy
import functools
import sys

import pytest
import torch
import transformers
from packaging import version
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import DynamicCache, PreTrainedTokenizerFast, pipeline

from hf_static_kv import StaticContiguousCache
from tests.conftest import (
    ARCHITECTURES,
    BATCH,
    COMMON,
    PROMPT,
    Collect,
    shared_toy_model,
    toy_model,
)

NEW_TOKENS = 10  # past a window, and past a border of Llama 4's chunks
COMMON = COMMON | {"max_new_tokens": NEW_TOKENS}


SLIDING = "full"  # of new caches


def new_cache(model, max_cache_len=64):
    return StaticContiguousCache(model.config, max_cache_len, sliding=SLIDING)


def run(model, ids, cache, seed=None, **kwargs):
    """One call of `generate`: with the given cache, or with none at all."""
    if seed is not None:
        torch.manual_seed(seed)
    how = {"use_cache": False} if cache is None else {"past_key_values": cache}
    return model.generate(
        ids, **{**COMMON, "attention_mask": torch.ones_like(ids), **how, **kwargs}
    )


def both(model, ids, **kwargs):
    return run(model, ids, None, **kwargs), run(model, ids, new_cache(model), **kwargs)


@functools.cache
def uncached_prompt(model):
    """The reference that several modes share."""
    return run(model, PROMPT, None)


def greedy(model):
    return both(model, BATCH)


def sampling(model):
    return both(model, BATCH, seed=42, do_sample=True, temperature=0.7, top_k=20)


def beam_search(model):
    return both(model, BATCH, num_beams=3)


def beam_sampling(model):
    return both(model, PROMPT, seed=42, num_beams=3, do_sample=True, temperature=1.5)


def return_sequences(model):
    return both(model, BATCH, seed=42, do_sample=True, num_return_sequences=3)


def assistant_of(model):
    """Alike enough to guess right at times, unlike enough to guess wrong at times."""
    assistant = copy.deepcopy(model)
    for parameter in assistant.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return assistant


def assisted(model):
    return uncached_prompt(model), run(
        model, PROMPT, new_cache(model), assistant_model=assistant_of(model)
    )


def prompt_lookup(model):
    return uncached_prompt(model), run(model, PROMPT, new_cache(model), prompt_lookup_num_tokens=4)


def left_padded(model):
    mask = torch.ones_like(BATCH)
    mask[1, :4] = 0
    return both(model, BATCH * mask, attention_mask=mask)


def chunked_prefill(model):
    return uncached_prompt(model), run(model, PROMPT, new_cache(model), prefill_chunk_size=5)


def inputs_embeds(model):
    # Without a cache, generate forgets the embeds after the first token: the reference starts from
    # the same ids.
    embeds = model.get_input_embeddings()(PROMPT)
    cached = model.generate(inputs_embeds=embeds, past_key_values=new_cache(model), **COMMON)
    return uncached_prompt(model)[:, PROMPT.shape[1] :], cached


def streamer(model):
    stream = Collect()
    run(model, PROMPT, new_cache(model), streamer=stream)
    assert stream.ended
    return uncached_prompt(model), torch.tensor([stream.tokens])


def return_dict(model):
    options = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    reference, cached = both(model, BATCH, **options)
    assert isinstance(cached.past_key_values, StaticContiguousCache)
    # The two runs multiply matrices of unlike height, so float32 rounds differently; the logits'
    # size is about 10.
    torch.testing.assert_close(
        torch.stack(cached.logits), torch.stack(reference.logits), rtol=0, atol=5e-4
    )
    return reference.sequences, cached.sequences


def continuing(model):
    cache = new_cache(model)
    first = run(model, PROMPT, cache, max_new_tokens=6)
    longer = torch.cat([first, torch.tensor([[44, 45, 46]])], dim=1)
    return run(model, longer, None), run(model, longer, cache)


def reused_after_reset(model):
    cache = new_cache(model)
    run(model, PROMPT, cache)
    cache.reset()
    return run(model, PROMPT.flip(1), None), run(model, PROMPT.flip(1), cache)


def rollback(model):
    cache = new_cache(model)
    tokens = run(model, PROMPT, cache)
    cache.crop(-min(9, *(layer.num_croppable for layer in cache.layers)))
    other = torch.cat([tokens[:, : cache.seq_len], torch.tensor([[99, 98]])], dim=1)
    return run(model, other, None), run(model, other, cache)


def text_pipeline(model):
    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    backend = Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    pipe = pipeline(
        "text-generation", model=model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend)
    )
    text = " ".join(f"w{i}" for i in PROMPT[0].tolist())
    (result,) = pipe(text, past_key_values=new_cache(model), return_tensors=True, **COMMON)
    return uncached_prompt(model), torch.tensor([result["generated_token_ids"]])


MODES = [
    greedy,
    sampling,
    beam_search,
    beam_sampling,
    return_sequences,
    assisted,
    prompt_lookup,
    left_padded,
    chunked_prefill,
    inputs_embeds,
    streamer,
    return_dict,
    continuing,
    reused_after_reset,
    rollback,
    text_pipeline,
]

# What eager attention is given differs from what SDPA is given in these: masks, and more than one
# row or token.
WITH_EAGER_TOO = [greedy, beam_search, assisted, left_padded, chunked_prefill, continuing, rollback]

transformers_version = version.parse(transformers.__version__)
# Sinks; soft caps.
WITHOUT_SDPA = (
    ["gpt_oss", "gemma2"] if transformers_version >= version.parse("5.21") else ["gpt_oss"]
)
CASES = [
    (mode, name, attn)
    for mode in MODES
    for name in ARCHITECTURES
    for attn in ("sdpa", "eager")
    if (attn == "eager" if name in WITHOUT_SDPA else attn == "sdpa" or mode in WITH_EAGER_TOO)
]


@pytest.mark.parametrize(
    ("mode", "name", "attn"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_tokens_equal_use_cache_false(mode, name, attn):
    reference, cached = tokens_of(mode, name, attn)
    assert cached.shape[1] >= NEW_TOKENS
    assert cached.tolist() == reference.tolist()


WITH_WINDOWS = ["gemma3", "gemma2", "mistral", "qwen2", "cohere2", "gpt_oss", "llama4"]
COMPACT_CASES = [(mode, name, attn) for mode, name, attn in CASES if name in WITH_WINDOWS]


@pytest.mark.usefixtures("small_spare")
@pytest.mark.parametrize(
    ("mode", "name", "attn"), COMPACT_CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_tokens_of_compact_layers_equal_use_cache_false(monkeypatch, mode, name, attn):
    monkeypatch.setattr(sys.modules[__name__], "SLIDING", "compact")
    reference, cached = tokens_of(mode, name, attn)
    assert cached.shape[1] >= NEW_TOKENS
    assert cached.tolist() == reference.tolist()


def tokens_of(mode, name, attn):
    """Without a cache, and with ours."""
    model = shared_toy_model(name, attn)
    if mode is assisted:
        skip_where_transformers_cannot_assist(model)
    return mode(model)


def skip_where_transformers_cannot_assist(model):
    """After showing that it fails without our cache."""
    if transformers_version < version.parse("5.18") and any(new_cache(model).is_sliding):
        with pytest.raises(RuntimeError, match="must match"):
            run(
                model,
                PROMPT,
                DynamicCache(config=model.config),
                assistant_model=assistant_of(model),
            )
        pytest.skip(
            f"transformers {transformers_version}: the assistant's own sliding DynamicCache fails "
            "(mended in 5.18)"
        )


@pytest.mark.parametrize("name", WITHOUT_SDPA)
def test_transformers_itself_refuses_sdpa_where_the_matrix_has_none(name):
    with pytest.raises(ValueError, match="does not support an attention implementation"):
        toy_model(name, "sdpa")


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_the_comparison_can_fail(name):
    """One changed key in one layer, within every window, shows in the tokens."""
    model = toy_model(name)
    cache = new_cache(model)
    tokens = run(model, PROMPT, cache, max_new_tokens=2)
    cache.layers[0].keys[:, :, -2] += 3.0
    assert run(model, tokens, cache).tolist() != run(model, tokens, None).tolist()


@pytest.mark.parametrize("name", ["gemma3", "mistral", "llama4"])
def test_a_window_that_is_off_by_one_shows(name):
    model = toy_model(name)
    cache = new_cache(model)
    for layer in cache.layers:
        if layer.is_sliding:
            layer.sliding_window -= 1
    assert run(model, PROMPT, cache).tolist() != run(model, PROMPT, None).tolist()


def attention_calls(monkeypatch, model, cache):
    """What `scaled_dot_product_attention` is called with in the last decode step of a short run."""
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **kwargs):
        calls.append(
            (list(query.shape), list(key.shape), attn_mask is None, kwargs.get("enable_gqa", False))
        )
        return real(query, key, value, attn_mask=attn_mask, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        model.generate(PROMPT, past_key_values=cache, **COMMON)
    return calls[-model.config.num_hidden_layers :]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral"])
def test_a_decode_step_makes_the_sdpa_calls_of_dynamic_cache(monkeypatch, name):
    """No copied heads and no mask where there need be none:

    the text's keys only, whatever the capacity.
    """
    model = toy_model(name)
    ours = attention_calls(monkeypatch, model, new_cache(model, max_cache_len=200))
    assert ours == attention_calls(monkeypatch, model, DynamicCache(config=model.config))
    full_layers = [
        call for call, sliding in zip(ours, new_cache(model).is_sliding, strict=True) if not sliding
    ]
    assert all(no_mask and enable_gqa for _, _, no_mask, enable_gqa in full_layers)


def test_overflow_in_the_middle_says_the_remedy():
    """In a loop of one's own; `generate` is refused before its first token."""
    model = toy_model("llama")
    cache = new_cache(model, max_cache_len=PROMPT.shape[1])
    with torch.no_grad():
        token = model(PROMPT, past_key_values=cache).logits[:, -1:].argmax(dim=-1)
        with pytest.raises(ValueError, match=r"holds 13 of at most 13 tokens.*max_cache_len >= 14"):
            model(token, past_key_values=cache)
    assert cache.seq_len == 13


def test_a_copied_cache_goes_on_alone():
    """The documented way to reuse a prompt: fill once, deepcopy for each continuation."""
    model = toy_model("gemma3")
    prompt_cache = StaticContiguousCache.from_model(model, 64)
    with torch.no_grad():
        model(PROMPT, past_key_values=prompt_cache)
    for word in (7, 70):
        ids = torch.cat([PROMPT, torch.tensor([[word]])], dim=1)
        assert (
            run(model, ids, copy.deepcopy(prompt_cache)).tolist() == run(model, ids, None).tolist()
        )
    assert prompt_cache.seq_len == PROMPT.shape[1]


def test_storage_made_in_inference_mode_serves_outside_it():
    model = toy_model("llama")
    cache = new_cache(model)
    with torch.inference_mode():
        run(model, BATCH[:1], cache)
    cache.reset()
    assert run(model, PROMPT, cache).tolist() == run(model, PROMPT, None).tolist()


def test_fewer_rows_than_allocated():
    model = toy_model("qwen3")
    cache = StaticContiguousCache.from_model(model, 64, batch_size=4)
    address = cache.key_storage.data_ptr()
    assert run(model, BATCH, cache).tolist() == run(model, BATCH, None).tolist()
    cache.reset()
    assert (
        run(model, PROMPT, cache, num_beams=4).tolist()
        == run(model, PROMPT, None, num_beams=4).tolist()
    )
    assert cache.key_storage.data_ptr() == address


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
@pytest.mark.parametrize("sliding", ["full", "compact"])
def test_a_cache_is_iterable_as_transformers_own(name, sliding):
    """(keys, values, window) of each layer; a sliding layer gives what the next token may see."""
    model = shared_toy_model(name)
    cache, theirs = (
        StaticContiguousCache(model.config, 64, sliding=sliding),
        DynamicCache(config=model.config),
    )
    assert [entry[:2] for entry in cache] == [(None, None)] * len(cache.layers)
    for tokens in (3, 8):
        with torch.no_grad():
            for each in (cache, theirs):
                model(PROMPT[:, :tokens], past_key_values=each)
        for ours, expected in zip(cache, theirs, strict=True):
            for one, other in zip(ours, expected, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)
