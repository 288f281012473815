"""Who is using a cache: the model and the threads, read from the stack. For the rare paths alone."""

from __future__ import annotations

import sys
from time import monotonic, sleep
from types import FrameType

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

_PATIENCE = 0.5  # seconds


def running_model() -> PreTrainedModel | None:
    """The model whose forward pass this is called from, the innermost one; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, PreTrainedModel):
            return model
        frame = frame.f_back
    return None


def is_in_use(cache: Cache, thread: int) -> bool:
    """Whether this thread is inside of `generate` or a forward pass of a model that was given the cache."""
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
    """A call whose streamer has ended is over, though its thread may take a moment to leave it."""
    deadline = monotonic() + _PATIENCE
    while is_in_use(cache, thread) and monotonic() < deadline:
        sleep(0.005)
