"""What is refused before the first token of a call of `generate`, with and without the decoder."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, pipeline
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_static_kv import GraphDecoder, StaticContiguousCache
from hf_static_kv.cache.request import _CHUNKS_CONTINUE, running_request
from hf_static_kv.testing import load_model
from tests.conftest import COMMON, PROMPT, Collect, toy_model

BOTH = pytest.mark.parametrize(
    "loop", [{}, {"custom_generate": GraphDecoder()}], ids=["plain", "decoder"]
)
ASKED = {**COMMON, "max_new_tokens": 5}
WHOLE = torch.cat([PROMPT, PROMPT + 1], dim=1)  # other tokens after the prompt


@pytest.fixture
def model():
    return toy_model("llama")


def generate(model, cache, ids=PROMPT, **kwargs):
    return model.generate(
        ids, **{**ASKED, "attention_mask": torch.ones_like(ids), **kwargs}, past_key_values=cache
    )


def test_outside_of_generate_there_is_no_request():
    assert running_request() is None


class TestUseCache:
    @BOTH
    @pytest.mark.parametrize("where", ["config", "call"])
    def test_false_is_refused_with_the_remedy(self, model, loop, where):
        cache, call = StaticContiguousCache(model.config, 40), {}
        if where == "config":
            model.generation_config.use_cache = False
        else:
            call = {"use_cache": False}
        with pytest.raises(
            ValueError, match=r"use_cache=False, and a cache is passed.*Pass use_cache=True"
        ):
            generate(model, cache, **call, **loop)
        assert cache.seq_len == 0

    @BOTH
    def test_true_in_the_call_is_enough(self, model, loop):
        expected = model.generate(PROMPT, **ASKED, use_cache=False)
        model.config.use_cache = model.generation_config.use_cache = False
        cache = StaticContiguousCache(model.config, 40)
        assert torch.equal(generate(model, cache, use_cache=True, **loop), expected)


class TestOtherTexts:
    @BOTH
    def test_the_same_prompt_again(self, model, loop):
        """13 + 5 tokens: the cache holds 17, fewer than two prompts."""
        cache = StaticContiguousCache(model.config, 64)
        first = generate(model, cache, **loop)
        assert cache.seq_len == 17
        with pytest.raises(
            ValueError,
            match=r"A prompt of 13 has no new tokens: the cache already holds 17. Call res",
        ):
            generate(model, cache, **loop)
        assert cache.seq_len == 17
        cache.reset()
        assert torch.equal(generate(model, cache, **loop), first)

    @BOTH
    def test_a_longer_prompt_that_begins_otherwise(self, model, loop):
        cache = StaticContiguousCache(model.config, 64)
        generate(model, cache, **loop)
        other = WHOLE.clone()
        other[0, 4] += 1
        with pytest.raises(
            ValueError, match=r"token 4 of row 0 is \d+, and the cache holds \d+ there. Call reset"
        ):
            generate(model, cache, other, **loop)
        assert cache.seq_len == 17

    def test_the_decoder_knows_what_it_has_chosen(self, model):
        cache, decoder = StaticContiguousCache(model.config, 64), GraphDecoder()
        tokens = generate(model, cache, custom_generate=decoder)
        other = torch.cat([tokens, PROMPT], dim=1)
        other[0, 15] += 1
        with pytest.raises(ValueError, match="token 15 of row 0"):
            generate(model, cache, other, custom_generate=decoder)
        right = torch.cat([tokens, PROMPT], dim=1)
        expected = model.generate(right, **ASKED, use_cache=False)
        assert torch.equal(generate(model, cache, right, custom_generate=decoder), expected)

    @BOTH
    def test_a_text_that_was_cropped_goes_on_with_other_tokens(self, model, loop):
        cache = StaticContiguousCache(model.config, 64)
        generate(model, cache, **loop)
        cache.crop(-10)
        other = torch.cat([PROMPT[:, :7], WHOLE[:, 13:]], dim=1)
        assert torch.equal(
            generate(model, cache, other, **loop), model.generate(other, **ASKED, use_cache=False)
        )

    def test_what_other_passes_wrote_is_not_known_and_not_refused(self, model):
        cache = StaticContiguousCache(model.config, 64)
        with torch.no_grad():
            model(PROMPT, past_key_values=cache)
        expected = model.generate(WHOLE, **ASKED, use_cache=False)
        assert torch.equal(generate(model, cache, WHOLE), expected)

    def test_rows_that_were_taken_apart_are_not_known(self, model):
        cache = StaticContiguousCache.from_model(model, 64, batch_size=2)
        both = torch.cat([PROMPT, PROMPT + 1])
        out = generate(model, cache, both)
        cache.batch_select_indices(torch.tensor([1]))
        longer = torch.cat([out[1:], PROMPT], dim=1)
        assert torch.equal(
            generate(model, cache, longer), model.generate(longer, **ASKED, use_cache=False)
        )

    @BOTH
    @pytest.mark.parametrize("is_empty", [False, True])
    def test_new_tokens_behind_a_mask_over_another_past(self, model, loop, is_empty):
        """The last token of a generation is not in the cache, which is easily forgotten."""
        cache = StaticContiguousCache(model.config, 64)
        whole = torch.cat([generate(model, cache, **loop), PROMPT], dim=1)
        if is_empty:
            cache.reset()
        held = cache.seq_len
        with pytest.raises(
            ValueError,
            match=rf"covers 18 tokens before the 13 that are passed, and the cache holds {held}",
        ):
            generate(model, cache, PROMPT, attention_mask=torch.ones_like(whole), **loop)
        if not is_empty:
            expected = model.generate(whole, **ASKED, use_cache=False)
            got = generate(
                model, cache, whole[:, 17:], attention_mask=torch.ones_like(whole), **loop
            )
            assert torch.equal(got, expected[:, 17:])

    def test_new_tokens_alone_are_remembered_too(self, model):
        cache, decoder = StaticContiguousCache(model.config, 64), GraphDecoder()
        first = generate(model, cache, custom_generate=decoder)
        whole = torch.cat([first, PROMPT], dim=1)
        second = generate(
            model,
            cache,
            whole[:, 17:],
            attention_mask=torch.ones_like(whole),
            custom_generate=decoder,
        )
        third = torch.cat([whole[:, :17], second, PROMPT], dim=1)
        third[0, 20] += 1
        with pytest.raises(ValueError, match="token 20 of row 0"):
            generate(model, cache, third, custom_generate=decoder)
        third[0, 20] -= 1
        expected = model.generate(third, **ASKED, use_cache=False)
        assert torch.equal(generate(model, cache, third, custom_generate=decoder), expected)

    def test_a_call_that_fell_back_is_remembered(self, model, monkeypatch):
        cache, decoder = StaticContiguousCache(model.config, 64), GraphDecoder()
        monkeypatch.setattr("hf_static_kv.decoding.steps.verify", lambda step, call: 1 / 0)
        tokens = generate(model, cache, custom_generate=decoder)
        assert "ZeroDivisionError" in decoder.fallback_reason
        for position in (2, 15):
            other = torch.cat([tokens, PROMPT], dim=1)
            other[0, position] += 1
            with pytest.raises(ValueError, match=f"token {position} of row 0"):
                generate(model, cache, other, custom_generate=decoder)

    @pytest.mark.parametrize(
        "way", ["a call that never ran", "layers that were cropped", "layers that were emptied"]
    )
    def test_tokens_that_were_never_written_are_not_known(self, model, way):
        cache = StaticContiguousCache.from_model(model, 64)
        if way == "a call that never ran":
            with pytest.raises(ValueError, match="tokenizer"):
                generate(model, cache, PROMPT + 1, stop_strings=["x"])
        else:
            generate(model, cache, PROMPT + 1)
            for layer in cache.layers:
                if way == "layers that were cropped":
                    layer.crop(-layer.length)
                else:
                    layer.keys = layer.values = None
        with torch.no_grad():
            model(PROMPT, past_key_values=cache)
        assert torch.equal(
            generate(model, cache, WHOLE), model.generate(WHOLE, **ASKED, use_cache=False)
        )

    def test_ids_beside_vectors_are_no_text(self, model):
        cache = StaticContiguousCache(model.config, 64)
        whole = torch.cat([generate(model, cache), PROMPT], dim=1)
        how = {
            **ASKED,
            "inputs_embeds": model.get_input_embeddings()(whole),
            "attention_mask": torch.ones_like(whole),
        }
        got = model.generate(PROMPT, **how, past_key_values=cache)
        assert torch.equal(
            got, model.generate(PROMPT, **how, past_key_values=DynamicCache(config=model.config))
        )

    def test_a_text_that_was_assigned_is_not_known(self, model):
        first, second = (StaticContiguousCache.from_model(model, 64) for _ in range(2))
        generate(model, first, PROMPT + 1)
        generate(model, second)
        for ours, theirs in zip(first.layers, second.layers, strict=True):
            ours.keys, ours.values = theirs.keys.clone(), theirs.values.clone()
        longer = torch.cat([model.generate(PROMPT, **ASKED, use_cache=False), PROMPT], dim=1)
        assert torch.equal(
            generate(model, first, longer), model.generate(longer, **ASKED, use_cache=False)
        )

    def test_padding_may_hold_anything(self, model):
        mask = torch.ones_like(PROMPT)
        mask[0, :3] = 0
        cache = StaticContiguousCache(model.config, 64)
        out = generate(model, cache, PROMPT * mask, attention_mask=mask)
        longer = torch.cat([out, PROMPT], dim=1)
        longer[0, :3] = 9
        mask = torch.cat([mask, torch.ones(1, longer.shape[1] - 13, dtype=torch.long)], dim=1)
        expected = model.generate(longer, attention_mask=mask, **ASKED, use_cache=False)
        assert torch.equal(generate(model, cache, longer, attention_mask=mask), expected)

    def test_vectors_that_bring_nothing_new(self, model):
        cache, embeds = (
            StaticContiguousCache(model.config, 64),
            model.get_input_embeddings()(PROMPT),
        )
        model.generate(inputs_embeds=embeds, **ASKED, past_key_values=cache)
        with pytest.raises(
            ValueError, match="A prompt of 13 has no new tokens: the cache already holds 17"
        ):
            model.generate(inputs_embeds=embeds, **ASKED, past_key_values=cache)

    def test_a_pipeline_with_two_texts_and_one_cache(self):
        model, tokenizer = load_model("llama")
        cache = StaticContiguousCache(model.config, 128)
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        with pytest.raises(ValueError, match=r"Call reset\(\) before another sequence"):
            pipe(
                ["To be, or not", "Now is the winter of our discontent"],
                past_key_values=cache,
                max_new_tokens=8,
            )

    @BOTH
    def test_chunks_go_on_where_transformers_lets_them(self, model, loop):
        cache = StaticContiguousCache(model.config, 64)
        longer = torch.cat([generate(model, cache, **loop), PROMPT], dim=1)
        if _CHUNKS_CONTINUE:
            expected = model.generate(longer, **ASKED, use_cache=False)
            assert torch.equal(
                generate(model, cache, longer, prefill_chunk_size=4, **loop), expected
            )
        else:
            with pytest.raises(
                ValueError, match="starts at position 0, and the cache already holds 17 tokens"
            ):
                generate(model, cache, longer, prefill_chunk_size=4, **loop)

    def test_prompt_lookup_wants_an_empty_cache(self, model):
        cache = StaticContiguousCache(model.config, 64)
        generate(model, cache)
        with pytest.raises(
            ValueError, match=r"compute the whole prompt, and the cache already holds 17 tokens"
        ):
            generate(model, cache, WHOLE, prompt_lookup_num_tokens=3)


class TestLengths:
    @BOTH
    def test_what_cannot_fit_is_refused_before_any_token(self, model, loop):
        cache = StaticContiguousCache(model.config, 16)
        with pytest.raises(
            ValueError,
            match=r"13 and 5 new tokens take 17 positions.*has 16.*>= 17.* at most 4 new",
        ):
            generate(model, cache, **loop)
        assert cache.seq_len == 0
        assert cache.memory_bytes == 0
        expected = model.generate(PROMPT, **{**ASKED, "max_new_tokens": 4}, use_cache=False)
        assert torch.equal(generate(model, cache, max_new_tokens=4, **loop), expected)
        assert cache.seq_len == 16

    @pytest.mark.parametrize("seed", range(6))
    def test_prompt_lookup_fits_into_what_the_error_asks_for(self, model, seed):
        """It proposes past the end:

        prompt + max_new_tokens + prompt_lookup_num_tokens - 2 positions.
        """
        generator = torch.Generator().manual_seed(seed)
        # Few kinds of tokens, so that there is much to find.
        ids = torch.randint(3, 9, (1, 12), generator=generator)
        asked = {"prompt_lookup_num_tokens": 6, "max_new_tokens": 10}
        with pytest.raises(
            ValueError, match=r"take 26 positions.*may write 5 beyond its end.*>= 26"
        ):
            generate(model, StaticContiguousCache(model.config, 22), ids, **asked)
        got = generate(model, StaticContiguousCache(model.config, 26), ids, **asked)
        assert torch.equal(
            got, model.generate(ids, **{**ASKED, "max_new_tokens": 10}, use_cache=False)
        )

    @BOTH
    def test_a_long_default_that_ends_early_runs(self, model, loop):
        """The model's own config allows far more than the cache has; an end token comes first."""
        eos = int(model.generate(PROMPT, **ASKED, use_cache=False)[0, -2])
        model.generation_config = GenerationConfig(max_length=500, eos_token_id=eos, pad_token_id=0)
        asked = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False}
        expected = model.generate(PROMPT, **asked, use_cache=False)
        assert expected.shape[1] < 20
        cache = StaticContiguousCache(model.config, 24)
        assert torch.equal(model.generate(PROMPT, **asked, **loop, past_key_values=cache), expected)
        # An end with the very last token that fits: its position is not needed.
        cache = StaticContiguousCache(model.config, expected.shape[1] - 1)
        assert torch.equal(model.generate(PROMPT, **asked, **loop, past_key_values=cache), expected)

    @BOTH
    def test_a_limit_that_the_caller_did_not_give_is_not_checked(self, model, loop):
        eos = int(model.generate(PROMPT, **ASKED, use_cache=False)[0, -2])
        how = {"eos_token_id": eos, "pad_token_id": 0, "do_sample": False, **loop}
        expected = model.generate(
            PROMPT, **{**ASKED, "eos_token_id": eos, "max_new_tokens": 20}, use_cache=False
        )
        for config in (GenerationConfig(max_length=500), GenerationConfig()):
            model.generation_config = config
            cache = StaticContiguousCache(model.config, 24)
            assert torch.equal(
                model.generate(PROMPT, max_new_tokens=None, **how, past_key_values=cache), expected
            )

    def test_a_length_of_ones_own_criterion_counts(self, model):
        how = {"max_new_tokens": 100, "stopping_criteria": [MaxLengthCriteria(20)]}
        got = generate(model, StaticContiguousCache(model.config, 24), **how)
        assert torch.equal(
            got, model.generate(PROMPT, **{**ASKED, "max_new_tokens": 7}, use_cache=False)
        )

    def test_vectors_in_chunks_are_refused_with_the_reason(self, model):
        embeds = model.get_input_embeddings()(PROMPT)
        with pytest.raises(
            ValueError, match="the prompt is inputs_embeds: omit prefill_chunk_size"
        ):
            model.generate(
                inputs_embeds=embeds,
                **ASKED,
                prefill_chunk_size=4,
                past_key_values=StaticContiguousCache(model.config, 40),
            )

    @BOTH
    def test_a_long_default_that_does_not_end_is_an_error_and_not_a_shorter_text(self, model, loop):
        model.generation_config = GenerationConfig(max_length=500, pad_token_id=0)
        cache = StaticContiguousCache(model.config, 24)
        with pytest.raises(ValueError, match="The cache is full: it holds 24 of at most 24 tokens"):
            model.generate(
                PROMPT,
                attention_mask=torch.ones_like(PROMPT),
                do_sample=False,
                **loop,
                past_key_values=cache,
            )
        assert cache.seq_len == 24

    def test_after_such_an_error_the_decoder_knows_what_it_generated(self, model):
        model.generation_config = GenerationConfig(max_length=500, pad_token_id=0)
        cache = StaticContiguousCache(model.config, 24)
        expected = model.generate(PROMPT, **{**ASKED, "max_new_tokens": 12}, use_cache=False)
        how = {
            "attention_mask": torch.ones_like(PROMPT),
            "do_sample": False,
            "custom_generate": GraphDecoder(),
        }
        with pytest.raises(ValueError, match="The cache is full"):
            model.generate(PROMPT, **how, past_key_values=cache)
        cache.crop(-4)
        others = expected[:, :21].clone()
        others[0, 15] = 127 - others[0, 15]
        with pytest.raises(
            ValueError, match="does not continue the cached sequence: token 15 of row 0"
        ):
            model.generate(others, max_new_tokens=2, past_key_values=cache)


