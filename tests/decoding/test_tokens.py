"""Stop flags: read at once, or deferred by one step or several."""

from types import SimpleNamespace

import pytest
import torch

from hf_static_kv import GraphDecoder
from hf_static_kv.decoding.tokens import MAX_AHEAD, StopFlags
from tests.decoding.conftest import PROMPT, run, toy_model


class FlagOfAGPU(SimpleNamespace):
    """A flag on a device; its value is there when its event is waited for."""

    is_cuda, device = True, "cuda:1"


class TestStopFlags:
    @pytest.fixture
    def flags(self, monkeypatch):
        """Flags without a GPU; `recorded` has the streams of their events."""
        flags, flags_recorded = StopFlags(is_deferred=True), []
        event = SimpleNamespace(record=flags_recorded.append, synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device=None: f"the stream of {device}"
        )
        flags.slots = [Slot() for _ in range(MAX_AHEAD + 2)]
        flags.recorded = flags_recorded
        return flags

    def test_its_event_is_recorded_on_the_device_of_the_flag(self, flags):
        """Not on the current device, where it would come before the flag has been computed."""
        flags.push(FlagOfAGPU(value=False), is_last=False)
        assert flags.recorded == ["the stream of cuda:1"]

    def test_one_that_is_not_deferred_is_read_at_once(self):
        flags = StopFlags(is_deferred=False)
        assert flags.push(torch.tensor(True), is_last=False) == 0
        assert flags.is_set
        assert flags.newest()

    @pytest.mark.parametrize("end", range(6))
    def test_a_deferred_one_is_seen_one_step_later(self, flags, end):
        seen = [flags.push(FlagOfAGPU(value=i >= end), is_last=False) for i in range(end + 2)]
        assert seen == [0] * (end + 1) + [1]

    @pytest.mark.parametrize("steps", range(1, MAX_AHEAD + 1))
    @pytest.mark.parametrize("end", range(MAX_AHEAD))
    def test_a_busy_host_sees_it_later(self, flags, end, steps):
        """The prompt's own token, then `steps` that run ahead, then one of which the host sees the
        flag.
        """
        flags.is_busy = True
        for i in range(steps):
            assert flags.push(FlagOfAGPU(value=i >= end), is_last=False) == 0
        flags.is_busy = False
        assert flags.push(FlagOfAGPU(value=steps >= end), is_last=False) == (
            steps - end if steps > end else 0
        )

    def test_the_last_step_waits_for_all_before_it(self, flags):
        flags.is_busy = True
        for i in range(5):
            assert flags.push(FlagOfAGPU(value=i >= 2), is_last=False) == 0
        assert flags.push(FlagOfAGPU(value=True), is_last=True) == 3

    def test_after_a_restart_the_flag_of_the_first_token_counts(self, flags):
        flags.is_busy = True
        for _ in range(4):
            flags.push(FlagOfAGPU(value=True), is_last=False)
        flags.forget_all_but_first()
        flags.is_busy = False
        assert flags.push(FlagOfAGPU(value=True), is_last=False) == 1


class Slot:
    """Pinned memory of one flag."""

    def copy_(self, flag, non_blocking):
        self.value = flag.value

    def __bool__(self):
        return self.value


@pytest.mark.parametrize("part", ["logits_processor", "stopping_criteria"])
def test_what_the_caller_brings_sees_no_token_too_many(part):
    """A deferred flag selects one token more, which a function with a state of its own would see."""
    model, seen = toy_model("llama"), []

    def note(ids, scores, **kwargs):
        seen.append(ids.shape[1])
        return (
            scores
            if part == "logits_processor"
            else torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        )

    end = int(run(model)[0, PROMPT.shape[1] + 4])
    tokens = run(model, decoder=GraphDecoder(), eos_token_id=end, pad_token_id=0, **{part: [note]})
    first = PROMPT.shape[1] + (part == "stopping_criteria")
    assert seen == list(range(first, first + tokens.shape[1] - PROMPT.shape[1]))
