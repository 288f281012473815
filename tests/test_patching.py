"""What is changed on a model or in torch is put back."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import IdeficsConfig, IdeficsForVisionText2Text

from hf_static_kv.attention import ATTENTION_NAME
from hf_static_kv.patching import attention_implementation, without_cudnn
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


def test_the_attention_of_every_part_is_restored():
    model = toy_with_images()
    config = model.config
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})
    before = [c._attn_implementation for c in (config, config.text_config, config.vision_config)]
    with attention_implementation(model, ATTENTION_NAME):
        assert config.text_config._attn_implementation == ATTENTION_NAME
    assert [c._attn_implementation for c in (config, config.text_config, config.vision_config)] == before


def test_a_part_without_attention_is_left_without():
    with torch.device("meta"):
        model = IdeficsForVisionText2Text(IdeficsConfig(num_hidden_layers=1))
    assert model.config.perceiver_config._attn_implementation is None
    with attention_implementation(model, ATTENTION_NAME):
        assert model.config._attn_implementation == ATTENTION_NAME
    assert model.config.perceiver_config._attn_implementation is None
    assert model.config._attn_implementation == "sdpa"
