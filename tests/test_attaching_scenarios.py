"""The scenarios of transformers' own tests of `generate`, and misuse: an attached model does what a
plain one does.

Compared in full: every field of the output, the error, the warnings, the random state, and what is
left on the model.
"""

import copy
import logging
import warnings
from contextlib import contextmanager

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.utils import ModelOutput
from transformers.utils import logging as transformers_logging

from hf_static_kv import attached, served
from tests.conftest import ARCHITECTURES, Collect, tiny_model
from tests.decoding.conftest import BATCH, DEVICE, PROMPT, padded, toy_model
from tests.fuzz.models import at_least

NEW_TOKENS = 5
EVERYTHING = dict.fromkeys(
    (
        "return_dict_in_generate",
        "output_scores",
        "output_logits",
        "output_hidden_states",
        "output_attentions",
    ),
    True,
)
KEPT = {"return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def _prompts_of_any_length(monkeypatch):
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)


def call(model, ids=PROMPT, **how):
    torch.manual_seed(0)
    return model.generate(
        ids, **{"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "do_sample": False, **how}
    )


# --- scenarios


def calling(ids=PROMPT, **how):
    return lambda model: call(model, ids, **how)


def embedded(model, ids=PROMPT):
    return model.get_input_embeddings()(ids).detach()


def continuing(model, ids=BATCH, **how):
    """Continue from a returned cache: with the whole sequence, with the rest alone, and from a
    copy.
    """
    first = call(model, ids, **KEPT, **how)
    cache, longer = first.past_key_values, torch.cat([first.sequences, ids], dim=1)
    copied, third = copy.deepcopy(cache), copy.deepcopy(cache)
    whole = call(model, longer, past_key_values=cache, **KEPT)
    again = call(model, longer, past_key_values=copied)
    rest, mask = longer[:, third.get_seq_length() :], torch.ones_like(longer)
    return first, whole, again, call(model, rest, past_key_values=third, attention_mask=mask)


def continuing_from_embeds(model):
    embeds = embedded(model)
    first = call(model, None, inputs_embeds=embeds, **KEPT)
    longer = torch.cat([embeds, embedded(model, first.sequences)], dim=1)
    return first, call(
        model, None, inputs_embeds=longer, past_key_values=first.past_key_values, **KEPT
    )


def forward_on_a_returned_cache(model):
    """Fewer rows, more rows than the call had, and a pass: what a caller may do with a cache of its
    own.
    """
    cache = call(model, BATCH, **KEPT).past_key_values
    cache.batch_select_indices(torch.tensor([1], device=DEVICE))
    cache.batch_repeat_interleave(5)
    with torch.no_grad():
        return model(BATCH[[0, 1, 0, 0, 1]], past_key_values=cache).logits, cache


def from_a_config(model):
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=True, top_k=10, return_dict_in_generate=True
    )
    before = config.to_dict()
    torch.manual_seed(0)
    return model.generate(PROMPT, generation_config=config), config.to_dict() == before


def from_the_models_config(model):
    model.generation_config.update(
        max_new_tokens=4, do_sample=True, num_beams=2, num_return_sequences=2
    )
    torch.manual_seed(0)
    return model.generate(BATCH)


def by_default_length(model):
    return model.generate(PROMPT, do_sample=False)


def other_assistant(model):
    assistant = toy_model("llama", seed=1)
    return call(model, PROMPT, assistant_model=assistant, **KEPT)


def sampled_assistant(model):
    return call(
        model, PROMPT, assistant_model=copy.deepcopy(model), do_sample=True, num_assistant_tokens=3
    )


def own_processors(model):
    seen = []

    def note(ids, scores):
        seen.append((ids.clone(), scores.clone()))
        return scores.roll(1, dims=-1)

    def stop(ids, scores, **kwargs):
        return torch.full((len(ids),), ids.shape[1] >= PROMPT.shape[1] + 4, device=ids.device)

    how = {
        "logits_processor": LogitsProcessorList([note]),
        "stopping_criteria": StoppingCriteriaList([stop]),
    }
    return call(model, **how, **KEPT, output_scores=True), seen


def streamed(model):
    streamer = Collect()
    return call(model, streamer=streamer), streamer.tokens, streamer.ended


def trained(model, ids=PROMPT, checkpointing=False, **how):
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    # Twice: the second has other draws of its own.
    outputs = (
        call(model, ids, **how),
        call(model, ids, **how),
    )
    loss = model(ids, labels=ids).loss
    loss.backward()
    gradient = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    return outputs, gradient


