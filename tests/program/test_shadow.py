"""A shadow computes what its model computes, on modules and configs of its own and the same
weights.
"""

import functools
import gc
import types
import weakref

import pytest
import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache, attach, attachment, exact
from hf_static_kv.compat import all_modules
from hf_static_kv.patching import attention_implementation
from hf_static_kv.program import step as step_module
from hf_static_kv.program.shadow import original_of, shadow_of
from tests.conftest import COMMON, PROMPT, toy_model
from tests.decoding.conftest import run, toy_with_images

ATTENTION = type(toy_model("llama").model.layers[0].self_attn)


def with_closure(model):
    attention = model.model.layers[1].self_attn
    own = attention.forward
    attention.forward = lambda *args, **kwargs: own(*args, **kwargs)


def with_default(model):
    attention = model.model.layers[1].self_attn
    attention.forward = lambda *args, module=attention, **kwargs: ATTENTION.forward(
        module, *args, **kwargs
    )


def with_method(model):
    attention = model.model.layers[1].self_attn
    attention.forward = types.MethodType(
        lambda self, *args, **kwargs: ATTENTION.forward(self, *args, **kwargs), attention
    )


def with_partial(model):
    """As accelerate does it."""
    attention = model.model.layers[1].self_attn
    attention.own_forward = attention.forward

    def new_forward(module, *args, **kwargs):
        return module.own_forward(*args, **kwargs)

    attention.forward = functools.update_wrapper(
        functools.partial(new_forward, attention), attention.own_forward
    )


def with_attributes(model):
    """Modules that are not submodules of the one that calls them."""
    first, second = model.model.layers[:2]
    first.__dict__["others"] = {"second": [(second.self_attn,)]}
    del second._modules["self_attn"]
    second.self_attn = lambda *args, **kwargs: first.others["second"][0][0](*args, **kwargs)


def with_whole_model(model):
    own = model.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        model.model.calls = 1
        return own(*args, **kwargs)

    model.forward = torch.compiler.disable(forward)


def with_compiled_layer(model):
    model.model.layers[1].compile(backend="eager")


def with_wrapped_layer(model):
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")


PATCHES = [with_closure, with_default, with_method, with_partial, with_attributes, with_whole_model]
COMPILED = [with_compiled_layer, with_wrapped_layer]


class Attending(list):
    """Of a type of its own: a shadow copies plain lists."""


@pytest.fixture
def attending(monkeypatch):
    """The attention modules that have run."""
    modules, own = Attending(), ATTENTION.forward

    def forward(self, *args, **kwargs):
        modules.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(ATTENTION, "forward", forward)
    return modules


@pytest.mark.parametrize("patch", PATCHES)
def test_a_pass_runs_no_module_of_the_model(patch, attending):
    model = toy_model("llama")
    patch(model)
    expected = model(PROMPT).logits
    before = [dict(vars(module)) for module in model.modules()]
    attending.clear()
    shadow = shadow_of(model)
    assert torch.equal(shadow(PROMPT).logits, expected)
    assert len(attending) == len(model.model.layers)
    assert not set(attending) & set(model.modules())
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patched_model_has_a_step(patch):
    model, decoder = toy_model("llama"), GraphDecoder()
    patch(model)
    assert torch.equal(run(model, decoder=decoder), run(model))
    has_hidden_layer = patch is with_attributes  # which no step can find
    assert decoder.fallback_reason is None or has_hidden_layer


@pytest.mark.parametrize("patch", COMPILED)
def test_a_compiled_layer(patch):
    model, decoder = toy_model("llama"), GraphDecoder()
    expected = run(model)
    patch(model)
    assert torch.equal(run(model, decoder=decoder), expected)
    assert decoder.fallback_reason is None
    torch._dynamo.reset()


def test_inside_exact(attending):
    model = toy_model("llama", "eager")
    with exact(model):
        expected = model(PROMPT).logits
        attending.clear()
        shadow = shadow_of(model)
        assert torch.equal(shadow(PROMPT).logits, expected)
        assert not set(attending) & set(model.modules())
    assert torch.equal(shadow(PROMPT).logits, expected)


