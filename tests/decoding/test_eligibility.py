"""What the decoder refuses, what falls back to the loop of `generate`, and the reason that it
gives.
"""

import logging

import pytest
import torch
from accelerate import cpu_offload
from transformers import DynamicCache

from hf_static_kv import GraphDecoder, StaticContiguousCache
from hf_static_kv.compat import has_hooks
from hf_static_kv.decoding.verification import verify
from tests.conftest import COMMON, Collect
from tests.conftest import toy_model as toy_on_cpu
from tests.decoding.conftest import CAPACITY, DEVICE, PROMPT, run, toy_model


class TestRefusals:
    def test_a_text_that_cannot_fit_is_refused_before_any_token(self, model):
        cache, stream = StaticContiguousCache(model.config, 20), Collect()
        with pytest.raises(
            ValueError, match=r"take 26 positions.* has 20.* >= 26, or ask for at most 8 new"
        ):
            run(model, decoder=GraphDecoder(), cache=cache)
        assert cache.seq_len == 0
        got = run(model, decoder=GraphDecoder(streamer=stream), cache=cache, max_new_tokens=8)
        assert torch.equal(got, run(model)[:, :21])
        assert cache.seq_len == 20

    def test_a_call_that_wants_no_cache_is_refused(self, model):
        with pytest.raises(ValueError, match=r"use_cache=False, and a cache.*custom_generate"):
            run(
                model,
                decoder=GraphDecoder(),
                cache=StaticContiguousCache(model.config, 40),
                use_cache=False,
            )

    @pytest.mark.parametrize(
        "keywords", [{}, {"custom_generate": GraphDecoder()}], ids=["plain", "decoder"]
    )
    def test_the_same_prompt_again_is_refused_with_the_remedy(self, model, keywords):
        cache = StaticContiguousCache(model.config, 40)
        keywords = {
            **COMMON,
            "attention_mask": torch.ones_like(PROMPT),
            "past_key_values": cache,
            **keywords,
        }
        first = model.generate(PROMPT, **keywords)
        length = cache.seq_len
        with pytest.raises(
            ValueError, match=f"no new tokens: the cache already holds {length}. Call reset"
        ):
            model.generate(PROMPT, **keywords)
        assert cache.seq_len == length
        cache.reset()
        assert torch.equal(model.generate(PROMPT, **keywords), first)

    def test_where_only_the_new_tokens_are_passed_the_text_before_counts(self, model):
        cache, decoder = StaticContiguousCache(model.config, 24), GraphDecoder()
        with torch.no_grad():
            model(PROMPT, past_key_values=cache)
        new, mask = (
            torch.tensor([[9, 31, 60]], device=DEVICE),
            torch.ones(1, 16, dtype=torch.long, device=DEVICE),
        )
        with pytest.raises(
            ValueError,
            match=r"16 and 10 new tokens take 25 positions.* has 24.* at most 9 new tokens",
        ):
            run(model, new, decoder, cache, attention_mask=mask, max_new_tokens=10)
        assert cache.seq_len == 13
        got = run(model, new, decoder, cache, attention_mask=mask, max_new_tokens=9)
        whole = run(model, torch.cat([PROMPT, new], dim=1), max_new_tokens=9)
        assert torch.equal(got, whole[:, 13:])
        assert decoder.fallback_reason is None

    def test_what_runs_in_the_loop_of_generate_is_refused_at_entry_too(self, model):
        stream = Collect()
        with pytest.raises(ValueError, match="the cache has 20"):
            run(
                model,
                decoder=GraphDecoder(streamer=stream),
                cache=StaticContiguousCache(model.config, 20),
                output_hidden_states=True,
                return_dict_in_generate=True,
            )
        assert stream.tokens == []

    def test_a_cache_implementation_that_is_asked_for(self, model):
        decoder = GraphDecoder()
        output = model.generate(
            PROMPT,
            custom_generate=decoder,
            cache_implementation="dynamic",
            return_dict_in_generate=True,
            **COMMON,
        )
        assert type(output.past_key_values) is DynamicCache
        assert decoder.fallback_reason.startswith("past_key_values is a DynamicCache")

    def test_train_mode(self):
        model, decoder = toy_model("gpt2").train(), GraphDecoder()
        cache = StaticContiguousCache(model.config, CAPACITY)
        torch.manual_seed(0)
        expected = model.generate(PROMPT, past_key_values=cache, **COMMON)
        assert torch.equal(run(model, decoder=decoder, seed=0), expected)
        assert decoder.fallback_reason.startswith("the model is in train mode")

    def test_train_mode_without_dropout_is_served(self):
        model, decoder = toy_model("llama").train(), GraphDecoder()
        assert torch.equal(run(model, decoder=decoder), run(model))
        assert decoder.fallback_reason is None

    def test_a_cache_with_other_windows(self, model):
        decoder, sizes = GraphDecoder(), model.config
        cache = StaticContiguousCache.allocate(
            sizes.num_hidden_layers,
            sizes.num_key_value_heads,
            sizes.head_dim,
            CAPACITY,
            device=DEVICE,
        )
        assert torch.equal(run(model, decoder=decoder, cache=cache), run(model))
        assert decoder.fallback_reason == "the windows of the cache are not those of the model"

    def test_rotary_frequencies_that_depend_on_the_length(self):
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        model, decoder = toy_model("llama", rope_parameters=rope), GraphDecoder()
        assert torch.equal(run(model, decoder=decoder), run(model))
        assert decoder.fallback_reason == "the rotary frequencies depend on the length"

    def test_beams(self, model):
        with pytest.raises(ValueError, match=r"this is beam_search. Leave `custom_generate` out"):
            run(model, decoder=GraphDecoder(), num_beams=3)

    @pytest.mark.parametrize(
        ("kwargs", "reason"),
        [
            (
                {"output_hidden_states": True, "return_dict_in_generate": True},
                "hidden states are asked for",
            ),
            (
                {"attention_mask": torch.tensor([[1, 1, 1, 0, *[1] * 9]], device=DEVICE)},
                "the attention mask has holes",
            ),
        ],
    )
    def test_what_cannot_be_captured_runs_in_the_loop_of_generate(
        self, model, caplog, kwargs, reason
    ):
        decoder = GraphDecoder()
        with caplog.at_level(logging.WARNING, logger="hf_static_kv"):
            got = [run(model, decoder=decoder, **kwargs) for _ in range(2)]
        expected = run(model, **kwargs)
        tokens, reference = (
            out if torch.is_tensor(out) else out.sequences for out in (got[0], expected)
        )
        assert torch.equal(tokens, reference)
        assert reason in decoder.fallback_reason
        assert sum(reason in record.getMessage() for record in caplog.records) == 1

    def test_parts_that_are_offloaded(self):
        model, decoder = toy_on_cpu("llama"), GraphDecoder()
        expected = run(model, PROMPT.cpu())
        cache = StaticContiguousCache.from_model(model, CAPACITY)
        cpu_offload(model, execution_device="cpu")
        assert torch.equal(run(model, PROMPT.cpu(), decoder, cache), expected)
        assert decoder.fallback_reason.startswith(
            "a part of the model is offloaded to the CPU or the disk"
        )

    def test_another_cache(self, model):
        decoder = GraphDecoder()
        got = run(model, decoder=decoder, cache=DynamicCache(config=model.config))
        assert torch.equal(got, run(model))
        assert (
            decoder.fallback_reason
            == "past_key_values is a DynamicCache, not a StaticContiguousCache"
        )

    def test_a_step_that_disagrees_with_an_ordinary_one_is_not_used(self, model, monkeypatch):
        """As a model would whose step depends on a length that the host counts."""
        decoder = GraphDecoder()
        cache, expected = StaticContiguousCache(model.config, CAPACITY), run(model)

        def falls_back():
            cache.reset()
            assert torch.equal(run(model, decoder=decoder, cache=cache), expected)
            return "from those of an ordinary step" in decoder.fallback_reason

        monkeypatch.setattr("hf_static_kv.program.step.write_tokens", lambda *args: None)
        assert falls_back()
        assert falls_back()
        # It is not tried a third time.
        monkeypatch.setattr("hf_static_kv.decoding.steps.SelectingStep", int)
        assert falls_back()

    def test_what_fails_once_is_tried_again(self, model, monkeypatch):
        decoder, cache, calls = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY), []

        def fail_once(*args):
            calls.append(None)
            if len(calls) <= 2:  # where the pass is recorded, and where the model itself runs
                raise RuntimeError("this passes")
            verify(*args)

        monkeypatch.setattr("hf_static_kv.decoding.steps.verify", fail_once)
        reasons = []
        for _ in range(2):
            cache.reset()
            assert torch.equal(run(model, decoder=decoder, cache=cache), run(model))
            reasons.append(decoder.fallback_reason)
        assert reasons == ["the step cannot be captured (RuntimeError: this passes)", None]

    def test_a_lack_of_memory_may_pass(self, model, monkeypatch):
        decoder, cache, expected = (
            GraphDecoder(),
            StaticContiguousCache(model.config, CAPACITY),
            run(model),
        )

        def fail(*args):
            raise torch.OutOfMemoryError("no memory\nfor a graph")

        with monkeypatch.context() as patches:
            patches.setattr("hf_static_kv.decoding.steps.verify", fail)
            assert torch.equal(run(model, decoder=decoder, cache=cache), expected)
        assert (
            decoder.fallback_reason == "the step cannot be captured (OutOfMemoryError: no memory)"
        )
        cache.reset()
        assert torch.equal(run(model, decoder=decoder, cache=cache), expected)
        assert decoder.fallback_reason is None


def test_hooks_are_seen_but_for_those_that_transformers_leaves_behind():
    model, ids = toy_model("llama", "eager"), torch.tensor([[5, 6, 7]], device=DEVICE)
    model(ids, output_attentions=True, output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert not has_hooks(model.modules())
    model.model.layers[1].register_forward_hook(lambda module, args, output: None)
    assert has_hooks(model.modules())
