"""Encoder-decoders:

our cache for the decoder's self-attention, transformers' own for cross-attention.
"""

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    DynamicCache,
    EncoderDecoderCache,
    EncoderDecoderConfig,
    EncoderDecoderModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_static_kv import GraphDecoder, StaticContiguousCache, attached
from tests.conftest import SIZES, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMMON = {
    "max_new_tokens": 12,
    "do_sample": False,
    "eos_token_id": None,
    "decoder_start_token_id": 1,
}
# The decoder differs from the encoder in its number of layers and heads.
_PARTS = {
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "init_std": 0.4,
}
_SPEECH = {
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 64,
    "pad_token_id": 0,
}


def _seq2seq(model_type, **own):
    return tiny_model(model_type, AutoModelForSeq2SeqLM, **own)


def _whisper():
    model = tiny_model("whisper", AutoModelForSpeechSeq2Seq, **_PARTS, **_SPEECH)
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model


def _two_berts():
    part = CONFIG_MAPPING["bert"](
        **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")}
    )
    part.num_hidden_layers = 2
    config = EncoderDecoderConfig.from_encoder_decoder_configs(part, part)
    config.pad_token_id = 0
    torch.manual_seed(0)
    return EncoderDecoderModel(config).eval()


def _t5gemma():
    sizes = {
        key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim")
    }
    part = {
        **sizes,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "sliding_window": 4,
    }
    return _seq2seq("t5gemma", encoder=part, decoder=part)


MODELS = {
    "bart": lambda: _seq2seq("bart", **_PARTS),
    # Heads whose dims are not hidden_size.
    "t5": lambda: _seq2seq("t5", d_kv=24, initializer_factor=4.0),
    "t5gemma": _t5gemma,  # sliding layers
    "whisper": _whisper,
    "two berts": _two_berts,
}


def _inputs(name, seed=0):
    torch.manual_seed(seed)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32, device=DEVICE)}
    ids = torch.randint(3, 128, (2, 9), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _pair(ours, model):
    return EncoderDecoderCache(ours, DynamicCache(config=model.config))


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_are_those_of_the_default_cache(name):
    model = MODELS[name]().to(DEVICE)
    ours = StaticContiguousCache.from_model(model, 16, batch_size=2)
    for seed in (0, 1):  # another input on the same cache
        ours.reset()
        pair, inputs = _pair(ours, model), _inputs(name, seed)
        assert torch.equal(
            model.generate(**inputs, past_key_values=pair, **COMMON),
            model.generate(**inputs, **COMMON),
        )
        assert ours.seq_len == COMMON["max_new_tokens"]
    assert len(ours.storage_groups) == 1


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize(
    "how", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str
)
def test_beams_and_return_sequences(name, how):
    model, inputs, tokens = MODELS[name]().to(DEVICE), _inputs(name), []
    for cache in (_pair(StaticContiguousCache(model.config, 16), model), None):
        torch.manual_seed(0)
        tokens.append(model.generate(**inputs, past_key_values=cache, **{**COMMON, **how}))
    assert torch.equal(*tokens)


def test_a_decoder_that_is_longer_than_its_encoder():
    config = CONFIG_MAPPING["t5"](num_layers=2, num_decoder_layers=5, d_kv=24, num_heads=4)
    cache = StaticContiguousCache(config, 16)
    assert len(cache) == 5


def test_our_cache_without_one_for_cross_attention_is_refused():
    model, inputs = MODELS["bart"]().to(DEVICE), _inputs("bart")
    cache = StaticContiguousCache(model.config, 16)
    remedy = (
        r"encoder-decoder, which caches"
        r".*past_key_values=EncoderDecoderCache\(cache, DynamicCache\(config="
    )
    with pytest.raises(ValueError, match=remedy):
        model.generate(**inputs, past_key_values=cache, **COMMON)
    with pytest.raises(ValueError, match=remedy), torch.no_grad():
        model(**inputs, decoder_input_ids=inputs["input_ids"], past_key_values=cache)
    assert cache.seq_len == 0


def test_a_text_that_does_not_fit():
    model, inputs = MODELS["bart"]().to(DEVICE), _inputs("bart")
    pair = _pair(StaticContiguousCache(model.config, 8), model)
    with pytest.raises(ValueError, match="The cache is full"):
        model.generate(**inputs, past_key_values=pair, **COMMON)


def test_no_captured_step():
    model, inputs, decoder = MODELS["bart"]().to(DEVICE), _inputs("bart"), GraphDecoder()
    expected = model.generate(**inputs, **COMMON)
    pair = _pair(StaticContiguousCache(model.config, 16), model)
    assert torch.equal(
        model.generate(**inputs, past_key_values=pair, custom_generate=decoder, **COMMON), expected
    )
    assert (
        decoder.fallback_reason
        == "past_key_values is a EncoderDecoderCache, not a StaticContiguousCache"
    )
    assert torch.equal(model.generate(**inputs, custom_generate=decoder, **COMMON), expected)


def test_attach_leaves_the_call_as_it_is(caplog):
    model, inputs = MODELS["bart"]().to(DEVICE), _inputs("bart")
    expected = model.generate(**inputs, **COMMON)
    with attached(model) as info:
        assert torch.equal(model.generate(**inputs, **COMMON), expected)
    assert info.fallback_reason == "There is no captured step for an encoder-decoder"
    assert (
        "run with transformers' own cache. There is no captured step for an encoder-decoder."
        in caplog.text
    )
    assert info.caches == []
