"""Prompts by captured passes of fixed sizes.

    16 ... 512 ... 2048     a pass serves all prompts of up to so many new tokens, after any prefix
    2300 = 2048 + 252       a longer prompt takes several passes; the last one is padded

The first time that a size is needed, the model computes the prompt: a first call waits for nothing.
The second time its pass is captured and verified. A size whose pass cannot be captured is left to
the model, as long as the model is the same.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hf_static_kv.cache import debug
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.identity import State
from hf_static_kv.cache.storage import is_out_of_memory
from hf_static_kv.decoding.call import Call, kept_random_state
from hf_static_kv.decoding.turns import turns_of
from hf_static_kv.decoding.verification import append_prompt, verify_prompt, without_side_effects
from hf_static_kv.patching import EXACT_ATTENTION_NAME, TRACED_ATTENTION_NAME
from hf_static_kv.program.step import DecodeStep, side_stream

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
_MAX_PASSES = 16  # of one cache; the one that was not needed for longest goes first
DEVICES = ("cuda",)  # elsewhere a pass of the model takes as long
_MAX_TOKENS = 8192  # of all rows in a pass: more keep a GPU busy without a graph
# What a prompt may come with: a pass computes it from the lengths, or has no use for it.
_KNOWN_INPUTS = {
    "attention_mask",
    "cache_position",
    "logits_to_keep",
    "position_ids",
    "use_cache",
}


class _Seen(NamedTuple):
    """A size that was needed once, with the settings of the model in that call."""

    settings: dict[str, Any]


class _Captured(NamedTuple):
    """A verified pass, and the state of the model that it was captured of."""

    step: DecodeStep
    state: State


class _Failed(NamedTuple):
    """Why a pass cannot be captured of the model in this state; None: it is tried again."""

    reason: str
    state: State | None


class _Moment:
    """Where a device stands now. What it computes beside that does not wait for what it is given
    later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            # The model may not be on the current device.
            self._event.record(torch.cuda.current_stream(device))

    @contextmanager
    def beside(self) -> Iterator[None]:
        if self._event is None:
            yield
            return
        stream = side_stream(self._device)
        stream.wait_event(self._event)
        with torch.cuda.stream(stream):
            yield


class Prompts:
    """The prompt passes of a decoder.

    `reason` says why the model had to compute the last prompt; None: it did not, or its size was new.

    `without`: rewrite rules to leave out.
    """

    def __init__(self, without: Collection[str] = ()) -> None:
        # The caller may give positions that no table has.
        self._without = {"angles_from_table", *without}
        self.reason: str | None = None
        # By size and fingerprint.
        self._passes: WeakKeyDictionary[
            StaticContiguousCache, dict[Any, _Seen | _Captured | _Failed]
        ] = WeakKeyDictionary()
        self._pool: Any = None  # one memory for all graphs, which run one after the other

    @property
    def steps(self) -> list[DecodeStep]:
        kept = [own for passes in self._passes.values() for own in passes.values()]
        return [own.step for own in kept if isinstance(own, _Captured)]

    def begin(self, call: Call) -> bool:
        """Compute the prompt, if its passes are known and the model is as they were captured of.

        The host looks at the model while the device computes.
        """
        parts = _parts(call)
        known = self._known(call, parts)
        if not known:
            return False
        before = _Moment(call.device)
        logits = _append(call, parts, known)
        with before.beside():  # else what the host reads would wait for the prompt
            has_own_prefix = call.has_own_prefix()
            is_current = has_own_prefix and _are_current(call, known)
            has_holes = call.has_holes
        if is_current and not has_holes:
            call.prompt_logits = logits
            return True
        call.cache.restore(call.start)
        if not has_own_prefix:
            call.forget_prefix()
        elif not is_current:
            self._forget(call, parts)
        return False

    def run(self, call: Call) -> Tensor | None:
        """The logits [B, V] after the prompt; None if the model must compute it."""
        self.reason = None
        if call.prompt_logits is not None:
            logits = call.prompt_logits
            call.prompt_logits = None
            return logits
        parts = _parts(call)
        self.reason = _refused(call)
        passes = self._passes.setdefault(call.cache, {})
        for part in parts:
            key = _key(call, part)
            if isinstance(seen := passes.get(key), _Seen):
                passes[key] = self._new_pass(call, part, seen.settings)
            if isinstance(failed := passes.get(key), _Failed):
                self.reason = failed.reason
        if not (known := self._known(call, parts)):
            return None
        logits = _append(call, parts, known)
        if _are_current(call, known):
            return logits
        call.cache.restore(call.start)
        self._forget(call, parts)
        return None

    def _known(self, call: Call, parts: list[Tensor]) -> list[_Captured]:
        """The passes of these parts; none if one is missing."""
        passes = self._passes.get(call.cache, {})
        keys = [_key(call, part) for part in parts]
        for key in keys:
            if key in passes:
                passes[key] = passes.pop(key)  # the newest now
        found = [passes.get(key) for key in keys]
        known = [own for own in found if isinstance(own, _Captured) and own.step.is_in_place]
        return known if len(known) == len(parts) else []

    def _forget(self, call: Call, parts: list[Tensor]) -> None:
        for part in parts:
            self._passes[call.cache].pop(_key(call, part), None)

    def note(self, call: Call) -> None:
        """The model has computed the prompt: its sizes are captured if they are needed again."""
        passes = self._passes.setdefault(call.cache, {})
        for part in [] if call.step_inputs.tensors else _parts(call):
            known = passes.get(key := _key(call, part))
            if known is None or (isinstance(known, _Failed) and known.state != call.state):
                passes[key] = _Seen(call.step_inputs.settings)
        while len(passes) > _MAX_PASSES:
            del passes[next(iter(passes))]

    def _new_pass(self, call: Call, part: Tensor, settings: dict[str, Any]) -> _Captured | _Failed:
        before = call.cache.snapshot()
        try:
            with torch.inference_mode(False), torch.no_grad(), kept_random_state(call.device):
                return self._verified_pass(call, part, settings)
        except Exception as error:  # whatever a model does that a fixed pass cannot do
            debug.logger.debug("A prompt pass could not be captured.", exc_info=True)
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            return _Failed(reason, None if is_out_of_memory(error) else call.state)
        finally:
            call.cache.restore(before)

    def _verified_pass(self, call: Call, part: Tensor, settings: dict[str, Any]) -> _Captured:
        size = _key(call, part)[0]
        what = call.model, call.cache, len(part), (), settings
        step = DecodeStep(*what, num_tokens=size, computes_ids=False)
        call.cache.reserve(size)
        at = call.cache.seq_len, call.seq_start.to(call.device)
        with step.on_shadow(call.own_attention) as shadow, without_side_effects(shadow):
            # What is frozen in the recording shows: other tokens, at other positions.
            others = (_position_ids(call, part) + 1).clamp(max=call.cache.max_cache_len - 1)
            step.set_tokens((part - 1).abs(), others)
            is_exact = call.own_attention == EXACT_ATTENTION_NAME
            step.record(*at, is_exact=is_exact, without=self._without)
            if call.device.type == "cuda":
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                step.capture(*at, pool=self._pool)
            # About the least number of tokens that this pass serves, and the most that have room.
            # Not 64 n + 1: there SDPA's memory-efficient kernel is wrong if KV heads are repeated
            # and the mask slides (torch 2.11, H200).
            most = min(size, call.cache.max_cache_len - call.cache.seq_len)
            least = [1, *(other + 2 for other in SIZES if other < size)][-1]
            # A row of padding alone has no result.
            least = min(max(least, int(call.seq_start.max()) + 1 - call.cache.seq_len), most)
            verify_prompt(step, call, part, (least, most))
        return _Captured(step, call.state)


