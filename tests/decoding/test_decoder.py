"""`GraphDecoder` gives the tokens of `generate` without it, on a GPU where there is one.

On a CPU the step runs uncaptured; all else is the same.
"""

import gc
import weakref
from contextlib import suppress
from threading import Thread

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria

from hf_static_kv import GraphDecoder, StaticContiguousCache, StepRecorder, attached, cache_bytes
from hf_static_kv.cache.passes import UnfinishedPass
from hf_static_kv.decoding import prompts
from hf_static_kv.decoding import steps as steps_module
from hf_static_kv.program.rules import RULES
from hf_static_kv.program.step import DecodeStep
from tests.conftest import (
    ARCHITECTURES,
    COMMON,
    NEW_TOKENS,
    Collect,
    calls_in,
    shared_toy_model,
    triton_module,
)
from tests.decoding.conftest import (
    BATCH,
    CAPACITY,
    DEVICE,
    OWN_ATTENTION,
    PROMPT,
    padded,
    run,
    toy_model,
    toy_with_images,
)

needs_no_graph = pytest.mark.skipif(DEVICE == "cuda", reason="a replayed graph calls no Python")


MODES = {
    "greedy": {},
    "batch": {"ids": BATCH},
    "sampled": {"ids": BATCH, "seed": 42, "do_sample": True, "temperature": 0.7, "top_k": 20},
    "padded": padded(),
    "padded and sampled": {
        **padded(),
        "seed": 42,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    },
    "processors": {
        "ids": BATCH,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 5,
    },
    "return sequences": {"seed": 42, "do_sample": True, "num_return_sequences": 3},
    "chunked prefill": {"prefill_chunk_size": 5},
    "one token": {"max_new_tokens": 1},
    "int32": {"ids": BATCH.int()},  # `generate` gives int64
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_tokens_are_those_of_generate(name, mode):
    model, decoder = shared_toy_model(name, OWN_ATTENTION[name], DEVICE), GraphDecoder()
    how = {"max_new_tokens": 10, **MODES[mode]}
    expected = run(model, **{**how, "prefill_chunk_size": None})  # which needs a cache
    assert torch.equal(run(model, decoder=decoder, **how), expected)
    assert decoder.fallback_reason is None
    assert model.config._attn_implementation == OWN_ATTENTION[name]


@pytest.mark.usefixtures("small_spare")
@pytest.mark.parametrize(
    ("name", "mode"),
    [("gemma3", mode) for mode in MODES]
    + [(name, "padded") for name in ("gemma2", "mistral", "qwen2", "cohere2", "gpt_oss", "llama4")],
)
def test_compact_layers(name, mode):
    """Over two moves, in a first call and in one that uses the step again."""
    model, decoder = shared_toy_model(name, OWN_ATTENTION[name], DEVICE), GraphDecoder()
    how = {"max_new_tokens": 22, **MODES[mode]}
    expected = run(model, **{**how, "prefill_chunk_size": None})
    cache = StaticContiguousCache(model.config, CAPACITY, sliding="compact")
    for _ in range(2):
        cache.reset()
        assert torch.equal(run(model, decoder=decoder, cache=cache, **how), expected)
    assert decoder.fallback_reason is None
    assert decoder.num_steps == (mode != "one token")
    moved = [layer.offset for layer in cache.layers if layer.is_compact]
    assert len(set(moved)) == 1
    assert (moved[0] > 0) == (mode != "one token")


class After(StoppingCriteria):
    """Stops row b after `numbers[b]` tokens of text."""

    def __init__(self, *numbers):
        self.numbers = torch.tensor(numbers, device=DEVICE)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.numbers


class TestStops:
    def test_every_row_ends_at_its_own_eos_and_is_padded(self, model):
        free = run(model, BATCH)[:, BATCH.shape[1] :]
        eos = int(free[0, 3])  # the first row ends here, the second goes on or ends elsewhere
        expected = run(model, BATCH, eos_token_id=eos, pad_token_id=7)
        got = run(model, BATCH, GraphDecoder(), eos_token_id=eos, pad_token_id=7)
        assert torch.equal(got, expected)
        assert eos in got

    def test_the_cache_ends_where_that_of_generate_does(self, model):
        eos = int(run(model)[0, PROMPT.shape[1] + 4])
        plain, ours = (StaticContiguousCache(model.config, CAPACITY) for _ in range(2))
        model.generate(PROMPT, **{**COMMON, "eos_token_id": eos}, past_key_values=plain)
        run(model, decoder=GraphDecoder(), cache=ours, eos_token_id=eos)
        assert ours.seq_len == plain.seq_len < PROMPT.shape[1] + NEW_TOKENS - 1

    def test_a_criterion_of_ones_own(self, model):
        stops = [After(13, 17)]
        got = run(model, BATCH, GraphDecoder(), stopping_criteria=stops, pad_token_id=0)
        assert torch.equal(got, run(model, BATCH, stopping_criteria=stops, pad_token_id=0))
        assert got.shape[1] == 17

    def test_where_tokens_are_selected(self, model):
        """Greedily and by sampling with known processors: in the step. Otherwise on the host."""
        decoder, cache, sampled = (
            GraphDecoder(),
            StaticContiguousCache(model.config, CAPACITY),
            {"do_sample": True},
        )
        kinds = []
        for kwargs in (
            {},
            {"eos_token_id": [5, 6, 7]},
            sampled,
            {**sampled, "temperature": 0.7, "top_k": 9},
            {**sampled, "temperature": 0.9, "top_k": 8},
            {"no_repeat_ngram_size": 2, "max_time": 100.0},
            {"repetition_penalty": 1.2},
            {**sampled, "bad_words_ids": [[7]]},
        ):
            cache.reset()
            run(model, decoder=decoder, cache=cache, **kwargs)
            steps = list(decoder.steps.by_cache[cache].values())
            kinds.append((len(steps), type(steps[-1]).__name__))
        on_device, on_host = "SelectingStep", "DecodeStep"
        assert kinds == [
            *((1, on_device), (1, on_device), (2, on_device), (3, on_device), (3, on_device)),
            *((4, on_device), (5, on_host), (5, on_host)),
        ]

    @pytest.mark.parametrize("at", range(1, NEW_TOKENS + 1))
    def test_an_end_at_every_length(self, at):
        """The first token, the last one, and all between; two rows, of which one may go on."""
        model = toy_model("llama")
        free = run(model, BATCH)[:, BATCH.shape[1] :]
        eos = [int(free[0, at - 1])]
        cache, plain = (StaticContiguousCache(model.config, CAPACITY) for _ in range(2))
        got = run(model, BATCH, GraphDecoder(), cache, eos_token_id=eos, pad_token_id=7)
        expected = model.generate(
            BATCH, past_key_values=plain, **{**COMMON, "eos_token_id": eos, "pad_token_id": 7}
        )
        assert torch.equal(got, expected)
        assert cache.seq_len == plain.seq_len


class TestOutputs:
    def test_scores_and_logits(self, model):
        asked = {
            "return_dict_in_generate": True,
            "output_scores": True,
            "output_logits": True,
            "temperature": 0.5,
        }
        asked |= {"do_sample": True, "seed": 3}
        expected, got = run(model, BATCH, **asked), run(model, BATCH, GraphDecoder(), **asked)
        assert torch.equal(got.sequences, expected.sequences)
        for theirs, ours in ((expected.scores, got.scores), (expected.logits, got.logits)):
            assert len(ours) == NEW_TOKENS
            torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=0, atol=1e-3)
        assert got.past_key_values.seq_len == BATCH.shape[1] + NEW_TOKENS - 1

    def test_nothing_that_was_not_asked_for(self, model):
        got = run(model, decoder=GraphDecoder(), return_dict_in_generate=True)
        assert got.scores is None
        assert got.logits is None

    @pytest.mark.parametrize("name", ["gemma3", "llama4"])
    def test_a_streamer_sees_prompt_tokens_and_end(self, name):
        model, stream = toy_model(name), Collect()
        tokens = run(model, decoder=GraphDecoder(streamer=stream))
        assert stream.tokens == tokens[0].tolist()
        assert stream.ended


