"""The forward pass that is writing to a cache."""

from collections.abc import Sequence
from threading import Lock, get_ident
from time import monotonic, sleep
from typing import Any

from hf_static_kv import compat
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.layout import LayerPlan, refuse_missing_layers
from hf_static_kv.cache.request import is_in_use, running_model

KEYS = "keys"
INDEX = "index"
STATE = "state"
_CLAIMING = Lock()  # global: a cache that holds a lock cannot be copied
_SECONDS = 0.5  # to wait for a thread that returns: its streamer ends before its call


class UnfinishedPass(ValueError):
    """A model has skipped layers in a pass of `generate`."""


class OpenPass:
    """What the layers of a cache have done since its last complete pass.

    A layer takes part by writing keys, by writing index keys, or by using its
    recurrent state. When every part is taken, `commit` appends the tokens in
    all layers. `discard` drops them, and the cache reads as before the pass.

    ```
    parts   (keys, 0)  (keys, 1)  (state, 1)     layer 1 has keys and a recurrent state
    taken   (keys, 0)  (keys, 1)                 layer 1 has not used its state yet
    ```

    A recurrent state changes in place. If a pass fails after that, the states
    belong to two lengths: everything but `reset` is refused.
    """

    def __init__(self, plans: Sequence[LayerPlan]) -> None:
        parts = {(KEYS, i) for i, plan in enumerate(plans) if plan.has_keys}
        parts |= {(INDEX, i) for i, plan in enumerate(plans) if plan.index_shape is not None}
        parts |= {(STATE, i) for i, plan in enumerate(plans) if plan.num_states}
        self._parts = parts
        self._num_layers = len(plans)
        self._taken: set[tuple[str, int]] = set()
        self._last_layer: int | None = None
        self._is_broken = False  # states belong to two lengths
        self.has_states = any(plan.num_states for plan in plans)
        # (batch, tokens), once a layer has written.
        self.size: tuple[int, int] | None = None
        self.thread = 0  # which used the cache last

    @property
    def is_open(self) -> bool:
        return bool(self._taken)

    def take(self, part: str, layer_idx: int) -> bool:
        """Note that a layer has taken part; return whether the pass is complete."""
        self._taken.add((part, layer_idx))
        is_complete = len(self._taken) == len(self._parts)
        self._last_layer = layer_idx if is_complete else None
        return is_complete

    def use_state(self, layer_idx: int | None) -> bool:
        """As `take`, for a state. The layer that completed a pass may go on using its own."""
        if layer_idx == self._last_layer or (STATE, layer_idx) not in self._parts:
            return False
        self._refuse_broken()
        assert layer_idx is not None
        return self.take(STATE, layer_idx)

    def commit(self, layers: Sequence[StaticContiguousLayer]) -> None:
        for layer in layers:
            layer.commit()
        self._close()

    def discard(self, layers: Sequence[StaticContiguousLayer]) -> None:
        for layer in layers:
            layer.discard()
        self._close()

    def forget(self) -> None:
        """Begin again: the cache is empty, or its states are of one length."""
        self._close()
        self._last_layer = None
        self._is_broken = False

    def _close(self) -> None:
        self._taken.clear()
        self.size = None

    # --- failures

    def begin(self) -> None:
        """A new pass makes its masks: refuse it if the one before has not ended."""
        self.refuse_unfinished()
        self._last_layer = None
        self.refuse_states()

    def unfinished(self) -> UnfinishedPass:
        missing = sorted({layer_idx for _, layer_idx in self._parts - self._taken})
        return UnfinishedPass(
            f"Layers {missing} of {self._num_layers} did not run in the last forward pass. For a "
            "model that skips layers leave `past_key_values` out, or pass "
            "DynamicCache(config=model.config)."
        )

    def refuse_unfinished(self) -> None:
        """Raise if a pass of the running `generate` left out layers."""
        if self.is_open and compat.generate_locals() is not None:
            if (model := running_model()) is not None:
                refuse_missing_layers(model, self._num_layers)
            raise self.unfinished()

    def written(self) -> list[int]:
        return sorted(layer_idx for part, layer_idx in self._taken if part == KEYS)

    def refuse_states(self) -> None:
        self._is_broken |= any(part == STATE for part, _ in self._taken)
        self._refuse_broken()

    def _refuse_broken(self) -> None:
        if self._is_broken:
            raise RuntimeError(
                "The last forward pass failed after it had changed a recurrent state, which cannot "
                "go back. Call reset() and compute the sequence again."
            )

    # --- threads

    def claim(self, cache: Any, doing: str, is_writing: bool = False) -> None:
        """Make this thread the owner; raise if another one still uses the cache."""
        thread = get_ident()
        if self.thread == thread:
            return
        deadline = monotonic() + _SECONDS
        while not is_writing and is_in_use(cache, self.thread) and monotonic() < deadline:
            sleep(0.005)
        with _CLAIMING:
            if self.thread and (is_writing or is_in_use(cache, self.thread)):
                raise RuntimeError(
                    f"Thread {thread} {doing} while thread {self.thread} uses this cache: build "
                    "one for each thread."
                )
            self.thread = thread
