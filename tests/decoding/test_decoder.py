"""`GraphDecoder` gives the tokens of `generate` without it, on a GPU where there is one.

On a CPU the step runs uncaptured; all else is the same.
"""

import gc
import logging
import weakref
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    IdeficsConfig,
    IdeficsForVisionText2Text,
    StoppingCriteria,
)

from hf_static_kv import GraphDecoder, StaticContiguousCache, StepRecorder
from hf_static_kv.attention import ATTENTION_NAME
from hf_static_kv.decoding.eligibility import has_hooks
from hf_static_kv.decoding.sampling import StopFlag
from hf_static_kv.patching import attention_implementation, without_cudnn
from hf_static_kv.program.linears import fused_linears
from hf_static_kv.program.step import DecodeStep, _decoder_layers, compiled_layers
from tests.conftest import (
    ARCHITECTURES,
    BATCH,
    COMMON,
    NEW_TOKENS,
    PROMPT,
    Collect,
    calls_in,
    shared_toy_model,
    triton_module,
)
from tests.conftest import toy_model as toy_on_cpu

CAPACITY = 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT, BATCH = PROMPT.to(DEVICE), BATCH.to(DEVICE)
needs_no_graph = pytest.mark.skipif(DEVICE == "cuda", reason="a replayed graph calls no Python")
# Why a toy runs in the loop of `generate`; the others run as a step.
NOT_CAPTURED = {"llama4": "layers attend in chunks"}
OWN_ATTENTION = {name: "eager" if name in ("gemma2", "gpt_oss") else "sdpa" for name in ARCHITECTURES}


def toy_model(*args, **kwargs):
    return toy_on_cpu(*args, **kwargs).to(DEVICE)


def toy_with_images():
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"image_size": 28, "patch_size": 14}
    text = toy_on_cpu("gemma3").config.to_dict()
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision | sizes, mm_tokens_per_image=1)
    )


def run(model, ids=PROMPT, decoder=None, cache=None, seed=None, **kwargs):
    """One call: without a cache, or with ours in the hands of the decoder."""
    if seed is not None:
        torch.manual_seed(seed)
    how = {"use_cache": False}
    if decoder is not None:
        cache = cache if cache is not None else StaticContiguousCache(model.config, CAPACITY)
        how = {"past_key_values": cache, "custom_generate": decoder}
    return model.generate(ids, **{**COMMON, "attention_mask": torch.ones_like(ids), **how, **kwargs})


def padded():
    mask = torch.ones_like(BATCH)
    mask[1, :4] = 0
    return {"ids": BATCH * mask, "attention_mask": mask}


