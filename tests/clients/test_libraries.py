"""Libraries around `generate`: chains and agents, constrained decoding, quantised weights."""

from typing import Literal

import pytest
import transformers
from transformers import AutoModelForCausalLM

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