@pytest.mark.parametrize(
    ("tokens", "how", "is_used"),
    [
        (PROMPT.shape[1], {}, True),
        (PROMPT.shape[1] + 1, {}, False),
        (6, {"prefill_chunk_size": 5}, False),
    ],
    ids=["long", "short", "chunks"],
)
def test_cudnn_reads_long_prompts_alone(tokens, how, is_used, monkeypatch):
    monkeypatch.setattr("hf_static_kv.decoding.call._TOKENS_FOR_CUDNN", tokens)
    model, decoder, enabled = toy_model("llama"), GraphDecoder(), []
    attention = torch.nn.functional.scaled_dot_product_attention

    def attend(*args, **kwargs):
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    run(model, decoder=decoder, max_new_tokens=1, **how)
    assert decoder.fallback_reason is None
    assert enabled
    assert set(enabled) == {is_used}


class TestVectors:
    """A prompt as `inputs_embeds`, as in models for speech: what follows are tokens, and the result
    has these alone.
    """

    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
    @pytest.mark.parametrize(
        "how",
        [{}, {"do_sample": True}, {"repetition_penalty": 1.3}],
        ids=["greedy", "sample", "penalty"],
    )
    def test_the_tokens_are_those_of_generate(self, name, how):
        model, decoder = toy_model(name), GraphDecoder()
        embeds = model.get_input_embeddings()(PROMPT)
        cache, keywords = (
            StaticContiguousCache(model.config, CAPACITY),
            {**COMMON, **how, "inputs_embeds": embeds},
        )
        torch.manual_seed(3)
        expected = model.generate(**keywords, use_cache=False)
        for _ in range(2):
            cache.reset()
            torch.manual_seed(3)
            got = model.generate(**keywords, past_key_values=cache, custom_generate=decoder)
            assert torch.equal(got, expected)
            assert decoder.fallback_reason is None
            assert cache.seq_len == PROMPT.shape[1] + got.shape[1] - 1
        assert len(decoder.steps.by_cache[cache]) == 1

    def test_rows_of_unlike_length(self, model):
        padding, decoder = padded(), GraphDecoder()
        embeds, mask = model.get_input_embeddings()(padding["ids"]), padding["attention_mask"]
        keywords = {**COMMON, "inputs_embeds": embeds, "attention_mask": mask}
        cache = StaticContiguousCache(model.config, CAPACITY)
        got = model.generate(**keywords, past_key_values=cache, custom_generate=decoder)
        assert torch.equal(got, model.generate(**keywords, use_cache=False))
        assert decoder.fallback_reason is None

    def test_with_the_tokens_beside_them_and_steps_recorded(self, model):
        embeds, decoder, recorder = (
            model.get_input_embeddings()(PROMPT),
            GraphDecoder(),
            StepRecorder(best=2),
        )
        cache = StaticContiguousCache(model.config, CAPACITY)
        keywords = {**COMMON, "attention_mask": torch.ones_like(PROMPT), "inputs_embeds": embeds}
        got = model.generate(PROMPT, **keywords, past_key_values=cache, custom_generate=decoder)
        assert torch.equal(got, run(model))
        assert decoder.fallback_reason is None
        cache.reset()
        alone = model.generate(
            **keywords, past_key_values=cache, custom_generate=decoder, logits_processor=[recorder]
        )
        assert torch.equal(alone, got[:, PROMPT.shape[1] :])
        assert [step["token"] for step in recorder.steps(alone)[0]] == alone[0].tolist()

    def test_what_cannot_fit(self, model):
        embeds, cache = (
            model.get_input_embeddings()(PROMPT),
            StaticContiguousCache(model.config, 20),
        )
        keywords = {
            **COMMON,
            "inputs_embeds": embeds,
            "past_key_values": cache,
            "custom_generate": GraphDecoder(),
        }
        with pytest.raises(
            ValueError,
            match=r"13 and 14 new tokens take 26 positions.* has 20.* at most 8 new tokens",
        ):
            model.generate(**keywords)
        assert model.generate(**{**keywords, "max_new_tokens": 8}).shape == (1, 8)
        assert cache.seq_len == 20