MODES = {
    "greedy": {},
    "batch": {"ids": BATCH},
    "sampled": {"ids": BATCH, "seed": 42, "do_sample": True, "temperature": 0.7, "top_k": 20},
    "padded": padded(),
    "padded and sampled": {**padded(), "seed": 42, "do_sample": True, "temperature": 0.7, "top_p": 0.9},
    "processors": {"ids": BATCH, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "return sequences": {"seed": 42, "do_sample": True, "num_return_sequences": 3},
    "chunked prefill": {"prefill_chunk_size": 5},
    "one token": {"max_new_tokens": 1},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_tokens_are_those_of_generate(name, mode):
    model, decoder = shared_toy_model(name, OWN_ATTENTION[name], DEVICE), GraphDecoder()
    how = {"max_new_tokens": 10, **MODES[mode]}
    expected = run(model, **{**how, "prefill_chunk_size": None})  # which needs a cache
    assert torch.equal(run(model, decoder=decoder, **how), expected)
    assert decoder.fallback_reason == NOT_CAPTURED.get(name)
    assert model.config._attn_implementation == OWN_ATTENTION[name]


@pytest.fixture
def model():
    return toy_model("gemma3")


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

    def test_a_greedy_run_is_chosen_in_the_step_and_others_are_not(self, model):
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)
        kinds = []
        for kwargs in ({}, {"eos_token_id": [5, 6, 7]}, {"do_sample": True}, {"repetition_penalty": 1.2}):
            cache.reset()
            run(model, decoder=decoder, cache=cache, **kwargs)
            kinds.append([type(step).__name__ for step in decoder._steps[cache].values()])
        assert kinds == [["GreedyStep"], ["GreedyStep"], ["GreedyStep", "DecodeStep"], ["GreedyStep", "DecodeStep"]]

    @pytest.mark.parametrize("at", range(1, NEW_TOKENS + 1))
    def test_an_end_at_every_length(self, at):
        """The first token, the last one, and all between; two rows, of which one may go on."""
        model = toy_model("llama")
        free = run(model, BATCH)[:, BATCH.shape[1] :]
        eos = [int(free[0, at - 1])]
        cache, plain = (StaticContiguousCache(model.config, CAPACITY) for _ in range(2))
        got = run(model, BATCH, GraphDecoder(), cache, eos_token_id=eos, pad_token_id=7)
        expected = model.generate(BATCH, past_key_values=plain, **{**COMMON, "eos_token_id": eos, "pad_token_id": 7})
        assert torch.equal(got, expected)
        assert cache.seq_len == plain.seq_len


class TestStopFlag:
    def test_its_event_is_recorded_on_the_device_of_the_flag(self, monkeypatch):
        """Not on the current device, where it would come before the flag has been computed."""
        recorded = []
        event = SimpleNamespace(record=recorded.append, synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"the stream of {device}")
        flag, on_gpu = StopFlag(deferred=True), SimpleNamespace(is_cuda=True, device="cuda:1")
        flag.on_host = SimpleNamespace(copy_=lambda source, non_blocking: None)
        flag.push(on_gpu)
        assert recorded == ["the stream of cuda:1"]

    def test_one_that_is_not_deferred_is_read_at_once(self):
        flag = StopFlag(deferred=False)
        assert not flag.push(torch.tensor(True))
        assert flag.is_set
        assert flag.newest()


class TestOutputs:
    def test_scores_and_logits(self, model):
        asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "temperature": 0.5}
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


class TestVectors:
    """A prompt as `inputs_embeds`, as in models for speech: what follows are tokens, and the result has these alone."""

    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
    @pytest.mark.parametrize(
        "how", [{}, {"do_sample": True}, {"repetition_penalty": 1.3}], ids=["greedy", "sample", "penalty"]
    )
    def test_the_tokens_are_those_of_generate(self, name, how):
        model, decoder = toy_model(name), GraphDecoder()
        embeds = model.get_input_embeddings()(PROMPT)
        cache, keywords = StaticContiguousCache(model.config, CAPACITY), {**COMMON, **how, "inputs_embeds": embeds}
        torch.manual_seed(3)
        expected = model.generate(**keywords, use_cache=False)
        for _ in range(2):
            cache.reset()
            torch.manual_seed(3)
            got = model.generate(**keywords, past_key_values=cache, custom_generate=decoder)
            assert torch.equal(got, expected)
            assert decoder.fallback_reason is None
            assert cache.seq_len == PROMPT.shape[1] + got.shape[1] - 1
        assert len(decoder._steps[cache]) == 1

    def test_rows_of_unlike_length(self, model):
        padding, decoder = padded(), GraphDecoder()
        embeds, mask = model.get_input_embeddings()(padding["ids"]), padding["attention_mask"]
        keywords = {**COMMON, "inputs_embeds": embeds, "attention_mask": mask}
        cache = StaticContiguousCache(model.config, CAPACITY)
        got = model.generate(**keywords, past_key_values=cache, custom_generate=decoder)
        assert torch.equal(got, model.generate(**keywords, use_cache=False))
        assert decoder.fallback_reason is None

    def test_with_the_tokens_beside_them_and_steps_recorded(self, model):
        embeds, decoder, recorder = model.get_input_embeddings()(PROMPT), GraphDecoder(), StepRecorder(best=2)
        cache = StaticContiguousCache(model.config, CAPACITY)
        keywords = {**COMMON, "attention_mask": torch.ones_like(PROMPT), "inputs_embeds": embeds}
        got = model.generate(PROMPT, **keywords, past_key_values=cache, custom_generate=decoder)
        assert torch.equal(got, run(model))
        assert decoder.fallback_reason is None
        cache.reset()
        alone = model.generate(**keywords, past_key_values=cache, custom_generate=decoder, logits_processor=[recorder])
        assert torch.equal(alone, got[:, PROMPT.shape[1] :])
        assert [step["token"] for step in recorder.steps(alone)[0]] == alone[0].tolist()

    def test_what_cannot_fit(self, model):
        embeds, cache = model.get_input_embeddings()(PROMPT), StaticContiguousCache(model.config, 20)
        keywords = {**COMMON, "inputs_embeds": embeds, "past_key_values": cache, "custom_generate": GraphDecoder()}
        with pytest.raises(ValueError, match=r"13 and 14 new tokens take 26 positions.* has 20.* at most 8 new tokens"):
            model.generate(**keywords)
        assert model.generate(**{**keywords, "max_new_tokens": 8}).shape == (1, 8)
        assert cache.seq_len == 20