def test_an_object_that_holds_a_layer_runs_that_layer_and_the_call_falls_back():
    model, decoder = toy_model("llama"), GraphDecoder()

    class Patch:
        def __init__(self, module):
            self.module = module

        def forward(self, *args, **kwargs):
            return ATTENTION.forward(self.module, *args, **kwargs)

    attention = model.model.layers[1].self_attn
    attention.forward = Patch(attention).forward
    assert torch.equal(run(model, decoder=decoder), run(model))
    assert "it uses that of another layer" in decoder.fallback_reason


def test_passes_of_a_shadow_do_not_count():
    model, count, calls = toy_model("llama"), 0, []
    mlp = model.model.layers[0].mlp
    own = mlp.forward

    def forward(x):
        nonlocal count
        count += 1
        calls.append(x.shape)
        return own(x)

    mlp.forward = forward
    shadow_of(model)(PROMPT)
    assert (count, len(calls)) == (0, 0)
    model(PROMPT)
    assert (count, len(calls)) == (1, 1)


def test_weights_are_shared_and_configs_and_hooks_are_not():
    model = toy_with_images()
    shadow = shadow_of(model)
    for own, copied in zip(all_modules(model), all_modules(shadow), strict=True):
        assert copied is not own
        assert type(copied) is type(own)
        assert original_of(copied) is original_of(own) is own
        for kind in ("parameters", "buffers"):
            pairs = zip(
                getattr(own, kind)(recurse=False), getattr(copied, kind)(recurse=False), strict=True
            )
            assert all(one is other for one, other in pairs)
        if hasattr(own, "config"):
            assert copied.config is not own.config
            assert copied.config.to_dict() == own.config.to_dict()
    assert shadow.config.text_config is shadow.model.language_model.config
    with attention_implementation(shadow, "eager"):
        shadow.lm_head.register_forward_hook(lambda *args: None)
        assert shadow.config.text_config._attn_implementation == "eager"
        assert model.config.text_config._attn_implementation == "sdpa"
    assert not model.lm_head._forward_hooks


def test_a_scripted_part_is_shared():
    model = toy_model("gpt2")
    model.transformer.h[0].mlp.act = torch.jit.script(torch.nn.Tanh())
    assert torch.equal(shadow_of(model)(PROMPT).logits, model(PROMPT).logits)


def test_functions_and_containers_that_hold_themselves():
    model = toy_model("llama")
    model.model.loop = [model]
    model.model.loop.append(model.model.loop)

    def count_down(n):
        return count_down(n - 1) if n else model

    model.model.count_down = count_down
    shadow = shadow_of(model)
    assert shadow.model.loop[0] is shadow
    assert shadow.model.count_down(0) is shadow


def test_an_attachment_is_that_of_the_model_alone():
    model = toy_model("llama")
    attach(model)
    with pytest.raises(ValueError, match="not attached"):
        attachment(shadow_of(model))
    expected = model.generate(PROMPT, **COMMON)
    assert torch.equal(shadow_of(model).generate(PROMPT, **COMMON), expected)


@pytest.mark.parametrize("patch", [None, with_whole_model])
def test_no_step_keeps_a_shadow(patch, monkeypatch):
    model, shadows, own = toy_model("llama"), [], step_module.shadow_of

    def spy(model):
        shadow = own(model)
        shadows.append(weakref.ref(shadow))
        return shadow

    monkeypatch.setattr(step_module, "shadow_of", spy)
    if patch is not None:
        patch(model)
    decoder, cache = GraphDecoder(), StaticContiguousCache(model.config, 64)
    run(model, decoder=decoder, cache=cache)
    (step,) = decoder.steps.by_cache[cache].values()
    gc.collect()
    assert step.is_recorded
    assert len(shadows) == 1
    assert shadows[0]() is None
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_steps_share_the_tables_of_a_model():
    model, decoder = toy_model("gemma3"), GraphDecoder()
    cache = StaticContiguousCache(model.config, 64)
    for mode in ({}, {"do_sample": True}):
        run(model, decoder=decoder, cache=cache, **mode)
        assert decoder.fallback_reason is None
        cache.reset()
    first, second = (step._tables for step in decoder.steps.by_cache[cache].values())
    assert first
    assert all(one is other for one, other in zip(first, second, strict=True))