class TestReuse:
    def test_a_second_call_uses_the_step_again(self, model, monkeypatch):
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)
        first = run(model, decoder=decoder, cache=cache)
        # A new one could not be made.
        monkeypatch.setattr("hf_static_kv.decoding.steps.SelectingStep", int)
        cache.reset()
        assert torch.equal(run(model, decoder=decoder, cache=cache), first)

    def test_other_rows_and_lengths_on_one_cache(self, model):
        decoder, cache = (
            GraphDecoder(),
            StaticContiguousCache.from_model(model, CAPACITY, batch_size=2),
        )
        for ids in (PROMPT, BATCH, PROMPT[:, :3], BATCH):
            cache.reset()
            assert torch.equal(run(model, ids, decoder, cache), run(model, ids))

    def test_two_models_and_two_caches_side_by_side(self):
        decoder = GraphDecoder()
        models = [toy_model("llama", seed=seed) for seed in (0, 1)]
        caches = [StaticContiguousCache(model.config, CAPACITY) for model in models]
        for _ in range(2):
            for model, cache in zip(models, caches, strict=True):
                cache.reset()
                assert torch.equal(run(model, decoder=decoder, cache=cache), run(model))

    def test_inside_and_outside_of_inference_mode(self, model):
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)
        expected = run(model)
        with torch.inference_mode():
            assert torch.equal(run(model, decoder=decoder, cache=cache), expected)
        cache.reset()
        assert torch.equal(run(model, decoder=decoder, cache=cache), expected)
        assert decoder.fallback_reason is None

    def test_another_state_of_the_model_is_another_step(self, model):
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)
        run(model, decoder=decoder, cache=cache)
        cache.reset()
        model.model.layers[0].active_adapters, model.model.layers[0].disable_adapters = (
            ["one"],
            True,
        )
        run(model, decoder=decoder, cache=cache)
        assert len(decoder.steps.by_cache[cache]) == 2

    def test_other_parts_and_settings_are_another_step(self, model):
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)

        def steps():
            cache.reset()
            run(model, decoder=decoder, cache=cache)
            return len(decoder.steps.by_cache[cache])

        assert (steps(), steps()) == (1, 1)
        model.model.layers[1].mlp.act_fn = torch.nn.GELU()
        assert steps() == 2
        model.model.norm.variance_epsilon = 0.5
        assert steps() == 3
        model.model.calls = 7
        assert steps() == 4

    @pytest.mark.parametrize("name", ["merged_adapters", "scaling"])
    def test_an_adapter_that_is_merged_or_rescaled_is_another_step(self, model, name):
        """As peft does it: the weights are changed where they are."""
        cache, decoder = StaticContiguousCache.from_model(model, CAPACITY), GraphDecoder()
        module = model.model.layers[0].mlp
        module.active_adapters = ["default"]
        for state in (["none"], ["default"]):
            setattr(module, name, state)
            cache.reset()
            run(model, decoder=decoder, cache=cache)
        assert len(decoder.steps.by_cache[cache]) == 2

    @pytest.mark.parametrize("what", ["a forward", "a buffer", "a setting"])
    def test_what_is_changed_behind_a_replay_is_another_step(self, what):
        model = toy_model("gemma3")
        cache, decoder, mlp = (
            StaticContiguousCache.from_model(model, CAPACITY),
            GraphDecoder(),
            model.model.layers[2].mlp,
        )
        run(model, decoder=decoder, cache=cache)
        if what == "a forward":
            mlp.forward = lambda x: 3 * type(mlp).forward(mlp, x)
        elif what == "a buffer":
            rotary = model.model.rotary_emb
            rotary.full_attention_inv_freq = rotary.full_attention_inv_freq * 7
        else:
            model.config.final_logit_softcapping = 0.1
        for _ in range(2):
            cache.reset()
            assert torch.equal(run(model, decoder=decoder, cache=cache), run(model))
        assert len(decoder.steps.by_cache[cache]) == 2

    def test_steps_of_one_cache_are_eight_at_most(self, model, caplog):
        cache, decoder = StaticContiguousCache.from_model(model, CAPACITY), GraphDecoder()
        for n in range(12):
            model.eps_of_today = float(n)
            cache.reset()
            run(model, decoder=decoder, cache=cache, max_new_tokens=3)
        assert len(decoder.steps.by_cache[cache]) == 8
        assert caplog.text.count("has more than 8 kinds of steps") == 1
        oldest = next(iter(decoder.steps.by_cache[cache]))
        model.eps_of_today = 4.0
        cache.reset()
        run(model, decoder=decoder, cache=cache, max_new_tokens=3)
        assert list(decoder.steps.by_cache[cache])[-1] == oldest  # known, and the newest now

    @pytest.mark.parametrize("first", [40, -20])
    def test_positions_of_ones_own(self, first):
        """No table of angles has those after the end of the cache, or before its beginning."""
        model, decoder, size = toy_model("llama"), GraphDecoder(), PROMPT.shape[1] + NEW_TOKENS - 1
        positions = torch.arange(PROMPT.shape[1], device=DEVICE)[None] + first
        expected = model.generate(PROMPT, position_ids=positions, **COMMON)
        cache = StaticContiguousCache(model.config, size)
        for own, tokens in ((None, run(model)), (positions, expected)):
            cache.reset()
            assert torch.equal(run(model, decoder=decoder, cache=cache, position_ids=own), tokens)
            assert decoder.fallback_reason is None

    def test_a_model_for_images_too_with_a_text_alone(self):
        model = toy_with_images().eval().to(DEVICE)
        decoder = GraphDecoder()
        assert torch.equal(run(model, decoder=decoder), run(model))
        assert decoder.fallback_reason is None

    def test_two_threads_with_one_model(self, model):
        expected, results = run(model), []

        def work():
            results.append(
                run(
                    model,
                    decoder=GraphDecoder(),
                    cache=StaticContiguousCache.from_model(model, CAPACITY),
                )
            )

        before = model.config._attn_implementation
        threads = [Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        assert all(torch.equal(result, expected) for result in results)
        assert model.config._attn_implementation == before

    def test_going_on_with_the_text(self, model):
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)
        first = run(model, decoder=decoder, cache=cache)
        longer = torch.cat([first, torch.tensor([[9, 31]], device=DEVICE)], dim=1)
        assert torch.equal(run(model, longer, decoder, cache), run(model, longer))

    def test_the_step_goes_with_its_cache(self, model):
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)
        run(model, decoder=decoder, cache=cache)
        (step,) = decoder.steps.by_cache[cache].values()
        step, storage = weakref.ref(step), weakref.ref(cache.storage_groups[0])
        del cache
        gc.collect()
        assert step() is None
        assert storage() is None
        assert len(decoder.steps.by_cache) == 0