class TestReuse:
    def test_a_second_call_uses_the_step_again(self, model, monkeypatch):
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)
        first = run(model, decoder=decoder, cache=cache)
        monkeypatch.setattr("hf_static_kv.decoding.decoder.GreedyStep", int)  # a new one could not be made
        cache.reset()
        assert torch.equal(run(model, decoder=decoder, cache=cache), first)

    def test_other_rows_and_lengths_on_one_cache(self, model):
        decoder, cache = GraphDecoder(), StaticContiguousCache.from_model(model, CAPACITY, batch_size=2)
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
        model.model.layers[0].active_adapters, model.model.layers[0].disable_adapters = ["one"], True
        run(model, decoder=decoder, cache=cache)
        assert len(decoder._steps[cache]) == 2

    def test_other_parts_and_settings_are_another_step(self, model):
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)

        def steps():
            cache.reset()
            run(model, decoder=decoder, cache=cache)
            return len(decoder._steps[cache])

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
        assert len(decoder._steps[cache]) == 2

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
        assert len(decoder._steps[cache]) == 2

    def test_steps_of_one_cache_are_eight_at_most(self, model, caplog):
        cache, decoder = StaticContiguousCache.from_model(model, CAPACITY), GraphDecoder()
        for n in range(12):
            model.eps_of_today = float(n)
            cache.reset()
            run(model, decoder=decoder, cache=cache, max_new_tokens=3)
        assert len(decoder._steps[cache]) == 8
        assert caplog.text.count("has more than 8 kinds of steps") == 1
        oldest = next(iter(decoder._steps[cache]))
        model.eps_of_today = 4.0
        cache.reset()
        run(model, decoder=decoder, cache=cache, max_new_tokens=3)
        assert list(decoder._steps[cache])[-1] == oldest  # known, and the newest now

    def test_a_model_for_images_too_with_a_text_alone(self):
        model = toy_with_images().eval().to(DEVICE)
        decoder = GraphDecoder()
        assert torch.equal(run(model, decoder=decoder), run(model))
        assert decoder.fallback_reason is None

    def test_two_threads_with_one_model(self, model):
        expected, results = run(model), []

        def work():
            results.append(run(model, decoder=GraphDecoder(), cache=StaticContiguousCache.from_model(model, CAPACITY)))

        before = model.config._attn_implementation
        threads = [Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        assert all(torch.equal(result, expected) for result in results)
        assert model.config._attn_implementation == before

    def test_the_attention_of_every_part_is_restored(self):
        model = toy_with_images()
        config = model.config
        model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})
        before = [c._attn_implementation for c in (config, config.text_config, config.vision_config)]
        with attention_implementation(model, ATTENTION_NAME):
            assert config.text_config._attn_implementation == ATTENTION_NAME
        assert [c._attn_implementation for c in (config, config.text_config, config.vision_config)] == before

    def test_a_part_without_attention_is_left_without(self):
        with torch.device("meta"):
            model = IdeficsForVisionText2Text(IdeficsConfig(num_hidden_layers=1))
        assert model.config.perceiver_config._attn_implementation is None
        with attention_implementation(model, ATTENTION_NAME):
            assert model.config._attn_implementation == ATTENTION_NAME
        assert model.config.perceiver_config._attn_implementation is None
        assert model.config._attn_implementation == "sdpa"

    def test_going_on_with_the_text(self, model):
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)
        first = run(model, decoder=decoder, cache=cache)
        longer = torch.cat([first, torch.tensor([[9, 31]], device=DEVICE)], dim=1)
        assert torch.equal(run(model, longer, decoder, cache), run(model, longer))

    def test_the_step_goes_with_its_cache(self, model):
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)
        run(model, decoder=decoder, cache=cache)
        (step,) = decoder._steps[cache].values()
        step, storage = weakref.ref(step), weakref.ref(cache.storage_groups[0])
        del cache
        gc.collect()
        assert step() is None
        assert storage() is None
        assert len(decoder._steps) == 0


