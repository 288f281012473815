"""Which model and which threads use a cache, read from their stacks. For rare paths only."""

from __future__ import annotations

import sys
from time import monotonic, sleep
from types import FrameType

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

_PATIENCE_S = 0.5


def running_model() -> PreTrainedModel | None:
    """The innermost model whose forward pass this is called from; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, PreTrainedModel):
            return model
        frame = frame.f_back
    return None


def is_in_use(cache: Cache, thread: int) -> bool:
    """Whether this thread is inside `generate` or a forward pass of a model that was given the cache."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        names = frame.f_locals
        if frame.f_code.co_name in ("generate", "forward") and isinstance(names.get("self"), PreTrainedModel):
            given = [names, *(names[key] for key in ("kwargs", "model_kwargs") if isinstance(names.get(key), dict))]
            if any(arguments.get("past_key_values") is cache for arguments in given):
                return True
        frame = frame.f_back
    return False


def wait_until_left(cache: Cache, thread: int) -> None:
    """Wait a moment for a thread to return from its call: its streamer may have ended already."""
    deadline = monotonic() + _PATIENCE_S
    while is_in_use(cache, thread) and monotonic() < deadline:
        sleep(0.005)
