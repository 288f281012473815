"""What is changed on a model or in torch is put back."""

import itertools
import sys
import types

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import IdeficsConfig, IdeficsForVisionText2Text

from hf_static_kv import patching
from hf_static_kv.attention import ATTENTION_NAME
from hf_static_kv.patching import (
    attention_implementation,
    original_function,
    replaced,
    replaced_function,
    without_cudnn,
)
from tests.decoding.conftest import toy_with_images


class TestWithoutCudnn:
    def allowed(self):
        cuda = torch.backends.cuda
        return [
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ]

    @pytest.mark.parametrize(
        "backends", [[SDPBackend.MATH], [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]], ids=str
    )
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


def test_the_attention_of_every_part_is_restored():
    model = toy_with_images()
    config = model.config
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})
    before = [c._attn_implementation for c in (config, config.text_config, config.vision_config)]
    with attention_implementation(model, ATTENTION_NAME):
        assert config.text_config._attn_implementation == ATTENTION_NAME
    assert [
        c._attn_implementation for c in (config, config.text_config, config.vision_config)
    ] == before


def test_a_part_without_attention_is_left_without():
    with torch.device("meta"):
        model = IdeficsForVisionText2Text(IdeficsConfig(num_hidden_layers=1))
    assert model.config.perceiver_config._attn_implementation is None
    with attention_implementation(model, ATTENTION_NAME):
        assert model.config._attn_implementation == ATTENTION_NAME
    assert model.config.perceiver_config._attn_implementation is None
    assert model.config._attn_implementation == "sdpa"


class TestOverlappingChanges:
    """As two threads make them: they end in any order."""

    @pytest.mark.parametrize("has_own", [False, True], ids=["", "with a value of its own"])
    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
    def test_of_an_attribute(self, order, has_own):
        module = torch.nn.Linear(2, 2)
        if has_own:
            module.forward = "own"
        before = dict(vars(module))
        contexts = [replaced("forward", {module: name}) for name in "abc"]
        for context in contexts:
            context.__enter__()
        inside = set("abc")
        for number in order:
            contexts[number].__exit__(None, None, None)
            inside.remove("abc"[number])
            assert module.forward == max(inside) if inside else vars(module) == before
        assert patching._CHANGES == {}

    def test_what_another_assigned_between_two_changes(self):
        module = torch.nn.Linear(2, 2)
        first, second = (replaced("forward", {module: name}) for name in "ab")
        first.__enter__()
        module.forward = "theirs"
        second.__enter__()
        first.__exit__(None, None, None)
        assert module.forward == "b"
        second.__exit__(None, None, None)
        assert module.forward == "theirs"

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
    def test_of_a_function(self, order, monkeypatch):
        monkeypatch.setitem(sys.modules, "home", home := types.ModuleType("home"))
        home.f = own = lambda x: [x]
        functions = [lambda original, x, name=name: [*original(x), name] for name in "abc"]
        contexts = [replaced_function("f", {"home": function}) for function in functions]
        for context in contexts:
            context.__enter__()
        inside = list("abc")
        for number in order:
            assert home.f(0) == [0, *inside]
            assert original_function("home", "f") is own
            contexts[number].__exit__(None, None, None)
            inside.remove("abc"[number])
        assert home.f is own