class TestComparison:
    """A new step beside an ordinary one, in a model that writes a number where a token is never to
    be chosen.
    """

    @pytest.fixture(params=[-torch.inf, -1e9])
    def masking(self, request):
        model = toy_model("llama")

        def masked(x):
            logits = torch.nn.functional.linear(x, model.lm_head.weight)
            return logits.index_fill(-1, torch.arange(3, device=x.device), request.param)

        model.lm_head.forward = masked
        return model

    def test_a_sound_step_is_taken(self, masking):
        decoder = GraphDecoder()
        assert torch.equal(run(masking, decoder=decoder), run(masking))
        assert decoder.fallback_reason is None

    def test_a_broken_one_is_not(self, masking, monkeypatch):
        own, decoder = DecodeStep.run, GraphDecoder()

        def broken(self, tokens):
            logits = own(self, tokens)
            # Those that are no mask.
            return torch.cat([logits[:, :3], logits[:, 3:].roll(1, dims=-1)], dim=-1)

        monkeypatch.setattr(DecodeStep, "run", broken)
        assert torch.equal(run(masking, decoder=decoder), run(masking))
        assert "from those of an ordinary step" in decoder.fallback_reason


class TestFaults:
    """An exception leaves the model as it was and in the cache nothing but complete steps."""

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_in_the_middle_of_the_loop(self, model, error):
        class Failing(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                if input_ids.shape[1] == 18:
                    raise error
                return torch.zeros(len(input_ids), dtype=torch.bool, device=DEVICE)

        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)
        expected = run(model)
        with pytest.raises(error):
            run(model, decoder=decoder, cache=cache, stopping_criteria=[Failing()])
        assert model.config._attn_implementation == "sdpa"
        assert cache.seq_len == 17  # of 18 tokens the last one was not yet written
        assert torch.equal(run(model, expected[:, :18], decoder, cache, max_new_tokens=9), expected)

    @needs_no_graph
    def test_in_the_middle_of_a_step(self, model):
        decoder, cache, fails = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY), False

        def fail(*args):
            if fails and cache.seq_len == PROMPT.shape[1] + 2:  # after two whole steps
                raise RuntimeError("out of something")

        # So the step runs the model itself.
        hook = model.model.layers[2].mlp.register_forward_hook(fail)
        expected = run(model, decoder=decoder, cache=cache)
        cache.reset()
        fails = True
        with pytest.raises(RuntimeError, match="out of something"):
            run(model, decoder=decoder, cache=cache)
        hook.remove()
        assert cache.seq_len == PROMPT.shape[1] + 2
        assert torch.equal(
            run(model, expected[:, : PROMPT.shape[1] + 3], decoder, cache, max_new_tokens=11),
            expected,
        )