class TestRefusals:
    def test_a_text_that_cannot_fit_is_refused_before_any_token(self, model):
        cache, stream = StaticContiguousCache(model.config, 20), Collect()
        with pytest.raises(ValueError, match=r"take 26 positions.* has 20.* >= 26, or ask for at most 8 new"):
            run(model, decoder=GraphDecoder(), cache=cache)
        assert cache.seq_len == 0
        got = run(model, decoder=GraphDecoder(streamer=stream), cache=cache, max_new_tokens=8)
        assert torch.equal(got, run(model)[:, :21])
        assert cache.seq_len == 20

    def test_a_call_that_wants_no_cache_is_refused(self, model):
        with pytest.raises(ValueError, match=r"use_cache=False, and a cache.*custom_generate"):
            run(model, decoder=GraphDecoder(), cache=StaticContiguousCache(model.config, 40), use_cache=False)

    @pytest.mark.parametrize("keywords", [{}, {"custom_generate": GraphDecoder()}], ids=["plain", "decoder"])
    def test_the_same_prompt_again_is_refused_with_the_remedy(self, model, keywords):
        cache = StaticContiguousCache(model.config, 40)
        keywords = {**COMMON, "attention_mask": torch.ones_like(PROMPT), "past_key_values": cache, **keywords}
        first = model.generate(PROMPT, **keywords)
        length = cache.seq_len
        with pytest.raises(ValueError, match=f"no new tokens: the cache already holds {length}. Call reset"):
            model.generate(PROMPT, **keywords)
        assert cache.seq_len == length
        cache.reset()
        assert torch.equal(model.generate(PROMPT, **keywords), first)

    def test_where_only_the_new_tokens_are_passed_the_text_before_counts(self, model):
        cache, decoder = StaticContiguousCache(model.config, 24), GraphDecoder()
        with torch.no_grad():
            model(PROMPT, past_key_values=cache)
        new, mask = torch.tensor([[9, 31, 60]], device=DEVICE), torch.ones(1, 16, dtype=torch.long, device=DEVICE)
        with pytest.raises(ValueError, match=r"16 and 10 new tokens take 25 positions.* has 24.* at most 9 new tokens"):
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

    def test_positions_of_ones_own(self):
        model, decoder = toy_model("llama"), GraphDecoder()
        positions = torch.arange(13, device=DEVICE)[None] + 40
        cache = StaticContiguousCache(model.config, CAPACITY)
        expected = model.generate(PROMPT, position_ids=positions, past_key_values=cache, **COMMON)
        assert torch.equal(run(model, decoder=decoder, position_ids=positions), expected)
        assert decoder.fallback_reason == "position_ids do not count from the first token"

    def test_a_cache_with_other_windows(self, model):
        decoder, sizes = GraphDecoder(), model.config
        cache = StaticContiguousCache.allocate(
            sizes.num_hidden_layers, sizes.num_key_value_heads, sizes.head_dim, CAPACITY, device=DEVICE
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
            ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states are asked for"),
            ({"attention_mask": torch.tensor([[1, 1, 1, 0, *[1] * 9]], device=DEVICE)}, "the attention mask has holes"),
        ],
    )
    def test_what_cannot_be_captured_runs_in_the_loop_of_generate(self, model, caplog, kwargs, reason):
        decoder = GraphDecoder()
        with caplog.at_level(logging.WARNING, logger="hf_static_kv"):
            got = [run(model, decoder=decoder, **kwargs) for _ in range(2)]
        expected = run(model, **kwargs)
        tokens, reference = (out if torch.is_tensor(out) else out.sequences for out in (got[0], expected))
        assert torch.equal(tokens, reference)
        assert reason in decoder.fallback_reason
        assert sum(reason in record.getMessage() for record in caplog.records) == 1

    def test_parts_that_are_offloaded(self):
        model, decoder = toy_on_cpu("llama"), GraphDecoder()
        expected = run(model, PROMPT.cpu())
        cache = StaticContiguousCache.from_model(model, CAPACITY)
        cpu_offload(model, execution_device="cpu")
        assert torch.equal(run(model, PROMPT.cpu(), decoder, cache), expected)
        assert decoder.fallback_reason.startswith("a part of the model is offloaded to the CPU or the disk")

    def test_images(self):
        model, decoder = toy_with_images().eval().to(DEVICE), GraphDecoder()
        ids = PROMPT.clone()
        ids[0, 3] = model.config.image_token_id = 127
        images = {"pixel_values": torch.rand(1, 3, 28, 28, device=DEVICE), "token_type_ids": (ids == 127).long()}
        assert torch.equal(run(model, ids, decoder, **images), run(model, ids, **images))
        assert decoder.fallback_reason.startswith("the prompt has images, video or audio (")

    def test_another_cache(self, model):
        decoder = GraphDecoder()
        got = run(model, decoder=decoder, cache=DynamicCache(config=model.config))
        assert torch.equal(got, run(model))
        assert decoder.fallback_reason == "past_key_values is a DynamicCache, not a StaticContiguousCache"

    def test_a_step_that_disagrees_with_an_ordinary_one_is_not_used(self, model, monkeypatch):
        """As a model would whose step depends on a length that the host counts."""
        decoder = GraphDecoder()
        cache, expected = StaticContiguousCache(model.config, CAPACITY), run(model)

        def falls_back():
            cache.reset()
            assert torch.equal(run(model, decoder=decoder, cache=cache), expected)
            return "from those of an ordinary step" in decoder.fallback_reason

        monkeypatch.setattr("hf_static_kv.program.step.write_token", lambda *args: None)
        assert falls_back()
        assert falls_back()
        monkeypatch.setattr("hf_static_kv.decoding.decoder.GreedyStep", int)  # it is not tried a third time
        assert falls_back()

    def test_what_fails_once_is_tried_again(self, model):
        decoder, cache, calls = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY), []

        def fail_once(*args):
            calls.append(None)
            if len(calls) == 2:  # after the prompt
                raise RuntimeError("this passes")

        own = model.model.layers[0].mlp.forward
        model.model.layers[0].mlp.forward = lambda x: fail_once() or own(x)
        reasons = []
        for _ in range(2):
            cache.reset()
            assert torch.equal(run(model, decoder=decoder, cache=cache), run(model))
            reasons.append(decoder.fallback_reason)
        assert reasons == ["the step cannot be captured (RuntimeError: this passes)", None]

    def test_a_lack_of_memory_may_pass(self, model, monkeypatch):
        decoder, cache, expected = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY), run(model)

        def fail(*args):
            raise torch.OutOfMemoryError("no memory\nfor a graph")

        with monkeypatch.context() as patches:
            patches.setattr("hf_static_kv.decoding.decoder.verify", fail)
            assert torch.equal(run(model, decoder=decoder, cache=cache), expected)
        assert decoder.fallback_reason == "the step cannot be captured (OutOfMemoryError: no memory)"
        cache.reset()
        assert torch.equal(run(model, decoder=decoder, cache=cache), expected)
        assert decoder.fallback_reason is None


