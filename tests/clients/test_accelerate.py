"""Models that accelerate has placed: `device_map`, `dispatch_model`, `Accelerator.prepare`."""

import pytest
import torch
from accelerate import Accelerator, dispatch_model
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM

from hf_static_kv import attach, attachment
from hf_static_kv.testing import find_source, load_model
from tests.clients.conftest import ANSWER, DEVICE, QUESTION, same_with_attach

pytestmark = pytest.mark.clients


def answers(model, tokenizer):
    """The tokens of a prompt, of a padded batch, and of the prompt again."""
    tokenizer.padding_side = "left"
    prompts = [
        tokenizer(text, return_tensors="pt", padding=True)
        for text in (QUESTION, [QUESTION, ANSWER], QUESTION)
    ]
    return [
        model.generate(**ids.to(model.device), max_new_tokens=8, do_sample=False).tolist()
        for ids in prompts
    ]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_device_map_auto(name):
    _, tokenizer = load_model(name)
    model = AutoModelForCausalLM.from_pretrained(
        find_source(name).location, device_map="auto", dtype=torch.float32
    )
    _, info = same_with_attach(model, lambda: answers(model, tokenizer))
    assert (info.calls, info.hits) == (3, 1)


def layer_map(model, first, last):
    """Every part of the model on `first`, the second half of its layers on `last`."""
    layers = {
        f"model.layers.{number}": first if number < 3 else last
        for number in range(len(model.model.layers))
    }
    return {
        "model.embed_tokens": first,
        "model.norm": first,
        "model.rotary_emb": first,
        "lm_head": first,
        **layers,
    }


PLACES = {
    "one entry": lambda model: {"": "cpu"},
    "an entry a layer": lambda model: layer_map(model, "cpu", "cpu"),
    "half on disk": lambda model: layer_map(model, "cpu", "disk"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "is_attached_first", [False, True], ids=["dispatched, attached", "attached, dispatched"]
)
def test_dispatch_model(place, is_attached_first, tmp_path):
    model, tokenizer = load_model("llama")
    expected = answers(model, tokenizer)
    if is_attached_first:
        attach(model)
        answers(model, tokenizer)  # its caches are in the pool before the model is moved
    before = attachment(model).calls if is_attached_first else 0
    model = dispatch_model(
        model, PLACES[place](model), main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    if not is_attached_first:
        assert answers(model, tokenizer) == expected
        attach(model)
    assert answers(model, tokenizer) == expected
    info = attachment(model)
    assert info.calls == before + 3
    assert info.hits >= 1


@pytest.fixture
def accelerator():
    yield Accelerator(mixed_precision="bf16", cpu=DEVICE == "cpu")
    AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the process


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 takes another way
def test_mixed_precision_begins_and_ends_between_calls(accelerator):
    """As a trainer with `bf16=True`: autocast is inside of the model's `forward`."""

    def program(model, tokenizer, inspect):
        found = [answers(model, tokenizer), answers(accelerator.prepare(model), tokenizer)]
        inspect()
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        return [*found, answers(model, tokenizer)]

    def check_caches():
        assert {cache.layers[0].value_dtype for cache in info.caches} == {torch.bfloat16}

    expected = program(*load_model("llama", device=DEVICE), lambda: None)
    model, tokenizer = load_model("llama", device=DEVICE)
    info = attach(model)
    assert program(model, tokenizer, check_caches) == expected
    assert info.calls == 9
    assert info.hits >= 7