class TestFallback:
    """A call that cannot go on as a captured step goes on in transformers' loop, from the prompt
    on.
    """

    @pytest.fixture
    def noisy(self):
        """Every pass over a prompt draws random numbers, and counts."""
        model = toy_model("llama")
        model.register_buffer("prompts", torch.zeros(1, device=DEVICE))

        def move(module, args, output):
            if output.shape[1] == 1:
                return output
            model.prompts += 1
            return output + 0.05 * torch.randn_like(output)

        model.model.embed_tokens.register_forward_hook(move)
        return model

    @staticmethod
    def fail(step, call):
        raise RuntimeError("it differs")

    @pytest.mark.skipif(DEVICE == "cuda", reason="a graph calls no hooks")
    @pytest.mark.parametrize("mode", [*MODES, "streamed", "returned", "attached"])
    def test_the_prompt_is_computed_once(self, noisy, mode, monkeypatch):
        monkeypatch.setattr("hf_static_kv.decoding.steps.verify", self.fail)
        monkeypatch.setattr("hf_static_kv.served._DECODER_DEVICES", (DEVICE,))
        monkeypatch.setattr("hf_static_kv.served._MIN_PROMPT_ON_CPU", 0)
        how = {"seed": 1, **MODES.get(mode, {}), "return_dict_in_generate": mode == "returned"}

        def call(decoder=None, **own):
            if mode == "streamed":
                own["streamer"] = Collect()
            ids, seed = how.get("ids", PROMPT), how["seed"]
            rest = {key: value for key, value in how.items() if key not in ("ids", "seed")}
            torch.manual_seed(seed)
            noisy.prompts.zero_()
            mask = {"attention_mask": torch.ones_like(ids)}
            output = noisy.generate(
                ids, **{**COMMON, **mask, **rest, "custom_generate": decoder, **own}
            )
            tokens = output if isinstance(output, torch.Tensor) else output.sequences
            streamed = own["streamer"].tokens if mode == "streamed" else None
            return tokens.tolist(), streamed, int(noisy.prompts), torch.get_rng_state().tolist()

        expected = call()
        if mode == "attached":
            with attached(noisy) as info:
                assert call() == expected
            assert "it differs" in info.fallback_reason
            return
        decoder, cache = GraphDecoder(), StaticContiguousCache(noisy.config, CAPACITY)
        for own in ({}, {"past_key_values": cache}):
            assert call(decoder, **own) == expected
            assert mode == "one token" or "it differs" in decoder.fallback_reason
        assert cache.seq_len == len(expected[0][0]) - 1

    @pytest.mark.parametrize("is_own", [False, True])
    def test_a_layer_that_does_not_run(self, is_own):
        """The caller's own cache raises before the first token; one of the pool is replaced."""
        model, decoder, streamer = toy_model("llama"), GraphDecoder(), Collect()
        model.model.layers[1].forward = lambda hidden_states, *args, **kwargs: hidden_states
        expected = model.generate(PROMPT, **COMMON)
        how = {**COMMON, "custom_generate": decoder, "streamer": streamer}
        if is_own:
            cache = StaticContiguousCache(model.config, CAPACITY)
            with pytest.raises(UnfinishedPass, match=r"Layers \[1\] of 2 did not run"):
                model.generate(PROMPT, past_key_values=cache, **how)
            assert streamer.tokens == PROMPT[0].tolist()
        else:
            assert torch.equal(model.generate(PROMPT, **how), expected)
            assert streamer.tokens == expected[0].tolist()
            assert "Layers [1] of 2 did not run" in decoder.fallback_reason

    def test_a_loop_of_its_own_begins_with_the_prompt(self, monkeypatch):
        monkeypatch.setattr("hf_static_kv.decoding.steps.verify", self.fail)
        model, decoder = toy_model("llama"), GraphDecoder()

        class Own(type(model)):
            def _sample(self, *args, **kwargs):
                return super()._sample(*args, **kwargs)

        expected = run(model)
        model.__class__ = Own
        assert torch.equal(run(model, decoder=decoder), expected)
        assert "it differs" in decoder.fallback_reason


