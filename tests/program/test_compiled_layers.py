"""`GraphDecoder("layers")`: what of a step is compiled, and that all is put back."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hf_static_kv import GraphDecoder, StaticContiguousCache
from hf_static_kv.attention import ATTENTION_NAME
from hf_static_kv.patching import attention_implementation
from hf_static_kv.program.linears import fused_linears
from hf_static_kv.program.step import DecodeStep, _decoder_layers, compiled_layers
from tests.conftest import toy_model as toy_on_cpu
from tests.decoding.conftest import CAPACITY, PROMPT, toy_model


@pytest.fixture
def model():
    return toy_model("gemma3")


def test_the_layers_that_are_compiled_are_those_with_a_number():
    model, others = toy_on_cpu("llama"), torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))
    model._modules = {"vision": others, **model._modules}  # before the layers, and as many
    assert _decoder_layers(model, 2) == list(model.model.layers)
    with pytest.raises(ValueError, match="no list of 3 decoder layers was found in LlamaForCausalLM"):
        _decoder_layers(model, 3)


class TestCompiled:
    """The step with compiled layers, on a CPU without code generation: what is compiled, how often, and the tokens."""

    @pytest.mark.parametrize(
        ("name", "kinds"), [("llama", 1), ("qwen3", 1), ("mixtral", 1), ("gpt2", 1), ("gemma3", 2), ("gpt_oss", 2)]
    )
    def test_layers_of_one_kind_share_one_compilation(self, name, kinds):
        torch._dynamo.reset()
        model = toy_on_cpu(name, ATTENTION_NAME, num_hidden_layers=6)
        cache, counter = StaticContiguousCache.from_model(model, CAPACITY), CompileCounterWithBackend("aot_eager")
        origin, token = torch.zeros(1, dtype=torch.long), torch.tensor([5])
        with torch.no_grad():
            model(PROMPT.cpu(), past_key_values=cache)
            step = DecodeStep(model, cache, 1)
            step.set_position(cache.seq_len, origin)
            expected = step.run(token)
            with (
                fused_linears(model, lambda: step.run(token)),
                compiled_layers(model, 6, backend=counter),
            ):
                step.set_position(cache.seq_len, origin)
                got = [step.run(token), step.run(token)]
        assert counter.frame_count == kinds
        assert torch.equal(got[0], expected)
        assert not torch.equal(got[1], expected)  # the second token stands elsewhere and sees the first

    def test_the_model_has_its_own_forward_back_even_after_an_exception(self, model):
        parts = [model, *model.model.layers]
        model.model.layers[1].forward = own = model.model.layers[1].forward  # as a hook of accelerate would
        before = [dict(part.__dict__) for part in parts]
        changed = []

        def fail_inside():
            with compiled_layers(model, 3):
                changed.extend(part.__dict__.get("forward") not in (None, own) for part in parts)
                raise RuntimeError("in the middle")

        with pytest.raises(RuntimeError, match="in the middle"):
            fail_inside()
        assert changed == [False, *[True] * 3]
        assert [dict(part.__dict__) for part in parts] == before

    def test_layer_indices_are_ints_again_after_an_exception(self, model):
        numbered = [module for module in model.modules() if hasattr(module, "layer_idx")]
        before = [module.layer_idx for module in numbered]
        step, inside = DecodeStep(model, StaticContiguousCache.from_model(model, CAPACITY), 1), []

        def fail(module, args):
            inside.extend(module.layer_idx for module in numbered)
            raise RuntimeError("in the middle")

        hook = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"), attention_implementation(model, ATTENTION_NAME):
            step.run(torch.tensor([5]))
        hook.remove()
        assert [layer.index for layer in inside] == before
        assert [module.layer_idx for module in numbered] == before
        assert all(type(index) is int for index in before)

    def test_a_part_with_more_layers_than_the_cache_keeps_its_indices(self, model):
        other = torch.nn.Linear(2, 2)
        other.layer_idx = 40  # a layer of a vision tower, say
        model.tower = other
        step, inside = DecodeStep(model, StaticContiguousCache.from_model(model, CAPACITY), 1), []
        attention = model.model.layers[2].self_attn
        hook = attention.register_forward_pre_hook(
            lambda *_: inside.extend([other.layer_idx, attention.layer_idx.index])
        )
        with attention_implementation(model, ATTENTION_NAME):
            step.run(torch.tensor([5]))
        hook.remove()
        del model.tower
        assert inside == [40, 2]

    def test_an_unknown_setting(self):
        with pytest.raises(ValueError, match="compile must be one of 'none', 'layers', got 'max'"):
            GraphDecoder(compile="max")
