"""One kernel takes over from the graph of a step: when it is compiled, and if it computes the same."""

import gc
import logging
import math
import time
import weakref
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn import Parameter
from transformers import StoppingCriteriaList

from hf_static_kv import GraphDecoder, StaticContiguousCache, attach, exact, served
from hf_static_kv.kernels.persistent_step import persistent_step_plain
from hf_static_kv.kernels.select_greedy import select_greedy
from hf_static_kv.program import selecting, takeover
from hf_static_kv.testing import dev_config, random_model
from tests.conftest import COMMON, NEW_TOKENS, PROMPT, Collect, toy_model
from tests.decoding.conftest import CAPACITY
from tests.kernels.step_plans import random_plan
from tests.quantised_layers import quantise

HAS_KERNEL = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SAMPLED = {"do_sample": True, "top_k": 7}


class FakeStep:
    """Launches the reference in the place of a kernel."""

    def __init__(self, plan, factor):
        self.plan = plan
        self.factor = factor
        self.launches = 0
        self.left = math.inf  # launches before one that gives up, and all after it
        self.buffers = [torch.zeros(8)]
        self.chunks = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int32)

    def __call__(self):
        self.launches += 1
        self.left -= 1
        logits = persistent_step_plain(self.plan) * self.factor
        return logits if self.left >= 0 else -logits

    def has_failed(self):
        return self.left < 0


class FakeBuild:
    """Every kernel is ready, or none yet."""

    is_ready = True
    factor = 1.0

    def __init__(self, plan):
        self.plan = plan

    def step(self):
        return FakeStep(self.plan, self.factor)

    def wait(self):
        pass


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

    def __init__(self, model="llama", sliding="full", **how):
        self.model = toy_model(model) if isinstance(model, str) else model
        self.decoder = GraphDecoder(**how)
        self.cache = StaticContiguousCache.from_model(self.model, CAPACITY, sliding=sliding)

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


LOGITS = {"output_logits": True, "return_dict_in_generate": True}
ENDS = {"eos_token_id": "a token of the answer"}


@pytest.fixture
def attached_on_cpu(monkeypatch):
    """A model whose decoder serves on a CPU, too; what `attach` gives; and a call."""
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)
    monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu", "cuda"))
    model = toy_model("llama")
    mask = torch.ones_like(PROMPT)
    return model, attach(model), lambda: model.generate(PROMPT, attention_mask=mask, **COMMON)


def tokens_of(output):
    return output if isinstance(output, torch.Tensor) else output.sequences


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


@pytest.mark.parametrize("settings", [{}, {"min_new_tokens": 4, "eos_token_id": 5}], ids=str)
def test_the_largest_logits_of_a_kernel_are_those_of_its_blocks(settings, build, monkeypatch):
    """Unless the selection is from other numbers than its logits."""
    given = []

    def note(logits, positions, state, chunks=None):
        given.append(chunks)
        select_greedy(logits, positions, state)

    monkeypatch.setattr(selecting, "select_greedy", note)
    talk = Conversation()
    talk.call(**settings)
    assert given
    assert all(chunks is None for chunks in given)
    talk.call(**settings)
    given.clear()
    talk.call(**settings)
    ours = talk.takeover.kernel.chunks
    assert given
    assert all(chunks is (None if settings else ours) for chunks in given)
    monkeypatch.setattr(takeover, "MOST_TOKENS", 0)
    given.clear()
    talk.call(**settings)
    assert all(chunks is None for chunks in given)


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


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"),
        ImportError("The persistent step needs the package cuda.bindings."),
    ],
    ids=str,
)
def test_a_launch_that_is_refused_leaves_the_list(error, build, monkeypatch, caplog):
    """A full GPU, fewer multiprocessors than blocks (MPS, MIG), a library that does not load."""
    monkeypatch.setattr(FakeStep, "__call__", MagicMock(side_effect=error))
    caplog.set_level(logging.INFO)
    talk = Conversation()
    for _ in range(3):
        assert torch.equal(talk.call(), talk.expected())
    assert str(error) in talk.decoder.kernel_reason
    assert talk.decoder.fallback_reason is None
    assert not caplog.records