class TestPrograms:
    def steps(self, decoder):
        return [step for steps in decoder.steps.by_cache.values() for step in steps.values()]

    @pytest.mark.parametrize("vocab_size", [2, 6, 7])
    def test_a_small_vocabulary(self, vocab_size):
        """A pass is recorded with a token of the vocabulary: on a GPU another one is fatal."""
        decoder, model = GraphDecoder(), toy_model("llama", vocab_size=vocab_size)
        cache = StaticContiguousCache(model.config, CAPACITY)
        run(model, PROMPT % vocab_size, decoder, cache)
        assert [step.is_recorded for step in self.steps(decoder)] == [True]

    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_the_pass_of_a_model_is_recorded(self, name):
        decoder, model = GraphDecoder(), toy_model(name, OWN_ATTENTION[name])
        cache = StaticContiguousCache(model.config, CAPACITY)
        run(model, decoder=decoder, cache=cache, max_new_tokens=3)
        assert [step.is_recorded for step in self.steps(decoder)] == [True]

    def test_what_cannot_be_recorded_runs_the_model(self, model, monkeypatch):
        """A function that torch does not see, as a kernel of another library is."""
        mlp = type(model.model.layers[0].mlp)
        own = mlp.forward

        def unseen(self, x):
            with torch._C.DisableTorchFunction():  # modes are off, too
                return own(self, x)

        monkeypatch.setattr(mlp, "forward", unseen)
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)
        got = run(model, decoder=decoder, cache=cache)
        assert torch.equal(got, run(model))
        assert decoder.fallback_reason is None
        assert [step.is_recorded for step in self.steps(decoder)] == [False]

    def test_rules_are_left_out(self, model):
        decoder, cache = GraphDecoder(without=RULES), StaticContiguousCache(model.config, CAPACITY)
        assert torch.equal(run(model, decoder=decoder, cache=cache), run(model))
        with pytest.raises(
            ValueError, match="There is no rule speed: choose among angles_from_table, "
        ):
            GraphDecoder(without=["speed"])


