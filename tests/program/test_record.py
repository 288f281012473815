"""A recorded pass: the list gives what the function gives, for other inputs too, and `fuse` takes
only what is safe.
"""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from hf_static_kv.kernels.norm import STYLES, Norm, norm
from hf_static_kv.program.record import Recorder, leaves, map_leaves
from hf_static_kv.program.rules import rewrite
from tests.conftest import given, settings, st


def record(function, *inputs):
    with torch.no_grad(), Recorder() as recorder:
        output = function(*inputs)
    return recorder.program(output)


def names(program):
    return [call.name for call in program]


W = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class TestRecording:
    def test_the_list_runs_with_what_is_in_the_inputs_now(self):
        x = torch.ones(2, 4)
        run = record(lambda x: F.linear(x, W).relu() + x, x).compiled()
        x.copy_(torch.arange(8.0).view(2, 4))
        assert torch.equal(run(), F.linear(x, W).relu() + x)
        assert torch.equal(run(), F.linear(x, W).relu() + x)  # and again

    def test_operations_in_place_and_views(self):
        def function(x):
            y = x.clone()
            y[:, :2] += 1
            y.view(-1)[0] = 7
            first, second = y.chunk(2, dim=-1)
            return torch.cat([second, first.mul_(2)], dim=-1)

        x = torch.randn(2, 4)
        run = record(function, x).compiled()
        x.normal_()
        assert torch.equal(run(), function(x))

    def test_what_is_made_of_numbers_is_made_once(self):
        def function(x):
            number = torch.tensor(0.25)
            return x * number.sqrt() if number > 0 else x

        x = torch.randn(3)
        program = record(function, x)
        assert names(program) == ["mul"]
        x.normal_()
        assert torch.equal(program.compiled()(), function(x))

    def test_what_is_written_into_numbers_cannot_be_recorded(self):
        with pytest.raises(
            RuntimeError, match=r"writes into a tensor that it has made of numbers \(add_\)"
        ):
            record(lambda x: torch.tensor([1.0, 2.0]).view(2, 1).add_(x), torch.ones(1))

    def test_named_tuples_dicts_and_several_results(self):
        def function(x):
            values, indices = x.topk(2)
            return (
                torch.stack([values, x.sort(dim=-1, descending=True).values[..., :2]]).sum(dim=0)
                + indices
            )

        x = torch.randn(3, 5)
        run = record(function, x).compiled()
        x.normal_()
        assert torch.equal(run(), function(x))

    def test_what_does_nothing_is_not_written_down(self):
        program = record(
            lambda x: F.dropout(x.to(torch.float32).contiguous().view(2, 4), training=False) * 2,
            torch.ones(2, 4),
        )
        assert names(program) == ["mul"]

    def test_shapes_are_constants(self):
        assert names(
            record(
                lambda x: x.view(x.shape[1], -1) if x.dtype == torch.float32 else x,
                torch.ones(2, 4),
            )
        ) == ["view"]

    @pytest.mark.parametrize(
        "read",
        [
            lambda x: x if x.sum() > 0 else -x,
            lambda x: x * x.max().item(),
            lambda x: x * float(x.max()),
            lambda x: x[x > 0],
            lambda x: x.sum().tolist() * x,
            lambda x: torch.masked_select(x, x > 0),
            lambda x: x[: int(x[0, 0])],
            lambda x: x[:, : x[0, 0].long()],
            lambda x: x[torch.where(x > 0)],
            lambda x: x * len(torch.argwhere(x)),
            lambda x: x * len(torch.bincount(x.long().flatten())),
            lambda x: x if torch.zeros(2, 4).add_(x).sum() > 0 else -x,
            lambda x: x if (zeros := torch.zeros(2, 4), zeros[0].add_(x[0]))[0].sum() > 0 else -x,
        ],
    )
    def test_a_pass_that_asks_for_a_value_is_refused(self, read):
        with pytest.raises(RuntimeError, match="depends on the values of a tensor"):
            record(read, torch.ones(2, 4))

    def test_a_constant_may_be_asked_for(self):
        program = record(
            lambda x: x * torch.arange(3).max().item() if torch.ones(2).all() else x,
            torch.ones(2, 4),
        )
        assert torch.equal(program.compiled()(), torch.full((2, 4), 2.0))

    def test_a_constant_may_bound_a_slice(self):
        program = record(
            lambda x: x[:, : torch.tensor(3)] + x[:, torch.arange(2).sum() :], torch.ones(2, 4)
        )
        assert torch.equal(program.compiled()(), torch.full((2, 3), 2.0))

    def test_a_wrapper_without_memory(self):
        weight = TwoTensor(W, W)
        x = torch.randn(2, 4)
        run = record(lambda x: x @ weight.t(), x).compiled()
        x.normal_()
        assert torch.equal(run().a, x @ W.t())

    def test_an_output_that_is_an_input(self):
        with pytest.raises(RuntimeError, match="by no operation"):
            record(lambda x: x.view(2, 4), torch.ones(2, 4))

    def test_values_are_dropped_after_their_last_use(self):
        kept = []

        def note(x):
            kept.append(x)
            return x + 1

        program = record(lambda x: torch.relu(x * 2) + 1, torch.ones(2))
        for call in program:
            own = call.func
            call.func = lambda *args, own=own: note(own(*args))
        program.compiled()()
        references = [weakref.ref(tensor) for tensor in kept]
        kept.clear()
        assert all(reference() is None for reference in references)

    def test_a_call_can_be_read(self):
        program = record(lambda x: F.linear(x, W) + 1, torch.ones(2, 4))
        assert [str(call) for call in program] == [
            "%1 = linear(Tensor[2, 4], Tensor[4, 4])",
            "%2 = add(%1, 1)",
        ]


