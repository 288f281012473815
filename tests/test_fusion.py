"""Norms are found by what they compute, replaced for a while, and put back."""

import pytest
import torch
from architectures import toy_model

from hf_static_kv.fusion import fused_norms, norm_style
from hf_static_kv.kernels.rms_norm import NormStyle, rms_norm_plain

LLAMA, OLMO, GEMMA = NormStyle(0.0, True), NormStyle(0.0, False), NormStyle(1.0, False)
# Style and number of the norms: two in each of two layers and one at the end; Qwen3 and OLMo 2 have two more in each
# layer, for queries and keys; Gemma 3 has six in each of six.
EXPECTED = {
    "llama": (LLAMA, 5),
    "qwen3": (LLAMA, 9),
    "gemma3": (GEMMA, 37),
    "olmo2": (OLMO, 9),
    "gpt_oss": (OLMO, 5),
    "mixtral": (LLAMA, 5),
    "gpt2": (None, 0),
    "cohere2": (None, 0),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_norm_of_a_model_is_found(name):
    model = toy_model(name, "eager")
    style, count = EXPECTED[name]
    with fused_norms(model) as norms:
        assert len(norms) == count
    assert {norm_style(norm) for norm in norms} == ({style} if count else set())


@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2"])
def test_a_fused_model_computes_the_same(name, monkeypatch):
    model, ids, calls = toy_model(name), torch.tensor([[5, 6, 7, 8]]), []

    def count(*args):
        calls.append(args)
        return rms_norm_plain(*args)

    expected = model(ids).logits
    monkeypatch.setattr("hf_static_kv.fusion.rms_norm", count)
    with fused_norms(model) as norms:
        assert torch.equal(model(ids).logits, expected)
    assert len(calls) == len(norms)


def test_the_norms_have_their_own_forward_back_after_an_exception():
    model = toy_model("llama")
    before = [dict(module.__dict__) for module in model.modules()]
    inside = []

    def fail_inside():
        with fused_norms(model) as norms:
            inside.extend("forward" in norm.__dict__ for norm in norms)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail_inside()
    assert inside == [True] * 5
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_what_only_looks_like_one_is_left_alone():
    class HalfRMSNorm(torch.nn.Module):
        """Half of an RMS norm."""

        def __init__(self):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x):
            return rms_norm_plain(x, self.weight, self.eps, LLAMA) / 2

    assert norm_style(HalfRMSNorm()) is None
    with fused_norms(torch.nn.Sequential(HalfRMSNorm())) as norms:
        assert norms == []


def test_a_norm_with_a_hook_in_its_place_is_left_alone():
    model = toy_model("llama")
    norm = model.model.norm
    norm.forward = own = norm.forward  # as accelerate does
    with fused_norms(model) as norms:
        assert norm not in norms
    assert norm.forward == own
