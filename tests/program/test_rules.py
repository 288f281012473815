"""Each rule: a list that it rewrites, with its bits or within rounding, and lists that it leaves
alone.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.nn import Conv1d, Parameter
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from hf_static_kv import StaticContiguousCache
from hf_static_kv.exactness.exact import exact
from hf_static_kv.kernels.decode_attention import attend
from hf_static_kv.kernels.linear import linears
from hf_static_kv.kernels.norm import STYLES, Norm, norm
from hf_static_kv.kernels.positions import write_tokens
from hf_static_kv.kernels.rotary import rotary
from hf_static_kv.patching import attention_implementation
from hf_static_kv.program import step as step_module
from hf_static_kv.program.activations import named_activations
from hf_static_kv.program.record import Recorder
from hf_static_kv.program.rules import RULES, rewrite, run_linear
from hf_static_kv.program.step import DecodeStep
from tests.conftest import ARCHITECTURES, PROMPT, toy_model

OWN_ATTENTION = {
    name: "eager" if name in ("gemma2", "gpt_oss") else "sdpa" for name in ARCHITECTURES
}


def weight(*shape, seed=0):
    return Parameter(
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 3, requires_grad=False
    )


W, U, DOWN, BIAS, GAIN = weight(12, 8), weight(12, 8, seed=1), weight(8, 12), weight(12), weight(8)
SQUARE, HEADS, OTHER_W = weight(8, 8), [weight(n, 8) for n in (8, 4, 4, 6)], weight(12, 8, seed=5)
RMS, OTHER = Norm(GAIN, 1e-6, STYLES[0]), Norm(weight(8, seed=2), 1e-6, STYLES[2])


def rewritten(function, *rules, rows=1, dim=8, dtype=torch.float32):
    """The names of the calls after these rules, and the largest difference that they make."""
    x = torch.randn(1, rows, dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.no_grad(), Recorder() as recorder:
        output = function(x)
    program = recorder.program(output)
    for name in rules:
        RULES[name].apply(program)
    x.mul_(-2)
    with torch.no_grad():
        difference = (program.compiled()() - function(x)).abs().max()
    return [call.name for call in program], float(difference)


def layers(program):
    return [call.args[1] for call in program if call.func is run_linear]


class TestLinearLayers:
    def test_few_tokens(self):
        assert rewritten(lambda x: F.linear(x, W, BIAS), "few_tokens") == (["run_linear"], 0)

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: F.linear(x, W * 2),  # computed: perhaps an adapter
            lambda x: F.linear(x.double(), W.double()),
            # A class of its own, as a quantised weight has.
            lambda x: F.linear(x, torch.nn.parameter.Buffer(W.data)),
            lambda x: F.linear(x.expand(1, 65, 8), W),  # many tokens
        ],
    )
    def test_other_linear_layers_are_left_alone(self, function):
        assert "run_linear" not in rewritten(function, "few_tokens")[0]

    @pytest.mark.parametrize("rows", [1, 3])
    def test_conv1d(self, rows):
        layer = Conv1D(12, 8)
        assert rewritten(layer, "conv1d", rows=rows) == (["run_linear"], pytest.approx(0, abs=1e-6))

    def test_another_convolution_is_left_alone(self):
        layer = Conv1d(8, 3, 1)
        names, _ = rewritten(lambda x: layer(x.transpose(1, 2)), "conv1d", "few_tokens")
        assert "run_linear" not in names

    @pytest.mark.parametrize(
        "activation", [F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.relu]
    )
    @pytest.mark.parametrize("is_first", [False, True])
    def test_gate(self, activation, is_first):
        def function(x):
            g, u = activation(F.linear(x, W)), F.linear(x, U)
            return g * u if is_first else u * g

        assert rewritten(function, "few_tokens", "gate") == (["run_linear"], 0)

    def test_the_halves_of_one_weight_are_a_gate(self):
        def function(x):
            gate, up = F.linear(x, W).chunk(2, dim=-1)
            return up * F.silu(gate)

        assert rewritten(function, "few_tokens", "gate") == (
            ["run_linear"],
            pytest.approx(0, abs=1e-6),
        )

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: F.silu(F.linear(x, W, BIAS)) * F.linear(x, U),
            lambda x: F.silu(F.linear(x, W)) * F.linear(x + 1, U),
            lambda x: (
                F.silu(F.linear(x, W)) * F.linear(x, U[:, :]) * 2
                if False
                else F.sigmoid(F.linear(x, W)) * x.sum()
            ),
            lambda x: (y := F.linear(x, W)) * F.silu(y),
            lambda x: (y := F.linear(x, W), F.silu(y) * F.linear(x, U) + y)[1],
        ],
    )
    def test_what_is_no_gate_is_left_alone(self, function):
        names, difference = rewritten(function, "few_tokens", "gate")
        assert difference == 0
        assert "mul" in names

    def test_activation(self):
        names, difference = rewritten(
            lambda x: F.relu(F.linear(x, W, BIAS)), "few_tokens", "activation"
        )
        assert (names, difference) == (["run_linear"], 0)
        assert (
            len(rewritten(lambda x: F.relu(F.linear(x, W)), "few_tokens", "activation", rows=2)[0])
            == 2
        )

    @pytest.mark.parametrize(
        "name", ["gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "gelu", "relu"]
    )
    def test_an_activation_of_transformers(self, name):
        module = ACT2FN[name]
        with named_activations(module):
            names, difference = rewritten(
                lambda x: module(F.linear(x, W)), "few_tokens", "activation"
            )
        assert (names, difference) == (["run_linear"], pytest.approx(0, abs=1e-6))

    def test_another_activation_is_left_alone(self):
        module = ACT2FN["quick_gelu"]
        with named_activations(module):
            assert (
                len(rewritten(lambda x: module(F.linear(x, W)), "few_tokens", "activation")[0]) > 1
            )

    def test_residual(self):
        assert rewritten(
            lambda x: x + F.linear(F.linear(x, W), DOWN), "few_tokens", "residual"
        ) == (
            ["run_linear"] * 2,
            0,
        )

    @pytest.mark.parametrize(
        ("size", "expected"),
        [(100, ["run_linear", "run_linear"]), (0, ["run_linear", "add_norm", "run_linear"])],
    )
    def test_a_residual_whose_norm_has_a_launch(self, size, expected, monkeypatch):
        monkeypatch.setattr("hf_static_kv.program.rules._MAX_NORMED", size)
        rules = "few_tokens", "residual", "norm_of_sum", "norm_before"

        def function(x):
            h = x + F.linear(x, SQUARE)
            return h + F.linear(norm(h, RMS), SQUARE)

        assert rewritten(function, *rules)[0] == expected

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x[..., :1] + F.linear(F.linear(x, W), DOWN),  # of another shape
            # Which goes elsewhere, too.
            lambda x: (y := F.linear(F.linear(x, W), DOWN), (x + y) * y)[1],
            lambda x: torch.add(x, F.linear(F.linear(x, W), DOWN), alpha=2),
        ],
    )
    def test_other_sums_are_left_alone(self, function):
        names, difference = rewritten(function, "few_tokens", "residual")
        assert "add" in names
        assert difference == 0

    def test_a_residual_that_is_written_in_between(self):
        def function(x):
            h = x * 2
            y = F.linear(x, SQUARE)
            h.add_(1)
            return h + y

        assert rewritten(function, "few_tokens", "residual") == (
            ["mul", "run_linear", "add_", "add"],
            0,
        )

    @pytest.mark.parametrize("rows", [1, 3])
    def test_shared_input(self, rows):
        def function(x):
            return torch.cat([F.linear(x, head) for head in HEADS], dim=-1)

        names, difference = rewritten(function, "few_tokens", "shared_input", rows=rows)
        # Three, and the fourth.
        assert (names, difference) == (
            ["run_linear", "run_linear", "cat"],
            0,
        )

    def test_inputs_that_only_look_the_same(self):
        def function(x):
            return F.linear(x, W) + F.linear(x.clone(), U) + F.linear(x, OTHER_W, BIAS)

        assert rewritten(function, "few_tokens", "shared_input")[0].count("run_linear") == 3


class TestNorms:
    def test_layer_norm(self):
        function = lambda x: F.layer_norm(x, (8,), GAIN, GAIN)  # noqa: E731
        assert rewritten(function, "layer_norm") == (["norm"], 0)
        # Without a weight.
        assert rewritten(lambda x: F.layer_norm(x, (8,)), "layer_norm")[0] == ["layer_norm"]
        two = GAIN[None]
        assert rewritten(lambda x: F.layer_norm(x, (1, 8), two), "layer_norm")[0] == ["layer_norm"]

    def test_norm_of_sum(self):
        def function(x):
            h = x + x * 2
            return norm(h, RMS) + h

        assert rewritten(function, "norm_of_sum") == (["mul", "add_norm", "add"], 0)

    @pytest.mark.parametrize("is_first", [False, True])
    def test_a_norm_before_the_sum_as_well(self, is_first):
        def function(x):
            y = norm(x * 2, OTHER)
            h = y + x if is_first else x + y
            return norm(h, RMS) + h

        assert rewritten(function, "norm_of_sum") == (["mul", "add_norm", "add"], 0)

    def test_a_norm_before_the_sum_that_goes_elsewhere(self):
        def function(x):
            y = norm(x * 2, OTHER)
            return norm(x + y, RMS) + y

        assert rewritten(function, "norm_of_sum") == (["mul", "norm", "add_norm", "add"], 0)

    @pytest.mark.parametrize(
        ("rows", "expected"), [(17, ["linear_add_norm"]), (16, ["run_linear", "add_norm"])]
    )
    @pytest.mark.parametrize("is_first", [False, True])
    def test_a_linear_layer_whose_parts_a_norm_adds(self, rows, expected, is_first):
        def function(x):
            y = F.linear(x, SQUARE)
            h = y + x if is_first else x + y
            return norm(h, RMS) + h

        rules = "few_tokens", "norm_of_sum", "sum_of_parts"
        names, difference = rewritten(function, *rules, rows=rows)
        assert (names, difference) == ([*expected, "add"], 0)

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: norm(x + F.linear(x, SQUARE, GAIN), RMS),
            lambda x: (y := F.linear(x, SQUARE), norm(x + y, RMS) * y)[1],
            lambda x: norm(x + F.silu(F.linear(x, SQUARE)), RMS),
        ],
    )
    def test_other_linear_layers_have_no_parts(self, function):
        rules = "few_tokens", "activation", "norm_of_sum", "sum_of_parts"
        names, difference = rewritten(function, *rules, rows=17)
        assert "linear_add_norm" not in names
        assert difference == 0

    def test_parts_of_a_linear_layer_with_a_norm_before_the_sum(self):
        def function(x):
            h = x + norm(F.linear(x, SQUARE), OTHER)
            return norm(h, RMS) + h

        rules = "few_tokens", "norm_of_sum", "sum_of_parts"
        assert rewritten(function, *rules, rows=17) == (["linear_add_norm", "add"], 0)

    def test_norm_before(self):
        def function(x):
            y = norm(x, RMS)
            return F.silu(F.linear(y, W)) * F.linear(y, U)

        rules = "few_tokens", "gate", "norm_before"
        assert rewritten(function, *rules) == (["run_linear"], 0)
        assert rewritten(function, *rules, rows=2)[0] == ["norm", "run_linear"]

    @pytest.mark.parametrize(
        ("rows", "dtype", "is_fused"),
        [
            (8, torch.bfloat16, True),
            (9, torch.bfloat16, False),
            (8, torch.float16, False),  # a product with the norm's weight may overflow
            (8, torch.float32, False),
        ],
        ids=str,
    )
    def test_few_tokens_have_norms_and_sums_inside(self, rows, dtype, is_fused):
        """Two layers: projections with a shared input, a gate, and sums that are read later."""
        square, w, u, down = (one.to(dtype) for one in (SQUARE, W, U, DOWN))
        rms = RMS._replace(weight=GAIN.to(dtype))

        def function(x):
            h = x
            for _ in range(2):
                y = norm(h, rms)
                h = h + F.linear(F.linear(y, square) * F.linear(y, square), square)
                y = norm(h, rms)
                h = h + F.linear(F.silu(F.linear(y, w)) * F.linear(y, u), down)
            return F.linear(norm(h, rms), w)

        rules = "few_tokens", "gate", "shared_input", "residual", "norm_of_sum", "norm_before"
        names, difference = rewritten(function, *rules, rows=rows, dtype=dtype)
        layer = ["run_linear", "mul"] + ["run_linear"] * 3
        with_norms = ["run_linear", "mul"] + ["run_linear", "add_norm"] + ["run_linear"] * 2
        assert difference == 0
        if is_fused:
            assert names == [*layer, *layer, "run_linear"]
        else:
            assert names == ["norm", *[*with_norms, "add_norm"] * 2, "run_linear"]

    def test_transposed_weights_of_few_tokens_stay_apart(self):
        gain, square = GAIN.bfloat16(), SQUARE.bfloat16().t()
        assert not square.is_contiguous()
        names, _ = rewritten(
            lambda x: x + F.linear(norm(x, RMS._replace(weight=gain)), square),
            "few_tokens", "residual", "norm_before", rows=2, dtype=torch.bfloat16,
        )  # fmt: skip
        assert names == ["norm", "run_linear", "add"]

    def test_a_large_weight_of_few_tokens_keeps_the_norm_apart(self, monkeypatch):
        monkeypatch.setattr("hf_static_kv.program.rules._MAX_NORMED_OF_SEVERAL", 12 * 8 - 1)
        gain, w, square = GAIN.bfloat16(), W.bfloat16(), SQUARE.bfloat16()

        def function(x):
            h = x + F.linear(x, square)
            return F.linear(norm(h, RMS._replace(weight=gain)), w)

        rules = "few_tokens", "residual", "norm_of_sum", "norm_before"
        names, difference = rewritten(function, *rules, rows=2, dtype=torch.bfloat16)
        assert (names, difference) == (["run_linear", "add_norm", "run_linear"], 0)

    def test_a_norm_that_goes_elsewhere_stays(self):
        def function(x):
            y = norm(x, RMS)
            return F.linear(y, SQUARE) + y

        assert rewritten(function, "few_tokens", "norm_before")[0] == ["norm", "run_linear", "add"]

    def test_large_weights_keep_a_norm_of_its_own(self, monkeypatch):
        monkeypatch.setattr("hf_static_kv.program.rules._MAX_NORMED", 12 * 8 - 1)
        assert rewritten(lambda x: F.linear(norm(x, RMS), W), "few_tokens", "norm_before")[0] == [
            "norm",
            "run_linear",
        ]


class TestRotations:
    def states(self, x):
        heads = x.view(1, 1, 4, 2)
        return (
            heads[:, :, :2].transpose(1, 2),
            heads[:, :, 2:3].transpose(1, 2),
            heads[:, :, 3:].transpose(1, 2),
        )

    @pytest.mark.parametrize("norms", [0, 1, 2])
    def test_write_rotated(self, norms):
        keys, values = torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2)
        slots = torch.tensor([[3]])
        gain, angles = Norm(weight(2), 1e-6, STYLES[1]), weight(1, 1, 2)

        def function(x):
            query, key, value = self.states(x)
            query = norm(query, gain) if norms > 0 else query
            key = norm(key, gain) if norms > 1 else key
            query, key = rotary(query, key, angles, angles)
            write_tokens(keys, values, key, value, slots)
            return query * 1

        names, difference = rewritten(function, "write_rotated")
        assert names[-2:] == ["rotate_and_write", "mul"]
        assert "norm" not in names
        assert difference == 0

    def test_a_key_that_goes_elsewhere(self):
        keys, values = torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2)
        slots = torch.tensor([[3]])
        angles = weight(1, 1, 2)

        def function(x):
            query, key, value = self.states(x)
            query, key = rotary(query, key, angles, angles)
            write_tokens(keys, values, key, value, slots)
            return query * key

        assert "rotate_and_write" not in rewritten(function, "write_rotated")[0]

    @pytest.mark.parametrize("fills", [False, True])
    def test_attend_rotated(self, fills, monkeypatch):
        monkeypatch.setattr("hf_static_kv.program.rules.is_joined", lambda *args: fills)
        keys, values, others = (torch.zeros(1, 1, 5, 2) for _ in range(3))
        slots, spans = torch.tensor([[3]]), torch.tensor([[[0, 0, 4]]])
        angles = weight(1, 1, 2)

        def function(x, own=keys, in_order=False):
            query, key, value = self.states(x)
            query, key = rotary(query, key, angles, angles)
            write_tokens(keys, values, key, value, slots)
            return attend(query, own, values, spans, 0.7, 5, None, None, in_order) * 1

        rules = "write_rotated", "attend_rotated"
        apart = ["rotate_and_write", "attend.default", "mul"]
        names, difference = rewritten(function, *rules)
        assert names[-2:] == ["rotate_and_attend", "mul"] if fills else names[-3:] == apart
        assert difference == 0
        # Another storage, and attention in the order of `exact`.
        for other in (lambda x: function(x, others), lambda x: function(x, keys, True)):
            assert rewritten(other, *rules)[0][-3:] == apart

    def test_attention_does_not_move_across_a_write(self, monkeypatch):
        monkeypatch.setattr("hf_static_kv.program.rules.is_joined", lambda *args: True)
        keys, values = torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2)
        slots, spans = torch.tensor([[3]]), torch.tensor([[[0, 0, 4]]])

        def function(x):
            query, key, value = self.states(x)
            query, key = rotary(query, key, weight(1, 1, 2), weight(1, 1, 2))
            write_tokens(keys, values, key, value, slots)
            values.add_(1)
            return attend(query, keys, values, spans, 0.7, 5, None, None) * 1

        assert "rotate_and_attend" not in rewritten(function, "write_rotated", "attend_rotated")[0]

    def test_transpose_first(self):
        gain = Norm(weight(2), 1e-6, STYLES[1])
        names, difference = rewritten(
            lambda x: norm(x.view(1, 1, 4, 2), gain).transpose(1, 2) * 1, "transpose_first"
        )
        assert (names, difference) == (["view", "transpose", "norm", "mul"], 0)
        wide = Norm(weight(4), 1e-6, STYLES[0])
        names, _ = rewritten(
            lambda x: norm(x.view(1, 2, 1, 4), wide).transpose(2, 3) * 1, "transpose_first"
        )
        assert names == ["view", "norm", "transpose", "mul"]

    def test_a_transpose_of_the_last_dim_stays_after_the_norm(self):
        gain = Norm(weight(8), 1e-6, STYLES[1])
        names, difference = rewritten(
            lambda x: norm(x, gain).transpose(1, 2) * 1, "transpose_first"
        )
        assert (names, difference) == (["norm", "transpose", "mul"], 0)

    def test_a_norm_does_not_move_across_a_write(self):
        gain = Norm(weight(2), 1e-6, STYLES[1])

        def function(x):
            heads = x.view(1, 1, 4, 2) * 2
            normed = norm(heads, gain)
            heads.add_(1)
            return normed.transpose(1, 2) * 1

        names, difference = rewritten(function, "transpose_first")
        assert (names[-4:], difference) == (["norm", "add_", "transpose", "mul"], 0)


def test_rules_are_left_out_by_name():
    x = torch.ones(1, 8)
    with torch.no_grad(), Recorder() as recorder:
        output = F.relu(F.linear(x, W))
    program = recorder.program(output)
    rewrite(program, without=list(RULES))
    assert [call.name for call in program] == ["linear", "relu"]
    rewrite(program, keeps_bits=True)
    # Neither rule keeps the bits of a GPU.
    assert [call.name for call in program] == [
        "linear",
        "relu",
    ]
    rewrite(program, without=["activation"])
    assert [call.name for call in program] == ["run_linear", "relu"]


# --- whole models

# Calls in the lists of the toys: those that launch something, without views.
COUNTS = {
    # 2 layers: q, k, v; rotation and write; attention; o and sum; gate and up; down and sum; the
    # embedding, its angles, the head. Norms are part of the linear layers.
    "llama": {"run_linear": 9, "rotate_and_write": 2, "attend.default": 2, "embedding": 1, "lookup": 1},
    "qwen3": {"run_linear": 9, "rotate_and_write": 2, "attend.default": 2, "embedding": 1, "lookup": 1},
    # 3 layers: two sums with a norm before and after each; the first norm is part of q, k, v.
    "gemma3": {
        "run_linear": 13, "rotate_and_write": 3, "attend.default": 3, "add_norm": 6, "embedding": 1, "mul": 1,
        "lookup": 2,
    },
    "gpt2": {"run_linear": 9, "write_tokens.default": 2, "attend.default": 2, "add_norm": 5, "embedding": 2},
    "phi3": {"run_linear": 9, "rotate_and_write": 2, "attend.default": 2, "embedding": 1, "lookup": 1},
    "qwen3_moe": {
        "run_linear": 7, "rotate_and_write": 2, "attend.default": 2, "add_norm": 4, "route": 2, "experts": 2,
        "embedding": 1, "lookup": 1,
    },
}  # fmt: skip
VIEWS = {"view", "transpose", "reshape", "__getitem__", "split"}


def step_of(model, batch_size=1, **how):
    """A step at the end of a prompt, and its list."""
    cache, programs = StaticContiguousCache.from_model(model, 64, batch_size), []
    prompt, start = PROMPT.expand(batch_size, -1), torch.zeros(batch_size, dtype=torch.int64)
    own = step_module.rewrite

    def spy(program, *args, **kwargs):
        own(program, *args, **kwargs)
        programs.append(program)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "rewrite", spy)
        model(prompt, past_key_values=cache)
        step = DecodeStep(model, cache, batch_size)
        step.set_position(PROMPT.shape[1], start)
        expected = step.run(torch.full((batch_size,), 7))  # the model itself
        step.record(PROMPT.shape[1], start, **how)
        step.set_position(PROMPT.shape[1], start)
        return step.run(torch.full((batch_size,), 7)), expected, programs[0]


@pytest.mark.parametrize("batch_size", [1, 2, 20])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_list_of_a_model_gives_its_logits(name, batch_size):
    model = toy_model(name, OWN_ATTENTION[name])
    with attention_implementation(model, "static_contiguous"):
        got, expected, program = step_of(model, batch_size)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert (
        not any(call.name in ("norm", "linear") for call in program)
        or batch_size > 1
        or name not in ("llama", "qwen3")
    )


@pytest.mark.parametrize("name", COUNTS)
def test_what_the_rules_leave(name):
    model = toy_model(name, OWN_ATTENTION[name])
    with attention_implementation(model, "static_contiguous"):
        names = [call.name for call in step_of(model)[2]]
    assert {name: names.count(name) for name in names if name not in VIEWS} == COUNTS[name]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3"])
def test_few_rows_leave_what_one_leaves(name):
    """In bfloat16: norms and sums are inside their linear layers."""
    model = toy_model(name, OWN_ATTENTION[name]).to(torch.bfloat16)
    with attention_implementation(model, "static_contiguous"):
        got, expected, program = step_of(model, 2)
    names = [call.name for call in program]
    assert {name: names.count(name) for name in names if name not in VIEWS} == COUNTS[name]
    assert torch.equal(got, expected)  # on a CPU they are the operations of the model


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_inside_exact_the_list_has_the_bits_of_the_model(name):
    model = toy_model(name, "eager").to(torch.bfloat16)
    with exact(model):
        got, expected, program = step_of(model, 2, is_exact=True)
    assert torch.equal(got, expected)
    names = {call.name for call in program}
    assert {"rotate_and_write", "add_norm", "run_linear"} <= names
    assert all(layer.norm is layer.residual is None for layer in layers(program))


def test_linears_are_custom_operations_inside_exact():
    x = torch.ones(1, 1, 8)
    with torch.no_grad(), Recorder() as recorder:
        output = linears(x, [W], []) + linears(x, [U], [])
    program = recorder.program(output)
    rewrite(program, keeps_bits=True)
    assert [call.name for call in program] == ["run_linear", "add"]
