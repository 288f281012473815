"""Modules are found by what they compute, replaced inside a context, and restored."""

import inspect
import sys
from contextlib import contextmanager
from threading import Thread

import pytest
import torch

from hf_static_kv.exactness.exact import exact
from hf_static_kv.kernels import linear
from hf_static_kv.kernels.rms_norm import NormStyle, rms_norm_plain
from hf_static_kv.patching import replaced
from hf_static_kv.program import norms as fused
from hf_static_kv.program.linears import fused_linears, gated_mlps, mlp_activation, single_linears
from hf_static_kv.program.norms import FusedSums, fused_norms, norm_style
from hf_static_kv.program.rotary import angles_from_tables, fused_rotary
from tests.conftest import ARCHITECTURES, toy_model

LLAMA, OLMO, GEMMA = NormStyle(0.0, True), NormStyle(0.0, False), NormStyle(1.0, False)
# Style and number of the norms: two in each of two layers and one at the end; Qwen3 and OLMo 2 have two more in each
# layer, for queries and keys; Gemma 3 has six in each of three.
EXPECTED = {
    "llama": (LLAMA, 5),
    "qwen3": (LLAMA, 9),
    "gemma3": (GEMMA, 19),
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
    monkeypatch.setattr("hf_static_kv.program.norms.rms_norm", count)
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


TOKEN = torch.tensor([[5]])


def everything_in(model):
    """What may be changed: the instances' own attributes, and the function in the files of their classes."""
    homes = {sys.modules[type(module).__module__] for module in model.modules()}
    functions = {home.__name__: getattr(home, "apply_rotary_pos_emb", None) for home in homes}
    return [dict(module.__dict__) for module in model.modules()], functions


@contextmanager
def all_fused(model):
    with (
        fused_norms(model),
        fused_rotary(model),
        angles_from_tables(model, 64),
        fused_linears(model, lambda: model(TOKEN)),
    ):
        yield


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_with_everything_fused_computes_the_same(name):
    """On a CPU each part is the plain twin of its kernel: the bits are those of the model."""
    model = toy_model(name, "eager")
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    # At position 0 every rotary angle is 0, whatever its frequency.
    places = [{"position_ids": torch.tensor([[n]])} for n in (3, 40)] if takes_positions else [{}]
    with torch.no_grad():
        expected, before = [model(TOKEN, **place).logits for place in places], everything_in(model)
        with all_fused(model):
            sums = FusedSums()
            for _ in range(3):  # the first pass records, the others fuse
                for place, logits in zip(places, expected, strict=True):
                    with sums:
                        assert torch.equal(model(TOKEN, **place).logits, logits)
        assert everything_in(model) == before


def test_everything_is_put_back_after_an_exception():
    model = toy_model("gemma3")
    before, inside = everything_in(model), []

    def fail_inside():
        with all_fused(model):
            inside.append(everything_in(model))
            raise RuntimeError("in the middle")

    with torch.no_grad(), pytest.raises(RuntimeError, match="in the middle"):
        fail_inside()
    assert inside[0] != before
    assert inside[0][1] != before[1]
    assert everything_in(model) == before


class TestLinears:
    # Of two layers: q, k, v together where they are three; o; the MLP's gate and up in its own kernel, so down alone.
    @pytest.mark.parametrize(
        ("name", "sizes"),
        [("llama", [3, 1, 1] * 2 + [1]), ("qwen3", [3, 1, 1] * 2 + [1]), ("gpt2", [1]), ("phi3", [1] * 9)],
    )
    def test_those_with_the_same_input_are_one_group(self, name, sizes):
        model = toy_model(name)
        with torch.no_grad(), fused_linears(model, lambda: model(TOKEN)) as groups:
            assert [len(group) for group in groups] == sizes

    def test_gate_and_up_stay_one_operation_inside_exact(self):
        """Two linear layers and torch's own activation have other bits than the kernel, which float16 shows."""
        model = toy_model("llama")
        with torch.no_grad(), exact(model), fused_linears(model, lambda: model(TOKEN)) as groups:
            assert [len(group) for group in groups] == [3, 1, 1] * 2 + [1]

    def test_one_launch_for_a_group(self, monkeypatch):
        model, launches = toy_model("llama"), []
        own = linear.linears

        def count(x, weights, biases):
            launches.append(len(weights))
            return own(x, weights, biases)

        with torch.no_grad(), fused_linears(model, lambda: model(TOKEN)):
            monkeypatch.setattr(linear, "linears", count)
            model(TOKEN)
            assert launches == [3, 1, 1] * 2 + [1]
            launches.clear()
            model(torch.arange(20)[None])  # too many rows
            assert launches == []

    def test_another_input_than_in_the_first_pass(self):
        class Twice(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = torch.nn.Linear(4, 3), torch.nn.Linear(4, 2)

            def forward(self, x, y):
                return self.a(x), self.b(y)

        model, x, y = Twice(), torch.randn(1, 4), torch.randn(1, 4)
        with torch.no_grad():
            expected = model(x, y)
            with fused_linears(model, lambda: model(x, x)) as groups:
                assert [len(group) for group in groups] == [2]
                for got, of in zip(model(x, y), expected, strict=True):
                    assert torch.equal(got, of)
                # What was computed for the second and not asked for is not given to a later pass.
                assert torch.equal(model(y, y)[1], model.b.__class__.forward(model.b, y))

    def test_adapters_and_hooks_are_left_alone(self):
        class Adapted(torch.nn.Linear):
            pass

        model = torch.nn.Sequential(Adapted(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model[1].forward = own = model[1].forward  # as accelerate does
        with fused_linears(model, lambda: model(torch.ones(1, 4))) as groups:
            assert groups == [[model[2]]]
            assert model[1].forward == own
        assert model[1].forward == own


class TestMLP:
    @pytest.mark.parametrize(("name", "activation"), [("llama", "silu"), ("qwen3", "silu"), ("gemma3", "gelu_tanh")])
    def test_a_gated_one_is_recognised(self, name, activation):
        assert {mlp_activation(layer.mlp) for layer in toy_model(name).model.layers} == {activation}

    @pytest.mark.parametrize("name", ["gpt2", "phi3", "mixtral"])
    def test_no_other_is(self, name):
        assert {mlp_activation(module) for module in toy_model(name).modules()} == {None}

    def test_one_that_computes_something_else_is_left_alone(self):
        model = toy_model("llama")
        mlp = model.model.layers[0].mlp
        kind = type(mlp)
        mlp.__class__ = type("Other", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})
        assert mlp_activation(mlp) is None

    def test_recognising_draws_no_random_numbers(self):
        before = torch.get_rng_state()
        mlp_activation(toy_model("llama").model.layers[0].mlp)
        assert torch.equal(torch.get_rng_state(), before)


def calls_in_two_passes(model):
    """How many functions the first pass calls, and the next."""
    sums, counts = FusedSums(), [0, 0]
    with torch.no_grad(), fused_norms(model):
        model(TOKEN)  # imports and the like
        for i in range(2):

            def count(frame, event, arg, i=i):
                counts[i] += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                with sums:
                    model(TOKEN)
            finally:
                sys.setprofile(None)
    return counts


class TestSums:
    # Llama: two layers with two sums each, and a norm after each. Gemma 3: three layers, and a norm before each too.
    @pytest.mark.parametrize(("name", "number", "has_first"), [("llama", 4, False), ("gemma3", 6, True)])
    def test_a_sum_is_computed_with_the_norms_around_it(self, monkeypatch, name, number, has_first):
        model, calls = toy_model(name), []
        own = fused.add_rms_norm

        def count(*args):
            calls.append(args[-1] is not None)
            return own(*args)

        monkeypatch.setattr(fused, "add_rms_norm", count)
        sums = FusedSums()
        with torch.no_grad(), fused_norms(model):
            with sums:
                model(TOKEN)
            assert calls == []
            with sums:
                model(TOKEN)
        assert calls == [has_first] * number

    def test_a_model_of_twice_the_layers_takes_twice_the_work(self):
        """In the first pass and in a later one: counted in calls, as time is not the same twice."""
        first, later = zip(
            *(calls_in_two_passes(toy_model("gemma3", num_hidden_layers=n)) for n in (8, 16)), strict=True
        )
        assert first[1] < 2.1 * first[0]
        assert later[1] < 2.1 * later[0]

    def test_a_guess_that_fails_changes_nothing(self):
        """A second pass with other sums than the first."""
        model = toy_model("llama")
        norm, x, y = model.model.norm, torch.randn(1, 64), torch.randn(1, 64)
        with torch.no_grad():
            dim = norm.weight.shape[0]
            x, y = torch.randn(1, dim), torch.randn(1, dim)
            expected = norm(x * y), x + y
            with fused_norms(model):
                sums = FusedSums()
                with sums:
                    norm(x + y)
                with sums:
                    total = x + y
                    assert torch.equal(norm(x * y), expected[0])
                    assert torch.equal(total, expected[1])

    def test_inside_exact(self):
        model = toy_model("gemma3")
        with torch.no_grad(), exact(model):
            expected, sums = model(TOKEN).logits, FusedSums()
            for _ in range(3):
                with sums:
                    assert torch.equal(model(TOKEN).logits, expected)
        assert sum(before is not None for _, before in sums.norms) == 6

    def test_after_a_first_pass_that_fails_comes_another(self):
        layer = toy_model("gemma3").model.layers[0]
        first, last, sums = layer.post_attention_layernorm, layer.pre_feedforward_layernorm, FusedSums()
        x, y = torch.randn(2, 1, first.weight.shape[0])

        def fail_inside():
            with sums:
                last(x + first(y))
                raise RuntimeError("in the middle")

        with torch.no_grad(), fused_norms(layer):
            with pytest.raises(RuntimeError, match="in the middle"):
                fail_inside()
            assert sums.first_pass is not None
            for _ in range(2):
                with sums:
                    total = last(x + first(y))
        with torch.no_grad():
            assert torch.equal(total, last(x + first(y)))
        assert len(sums.norms) == 1

    def test_a_deferred_output_that_is_used_otherwise_is_computed(self):
        """In the first pass the output of a norm goes into a sum alone; in the others elsewhere too, or not at all."""
        layer = toy_model("gemma3").model.layers[0]
        first, last = layer.post_attention_layernorm, layer.pre_feedforward_layernorm
        x, y = torch.randn(2, 1, first.weight.shape[0])
        others = {
            "into the sum": lambda z: last(x + z),
            "from the left": lambda z: last(z + x),
            "elsewhere too": lambda z: last(x + z) + z * 2,
            "into another sum before": lambda z: (z + z) * last(x + z),
            "into a norm": lambda z: last(z),
            "into no sum": lambda z: torch.cat([z, z]),
            "written": lambda z: (z.mul_(2), last(x + z))[1],
            "written in part": lambda z: (z.view(-1)[:3].zero_(), last(x + z) * z)[1],
            "a number": lambda z: (x.sum() + z.sum()) * last(x + z),
            "in a tuple": lambda z: torch.cat((z, x)).sum() * last(x + z),
            "into a sum by name": lambda z: torch.add(input=x, other=z) if z.device.type == "cpu" else last(x + z),
            "into a sum of another width": lambda z: (x[:, :3] + x[:, :3], last(x + z))[1],
        }
        with torch.no_grad():
            for words, use in others.items():
                expected = use(first(y))
                with fused_norms(layer):
                    sums = FusedSums()
                    with sums:
                        last(x + first(y))
                    assert sums.norms[0][1].module is first
                    for _ in range(2):
                        with sums:
                            assert torch.equal(use(first(y)), expected), words

    @pytest.mark.parametrize(
        "compute",
        [
            lambda x, y, first, last: last(x + (z := first(y))) * z,
            lambda x, y, first, last: (z := first(y)).sum() + last(x + z),
            lambda x, y, first, last: last((z := first(y)) + z),
            lambda x, y, first, last: last(x + first(y)) + first(x),
            lambda x, y, first, last: x + first(y),
            lambda x, y, first, last: (z := first(y), y.mul_(2), last(x + z))[2],
        ],
        ids=["after", "before", "twice", "another call", "nothing follows", "its input is written"],
    )
    def test_an_output_with_other_uses_than_one_sum_is_not_deferred(self, compute):
        layer = toy_model("gemma3").model.layers[0]
        first, last = layer.post_attention_layernorm, layer.pre_feedforward_layernorm
        x, y = torch.randn(2, 1, first.weight.shape[0])
        with torch.no_grad():
            expected = compute(x, y.clone(), first, last)
            with fused_norms(layer):
                sums = FusedSums()
                for _ in range(2):
                    with sums:
                        assert torch.equal(compute(x, y.clone(), first, last), expected)
                assert not any(before for _, before in sums.norms)

    def test_a_deferred_output_whose_input_is_written_raises(self):
        layer = toy_model("gemma3").model.layers[0]
        first, last, sums = layer.post_attention_layernorm, layer.pre_feedforward_layernorm, FusedSums()
        x, y = torch.randn(2, 1, first.weight.shape[0])
        with torch.no_grad(), fused_norms(layer):
            with sums:
                last(x + first(y))
            with sums, pytest.raises(RuntimeError, match="written before its output was used"):
                (z := first(y), y.mul_(2), last(x + z))

    def test_another_thread_does_not_see_them(self):
        layer = toy_model("gemma3").model.layers[0]
        norm, sums, got = layer.post_attention_layernorm, FusedSums(), []
        x = torch.randn(1, norm.weight.shape[0])
        with torch.no_grad():
            expected = norm(x)
            with fused_norms(layer), sums:
                thread = Thread(target=lambda: got.append(norm(x)))
                thread.start()
                thread.join()
                assert sums.first_pass.outputs == {}
        assert torch.equal(got[0], expected)

    def test_in_inference_mode_a_write_cannot_be_seen(self):
        layer = toy_model("gemma3").model.layers[0]
        first, last, sums = layer.post_attention_layernorm, layer.pre_feedforward_layernorm, FusedSums()
        with torch.inference_mode(), fused_norms(layer):
            x, y = torch.randn(2, 1, first.weight.shape[0])
            expected = last(x + first(y))
            for _ in range(2):
                own = y.clone()
                with sums:
                    assert torch.equal((z := first(own), own.mul_(2), last(x + z))[2], expected)

    @pytest.mark.parametrize("name", ["gemma3", "llama"])
    def test_what_the_user_compiles_is_left_to_the_compiler(self, name):
        model, sums = toy_model(name), FusedSums()
        with torch.no_grad():
            expected = model(TOKEN).logits
            for layer in model.model.layers:
                layer.compile(backend="eager")
            with fused_norms(model):
                for _ in range(2):
                    with sums:
                        assert torch.equal(model(TOKEN).logits, expected)
        torch.compiler.reset()

    def test_a_sum_of_another_width_and_one_that_is_written_in_between(self):
        model = toy_model("llama")
        norm = model.model.norm
        dim = norm.weight.shape[0]
        x, y, narrow = torch.randn(1, dim), torch.randn(1, dim), torch.randn(1, 3)
        with torch.no_grad():
            expected = norm(2 * (x + y))
            with fused_norms(model):
                sums = FusedSums()
                with sums:
                    norm(x + y)
                with sums:
                    assert torch.equal(narrow + narrow, 2 * narrow)
                with sums:
                    assert torch.equal(norm((x + y).mul_(2)), expected)


class TestTrials:
    def test_a_norm_that_takes_other_arguments_is_left_alone(self):
        class GatedRMSNorm(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

            def forward(self, x, gate):
                return x * gate

        assert norm_style(GatedRMSNorm()) is None
        assert norm_style(torch.nn.RMSNorm(8)) is None  # its eps is None

    def test_two_settings_of_one_class_are_two_kinds(self):
        class OffsetRMSNorm(torch.nn.Module):
            def __init__(self, offset):
                super().__init__()
                self.weight, self.eps, self.offset = torch.nn.Parameter(torch.randn(8)), 1e-6, offset

            def forward(self, x):
                return rms_norm_plain(x, self.weight, self.eps, NormStyle(self.offset, False))

        model, x = torch.nn.Sequential(OffsetRMSNorm(0.0), OffsetRMSNorm(1.0)), torch.randn(2, 8)
        with torch.no_grad():
            expected = model(x)
            with fused_norms(model) as norms:
                assert len(norms) == 2
                torch.testing.assert_close(model(x), expected)

    def test_another_default_device(self):
        model = toy_model("llama")
        with torch.device("meta"):
            assert norm_style(model.model.norm) == LLAMA
            assert mlp_activation(model.model.layers[0].mlp) == "silu"
            with fused_rotary(model) as files:
                assert len(files) == 1


def test_angles_that_are_no_rows_of_a_table_are_computed_as_before():
    class OddRotaryEmbedding(torch.nn.Module):
        """Depends on how many positions it is given."""

        def forward(self, x, position_ids):
            angle = position_ids[..., None] * torch.ones(4) / position_ids.shape[1]
            return angle.cos(), angle.sin()

    model, positions = OddRotaryEmbedding(), torch.tensor([[0]])  # where all angles are alike
    expected = model(None, positions)
    with angles_from_tables(model, 16) as tables:
        assert torch.equal(model(None, positions)[0], expected[0])
        assert tables == []


class TestReplacing:
    def test_one_inside_the_other(self):
        module = torch.nn.Linear(2, 2)
        with replaced("forward", {module: lambda x: "outer"}):
            with replaced("forward", {module: lambda x: "inner"}):
                assert module(0) == "inner"
            assert module(0) == "outer"
        assert "forward" not in module.__dict__

    def test_a_value_that_another_assigned_inside_stays(self):
        module = torch.nn.Linear(2, 2)
        with replaced("forward", {module: lambda x: "ours"}):
            module.forward = lambda x: "theirs"
        assert module(0) == "theirs"


class TestSingleLinears:
    def test_each_is_one_operation_and_can_still_be_grouped(self, monkeypatch):
        model, ids, calls = toy_model("llama"), torch.tensor([[5, 6, 7]]), []
        expected, own = model(ids).logits, linear.linears

        def note(x, weights, biases):
            calls.append(len(weights))
            return own(x, weights, biases)

        monkeypatch.setattr(linear, "linears", note)
        with single_linears(model) as layers:
            assert torch.equal(model(ids).logits, expected)
            assert calls == [1] * len(layers) == [1] * 15  # seven in each of two layers, and the head
            calls.clear()
            with fused_linears(model, run=lambda: model(ids)):
                calls.clear()
                assert torch.equal(model(ids).logits, expected)
            assert calls == [3, 1, 1] * 2 + [1]  # q, k, v in one; gate and up are another operation's
            calls.clear()
            model(ids)
            assert calls == [1] * 15
        assert not any("forward" in module.__dict__ for module in model.modules())

    def test_models_that_share_a_layer(self):
        one, other = toy_model("llama"), toy_model("llama")
        other.lm_head = one.lm_head
        first, second = single_linears(one), single_linears(other)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        for model in (one, other):
            assert not any("forward" in module.__dict__ for module in model.modules())

    def test_the_input_may_be_named(self):
        module = torch.nn.Linear(2, 3)
        with single_linears(module):
            assert module(input=torch.ones(1, 2)).shape == (1, 3)


def test_an_mlp_with_a_new_hook_is_not_fused():
    model, ids, calls = toy_model("llama"), torch.tensor([[5, 6, 7]]), []
    with gated_mlps(model):
        handle = model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *args: calls.append(args))
        model(ids)
        handle.remove()
    assert len(calls) == 1
