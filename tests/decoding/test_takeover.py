"""One kernel takes over from the graph of a step: when it is compiled, and if it computes the same."""

import gc
import logging
import time
import weakref

import pytest
import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache, attach, exact, served
from hf_static_kv.kernels.persistent_step import persistent_step_plain
from hf_static_kv.program import takeover
from hf_static_kv.testing import dev_config, random_model
from tests.conftest import COMMON, PROMPT, toy_model
from tests.decoding.conftest import CAPACITY
from tests.quantised_layers import quantise

HAS_KERNEL = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SAMPLED = {"do_sample": True, "top_k": 7}


class FakeStep:
    """Launches the reference in the place of a kernel."""

    def __init__(self, plan, factor):
        self.plan = plan
        self.factor = factor
        self.launches = 0
        self.fails = False
        self.buffers = [torch.zeros(8)]

    def __call__(self):
        self.launches += 1
        return persistent_step_plain(self.plan) * self.factor

    def has_failed(self):
        return self.fails


class FakeBuild:
    """Every kernel is ready, or none yet."""

    is_ready = True
    factor = 1.0

    def __init__(self, plan):
        self.plan = plan

    def step(self):
        return FakeStep(self.plan, self.factor)


@pytest.fixture
def build(monkeypatch):
    """A class whose attributes a test may set."""
    own = type("Build", (FakeBuild,), {})
    monkeypatch.setattr(takeover, "refusal", lambda plan: "")
    monkeypatch.setattr(takeover, "is_faster", lambda plan: True)
    monkeypatch.setattr(takeover, "Build", own)
    return own


class Conversation:
    """Calls on one cache with one decoder."""

    def __init__(self, model="llama", persistent=True):
        self.model = toy_model(model) if isinstance(model, str) else model
        self.decoder = GraphDecoder(persistent=persistent)
        self.cache = StaticContiguousCache.from_model(self.model, CAPACITY)

    def call(self, **settings):
        self.cache.reset()
        how = {"past_key_values": self.cache, "custom_generate": self.decoder}
        return self.generate(**how, **settings)

    def expected(self, **settings):
        return self.generate(use_cache=False, **settings)

    def generate(self, **settings):
        torch.manual_seed(5)
        ids = PROMPT.to(self.model.device)
        mask = torch.ones_like(ids)
        return self.model.generate(ids, attention_mask=mask, **{**COMMON, **settings})

    @property
    def takeover(self):
        (step,) = self.decoder.steps.captured
        return takeover.takeover_of(step)


def has_none(state):
    return state.kernel is None


@pytest.mark.parametrize("settings", [{}, SAMPLED, {"output_logits": True}])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_the_kernel_serves_from_the_second_call_on(name, settings, build):
    talk = Conversation(name)
    expected = talk.expected(**SAMPLED) if settings is SAMPLED else talk.expected()
    for number in range(3):
        made = talk.call(**settings, return_dict_in_generate=True).sequences
        assert torch.equal(made, expected)
        kernel = talk.takeover.kernel
        assert (kernel is None) == (number == 0)
    assert kernel.launches > expected.shape[1] - PROMPT.shape[1]
    assert talk.takeover.reason == ""
    assert talk.decoder.memory_bytes >= kernel.buffers[0].nbytes


def test_the_list_serves_until_the_kernel_is_compiled(build):
    build.is_ready = False
    talk = Conversation()
    for _ in range(2):
        talk.call()
        assert talk.takeover.kernel is None
    build.is_ready = True
    talk.call()
    assert talk.takeover.kernel is not None


def test_a_kernel_with_other_logits_is_not_used(build):
    build.factor = 1.01
    talk = Conversation()
    for _ in range(3):
        assert torch.equal(talk.call(), talk.expected())
    assert talk.takeover.kernel is None
    assert "from those of an ordinary step" in talk.takeover.reason
    assert talk.decoder.fallback_reason is None