class TestComparison:
    """A new step beside an ordinary one, in a model that writes a number where a token is never to be chosen."""

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
            return torch.cat([logits[:, :3], logits[:, 3:].roll(1, dims=-1)], dim=-1)  # those that are no mask

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
        decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, CAPACITY)
        expected = run(model, decoder=decoder, cache=cache)
        cache.reset()
        calls = 0

        def fail(*args):
            nonlocal calls
            calls += 1
            if calls == 4:  # the prompt, then two whole steps
                raise RuntimeError("out of something")

        hook = model.model.layers[2].mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="out of something"):
            run(model, decoder=decoder, cache=cache)
        hook.remove()
        assert cache.seq_len == PROMPT.shape[1] + 2
        assert torch.equal(run(model, expected[:, : PROMPT.shape[1] + 3], decoder, cache, max_new_tokens=11), expected)


def test_the_layers_that_are_compiled_are_those_with_a_number():
    model, others = toy_on_cpu("llama"), torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))
    model._modules = {"vision": others, **model._modules}  # before the layers, and as many
    assert _decoder_layers(model, 2) == list(model.model.layers)
    with pytest.raises(ValueError, match="no list of 3 decoder layers was found in LlamaForCausalLM"):
        _decoder_layers(model, 3)


class TestCompiled:
    """The step with compiled layers, on a CPU without code generation: what is compiled, how often, and the tokens."""

    @pytest.mark.parametrize(
        ("name", "kinds"), [("llama", 1), ("qwen3", 1), ("mixtral", 1), ("gpt2", 1), ("gemma3", 2), ("gpt_oss", 2)]
    )
    def test_layers_of_one_kind_share_one_compilation(self, name, kinds):
        torch._dynamo.reset()
        model = toy_on_cpu(name, ATTENTION_NAME, num_hidden_layers=6)
        cache, counter = StaticContiguousCache.from_model(model, CAPACITY), CompileCounterWithBackend("aot_eager")
        origin, token = torch.zeros(1, dtype=torch.long), torch.tensor([5])
        with torch.no_grad():
            model(PROMPT.cpu(), past_key_values=cache)
            step = DecodeStep(model, cache, 1)
            step.set_position(cache.seq_len, origin)
            expected = step.run(token)
            with (
                fused_linears(model, lambda: step.run(token)),
                compiled_layers(model, 6, backend=counter),
            ):
                step.set_position(cache.seq_len, origin)
                got = [step.run(token), step.run(token)]
        assert counter.frame_count == kinds
        assert torch.equal(got[0], expected)
        assert not torch.equal(got[1], expected)  # the second token stands elsewhere and sees the first

    def test_the_model_has_its_own_forward_back_even_after_an_exception(self, model):
        parts = [model, *model.model.layers]
        model.model.layers[1].forward = own = model.model.layers[1].forward  # as a hook of accelerate would
        before = [dict(part.__dict__) for part in parts]
        changed = []

        def fail_inside():
            with compiled_layers(model, 3):
                changed.extend(part.__dict__.get("forward") not in (None, own) for part in parts)
                raise RuntimeError("in the middle")

        with pytest.raises(RuntimeError, match="in the middle"):
            fail_inside()
        assert changed == [False, *[True] * 3]
        assert [dict(part.__dict__) for part in parts] == before

    def test_layer_indices_are_ints_again_after_an_exception(self, model):
        numbered = [module for module in model.modules() if hasattr(module, "layer_idx")]
        before = [module.layer_idx for module in numbered]
        step, inside = DecodeStep(model, StaticContiguousCache.from_model(model, CAPACITY), 1), []

        def fail(module, args):
            inside.extend(module.layer_idx for module in numbered)
            raise RuntimeError("in the middle")

        hook = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"), attention_implementation(model, ATTENTION_NAME):
            step.run(torch.tensor([5]))
        hook.remove()
        assert [layer.index for layer in inside] == before
        assert [module.layer_idx for module in numbered] == before
        assert all(type(index) is int for index in before)

    def test_a_part_with_more_layers_than_the_cache_keeps_its_indices(self, model):
        other = torch.nn.Linear(2, 2)
        other.layer_idx = 40  # a layer of a vision tower, say
        model.tower = other
        layers = DecodeStep(model, StaticContiguousCache.from_model(model, CAPACITY), 1)._layers_by_module()
        del model.tower
        assert other not in layers
        assert layers[model.model.layers[2].self_attn].index == 2

    def test_an_unknown_setting(self):
        with pytest.raises(ValueError, match="compile must be one of 'none', 'layers', got 'max'"):
            GraphDecoder(compile="max")


