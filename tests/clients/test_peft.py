"""PEFT: adapters that are switched, disabled, merged, mixed in a batch, or outside of the model."""

import pytest
import torch

from hf_static_kv import attach, attachment, exact
from hf_static_kv.testing import load_model
from tests.clients.conftest import ANSWER, DEVICE, QUESTION
from tests.conftest import toy_model

peft = pytest.importorskip("peft", reason="peft is not installed: it is in the extra `clients`")
pytestmark = pytest.mark.clients
NEW_TOKENS = 8


def with_adapters(name="llama", **settings):
    """A miniature with two adapters of large random weights, so that each state of it has other
    tokens.
    """
    model, tokenizer = load_model(name, device=DEVICE)
    targets = ["q_proj", "k_proj", "v_proj"]
    config = peft.LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=targets,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **settings,
    )
    torch.manual_seed(1)
    wrapper = peft.get_peft_model(model, config, "first")
    wrapper.add_adapter("second", config)
    return wrapper.eval(), tokenizer


def answer(model, tokenizer, text=QUESTION, **how):
    inputs = tokenizer(text, return_tensors="pt", padding=True, padding_side="left").to(
        model.device
    )
    return model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **how).tolist()


def switched(model, ask):
    found = []
    for name in ("first", "second", "first"):
        model.set_adapter(name)
        found.append(ask())
    return found


def disabled(model, ask):
    found = [ask()]
    with model.disable_adapter():
        found.append(ask())
    return [*found, ask()]


def merged(model, ask):
    """Merging leaves the tokens as they are, but for rounding; the adapter that is merged is
    another one here.
    """
    found = [ask()]
    model.base_model.merge_adapter(["second"])
    found.append(ask())
    model.base_model.unmerge_adapter()
    return [*found, ask()]


def scaled(model, ask):
    found = [ask()]
    layers = [
        module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)
    ]
    [layer.scale_layer(-2.0) for layer in layers]
    found.append(ask())
    [layer.unscale_layer() for layer in layers]
    return [*found, ask()]


def retrained(model, ask):
    found = [ask()]
    weights = [weight for name, weight in model.named_parameters() if "lora_B.first" in name]
    with torch.no_grad():
        [weight.neg_() for weight in weights]
        found.append(ask())
        [weight.neg_() for weight in weights]
    return [*found, ask()]


CHANGES = {change.__name__: change for change in (switched, disabled, merged, scaled, retrained)}


@pytest.mark.parametrize("reuse_prefix", [False, True], ids=["", "reuse_prefix"])
@pytest.mark.parametrize("change", CHANGES)
def test_each_state_of_an_adapter_has_its_own_tokens(change, reuse_prefix):
    plain, tokenizer = with_adapters()
    expected = CHANGES[change](plain, lambda: answer(plain, tokenizer))
    assert expected[0] != expected[1]
    model, _ = with_adapters()
    info = attach(model, reuse_prefix=reuse_prefix)
    assert CHANGES[change](model, lambda: answer(model, tokenizer)) == expected
    assert info is attachment(model)
    assert info.calls == 3
    # Weights that were written and written back count as other weights.
    is_back = reuse_prefix and change not in ("merged", "retrained")
    assert info.reused_tokens == (len(tokenizer(QUESTION).input_ids) - 1 if is_back else 0)
    assert info.hits == (int(is_back) if reuse_prefix else 2)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_model_that_is_merged_for_good(name):
    (plain, tokenizer), (model, _) = with_adapters(name), with_adapters(name)
    info = attach(model, reuse_prefix=True)
    expected = [answer(plain, tokenizer, text) for text in (QUESTION, [QUESTION, ANSWER])]
    assert [answer(model, tokenizer, text) for text in (QUESTION, [QUESTION, ANSWER])] == expected
    plain, model = plain.merge_and_unload(), model.merge_and_unload()
    expected = answer(plain, tokenizer)
    assert answer(model, tokenizer) == expected
    assert attachment(model) is info
    assert info.reused_tokens == 0
    assert answer(model, tokenizer) == expected
    assert info.calls == 4
    assert info.reused_tokens == len(tokenizer(QUESTION).input_ids) - 1