def test_a_kernel_that_does_not_load_is_not_used(build, monkeypatch):
    def fail(self):
        raise RuntimeError("CUDA: out of resources\nmore")

    monkeypatch.setattr(build, "step", fail)
    talk = Conversation()
    for _ in range(2):
        assert torch.equal(talk.call(), talk.expected())
    assert talk.takeover.reason == "RuntimeError: CUDA: out of resources"


def test_a_kernel_that_writes_elsewhere_spoils_no_call(build, monkeypatch):
    """The prompt is computed again."""

    def spoil(self):
        for layer in self.plan.layers:
            layer.keys.fill_(3.0)
        return persistent_step_plain(self.plan)

    monkeypatch.setattr(FakeStep, "__call__", spoil)
    talk = Conversation()
    expected = talk.expected()
    assert torch.equal(talk.call(), expected)
    assert torch.equal(talk.call(), expected)
    assert "overwritten" in talk.decoder.fallback_reason
    assert torch.equal(talk.call(), expected)
    assert talk.decoder.fallback_reason is None
    assert talk.takeover.kernel is None
    assert "writes over other tokens" in talk.takeover.reason


class TestAFailedLaunch:
    def test_the_call_raises_and_the_list_takes_over_for_good(self, build, caplog):
        talk = Conversation()
        expected = talk.expected()
        talk.call()
        talk.call()
        talk.takeover.kernel.fails = True
        with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="Call again"):
            talk.call()
        assert len(caplog.records) == 1
        assert "Captured graphs take over" in caplog.text
        assert talk.cache.seq_len == 0
        for _ in range(2):
            assert torch.equal(talk.call(), expected)
        assert len(caplog.records) == 1
        assert talk.takeover.kernel is None
        assert "waited in vain" in talk.takeover.reason

    def test_no_other_step_gets_a_kernel(self, build):
        talk = Conversation()
        for settings in ({}, SAMPLED):
            talk.call(**settings)
        talk.call()
        first, _ = sorted(map(takeover.takeover_of, talk.decoder.steps.captured), key=has_none)
        first.kernel.fails = True
        with pytest.raises(RuntimeError, match="Call again"):
            talk.call()
        for _ in range(2):
            assert torch.equal(talk.call(**SAMPLED), talk.expected(**SAMPLED))
        talk.call(output_logits=True, return_dict_in_generate=True)
        states = list(map(takeover.takeover_of, talk.decoder.steps.captured))
        assert len(states) == 3
        assert all(state is None or state.kernel is None for state in states)

    def test_in_the_trial(self, build, monkeypatch):
        monkeypatch.setattr(FakeStep, "has_failed", lambda self: True)
        talk = Conversation()
        for _ in range(2):
            assert torch.equal(talk.call(), talk.expected())
        assert "waited in vain" in talk.takeover.reason

    def test_a_cache_with_earlier_tokens_has_these_and_no_others(self, build):
        talk = Conversation()
        talk.call()
        ids = talk.call()
        length = talk.cache.seq_len
        more = torch.cat([ids, torch.full((1, 3), 9)], dim=1)
        how = {"past_key_values": talk.cache, "custom_generate": talk.decoder}
        settings = {**COMMON, "max_new_tokens": 4, "attention_mask": torch.ones_like(more)}
        talk.takeover.kernel.fails = True
        with pytest.raises(RuntimeError, match="Call again"):
            talk.model.generate(more, **how, **settings)
        assert talk.cache.seq_len == length
        again = talk.model.generate(more, **how, **settings)
        assert again.shape == (1, more.shape[1] + 4)

    def test_of_an_attached_model(self, build, monkeypatch):
        monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)
        monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu", "cuda"))
        model = toy_model("llama")
        info = attach(model)
        info.decoder.steps._persistent = True
        mask = torch.ones_like(PROMPT)
        expected = model.generate(PROMPT, attention_mask=mask, **COMMON)
        model.generate(PROMPT, attention_mask=mask, **COMMON)
        (step,) = info.decoder.steps.captured
        takeover.takeover_of(step).kernel.fails = True
        with pytest.raises(RuntimeError, match="Call again"):
            model.generate(PROMPT, attention_mask=mask, **COMMON)
        for _ in range(2):
            assert torch.equal(model.generate(PROMPT, attention_mask=mask, **COMMON), expected)


