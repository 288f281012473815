"""The stop flag: read at once, or deferred by a step."""

from types import SimpleNamespace

import pytest
import torch

from hf_static_kv import GraphDecoder
from hf_static_kv.decoding.sampling import StopFlag
from tests.decoding.conftest import PROMPT, run, toy_model


class TestStopFlag:
    def test_its_event_is_recorded_on_the_device_of_the_flag(self, monkeypatch):
        """Not on the current device, where it would come before the flag has been computed."""
        recorded = []
        event = SimpleNamespace(record=recorded.append, synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"the stream of {device}")
        flag, on_gpu = StopFlag(deferred=True), SimpleNamespace(is_cuda=True, device="cuda:1")
        flag.on_host = SimpleNamespace(copy_=lambda source, non_blocking: None)
        flag.push(on_gpu)
        assert recorded == ["the stream of cuda:1"]

    def test_one_that_is_not_deferred_is_read_at_once(self):
        flag = StopFlag(deferred=False)
        assert not flag.push(torch.tensor(True))
        assert flag.is_set
        assert flag.newest()


@pytest.mark.parametrize("part", ["logits_processor", "stopping_criteria"])
def test_what_the_caller_brings_sees_no_token_too_many(part):
    """A deferred flag selects one token more, which a function with a state of its own would see."""
    model, seen = toy_model("llama"), []

    def note(ids, scores, **kwargs):
        seen.append(ids.shape[1])
        return scores if part == "logits_processor" else torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    end = int(run(model)[0, PROMPT.shape[1] + 4])
    tokens = run(model, decoder=GraphDecoder(), eos_token_id=end, pad_token_id=0, **{part: [note]})
    first = PROMPT.shape[1] + (part == "stopping_criteria")
    assert seen == list(range(first, first + tokens.shape[1] - PROMPT.shape[1]))