@needs_no_graph
def test_the_kernels_serve_a_whole_generation(monkeypatch):
    """On a CPU in Triton's interpreter: the path that a GPU takes, but for the graph."""
    write = triton_module("hf_static_kv.kernels.write_token_triton")
    attend = triton_module("hf_static_kv.kernels.decode_attention_triton")
    calls = []

    def write_token(*args):
        calls.append("write")
        write.write_token_triton(*args)

    def decode(query, keys, values, spans, *, scale, max_span, softcap, sinks, spans_ready):
        calls.append("attend")
        return attend.decode_attention_triton(
            query, keys, values, spans, None, scale, max_span, softcap, sinks, None, spans_ready
        )

    monkeypatch.setattr("hf_static_kv.kernels.decode_attention.decode_attention", decode)
    monkeypatch.setattr("hf_static_kv.program.step.write_token", write_token)
    for name in ("gemma3", "gpt_oss"):  # windows and one KV head; sinks
        model, decoder, few = toy_model(name, OWN_ATTENTION[name]), GraphDecoder(), {"max_new_tokens": 3}
        assert torch.equal(run(model, decoder=decoder, **padded(), **few), run(model, **padded(), **few))
        assert decoder.fallback_reason is None
        layers = model.config.num_hidden_layers
        # Two tokens are written and attended to, and three more where the step is compared with an ordinary one.
        assert calls.count("write") == calls.count("attend") == 5 * layers
        calls.clear()


