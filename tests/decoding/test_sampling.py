"""The stop flag: read at once, or deferred by a step."""

from types import SimpleNamespace

import torch

from hf_static_kv.decoding.sampling import StopFlag


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
