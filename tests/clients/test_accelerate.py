"""Models that accelerate has placed: `device_map`, `dispatch_model`, `Accelerator.prepare`."""

import pytest
import torch
from accelerate import Accelerator, dispatch_model
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_static_kv import attach, attachment, served
from hf_static_kv.batching import BatchManager
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
def accelerator(request):
    precision = getattr(request, "param", "bf16")
    # The state is one for the process: a trainer of another test may have left one.
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision=precision, cpu=DEVICE == "cpu")
    AcceleratorState._reset_state(reset_partial_state=True)


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


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("accelerator", ["no", "bf16"], indirect=True)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_generate_batch_of_a_prepared_model(accelerator, mode, monkeypatch):
    """The tokens of `generate`. In mixed precision there is no captured step, and no rows."""
    monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu", "cuda"))
    model, tokenizer = load_model("llama", device=DEVICE)
    prompts = tokenizer([QUESTION, "KING: My", ANSWER, f"{QUESTION} {ANSWER}"]).input_ids
    config = GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=-1, pad_token_id=0)
    model = accelerator.prepare(model)

    def alone(ids):
        ids = torch.tensor([ids], device=model.device)
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, generation_config=config)
        return output[0, ids.shape[1] :].tolist()

    with mode():
        expected = [alone(ids) for ids in prompts]
        info = attach(model)
        assert isinstance(model.init_continuous_batching(config), BatchManager)
        results = model.generate_batch(prompts, config)
    assert [result.generated_tokens for result in results.values()] == expected
    assert info.calls == len(prompts)
    is_mixed = accelerator.mixed_precision == "bf16"
    dtype = torch.bfloat16 if is_mixed else torch.float32
    assert {cache.layers[0].value_dtype for cache in info.caches} == {dtype}
    assert info.fallbacks.total() == len(prompts) * is_mixed