def test_the_attention_name_serves_generate_by_itself():
    """With our cache and with others, padded or not, on every architecture."""
    assert ATTENTION_NAME in AttentionInterface().valid_keys()
    few = {"max_new_tokens": 6}
    for name in ARCHITECTURES:
        model = toy_model(name, OWN_ATTENTION[name])
        expected = [run(model, **few), run(model, **padded(), **few)]
        model.set_attn_implementation(ATTENTION_NAME)
        for make in (lambda m: StaticContiguousCache(m.config, CAPACITY), lambda m: DynamicCache(config=m.config)):
            plain = model.generate(PROMPT, past_key_values=make(model), **COMMON | few)
            ids, mask = padded().values()
            batch = model.generate(ids, attention_mask=mask, past_key_values=make(model), **COMMON | few)
            assert torch.equal(plain, expected[0]), name
            assert torch.equal(batch, expected[1]), name


class TestWithoutCudnn:
    def allowed(self):
        cuda = torch.backends.cuda
        return [
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ]

    @pytest.mark.parametrize("backends", [[SDPBackend.MATH], [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]], ids=str)
    def test_what_the_caller_allows_stays(self, backends):
        with sdpa_kernel(backends):
            before = self.allowed()
            with without_cudnn():
                assert self.allowed() == [False, False, True, False]
            assert self.allowed() == before

    def test_cudnn_alone_stays(self):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), without_cudnn():
            assert self.allowed() == [False, False, False, True]

    def test_two_that_overlap(self):
        before, one, other = self.allowed(), without_cudnn(), without_cudnn()
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        other.__exit__(None, None, None)
        assert self.allowed() == before


def test_the_first_token_does_not_wait_for_the_decoder():
    """It looks at the model before every prompt, and on a GPU a prompt is as long as the host takes to send it."""
    model, decoder = toy_model("llama"), GraphDecoder()
    cache = StaticContiguousCache(model.config, CAPACITY)

    def first_token(**how):
        cache.reset()
        model.generate(PROMPT, **COMMON | {"past_key_values": cache, "max_new_tokens": 1, **how})

    run(model, decoder=decoder, cache=cache)
    assert calls_in(lambda: first_token(custom_generate=decoder)) < 1.5 * calls_in(first_token)


def test_hooks_are_seen_but_for_those_that_transformers_leaves_behind():
    model, ids = toy_model("llama", "eager"), torch.tensor([[5, 6, 7]], device=DEVICE)
    model(ids, output_attentions=True, output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert not has_hooks(model.modules())
    model.model.layers[1].register_forward_hook(lambda module, args, output: None)
    assert has_hooks(model.modules())