def test_an_interrupted_trial_is_made_again(build, monkeypatch):
    talk = Conversation()
    expected = talk.call()
    with monkeypatch.context() as patch:
        patch.setattr(FakeStep, "__call__", MagicMock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            talk.call()
    assert talk.takeover.kernel is None
    assert torch.equal(talk.call(), expected)
    assert talk.decoder.kernel_reason is None


def test_a_streamer_and_a_criterion_of_the_caller_see_the_same_tokens(build):
    talk = Conversation()
    expected = talk.expected()
    for number in range(3):
        streamer, seen = Collect(), []

        def note(ids, scores, seen=seen, **kwargs):
            seen.append(ids[0, -1].item())
            return torch.zeros(1, dtype=torch.bool, device=ids.device)

        made = talk.call(streamer=streamer, stopping_criteria=StoppingCriteriaList([note]))
        assert torch.equal(made, expected)
        assert streamer.tokens == expected[0].tolist()
        assert seen == expected[0, PROMPT.shape[1] :].tolist()
        assert (talk.decoder.kernel_reason is None) == (number > 0)


def test_a_cache_that_grows_has_kernels_of_its_own(build):
    """Its storage moves: a kernel of the old one would write there."""
    model = toy_model("llama")
    decoder = GraphDecoder()
    mask = torch.ones_like(PROMPT)
    expected = model.generate(PROMPT, attention_mask=mask, use_cache=False, **COMMON)
    reasons = []
    for _ in range(3):
        cache = StaticContiguousCache.from_model(model, PROMPT.shape[1] + 4)
        cache.grows = True
        how = {"past_key_values": cache, "custom_generate": decoder, "attention_mask": mask}
        for _ in range(2):
            cache.reset()
            assert torch.equal(model.generate(PROMPT, **how, **COMMON), expected)
            reasons.append(decoder.kernel_reason)
    assert reasons[1] is None


def test_the_compiler_begins_after_the_first_call(build, monkeypatch):
    """Beside it, loading the compiler would take time of the interpreter."""
    begun = []
    own = build.__init__
    monkeypatch.setattr(build, "__init__", lambda self, plan: (begun.append(1), own(self, plan))[1])

    class Watch(Collect):
        def put(self, value):
            assert not begun

    talk = Conversation()
    talk.call(streamer=Watch())
    assert begun == [1]
    talk.call()
    assert begun == [1]


class TestALongText:
    """Its last tokens are for the list."""

    @pytest.mark.parametrize("by_kernel", [0, 1, 5])
    @pytest.mark.parametrize("settings", [{}, SAMPLED, LOGITS, {"streamer": True}], ids=str)
    def test_the_list_takes_over_and_the_kernel_again(
        self, settings, by_kernel, build, monkeypatch
    ):
        talk = Conversation()
        streamed = settings == {"streamer": True}
        settings = {} if streamed else settings
        expected = talk.expected(**settings)
        talk.call(**settings), talk.call(**settings)
        kernel = talk.takeover.kernel
        for most in (PROMPT.shape[1] + by_kernel, CAPACITY, PROMPT.shape[1] + by_kernel):
            monkeypatch.setattr(takeover, "MOST_TOKENS", most)
            launches = kernel.launches
            streamer = Collect()
            made = talk.call(**settings, **({"streamer": streamer} if streamed else {}))
            assert torch.equal(tokens_of(made), tokens_of(expected))
            assert not streamed or streamer.tokens == expected[0].tolist()
            if talk.model.device.type == "cpu":
                passes = NEW_TOKENS - 1
                assert kernel.launches - launches == (passes if most == CAPACITY else by_kernel)
            if most == CAPACITY:
                assert talk.decoder.kernel_reason is None
            else:
                assert talk.decoder.kernel_reason == f"the text has {most} tokens or more"
            assert talk.decoder.memory_bytes >= kernel.buffers[0].nbytes

    def test_it_is_not_tried(self, build, monkeypatch):
        monkeypatch.setattr(takeover, "MOST_TOKENS", PROMPT.shape[1])
        talk = Conversation()
        for _ in range(3):
            assert torch.equal(talk.call(), talk.expected())
        assert talk.takeover.kernel is None
        assert talk.takeover.build is not None

    def test_a_launch_that_gives_up_before(self, build, monkeypatch):
        talk = Conversation()
        talk.call(), talk.call()
        monkeypatch.setattr(takeover, "MOST_TOKENS", PROMPT.shape[1] + 6)
        talk.takeover.kernel.left = 2
        for _ in range(2):
            assert torch.equal(talk.call(), talk.expected())
        assert talk.takeover.kernel is None
        assert "waited in vain" in talk.decoder.kernel_reason


class TestAFailedLaunch:
    @pytest.mark.parametrize("left", [0, 3, 8])
    @pytest.mark.parametrize("settings", [{}, SAMPLED, LOGITS, ENDS], ids=str)
    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_the_call_goes_on_with_the_list(self, name, settings, left, build, caplog):
        """From the first token of the kernel on: it is not known which were wrong."""
        talk = Conversation(name)
        if settings is ENDS:
            settings = {"eos_token_id": int(talk.expected()[0, -4]), "pad_token_id": 0}
        expected = talk.expected(**settings)
        states = []
        for number in range(4):
            if number == 2:
                talk.takeover.kernel.left = left
                caplog.set_level(logging.WARNING)
            made = talk.call(**settings)
            states.append(torch.get_rng_state())
            assert torch.equal(tokens_of(made), tokens_of(expected))
            if settings is LOGITS:
                torch.testing.assert_close(made.logits, expected.logits, rtol=1e-3, atol=1e-4)
            assert (talk.takeover.kernel is None) == (number in (0, 2, 3))
            assert (talk.decoder.kernel_reason is None) == (number == 1)
        assert "waited in vain" in talk.decoder.kernel_reason
        (record,) = caplog.records
        assert "Captured graphs take over" in record.getMessage()
        if talk.model.device.type == "cpu":
            assert torch.equal(states[1], states[2])

    @pytest.mark.usefixtures("small_spare")
    def test_a_cache_that_has_been_compacted(self, build):
        talk = Conversation("gemma3", sliding="compact")
        expected = talk.expected(max_new_tokens=40)
        for number in range(3):
            if number == 2:
                talk.takeover.kernel.left = 30
            assert torch.equal(talk.call(max_new_tokens=40), expected)
        assert talk.takeover.kernel is None

    def test_a_watched_call_raises(self, build, caplog):
        """Its tokens cannot be taken back."""
        talk = Conversation()
        expected = talk.expected()
        talk.call()
        talk.call()
        talk.takeover.kernel.left = 3
        with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="Call again"):
            talk.call(streamer=Collect())
        assert len(caplog.records) == 1
        assert talk.cache.seq_len == 0
        streamer = Collect()
        for _ in range(2):
            assert torch.equal(talk.call(streamer=streamer), expected)
        assert len(caplog.records) == 1
        assert streamer.tokens == 2 * expected[0].tolist()

    def test_no_other_step_gets_a_kernel(self, build):
        talk = Conversation()
        for settings in ({}, SAMPLED):
            talk.call(**settings)
        talk.call()
        first, _ = sorted(map(takeover.takeover_of, talk.decoder.steps.captured), key=has_none)
        first.kernel.left = 0
        for settings in ({}, SAMPLED, SAMPLED):
            assert torch.equal(talk.call(**settings), talk.expected(**settings))
        assert talk.decoder.kernel_reason == "a kernel of another step has given up"
        talk.call(output_logits=True, return_dict_in_generate=True)
        states = list(map(takeover.takeover_of, talk.decoder.steps.captured))
        assert len(states) == 3
        assert all(state.kernel is None for state in states)
        assert talk.decoder.kernel_reason == "it is turned off"

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
        talk.takeover.kernel.left = 0
        with pytest.raises(RuntimeError, match="Call again"):
            talk.model.generate(more, streamer=Collect(), **how, **settings)
        assert talk.cache.seq_len == length
        again = talk.model.generate(more, **how, **settings)
        assert again.shape == (1, more.shape[1] + 4)

    def test_of_an_attached_model(self, attached_on_cpu, build, caplog):
        _, info, generate = attached_on_cpu
        expected = generate()
        generate()
        assert info.kernel_reason is None
        (step,) = info.decoder.steps.captured
        takeover.takeover_of(step).kernel.left = 2
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                assert torch.equal(generate(), expected)
        assert info.fallback_reason is None
        assert "waited in vain" in info.kernel_reason
        assert not caplog.records  # `attach` warns of nothing that nobody has asked for