def test_an_adapter_is_added_to_an_attached_model():
    plain, tokenizer = with_adapters()
    model, _ = load_model("llama", device=DEVICE)
    info = attach(model, reuse_prefix=True)
    with plain.disable_adapter():
        assert answer(model, tokenizer) == answer(plain, tokenizer)
    wrapper = peft.get_peft_model(model, plain.peft_config["first"], "first").eval()
    weights = {name: weight for name, weight in plain.state_dict().items() if ".first." in name}
    wrapper.load_state_dict(weights, strict=False)
    assert answer(wrapper, tokenizer) == answer(plain, tokenizer)
    assert attachment(wrapper) is info
    assert (info.calls, info.reused_tokens) == (2, 0)


@pytest.mark.parametrize("reuse_prefix", [False, True], ids=["", "reuse_prefix"])
def test_an_adapter_for_each_row(reuse_prefix):
    """`adapter_names` is in hooks during the call: nothing else of the model tells it."""
    (plain, tokenizer), (model, _) = with_adapters(), with_adapters()
    choices = [["first", "second"], ["second", "__base__"], ["first", "second"]]
    expected = [
        answer(plain, tokenizer, [QUESTION, QUESTION], adapter_names=names) for names in choices
    ]
    info = attach(model, reuse_prefix=reuse_prefix)
    assert [
        answer(model, tokenizer, [QUESTION, QUESTION], adapter_names=names) for names in choices
    ] == expected
    assert expected[0] != expected[1]
    assert (info.calls, info.hits, info.reused_tokens) == (3, 2, 0)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_tokens_before_the_prompt(kind):
    """The model inside is attached; `attach` of the wrapper is refused."""
    model, tokenizer = load_model("llama", device=DEVICE)
    config = getattr(peft, kind)(num_virtual_tokens=5, task_type="CAUSAL_LM")
    wrapper = peft.get_peft_model(model, config).eval()
    torch.nn.init.normal_(next(wrapper.prompt_encoder.parameters()))
    expected = answer(wrapper, tokenizer)
    with wrapper.disable_adapter():
        without = answer(wrapper, tokenizer)
    assert expected != without
    info = attach(model, reuse_prefix=True)
    assert [answer(wrapper, tokenizer) for _ in range(2)] == [expected, expected]
    assert (info.calls, info.reused_tokens) == (2, 0)
    with wrapper.disable_adapter():
        assert [answer(wrapper, tokenizer) for _ in range(2)] == [without, without]
    assert info.calls == 4
    with pytest.raises(ValueError, match="computes outside of the model"):
        attach(wrapper)


def test_an_adapter_of_stacked_experts_inside_exact():
    """Refused by the name of its module while it is in use; merged or disabled it is served."""
    model, ids = toy_model("qwen3_moe", "eager"), torch.arange(5, 25).view(1, 20)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(
        r=4, target_modules=[], target_parameters=parameters, init_lora_weights=False
    )
    with torch.no_grad(), exact(model):
        base = model(ids, use_cache=False).logits
    wrapper = peft.get_peft_model(model, config).eval()
    experts = r"^model\.layers\.0\.mlp\.experts"
    remedy = (
        experts + " has a LoRA adapter of its parameter (down|gate_up)_proj.* Merge the adapter"
    )
    with torch.no_grad(), exact(wrapper):
        with pytest.raises(ValueError, match=remedy):
            wrapper(input_ids=ids, use_cache=False)
        with wrapper.disable_adapter():
            assert torch.equal(wrapper(input_ids=ids, use_cache=False).logits, base)
    ordinary = wrapper(input_ids=ids, use_cache=False).logits
    wrapper.base_model.merge_adapter()
    with torch.no_grad(), exact(wrapper):
        merged = wrapper(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(merged, ordinary, rtol=1e-3, atol=1e-3)
    assert not torch.equal(merged, base)