class TestWhatGenerateKeepsFromALoop:
    def test_a_streamer_is_served(self, model):
        stream, cache = Collect(), StaticContiguousCache(model.config, 40)
        tokens = generate(model, cache, streamer=stream, custom_generate=GraphDecoder())
        assert stream.tokens == tokens[0].tolist()
        assert stream.ended

    def test_an_assistant_with_other_tokens_is_refused(self, model):
        with pytest.raises(
            ValueError, match=r"this is assisted_generation. Leave `custom_generate` out"
        ):
            generate(
                model,
                StaticContiguousCache(model.config, 40),
                assistant_model=toy_model("llama", vocab_size=64),
                tokenizer=object(),
                assistant_tokenizer=object(),
                custom_generate=GraphDecoder(),
            )

    def test_synced_gpus_runs_in_the_loop_of_generate(self, model, monkeypatch):
        seen, decoder = [], GraphDecoder()

        def sample(self, ids, synced_gpus, **kwargs):
            seen.append(synced_gpus)
            return ids

        monkeypatch.setattr(type(model), "_sample", sample)
        generate(
            model,
            StaticContiguousCache(model.config, 40),
            synced_gpus=True,
            custom_generate=decoder,
        )
        assert seen == [True]
        assert decoder.fallback_reason == "synced_gpus is asked for"

    def test_the_class_in_the_place_of_the_object(self, model):
        with pytest.raises(
            TypeError, match=r"takes an object and not a class: pass GraphDecoder\(\)"
        ):
            generate(model, StaticContiguousCache(model.config, 40), custom_generate=GraphDecoder)

    def test_a_subclass_of_the_length_criterion_has_a_will_of_its_own(self, model):
        class Twice(MaxLengthCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                return torch.full((len(input_ids),), input_ids.shape[1] >= 16)

        asked = {"stopping_criteria": [Twice(max_length=99)], "max_new_tokens": 12}
        expected = model.generate(PROMPT, **{**ASKED, **asked}, use_cache=False)
        assert expected.shape[1] == 16
        got = generate(
            model, StaticContiguousCache(model.config, 40), custom_generate=GraphDecoder(), **asked
        )
        assert torch.equal(got, expected)


class TestAModelThatUsesAnotherCache:
    """As PEFT's prefix tuning does: a cache of its own comes in with the prompt."""

    def test_the_call_falls_back(self, model):
        expected = model.generate(PROMPT, **ASKED, use_cache=False)
        own, decoder, cache = (
            model.prepare_inputs_for_generation,
            GraphDecoder(),
            StaticContiguousCache(model.config, 40),
        )

        def prepare(ids, **kwargs):
            if kwargs["past_key_values"] is cache:
                kwargs["past_key_values"] = DynamicCache(config=model.config)
            return own(ids, **kwargs)

        model.prepare_inputs_for_generation = prepare
        assert torch.equal(generate(model, cache, custom_generate=decoder), expected)
        assert decoder.fallback_reason == "the model returned a DynamicCache in place of the cache"
        assert cache.seq_len == 0

    def test_layers_that_are_missing_are_named_after_the_prompt(self, model):
        model = toy_model("llama", num_hidden_layers=4)
        cache = StaticContiguousCache(model.config, 40)
        model.model.layers = model.model.layers[:2]
        with pytest.raises(
            ValueError, match=r"has 2 layers and its config says 4.*without layer 2, 3"
        ):
            generate(model, cache, custom_generate=GraphDecoder())

    @BOTH
    def test_gradient_checkpointing_while_training_is_refused(self, model, loop):
        model.gradient_checkpointing_enable()
        model.train()
        with pytest.raises(
            ValueError, match=r"gradient checkpointing writes to no cache. Call model.eval\(\)"
        ):
            generate(model, StaticContiguousCache(model.config, 40), **loop)