class TestWhatHasNoKernel:
    def test_nobody_asked_for_it(self, build):
        assert not GraphDecoder().persistent
        talk = Conversation(persistent=False)
        for _ in range(2):
            talk.call()
        assert talk.takeover is None

    def test_a_list_without_a_plan(self, build):
        talk = Conversation("gpt2")
        talk.call()
        assert "the kernel has no" in talk.takeover.reason

    def test_where_the_list_is_faster(self, build, monkeypatch):
        monkeypatch.setattr(takeover, "is_faster", lambda plan: False)
        talk = Conversation()
        for _ in range(2):
            talk.call()
        assert talk.takeover.reason == "the list is faster"

    def test_a_device_without_one(self):
        talk = Conversation()
        talk.call()
        if talk.cache.storage_groups[0].keys.device.type == "cpu":
            assert talk.takeover.reason == "the device is no GPU of NVIDIA"

    def test_inside_exact(self, build):
        talk = Conversation()
        with exact(talk.model):
            talk.call()
        assert talk.takeover is None

    def test_several_rows(self, build):
        talk = Conversation()
        talk.cache = StaticContiguousCache.from_model(talk.model, CAPACITY, 2)
        ids = PROMPT.expand(2, -1)
        how = {"past_key_values": talk.cache, "custom_generate": talk.decoder}
        talk.model.generate(ids, attention_mask=torch.ones_like(ids), **how, **COMMON)
        assert talk.takeover is None


def test_a_changed_model_is_not_tried_with_an_old_kernel(build):
    """Its step is another one, with a kernel of its own."""
    talk = Conversation()
    talk.call()
    with torch.no_grad():
        talk.model.lm_head.weight.mul_(-1)
    for _ in range(3):
        assert torch.equal(talk.call(), talk.expected())


def test_neither_model_nor_cache_is_kept_alive(build):
    talk = Conversation()
    talk.call()
    talk.call()
    kernel = weakref.ref(talk.takeover.kernel)
    storage = weakref.ref(talk.cache.storage_groups[0])
    weight = weakref.ref(talk.model.lm_head.weight)
    del talk.cache
    gc.collect()
    assert storage() is None
    assert kernel() is None
    decoder = talk.decoder
    del talk
    gc.collect()
    assert weight() is None
    assert decoder.num_steps == 0


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_KERNEL, reason="the kernel runs on compute capability 9.0")
@pytest.mark.parametrize(
    "name",
    ["llama-3.2-1b", "llama-3.2-1b in four bits", "qwen3-1.7b", "gemma-3-1b", "smollm2-135m"],
)
class TestOnAGpu:
    @pytest.fixture
    def talk(self, name, monkeypatch):
        monkeypatch.setattr(takeover, "is_faster", lambda plan: True)
        name, in_bits, _ = name.partition(" in four bits")
        model = random_model(dev_config(name), device="cuda", dtype=torch.bfloat16)
        return Conversation(quantise(model) if in_bits else model)

    def test_the_kernel_takes_over_and_gives_back(self, talk):
        expected = [talk.call().tolist() for _ in range(2)]
        assert expected[0] == expected[1] or talk.takeover.kernel is not None
        while talk.takeover.build is not None and not talk.takeover.build.is_ready:
            time.sleep(0.1)
        made = [talk.call().tolist() for _ in range(4)]
        assert talk.takeover.reason == ""
        kernel = talk.takeover.kernel
        assert kernel is not None
        assert made == [made[0]] * 4
        kernel.error.fill_(1)
        with pytest.raises(RuntimeError, match="Call again"):
            talk.call()
        assert talk.call().tolist() == expected[0]
        assert talk.takeover.kernel is None

    def test_sampling(self, talk):
        talk.call(**SAMPLED)
        while not talk.takeover.build.is_ready:
            time.sleep(0.1)
        made = [talk.call(**SAMPLED).tolist() for _ in range(3)]
        assert talk.takeover.kernel is not None, talk.takeover.reason
        assert made == [made[0]] * 3