def _refused(call: Call) -> str | None:
    """Why the model must compute the prompt, whatever its size."""
    # The storage of a cache may be made by its first pass.
    if not isinstance(call.cache, StaticContiguousCache) or not call.cache.is_allocated:
        return "the cache has no storage yet"
    if call.device.type not in DEVICES:
        return f"there are no graphs on {call.device.type}"
    if call.cache.stateful_layers:
        return "padding would change a recurrent state"
    # Of a model for images: none were given.
    given = {
        name for name, value in call.given.items() if not (isinstance(value, dict) and not value)
    }
    if unknown := sorted(given - _KNOWN_INPUTS):
        return f"the model is given {', '.join(unknown)}"
    if getattr(call.given.get("position_ids"), "ndim", 2) != 2:
        return "a position has several parts"
    if call.config.prefill_chunk_size is not None:
        return "the prompt is read in chunks of the caller's size"
    return "a trace is asked for" if call.own_attention == TRACED_ATTENTION_NAME else None


def _parts(call: Call) -> list[Tensor]:
    """The new tokens of the prompt, as many in each part as a pass takes; none: not served."""
    if _refused(call) is not None:
        return []
    assert call.start is not None
    length = call.request.prompt_length
    num_new = length - call.start[0]
    if not 0 < num_new <= call.input_ids.shape[1] or length > call.cache.max_cache_len:
        return []
    # A compact layer can always free half of its slots.
    free = [layer.num_slots // 2 for layer in call.cache.kv_layers if layer.is_compact]
    most = min([_MAX_TOKENS // len(call.seq_start), *free])
    sizes = [size for size in SIZES if size <= most]
    if not sizes:
        return []
    return list(torch.split(call.input_ids[:, -num_new:].to(call.device), sizes[-1], dim=1))


def _append(call: Call, parts: list[Tensor], known: list[_Captured]) -> Tensor:
    """Run the passes; the logits [B, V] after the last token."""
    turns = turns_of(call.model)
    for number, (part, (step, _)) in enumerate(zip(parts, known, strict=True)):
        if number and turns.is_wanted:
            turns.give_way()  # calls that decode wait for one part, not for all
        logits = append_prompt(step, call, part, _position_ids(call, part))
    return logits


def _are_current(call: Call, known: list[_Captured]) -> bool:
    """Whether the model is as the passes were captured of; if not, they have not run."""
    return not call.has_hooks and all(state == call.state for _, state in known)


def _key(call: Call, part: Tensor) -> Any:
    return SIZES[bisect_left(SIZES, part.shape[1])], call.fingerprint


def _position_ids(call: Call, part: Tensor) -> Tensor:
    """The positions [B, n] of the next tokens, as `generate` gives them to the model."""
    start = call.cache.seq_len
    end = start + part.shape[1]
    given: Tensor | None = call.given.get("position_ids")
    if given is None:
        positions = torch.arange(start, end, device=call.device)
        return (positions - call.seq_start.to(call.device)[:, None]).clamp(min=0)
    behind = given.shape[-1] - (call.request.prompt_length - end)
    return given[..., behind - part.shape[1] : behind]