@needs_no_graph
def test_the_kernels_serve_a_whole_generation(monkeypatch):
    """On a CPU in Triton's interpreter: the path that a GPU takes, but for the graph."""
    attention, norms, rotation, linears = (
        triton_module(f"hf_static_kv.kernels.{name}_triton")
        for name in ("decode_attention", "norm", "rotary", "linear")
    )
    calls = []

    def note(name, kernel):
        return lambda *args, **kwargs: calls.append(name) or kernel(*args, **kwargs)

    def decode(query, keys, values, spans, *, scale, max_span, softcap, sinks, **flags):
        seen = weights = None
        return attention.decode_attention_triton(
            query, keys, values, spans, seen, scale, max_span, softcap, sinks, weights, **flags
        )

    def fused(x, layer):
        return linears.fused_linears_triton(x, *layer)

    def add_norm(x, other, norm, before=None):
        return norms.norm_triton(x, other, norm, before)

    def rotate(*args):
        return rotation.rotate_and_write_triton(*args, *[None] * (10 - len(args)), True)

    # Few programs, of 10 ms each in the interpreter.
    monkeypatch.setattr(linears, "_tiles", lambda *args: (32, 64, 2))
    monkeypatch.setattr(
        "hf_static_kv.kernels.decode_attention.decode_attention", note("attend", decode)
    )
    for name, kernel in (
        ("fused_linears", fused),
        ("add_norm", add_norm),
        ("rotate_and_write", rotate),
    ):
        monkeypatch.setattr(f"hf_static_kv.program.rules.{name}", note(name, kernel))
    # Norms before linear layers; norms around sums, windows, one KV head.
    for name in (
        "llama",
        "gemma3",
    ):
        model, decoder, few = (
            toy_model(name, OWN_ATTENTION[name]),
            GraphDecoder(),
            {"max_new_tokens": 3},
        )
        assert torch.equal(run(model, decoder=decoder, **few), run(model, **few))
        assert decoder.fallback_reason is None
        layers = model.config.num_hidden_layers
        # Two tokens, and four or five more when the step is compared with ordinary passes.
        assert calls.count("rotate_and_write") == (7 if name == "gemma3" else 6) * layers
        # The recorded pass attends, too.
        assert calls.count("attend") == calls.count("rotate_and_write") + layers
        assert (calls.count("fused_linears") > 0, calls.count("add_norm") > 0) == (
            True,
            name == "gemma3",
        )
        calls.clear()


@pytest.mark.parametrize("is_captured", [False, True])
def test_the_first_token_does_not_wait_for_the_decoder(is_captured, monkeypatch):
    """The model is looked at before a prompt that it computes: on a GPU that is as long as the host
    takes to send it. A captured prompt is sent before, so only what comes before it counts.
    """
    monkeypatch.setattr(prompts, "DEVICES", (DEVICE,) if is_captured else ())
    model, decoder = toy_model("llama"), GraphDecoder()
    cache = StaticContiguousCache(model.config, CAPACITY)

    def first_token(**how):
        cache.reset()
        model.generate(PROMPT, **COMMON | {"past_key_values": cache, "max_new_tokens": 1, **how})

    def until_sent():
        with suppress(SentError):
            first_token(custom_generate=decoder)

    def send(*args):
        raise SentError

    run(model, decoder=decoder, cache=cache)
    first_token(custom_generate=decoder)
    assert bool(decoder.prompts.steps) == is_captured
    if is_captured:
        monkeypatch.setattr(prompts, "append_prompt", send)
    assert calls_in(until_sent) < 1.5 * calls_in(first_token)