class TestWhatHasNoKernel:
    def test_who_turns_it_off(self, build):
        assert GraphDecoder().persistent
        talk = Conversation(persistent=False)
        for _ in range(2):
            talk.call()
        assert talk.decoder.kernel_reason == "it is turned off"

    def test_an_attached_model_that_turns_it_off(self, attached_on_cpu, build):
        model, _, generate = attached_on_cpu
        generate()
        info = attach(model, persistent=False)
        for _ in range(2):
            generate()
        assert info.kernel_reason == "it is turned off"

    def test_a_decoder_that_leaves_rules_out(self, build):
        """The kernel would compute what they leave alone."""
        talk = Conversation(without=("few_tokens",))
        for _ in range(2):
            talk.call()
        assert talk.decoder.kernel_reason == "rules are left out"

    def test_a_list_without_a_plan(self, build):
        talk = Conversation("gpt2")
        talk.call()
        assert "the kernel has no" in talk.takeover.reason

    def test_where_nobody_measured_it_to_be_faster(self, build, monkeypatch):
        monkeypatch.setattr(takeover, "is_faster", lambda plan: False)
        talk = Conversation()
        for _ in range(2):
            talk.call()
        assert talk.decoder.kernel_reason == "it was not measured to be faster"

    def test_a_device_without_one(self):
        talk = Conversation()
        talk.call()
        if talk.cache.storage_groups[0].keys.device.type == "cpu":
            assert talk.decoder.kernel_reason == "the device is no GPU of NVIDIA"

    def test_a_fault_of_its_own_keeps_no_list_from_serving(self, build, monkeypatch):
        def fail(program):
            raise IndexError("nobody thought of it")

        monkeypatch.setattr(takeover, "plan_of", fail)
        talk = Conversation()
        for _ in range(2):
            assert torch.equal(talk.call(), talk.expected())
        assert talk.decoder.kernel_reason == "IndexError: nobody thought of it"
        (step,) = talk.decoder.steps.captured
        assert step.is_recorded

    def test_inside_exact(self, build):
        talk = Conversation()
        with exact(talk.model):
            talk.call()
        assert talk.decoder.kernel_reason == "the step is exact"

    def test_several_rows(self, build):
        talk = Conversation()
        talk.cache = StaticContiguousCache.from_model(talk.model, CAPACITY, 2)
        ids = PROMPT.expand(2, -1)
        how = {"past_key_values": talk.cache, "custom_generate": talk.decoder}
        talk.model.generate(ids, attention_mask=torch.ones_like(ids), **how, **COMMON)
        assert talk.decoder.kernel_reason == "it has several rows"

    def test_drafts(self, build):
        talk = Conversation()
        for _ in range(2):
            talk.call(prompt_lookup_num_tokens=3)
        assert talk.decoder.kernel_reason == "a pass has several tokens"

    def test_a_call_that_falls_back(self, build):
        talk = Conversation()
        talk.call(), talk.call()
        assert talk.decoder.kernel_reason is None
        talk.generate(custom_generate=talk.decoder, cache_implementation="static")
        assert talk.decoder.kernel_reason == talk.decoder.fallback_reason


