"""The list of a step as the plan of one kernel: the plan computes what the list computes."""

import pytest
import torch

from hf_static_kv import StaticContiguousCache
from hf_static_kv.kernels.persistent_step import persistent_step_plain
from hf_static_kv.program import rules
from hf_static_kv.program import step as step_module
from hf_static_kv.program.persistent import Unplanned, plan_of
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
    step = DecodeStep(model, cache, 1)
    with step.on_shadow("static_contiguous"):
        step.record(length, torch.tensor([start]))
    return step


def written(step, plan):
    """Keys and values of the newest token in each layer."""
    states = [(layer.keys, layer.values, int(layer.slot)) for layer in plan.layers]
    return [own[:, slot].clone() for *both, slot in states for own in both]


@torch.no_grad()
def compare(step, plan, length, start=0, tokens=3):
    """The list and the plan, token by token."""
    for n in range(tokens):
        token = torch.tensor([17 + n])
        step.set_position(length + n, torch.tensor([start]))
        expected = step.run(token)
        states = written(step, plan)
        for own in states:
            assert own.abs().max() > 0
        for layer in plan.layers:
            layer.keys[:, int(layer.slot)] = 7.0
            layer.values[:, int(layer.slot)] = 7.0
        got = persistent_step_plain(plan)
        assert got.shape == expected.shape
        largest = float(expected.abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * largest)
        for one, other in zip(written(step, plan), states, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_normed", [1 << 22, 0])
@pytest.mark.parametrize("name", SERVED)
class TestServed:
    @pytest.fixture(autouse=True)
    def _norms(self, max_normed, monkeypatch):
        """Large weights have norms of their own."""
        monkeypatch.setattr(rules, "_MAX_NORMED", max_normed)

    @pytest.mark.parametrize("sliding", ["full", "compact"])
    @pytest.mark.parametrize(("length", "start"), [(3, 0), (2 * WINDOW, 0), (13, 4)])
    def test_the_plan_computes_what_the_list_computes(self, name, length, start, sliding, lists):
        model = toy_model(name)
        cache = StaticContiguousCache.from_model(model, CAPACITY, sliding=sliding)
        step = recorded(model, cache, length, start)
        compare(step, plan_of(lists[0]), length, start)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, lists):
    model = toy_model(name, "static_contiguous")
    recorded(model, StaticContiguousCache.from_model(model, CAPACITY), 3)
    with pytest.raises(Unplanned, match=REFUSED[name]):
        plan_of(lists[0])