class SentError(Exception):
    """A prompt is on its way."""


class TestACacheOfItsOwn:
    @pytest.mark.parametrize("mode", MODES)
    def test_the_tokens_are_those_of_generate(self, mode):
        model, decoder = shared_toy_model("gemma3", "sdpa", DEVICE), GraphDecoder()
        how = {"max_new_tokens": 10, **MODES[mode]}
        ids, seed = how.pop("ids", PROMPT), how.pop("seed", None)
        expected = run(model, ids, seed=seed, **{**how, "prefill_chunk_size": None})
        for _ in range(2):
            torch.manual_seed(seed or 0)
            how = {**COMMON, "attention_mask": torch.ones_like(ids), **how}
            assert torch.equal(model.generate(ids, custom_generate=decoder, **how), expected)
        assert decoder.fallback_reason is None
        assert (len(decoder.pool.free), decoder.pool.hits) == (1, 1)

    @pytest.mark.parametrize("is_captured_again", [True, False])
    @pytest.mark.parametrize("how", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("eos", [None, 40])
    def test_it_grows_in_the_middle_of_a_call(
        self, model, how, eos, is_captured_again, monkeypatch
    ):
        how = {**COMMON, "max_new_tokens": 90, "eos_token_id": eos, "pad_token_id": 0, **how}
        torch.manual_seed(1)
        expected = model.generate(BATCH, **how)
        decoder, stream = GraphDecoder(), Collect()
        decoder.pool.max_bytes = 30 * cache_bytes(model.config, 2)
        verify, capacities = steps_module.verify, set()

        def verify_the_first(step, call):
            capacities.add(call.cache.max_cache_len)
            if len(capacities) > 1:
                raise RuntimeError("on purpose")
            verify(step, call)

        if not is_captured_again:
            monkeypatch.setattr(steps_module, "verify", verify_the_first)
        torch.manual_seed(1)
        got = model.generate(BATCH, custom_generate=decoder, streamer=stream, **how)
        assert torch.equal(got, expected)
        assert stream.tokens == [
            *BATCH.flatten().tolist(),
            *expected[:, BATCH.shape[1] :].T.flatten().tolist(),
        ]
        reason = (
            None if is_captured_again else "the step cannot be captured (RuntimeError: on purpose)"
        )
        assert decoder.fallback_reason == reason

    def test_a_returned_cache_is_the_callers(self, model):
        decoder = GraphDecoder()
        output = model.generate(
            PROMPT, custom_generate=decoder, return_dict_in_generate=True, **COMMON
        )
        assert output.past_key_values.seq_len == PROMPT.shape[1] + NEW_TOKENS - 1
        assert decoder.pool.free == []

    def test_a_callers_dynamic_cache_is_not_replaced(self, model):
        decoder, cache = GraphDecoder(), DynamicCache(config=model.config)
        model.generate(PROMPT, custom_generate=decoder, past_key_values=cache, **COMMON)
        assert (
            decoder.fallback_reason
            == "past_key_values is a DynamicCache, not a StaticContiguousCache"
        )
        assert cache.get_seq_length() == PROMPT.shape[1] + NEW_TOKENS - 1

    def test_two_models_have_caches_of_their_own(self):
        decoder = GraphDecoder()
        for name in ("llama", "gemma3", "llama"):
            toy = toy_model(name)
            expected = toy.generate(PROMPT, **COMMON)
            assert torch.equal(toy.generate(PROMPT, custom_generate=decoder, **COMMON), expected)

    def test_a_model_that_cannot_be_cached_says_why(self):
        model, decoder = toy_model("llama"), GraphDecoder()
        model.config.model_type = "xlstm"
        expected = model.generate(PROMPT, **COMMON)
        assert torch.equal(model.generate(PROMPT, custom_generate=decoder, **COMMON), expected)
        assert decoder.fallback_reason.startswith("'xlstm' keeps a recurrent state")