@pytest.mark.parametrize("multiprocessors", [114, 132])
def test_a_gpu_with_other_multiprocessors_was_not_measured(multiprocessors, monkeypatch):
    sizes = {"L": 1, "H": 2048, "I": 8192, "NQ": 32, "NKV": 8, "D": 64, "V": 64}
    monkeypatch.setattr(takeover, "_multiprocessors", lambda device: multiprocessors)
    assert takeover.is_faster(random_plan(sizes, device="meta")) == (multiprocessors == 132)


def test_a_changed_model_is_not_tried_with_an_old_kernel(build):
    """Its step is another one, with a kernel of its own."""
    talk = Conversation()
    talk.call()
    with torch.no_grad():
        talk.model.lm_head.weight.mul_(-1)
    for _ in range(3):
        assert torch.equal(talk.call(), talk.expected())


CHANGES = {
    "in place": lambda model: model.lm_head.weight.data.mul_(-1),
    "another parameter": lambda model: setattr(
        model.lm_head, "weight", Parameter(-model.lm_head.weight.detach())
    ),
    "other memory": lambda model: setattr(
        model.lm_head.weight, "data", -model.lm_head.weight.detach()
    ),
    "a hook": lambda model: model.lm_head.register_forward_hook(lambda *args: -args[2]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_kernel_serves_no_model_that_has_changed(name, build):
    """Its step is that of the model as it was."""
    talk = Conversation()
    before = talk.expected()
    for _ in range(3):
        talk.call()
    kernel = talk.takeover.kernel
    launches = kernel.launches
    CHANGES[name](talk.model)
    expected = talk.expected()
    assert not torch.equal(expected, before)
    for _ in range(3):
        assert torch.equal(talk.call(), expected)
    # It reads weights where they are.
    assert (kernel.launches == launches) == (name != "in place")
    assert (talk.decoder.kernel_reason is None) == (name != "a hook")


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
        for _ in range(2):
            assert talk.call().tolist() == expected[0]
            assert talk.takeover.kernel is None

    def test_greedy_tokens_are_those_of_the_logits(self, talk):
        """They come from the largest logit of each block; with `output_logits` from all."""
        for settings in ({}, LOGITS):
            talk.call(**settings)
            for step in talk.decoder.steps.captured:
                takeover.wait_for(step)
            for _ in range(2):
                talk.call(**settings)
        states = list(map(takeover.takeover_of, talk.decoder.steps.captured))
        assert len(states) == 2
        assert not any(map(has_none, states))
        made, with_logits = (tokens_of(talk.call(**settings)) for settings in ({}, LOGITS))
        assert torch.equal(made, with_logits)
        for state in states:
            maxima, tokens = state.kernel.chunks
            logits = state.kernel.logits[0]
            largest = (logits == logits.max()).nonzero()
            assert tokens[maxima == maxima.max()].min() == largest[0]

    def test_sampling(self, talk, monkeypatch):
        talk.call(**SAMPLED)
        while not talk.takeover.build.is_ready:
            time.sleep(0.1)
        # By the list, from a second call on: then the prompt is a captured pass, which rounds otherwise.
        monkeypatch.setattr(takeover, "MOST_TOKENS", 0)
        expected = [talk.call(**SAMPLED).tolist() for _ in range(2)][1]
        monkeypatch.setattr(takeover, "MOST_TOKENS", PROMPT.shape[1] + 5)
        switched = [talk.call(**SAMPLED).tolist() for _ in range(2)]
        assert switched[0] == switched[1]
        assert "tokens or more" in talk.decoder.kernel_reason
        monkeypatch.setattr(takeover, "MOST_TOKENS", CAPACITY)
        made = [talk.call(**SAMPLED).tolist() for _ in range(3)]
        assert talk.takeover.kernel is not None, talk.takeover.reason
        assert made == [made[0]] * 3
        talk.takeover.kernel.error.fill_(1)
        assert talk.call(**SAMPLED).tolist() == expected