class TestFusing:
    """`fuse` puts `triple(x)` for two calls, where that is safe."""

    def fuse(self, function, *which, results=-1, arguments=None):
        program = record(function, torch.ones(2, 4))
        calls = list(program)
        parts = [calls[i] for i in which]
        arguments = arguments(calls) if arguments else parts[0].args[:1]
        done = program.fuse(
            parts, lambda *args: args[0], *arguments, results=parts[results].results
        )
        return done, names(program)

    def test_two_calls_become_one(self):
        assert self.fuse(lambda x: (x * 2 + 1).relu(), 0, 1) == (True, ["<lambda>", "relu"])

    def test_not_where_the_value_between_goes_elsewhere(self):
        def function(x):
            y = x * 2
            return (y + 1) * y

        assert self.fuse(function, 0, 1) == (False, ["mul", "add", "mul"])

    def test_not_where_the_value_between_is_the_output(self):
        def function(x):
            y = x * 2
            y + 1
            return y

        assert self.fuse(function, 0, 1) == (False, ["mul", "add"])

    def test_not_where_someone_writes_in_between(self):
        def function(x):
            y = x * 2
            x.add_(1)
            return y + 1

        assert self.fuse(function, 0, 2) == (False, ["mul", "add_", "add"])

    def test_not_where_an_argument_comes_later(self):
        def function(x):
            y = x * 2
            z = y.exp()  # needs y before w is there
            w = z.relu()
            return y + w

        program = record(function, torch.ones(2, 4))
        first, _, third, last = program
        both = [*first.results, *last.results]
        assert not program.fuse([first, last], max, third.results[0], results=both)
        assert names(program) == ["mul", "exp", "relu", "add"]

    def test_it_stands_before_the_first_use_of_a_result(self):
        def function(x):
            q = F.linear(x, W)
            used = q.exp()
            k = F.linear(x, W)
            return used + k

        program = record(function, torch.ones(2, 4))
        first, _, second, _ = program
        assert program.fuse(
            [first, second],
            lambda x: (x, x),
            first.args[0],
            results=[*first.results, *second.results],
        )
        assert names(program) == ["<lambda>", "exp", "add"]


def test_leaves_of_nested_things():
    nested = {"a": (1, [2, (3,)]), "b": torch.Size([4])}
    assert leaves(nested) == [1, 2, 3, 4]
    assert map_leaves(lambda leaf: -leaf, nested) == {"a": (-1, [-2, (-3,)]), "b": torch.Size([-4])}


# --- random passes

# An operation, and which of the newest values it takes.
STEPS = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 2), st.integers(0, 3)), min_size=4, max_size=14
)


def random_pass(steps, rows):
    weights = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) / 3 for i in range(4)]
    gain = torch.rand(8, generator=torch.Generator().manual_seed(9)) + 0.5

    operations = [
        lambda a, b, j: a + b,
        lambda a, b, j: norm(a, Norm(gain, 1e-6, STYLES[j % 3])),
        lambda a, b, j: F.linear(a, weights[j % 4]),
        lambda a, b, j: F.silu(a),
        lambda a, b, j: a * b,
        lambda a, b, j: F.layer_norm(a, (8,), gain, gain),
        lambda a, b, j: a.view(rows, 8)[:, :],
        lambda a, b, j: a.add_(b, alpha=0.5),
        lambda a, b, j: F.gelu(a, approximate="tanh"),
    ]

    def function(x):
        values = [x * 2, x * 3]  # a pass does not write into its input
        for kind, i, j in steps:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append(operations[kind](a, b, j))
        return torch.cat(values[-2:]) + 0

    return function


@settings(max_examples=400, deadline=None)
@given(STEPS, st.sampled_from([1, 3, 20]))
def test_rewritten_random_passes_give_what_they_gave(steps, rows):
    function, x = (
        random_pass(steps, rows),
        torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)),
    )
    plain, rewritten = record(function, x.clone()), record(function, inputs := x.clone())
    rewrite(rewritten)
    inputs.copy_(2 * x - 1)
    expected = function(inputs.clone())
    assert len(rewritten.calls) <= len(plain.calls)
    torch.testing.assert_close(rewritten.compiled()(), expected, rtol=1e-4, atol=1e-4)


def test_large_tensors_are_not_kept():
    """Those of a long prompt together are larger than the model. Their ids and addresses come
    again.
    """
    x = torch.rand(200, 200)
    gone = []
    with torch.no_grad(), Recorder() as recorder:
        y = x * 2
        for n in range(40):
            z = (y + n).t()
            y = z @ z - z
            y = y / y.norm()
            gone.append(weakref.ref(y))
        result = y.sum(dim=1)
    assert sum(own() is not None for own in gone) == 1
    program = recorder.program(result)
    assert torch.equal(program.compiled()(), result)
    x.mul_(-3).add_(1)
    with torch.no_grad():
        y = x * 2
        for n in range(40):
            z = (y + n).t()
            y = z @ z - z
            y = y / y.norm()
    assert torch.equal(program.compiled()(), y.sum(dim=1))
