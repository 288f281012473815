"""Libraries around `generate`: chains and agents, constrained decoding, quantised weights."""

from typing import Literal

import pytest
import transformers
from transformers import AutoModelForCausalLM

from hf_static_kv import GraphDecoder, StaticContiguousCache
from hf_static_kv.kernels.linear import is_packed
from hf_static_kv.program import quantised, step
from hf_static_kv.program.rules import run_linear
from hf_static_kv.testing import find_source, load_model
from tests.clients.conftest import CHAT_TEMPLATE, DEVICE, QUESTION, same_with_attach

pytestmark = pytest.mark.clients
GREEDY = {"do_sample": False, "max_new_tokens": 12}


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed: see the extra `clients`")


def generated(model, tokenizer, **how):
    inputs = tokenizer(QUESTION, return_tensors="pt").to(model.device)
    return model.generate(**inputs, **GREEDY, **how).tolist()


@pytest.mark.parametrize("miniature", ["llama"], indirect=True)
class TestWrappers:
    def test_langchain(self, miniature):
        model, tokenizer = miniature
        wrapper = library("langchain_huggingface").HuggingFacePipeline(
            pipeline=transformers.pipeline(
                "text-generation", model=model, tokenizer=tokenizer, **GREEDY
            )
        )
        _, info = same_with_attach(
            model, lambda: [wrapper.invoke(QUESTION), list(wrapper.stream(QUESTION))]
        )
        assert (info.calls, info.hits) == (2, 1)

    def test_smolagents(self, miniature):
        wrapper = library("smolagents").TransformersModel(
            find_source("llama").location, device_map=DEVICE, max_new_tokens=12
        )
        wrapper.tokenizer.chat_template = CHAT_TEMPLATE
        messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]

        def program():
            pieces = [piece.content for piece in wrapper.generate_stream(messages, do_sample=False)]
            return wrapper(messages, do_sample=False).content, pieces

        (answer, _), info = same_with_attach(wrapper.model, program)
        assert answer
        assert (info.calls, info.hits) == (2, 1)

    def test_outlines(self, miniature):
        model, _ = miniature
        ask = library("outlines").from_transformers(*miniature)
        answer, info = same_with_attach(
            model, lambda: ask(QUESTION, Literal["Juliet", "Nurse"], **GREEDY)
        )
        assert answer in ("Juliet", "Nurse")
        assert (info.calls, len(info.caches)) == (1, 1)

    def test_xgrammar(self, miniature):
        model, tokenizer = miniature
        xgrammar = library("xgrammar")
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=model.config.vocab_size
        )
        grammar = xgrammar.GrammarCompiler(vocabulary).compile_builtin_json_grammar()

        def program():
            processor = xgrammar.contrib.hf.LogitsProcessor(grammar)  # serves one call
            return generated(model, tokenizer, logits_processor=[processor])

        ((tokens,), info) = same_with_attach(model, program)
        text = tokenizer.decode(tokens[len(tokenizer(QUESTION).input_ids) :])
        assert text.lstrip()[0] in '{["0123456789-tfn'
        assert (info.calls, len(info.caches)) == (1, 1)


def torchao():
    library("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


def bitsandbytes_4bit():
    library("bitsandbytes")
    return transformers.BitsAndBytesConfig(load_in_4bit=True)


def bitsandbytes_8bit():
    library("bitsandbytes")
    return transformers.BitsAndBytesConfig(load_in_8bit=True)


def quanto():
    library("optimum.quanto")
    return transformers.QuantoConfig(weights="int8")


@pytest.mark.parametrize("kind", [torchao, bitsandbytes_4bit, bitsandbytes_8bit, quanto])
def test_quantised_weights(kind):
    model = AutoModelForCausalLM.from_pretrained(
        find_source("llama").location, quantization_config=kind(), device_map=DEVICE
    )
    _, tokenizer = load_model("llama")
    _, info = same_with_attach(model, lambda: generated(model, tokenizer))
    assert (info.calls, len(info.caches)) == (1, 1)


def nested_4bit():
    library("bitsandbytes")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )


@pytest.mark.parametrize("kind", [torchao, bitsandbytes_4bit, nested_4bit, quanto])
def test_quantised_weights_are_read_by_our_kernel(kind, monkeypatch):
    """On a CPU its plain twin. Every layer but the head is packed, and the tokens are the same."""
    monkeypatch.setattr(quantised, "DEVICES", (DEVICE,))
    model = AutoModelForCausalLM.from_pretrained(
        find_source("llama").location, quantization_config=kind(), device_map=DEVICE
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # it would change the weights for the CPU
    _, tokenizer = load_model("llama")
    found = []
    own = step.rewrite

    def noting(program, *args, **kwargs):
        own(program, *args, **kwargs)
        layers = [call.args[1] for call in program.calls_of(run_linear)]
        found.append(sum(len(one.weights) for one in layers if is_packed(one)))

    monkeypatch.setattr(step, "rewrite", noting)
    decoder = GraphDecoder()
    cache = StaticContiguousCache.from_model(model, 64)
    expected = generated(model, tokenizer)
    assert generated(model, tokenizer, past_key_values=cache, custom_generate=decoder) == expected
    assert decoder.fallback_reason is None
    assert found == [7 * model.config.num_hidden_layers]