def within(context, *calls):
    def scenario(model):
        with context():
            outputs = [each(model) for each in calls]
        return outputs, calls[0](model)

    return scenario


def autocast():
    return torch.autocast(DEVICE, torch.bfloat16)


def logits_of(ids):
    """Without the cache, whose values have the dtype of the keys under autocast where it is a
    DynamicCache.
    """
    return lambda model: call(model, ids, **KEPT, output_logits=True).logits


def converted(dtype):
    def scenario(model):
        first = call(model)
        model.to(dtype)
        return first, call(model, BATCH, **KEPT, output_logits=True), call(model), model.dtype

    return scenario


def edited(model):
    """Weights change between two calls of one prompt, by an optimizer's way and by loading them."""
    outputs = [call(model)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    outputs.append(call(model))
    model.load_state_dict({name: weight * 1.2 for name, weight in model.state_dict().items()})
    return *outputs, call(model), sorted(model.state_dict())


def chat(model):
    """Two turns, and then the first one again."""
    ids, outputs = PROMPT, []
    for turn in range(2):
        outputs.append(call(model, ids, do_sample=turn == 1, output_logits=True, **KEPT))
        ids = torch.cat([outputs[-1].sequences, BATCH[:1] + turn], dim=1)
    return outputs, call(model, PROMPT), call(model, ids)


def several(*scenarios):
    return lambda model: [scenario(model) for scenario in scenarios]


SCENARIOS = {
    "greedy": calling(**EVERYTHING),
    "sampled": calling(BATCH, do_sample=True, **EVERYTHING),
    "beams": calling(BATCH, num_beams=3, **EVERYTHING),
    "beams, several returned": calling(
        num_beams=3, num_return_sequences=2, length_penalty=2.0, early_stopping=True
    ),
    "beams, sampled": calling(BATCH, num_beams=2, do_sample=True, **EVERYTHING),
    "return sequences": calling(BATCH, do_sample=True, num_return_sequences=2, **EVERYTHING),
    "left padding": calling(
        padded()["ids"], attention_mask=padded()["attention_mask"], **EVERYTHING
    ),
    "a mask with holes": calling(
        attention_mask=torch.tensor([[1, 1, 0, 1, 1, 0, 0] + [1] * 6], device=DEVICE)
    ),
    "end tokens": calling(
        BATCH, eos_token_id=list(range(0, 128, 3)), pad_token_id=0, **KEPT, output_scores=True
    ),
    "no more than one token": several(
        calling(max_new_tokens=1, **EVERYTHING), calling(BATCH, max_new_tokens=1)
    ),
    "min_length": calling(eos_token_id=list(range(100)), pad_token_id=0, min_new_tokens=4),
    "its own assistant": lambda model: call(model, assistant_model=model, **KEPT),
    "another assistant": other_assistant,
    "a sampled assistant": sampled_assistant,
    "an early exit": calling(assistant_early_exit=1),
    "prompt lookup": calling(prompt_lookup_num_tokens=3, **KEPT, output_logits=True),
    "guidance": calling(guidance_scale=1.5, negative_prompt_ids=PROMPT[:, :4]),
    "embeds alone": lambda model: call(model, None, inputs_embeds=embedded(model), **EVERYTHING),
    "embeds with ids": lambda model: call(model, inputs_embeds=embedded(model), **KEPT),
    "embeds with other ids": lambda model: (
        call(model),
        call(model, inputs_embeds=embedded(model, PROMPT + 1)),
    ),
    "embeds, sampled beams": lambda m: call(
        m, None, inputs_embeds=embedded(m), num_beams=2, do_sample=True
    ),
    "continue": continuing,
    "continue, sampled": lambda model: continuing(model, do_sample=True),
    "continue from embeds": continuing_from_embeds,
    "continue by forward": forward_on_a_returned_cache,
    "a cache of one's own": lambda m: call(
        m, past_key_values=DynamicCache(config=m.config), **KEPT
    ),
    "positions": calling(position_ids=torch.arange(3, 16, device=DEVICE)[None]),
    "a generation config": from_a_config,
    "the model's generation config": from_the_models_config,
    "the default length": by_default_length,
    "max_length": calling(max_new_tokens=None, max_length=17),
    "max_time": calling(max_time=100.0),
    "all logits": calling(logits_to_keep=0, **KEPT, output_logits=True),
    "chunked prefill": calling(prefill_chunk_size=5, **KEPT, output_logits=True),
    "processors and criteria": own_processors,
    "more processors": calling(
        BATCH, repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=[[5], [7, 8]]
    ),
    "a constraint by prefix": calling(
        prefix_allowed_tokens_fn=lambda row, ids: [3, 4, len(ids)], num_beams=2
    ),
    "a watermark": calling(
        watermarking_config={"bias": 2.0, "seeding_scheme": "lefthash"}, do_sample=True
    ),
    "a streamer": streamed,
    "no cache": calling(use_cache=False, **EVERYTHING),
    "synced_gpus off": calling(synced_gpus=False),
    "no prompt": lambda model: call(model, None, bos_token_id=1),
    "train mode": trained,
    "gradient checkpointing": lambda model: trained(model, checkpointing=True),
    "autocast": within(autocast, logits_of(PROMPT), calling(BATCH)),
    "inference mode": within(
        torch.inference_mode, calling(**EVERYTHING), calling(BATCH, num_beams=2)
    ),
    "with grad": within(torch.enable_grad, calling(**EVERYTHING)),
    "float64": converted(torch.float64),
    "bf16": converted(torch.bfloat16),
    "other weights": edited,
    "a chat": chat,
    "other attention": lambda model: (
        call(model),
        model.set_attn_implementation("sdpa"),
        call(model),
    ),
}
PASSED_ON = {
    name: calling(cache_implementation=name, **KEPT)
    for name in ("dynamic", "static", "offloaded", "offloaded_static", "quantized", "unknown")
}
MISUSE = {
    "no token": calling(PROMPT[:, :0]),
    "a row of ids": calling(PROMPT[0]),
    "float ids": calling(PROMPT.float()),
    "too long a prompt": calling(max_new_tokens=None, max_length=5),
    "an unknown argument": calling(nonsense=1),
    "greedy sequences": calling(num_return_sequences=2),
    "a tuple as cache": calling(past_key_values=((PROMPT, PROMPT),)),
    "two caches": lambda m: call(
        m, past_key_values=DynamicCache(config=m.config), cache_implementation="static"
    ),
    "a mask of three dimensions": calling(attention_mask=torch.ones(1, 13, 13, device=DEVICE)),
    "a short mask": calling(attention_mask=torch.ones(1, 9, dtype=torch.long, device=DEVICE)),
    "a long mask": calling(attention_mask=torch.ones(1, 20, dtype=torch.long, device=DEVICE)),
    "right padding": calling(
        padded()["ids"].flip(1), attention_mask=padded()["attention_mask"].flip(1)
    ),
    "a masked row": calling(
        BATCH, attention_mask=torch.tensor([[1] * 10, [0] * 10], device=DEVICE)
    ),
    "assisted batch": lambda model: call(model, BATCH, assistant_model=model),
    "assisted without cache": lambda model: call(model, assistant_model=model, use_cache=False),
    "streamed beams": calling(streamer=Collect(), num_beams=2),
    "stop strings without tokenizer": calling(stop_strings=["a"]),
    "group beams": calling(num_beams=4, num_beam_groups=2, diversity_penalty=1.0),
    "negative length": calling(max_new_tokens=-1),
    "no new token": calling(max_new_tokens=0),
    "chunks of embeds": lambda m: call(m, None, inputs_embeds=embedded(m), prefill_chunk_size=4),
}
if DEVICE == "cpu":  # on a GPU such an error ends the process's use of it
    to_infinity = LogitsProcessorList([lambda ids, scores: scores * torch.inf])
    MISUSE["an infinite logit"] = calling(do_sample=True, logits_processor=to_infinity)
    MISUSE["an id beyond the vocabulary"] = calling(PROMPT + 1000)


# --- a run, and what differs


class Run:
    """What a scenario gives on a model: output or error, warnings, the random state, and the
    model's attributes.
    """

    def __init__(self, model, scenario):
        self.output = self.error = None
        torch.manual_seed(1)
        with recorded_warnings() as self.warnings:
            try:
                self.output = scenario(model)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
        self.random_state = torch.get_rng_state()
        self.attributes = (
            set(model.__dict__),
            model.training,
            str(model.config),
            str(model.generation_config),
        )


@contextmanager
def recorded_warnings():
    """The texts of Python's warnings and of the log."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("transformers", "hf_static_kv")]
    transformers_logging.warning_once.cache_clear()  # else each comes in the first run only
    transformers.logging.set_verbosity_warning()
    [logger.addHandler(handler) for logger in loggers]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
        # Torch's C++ code warns once in a process, so in the first run only.
        texts += [
            text
            for text in (str(warning.message) for warning in caught)
            if "Triggered internally" not in text
        ]
    finally:
        [logger.removeHandler(handler) for logger in loggers]
        transformers.logging.set_verbosity_error()


def difference(one, other, where="output"):
    """Where two outputs differ, in words; None where they do not."""
    if isinstance(one, Cache):
        return cache_difference(one, other, where)
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, torch.Tensor):
        return tensor_difference(one, other, where)
    if isinstance(one, ModelOutput):
        one, other = dict(one), dict(other)
    if isinstance(one, dict):
        if list(one) != list(other):
            return f"{where}: fields {list(one)} and {list(other)}"
        pairs = [(f"{where}.{key}", one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)} parts"
        pairs = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other else f"{where}: {one} and {other}"
    return next((found for name, a, b in pairs if (found := difference(a, b, name))), None)


def tensor_difference(one, other, where):
    kinds = [
        (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad) for tensor in (one, other)
    ]
    if kinds[0] != kinds[1]:
        return f"{where}: {kinds[0]} and {kinds[1]}"
    if not one.dtype.is_floating_point:
        return None if torch.equal(one, other) else f"{where}: other values"
    bound, size = 100 * torch.finfo(one.dtype).eps, 0.0
    if one.is_cuda:  # our kernels add in another order, and a sum errs by the size of its terms
        size = max([0.0, *one.detach().nan_to_num(0, 0, 0).abs().flatten().tolist()])
    is_close = torch.allclose(one, other, rtol=bound, atol=bound * max(1.0, size), equal_nan=True)
    return None if is_close else f"{where}: values up to {(one - other).abs().max()} apart"


def cache_difference(one, other, where):
    """Lengths, rows and states. A sliding layer of ours keeps the tokens before its window, too."""
    if isinstance(one, EncoderDecoderCache):
        parts = ("self_attention_cache", "cross_attention_cache")
        found = (
            difference(getattr(one, part), getattr(other, part), f"{where}.{part}")
            for part in parts
        )
        return next(filter(None, found), None)
    has_length = any(hasattr(layer, "get_seq_length") for layer in one.layers)
    sizes = [(len(cache), cache.get_seq_length() if has_length else None) for cache in (one, other)]
    if sizes[0] != sizes[1]:
        return f"{where}: (layers, tokens) {sizes[0]} and {sizes[1]}"
    for number, (a, b) in enumerate(zip(one.layers, other.layers, strict=True)):
        for name in ("keys", "values"):
            states, others = getattr(a, name, None), getattr(b, name, None)
            if states is not None and getattr(a, "is_sliding", False):
                others = others[:, :, -states.shape[2] :]
            if found := difference(states, others, f"{where}.layers[{number}].{name}"):
                return found
    return None


def check(make_model, scenario, **settings):
    """A plain model and an attached one.

    Both run the scenario twice: the second time with the caches of the first.
    """
    plain, model = make_model(), make_model()
    expected = [Run(plain, scenario) for _ in range(2)]
    with attached(model, **settings) as info:
        got = [Run(model, scenario) for _ in range(2)]
    for one, other in zip(expected, got, strict=True):
        assert other.error == one.error
        assert difference(one.output, other.output) is None
        assert set(other.warnings) <= set(one.warnings)  # a replayed step does not warn again
        assert torch.equal(other.random_state, one.random_state)
        assert other.attributes == one.attributes
    return expected[0], info


# A DynamicCache of transformers 5.17 cannot be cropped after a window is full, so these fail
# without us, too.
NOT_BEFORE_5_22 = (
    "its own assistant", "another assistant", "a sampled assistant", "an early exit",
    "prompt lookup", "assisted batch",
)  # fmt: skip
# How a model is attached: with prefixes kept, and with so few bytes that every cache grows.
MODELS = {
    "gemma3": {"reuse_prefix": True},
    "llama": {"max_bytes": 2 * 2 * 2 * 16 * 4 * 40},  # 40 tokens of one row
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", MODELS)
def test_a_scenario_of_generate(name, scenario):
    if scenario == "bf16" and DEVICE == "cuda":
        pytest.skip("on a GPU our kernels round differently")
    plain, info = check(lambda: toy_model(name, "eager"), SCENARIOS[scenario], **MODELS[name])
    assert info.pool.in_use == []
    assert plain.error is None or (scenario in NOT_BEFORE_5_22 and not at_least("5.22"))


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests show it there")
# Two round; where an assistant drafts, the decoder draws the tokens of a call without one.
@pytest.mark.parametrize(
    "scenario",
    [name for name in SCENARIOS if name not in ("bf16", "autocast", "a sampled assistant")],
)
def test_a_scenario_in_the_hands_of_the_decoder(scenario, monkeypatch):
    """What a GPU runs, without the graphs; of a model with dropout."""
    monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu",))
    _, info = check(lambda: toy_model("gpt2"), SCENARIOS[scenario], reuse_prefix=True)
    assert info.pool.in_use == []


@pytest.mark.parametrize("scenario", PASSED_ON)
def test_another_cache_is_left_alone(scenario):
    if scenario == "offloaded_static" and DEVICE == "cuda":
        pytest.skip("torch 2.11 crashes when it compiles transformers' own loop with this cache")
    if scenario == "offloaded" and DEVICE == "cuda":
        pytest.skip(
            "beside other work on the GPU, transformers' own offloaded cache gives other tokens "
            "each time"
        )
    _, info = check(lambda: toy_model("llama"), PASSED_ON[scenario], reuse_prefix=True)
    assert info.calls == 0


@pytest.mark.parametrize("scenario", MISUSE)
@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_misuse_is_refused_as_before(name, scenario):
    _, info = check(lambda: toy_model(name), MISUSE[scenario], reuse_prefix=name == "gemma3")
    assert info.pool.in_use == []


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU such an error ends the process's use of it")
def test_a_call_beyond_the_table_of_positions_fails_as_before():
    plain, _ = check(
        lambda: toy_model("gpt2", max_position_embeddings=32), calling(max_new_tokens=30)
    )
    assert plain.error.startswith("IndexError")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_everything_that_is_returned(name):
    scenario = several(SCENARIOS["left padding"], chat)
    check(lambda: toy_model(name, "eager"), scenario, reuse_prefix=True)


@pytest.mark.slow
def test_a_compiled_forward_pass():
    def scenario(model):
        torch.compiler.reset()
        model.forward = torch.compile(model.forward, backend="eager")
        outputs = call(model, max_new_tokens=12), call(model, BATCH, num_beams=2, max_new_tokens=3)
        del model.forward
        return outputs

    check(lambda: toy_model("llama"), scenario)


# --- models that are not served: attach must not matter


def made_as(model_type, cls=AutoModelForCausalLM, **own):
    def make():
        model = tiny_model(model_type, cls, **own).to(DEVICE)
        model.generation_config.update(eos_token_id=None)
        return model

    return make


ENCODER_DECODER = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 2,
}  # fmt: skip
SPEECH = {
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 40,
    "pad_token_id": 0,
}
UNSERVED = {
    "mamba": made_as("mamba", state_size=4),
    "mamba2": made_as(
        "mamba2", state_size=4, num_heads=8, head_dim=16, expand=2, n_groups=1, chunk_size=8
    ),
    "xlnet": made_as("xlnet"),
    "openai-gpt": made_as("openai-gpt"),
    "bert": made_as("bert"),
    "t5": made_as("t5", AutoModelForSeq2SeqLM, d_ff=48, d_kv=16, decoder_start_token_id=0),
    "bart": made_as("bart", AutoModelForSeq2SeqLM, **ENCODER_DECODER),
    "whisper": made_as("whisper", AutoModelForSpeechSeq2Seq, **ENCODER_DECODER, **SPEECH),
}


def some_modes(model):
    """Greedy, sampled and beams; of speech where the model hears."""
    if model.config.model_type == "whisper":
        inputs = {
            "input_features": torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(0)).to(
                DEVICE
            )
        }
    else:
        inputs = {"inputs": PROMPT}
    outputs = []
    for how in ({}, {"do_sample": True}, {"num_beams": 2}, KEPT):
        torch.manual_seed(0)
        outputs.append(model.generate(**inputs, max_new_tokens=3, **how))
    return outputs


@pytest.mark.parametrize("name", UNSERVED)
def test_an_unserved_model_is_as_before(name):
    plain, info = check(UNSERVED[name], some_modes, reuse_prefix=True)
    assert plain.error is None
    assert info.caches == []
