"""The list of a step as the plan of one kernel: the plan computes what the list computes."""

import pytest
import torch

from hf_static_kv import StaticContiguousCache
from hf_static_kv.kernels.norm import STYLES, Norm, norm
from hf_static_kv.kernels.persistent_step import persistent_step_plain
from hf_static_kv.program import rules
from hf_static_kv.program import step as step_module
from hf_static_kv.program.persistent import Unplanned, plan_of
from hf_static_kv.program.record import Operation, Value
from hf_static_kv.program.rules import run_linear
from hf_static_kv.program.step import DecodeStep
from tests.conftest import WINDOW, toy_model

CAPACITY = 40
SERVED = ("llama", "qwen3", "gemma3", "mistral", "qwen2", "phi3")
REFUSED = {
    "gpt2": "the kernel has no",
    "gemma2": "the kernel has no div",
    "mixtral": "the kernel has no",
    "olmo2": "in the place of",
    "cohere2": "the kernel has no mean",
    "gpt_oss": "the kernel has no",
}


@pytest.fixture
def lists(monkeypatch):
    """The lists of all steps that are recorded."""
    found = []
    own = step_module.rewrite

    def note(program, *args, **kwargs):
        own(program, *args, **kwargs)
        found.append(program)

    monkeypatch.setattr(step_module, "rewrite", note)
    return found


@torch.no_grad()
def recorded(model, cache, length, start=0):
    """A step behind a prompt of random tokens, and its list."""
    ids = torch.randint(3, 120, (1, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, :start] = 0
    model(ids, attention_mask=mask, past_key_values=cache)
    cache.reserve()
    step = DecodeStep(model, cache, 1)
    with step.on_shadow("static_contiguous"):
        step.record(length, torch.tensor([start]))
    return step


def written(step, plan):
    """Keys and values of the newest token in each layer."""
    states = [(layer.keys, layer.values, int(layer.slot)) for layer in plan.layers]
    return [own[:, slot].clone() for *both, slot in states for own in both]


@torch.no_grad()
def of_both(step, plan, cache, start=0, tokens=4):
    """What the plan and the list compute of each token, and how far it may be apart: the logits, then
    the keys and values.
    """
    for n in range(tokens):
        token = torch.tensor([17 + n])
        cache.reserve()
        step.set_position(cache.seq_len, torch.tensor([start]))
        expected = step.run(token)
        states = written(step, plan)
        for layer in plan.layers:
            layer.keys[:, int(layer.slot)] = 7.0
            layer.values[:, int(layer.slot)] = 7.0
        largest = float(expected.abs().max())
        yield persistent_step_plain(plan), expected, {"rtol": 0.0, "atol": 1e-5 * largest}
        for one, other in zip(written(step, plan), states, strict=True):
            yield one, other, {"rtol": 1e-5, "atol": 1e-5}
        cache.mark_written(1)


@pytest.mark.parametrize("max_normed", [1 << 22, 0])
@pytest.mark.parametrize("name", SERVED)
class TestServed:
    @pytest.fixture(autouse=True)
    def _norms(self, max_normed, monkeypatch):
        """Large weights have norms of their own."""
        monkeypatch.setattr(rules, "_MAX_NORMED", max_normed)

    @pytest.mark.usefixtures("small_spare")
    @pytest.mark.parametrize("sliding", ["full", "compact"])
    @pytest.mark.parametrize(("length", "start"), [(3, 0), (2 * WINDOW, 0), (13, 4), (19, 3)])
    def test_the_plan_computes_what_the_list_computes(self, name, length, start, sliding, lists):
        model = toy_model(name)
        cache = StaticContiguousCache.from_model(model, CAPACITY, sliding=sliding)
        step = recorded(model, cache, length, start)
        for got, expected, apart in of_both(step, plan_of(lists[0]), cache, start):
            assert got.shape == expected.shape
            assert expected.abs().max() > 0
            assert torch.allclose(got, expected, **apart)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, lists):
    model = toy_model(name, "static_contiguous")
    recorded(model, StaticContiguousCache.from_model(model, CAPACITY), 3)
    with pytest.raises(Unplanned, match=REFUSED[name]):
        plan_of(lists[0])


# --- strictness: what is not exactly as expected is refused


def changed(call, position, value):
    """Give a call another argument."""
    call.args = (*call.args[:position], value, *call.args[position + 1 :])


def soft_cap(calls):
    changed(calls["attend"][0], 6, 30.0)


def sinks(calls):
    changed(calls["attend"][0], 7, torch.zeros(4))


def exact_attention(calls):
    changed(calls["attend"][0], 8, True)


def keys_of_another_layer(calls):
    changed(calls["attend"][1], 1, calls["attend"][0].args[1])


def another_scale(calls):
    changed(calls["attend"][1], 4, 1.0)


def a_residual_from_before(calls):
    linears = [call for call in calls["run_linear"] if call.args[1].residual is not None]
    earlier = linears[0].args[1].residual
    changed(linears[-1], 1, linears[-1].args[1]._replace(residual=earlier))


def a_bias_after_the_gate(calls):
    linears = [call for call in calls["run_linear"] if call.args[1].residual is not None]
    layer = linears[1].args[1]
    changed(linears[1], 1, layer._replace(biases=[torch.zeros(48)]))


def another_eps(calls):
    call = next(call for call in calls["run_linear"] if call.args[1].norm is not None)
    layer = call.args[1]
    changed(call, 1, layer._replace(norm=layer.norm._replace(eps=0.5)))


def another_activation(calls):
    call = next(call for call in calls["run_linear"] if call.args[1].is_gated)
    changed(call, 1, call.args[1]._replace(activation="gelu"))


def a_scaled_value(calls):
    call = next(call for call in calls["run_linear"] if call.args[1].activation == "")
    changed(call, 1, call.args[1]._replace(activation="silu"))


def a_norm_of_queries_alone(calls):
    call = calls["rotate_and_write"][0]
    changed(call, 8, Norm(torch.ones(16), 1e-6, STYLES[0]))


def sines_as_cosines(calls):
    call = calls["rotate_and_write"][0]
    changed(call, 3, call.args[4])


def a_norm_of_the_embedding(calls):
    calls["embedding"][0].kwargs["max_norm"] = 1.0


def queries_of_keys(calls):
    call = calls["rotate_and_write"][1]
    changed(call, 0, calls["rotate_and_write"][0].args[0])


def other_positions(calls):
    changed(calls["lookup"][0], 0, calls["embedding"][0].results[0])


MUTATIONS = {
    soft_cap: "soft cap",
    sinks: "sinks",
    exact_attention: "exact",
    keys_of_another_layer: "attends to another one",
    another_scale: "layers differ",
    a_residual_from_before: "skips another one",
    a_bias_after_the_gate: "has a bias",
    another_eps: "layers differ",
    another_activation: "layers differ",
    a_scaled_value: "no such linear layer",
    a_norm_of_queries_alone: "alone have norms",
    sines_as_cosines: "several tables",
    a_norm_of_the_embedding: "largest norm",
    queries_of_keys: "other inputs",
    other_positions: "positions are computed",
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_another_list_is_refused(mutate, lists):
    model = toy_model("llama")
    recorded(model, StaticContiguousCache.from_model(model, CAPACITY), 3)
    program = lists[0]
    plan_of(program)
    calls = {}
    for call in program:
        calls.setdefault(call.name.removesuffix(".default"), []).append(call)
    mutate(calls)
    with pytest.raises(Unplanned, match=MUTATIONS[mutate]):
        plan_of(program)


def test_a_call_whose_value_nobody_takes_is_refused(lists):
    """A step without it would be another step."""
    model = toy_model("llama")
    recorded(model, StaticContiguousCache.from_model(model, CAPACITY), 3)
    program = lists[0]
    some = program.calls_of(norm, run_linear)[0]
    extra = Operation(10_000, some.func, some.args, some.kwargs, [object()], False)
    extra.results = [Value(10_000, torch.zeros(1, 1, 112)) for _ in some.results]
    program.calls[10_000] = extra
    with pytest.raises(Unplanned, match="no place for"):
        plan_of(program)


def test_several_rows_are_refused(lists):
    model = toy_model("llama")
    cache = StaticContiguousCache.from_model(model, CAPACITY, 2)
    step = DecodeStep(model, cache, 2)
    with step.on_shadow("static_contiguous"), torch.no_grad():
        step.record(0, torch.tensor([0, 0]))
    with pytest.raises(Unplanned, match="there are several rows"):
        plan_of(lists[0])


def test_an_embedding_scale_that_is_converted(lists):
    """It counts as it is rounded."""
    model = toy_model("gemma3").to(torch.bfloat16)
    model.model.embed_tokens.embed_scale = torch.tensor(6.93)
    recorded(model, StaticContiguousCache.from_model(model, CAPACITY), 3)
    assert any(call.name == "to" for call in lists[0])
    assert plan_of(lists[0]).embedding_scale == float(torch.tensor(6.93).bfloat16())
