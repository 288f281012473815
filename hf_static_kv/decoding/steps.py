"""The captured decode steps of a decoder: one for each kind of call on each cache, tried against the
model before it is used.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from hf_static_kv import compat
from hf_static_kv.cache import debug
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.identity import State
from hf_static_kv.cache.request import Fallback
from hf_static_kv.decoding.call import Call, kept_random_state
from hf_static_kv.decoding.drafts import check_drafts
from hf_static_kv.decoding.selection import Selection, selection_of
from hf_static_kv.decoding.verification import (
    unverified_inputs,
    verify,
    verify_drafts,
    without_side_effects,
)
from hf_static_kv.patching import EXACT_ATTENTION_NAME, TRACED_ATTENTION_NAME, SharedContext
from hf_static_kv.program.drafting import AssistantStep, LookupStep
from hf_static_kv.program.selecting import RowsStep, SelectingStep
from hf_static_kv.program.step import DecodeStep
from hf_static_kv.program.takeover import (
    begin,
    give_up_if_failed,
    is_ready,
    refuse,
    take_over,
    wait_for,
)

_MAX_STEPS = 8  # captured for one cache
_MAX_STEPS_OF_ROWS = 16  # greedy and sampling ones for 1, 2, 4, ... 64 rows
_MAX_ATTEMPTS = 2  # to capture one step: the first failure may be temporary


_DECODING: WeakKeyDictionary[Any, SharedContext] = WeakKeyDictionary()


def decoding(model: Any) -> AbstractContextManager[None]:
    """What `generate` does to a model while it decodes.

    No longer than the model runs: another call may compute its prompt next.
    """
    return _DECODING.setdefault(model, SharedContext(compat.optimized_for_decode))(model)


class RowsOverwritten(RuntimeError):
    """A trial has written into the rows of other calls."""


class _OverwrittenError(RuntimeError):
    """A trial has changed what the cache holds."""


class _Failed(NamedTuple):
    """A step that could not be captured."""

    fallback: Fallback
    attempts: int  # how often that was tried
    given: frozenset[str]  # the keywords of the call


class Steps:
    """The steps of all caches, until a cache is gone.

    Args:
        without: rewrite rules to leave out.
        warn: is told what a user should know, once.
        persistent: whether one kernel may compute a whole step. With `without` none does: it computes
            all of the list, whatever its rules.
    """

    def __init__(
        self, without: Collection[str], warn: Callable[[str], None], persistent: bool
    ) -> None:
        self._without = frozenset(without)
        self._warn = warn
        self._persistent = persistent and not self._without
        self.by_cache: WeakKeyDictionary[StaticContiguousCache, dict[Any, DecodeStep | _Failed]] = (
            WeakKeyDictionary()
        )

    @property
    def captured(self) -> list[DecodeStep]:
        kept = [step for steps in self.by_cache.values() for step in steps.values()]
        return [step for step in kept if isinstance(step, DecodeStep)]

    def get(self, call: Call) -> DecodeStep:
        """The step for this call, captured at its first use."""
        # A step draws from torch's generator.
        has_drafts = call.drafts is not None
        selection = selection_of(call, has_drafts) if call.seed is None else None
        if has_drafts:
            check_drafts(call, selection)
        return self.get_for(call, selection and selection._replace(drafts=call.drafts))

    def get_for_rows(self, call: Call, selection: Selection) -> RowsStep:
        """Of a call in rows."""
        step = self.get_for(call, selection)
        assert isinstance(step, RowsStep)
        return step

    def get_assistant(
        self, call: Call, lookup: LookupStep, sizes: Sequence[int]
    ) -> list[AssistantStep]:
        """Passes of an assistant that drafts for `lookup`: of so many newest tokens, and of one draft."""
        steps = self.by_cache.setdefault(call.cache, {})
        found: list[Any] = []
        for size in (*sizes, 1):
            key = (("assistant", size, lookup, call.step_kind, call.fingerprint), call.state)
            if not isinstance(steps.get(key), AssistantStep):
                self._evict(steps, _MAX_STEPS)
                beside = found[0] if found else None
                steps[key] = self._assistant_step(call, lookup, size, beside)
            found.append(steps[key])
        return found

    def _assistant_step(
        self, call: Call, lookup: LookupStep, size: int, beside: AssistantStep | None
    ) -> AssistantStep:
        try:
            with _trial(call):
                how: dict[str, Any] = {"num_tokens": size, "beside": beside}
                step = AssistantStep(*_what(call), drafts=lookup.drafts, **how)
                lookup.state.unfinished.zero_()  # so that a capture writes nothing
                # Not verified: a wrong draft is not accepted.
                self._make(step, call, True, lambda step, call: None)
        except Exception as error:
            debug.logger.debug("A pass of an assistant could not be captured.", exc_info=True)
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            raise Fallback(f"the assistant's pass cannot be captured ({first_line})") from error
        return step

    def get_for(self, call: Call, selection: Selection | None) -> DecodeStep:
        """The step that selects in this way; None: the host selects. Raises `Fallback`."""
        call.cache.reserve()  # a new step is tried at the next position
        steps = self.by_cache.setdefault(call.cache, {})
        # First: the device computes the prompt meanwhile.
        state = None if call.must_assume else call.state
        has_hooks = call.has_hooks
        selects = selection and selection.kind
        has_drafts = selection is not None and selection.drafts is not None
        what = selects, call.step_kind, has_hooks, call.fingerprint
        if state is None:
            state = call.assumed = _assumed_state(steps, what)
        key = what, state or call.state
        known = steps.pop(key, None)
        if has_drafts and isinstance(known, _Failed) and known.attempts >= _MAX_ATTEMPTS:
            steps[key] = known
            raise known.fallback
        if known is None:
            self._evict(steps, _MAX_STEPS_OF_ROWS if call.is_in_rows else _MAX_STEPS)
        if isinstance(known, DecodeStep):
            steps[key] = known  # kept if the trial of its kernel fails
            self._try_kernel(known, call)
        step = known if isinstance(known, DecodeStep) else self._new_step(call, selection, known)
        steps[key] = step  # the newest now
        if isinstance(step, _Failed):
            raise step.fallback
        if isinstance(step, SelectingStep) and selection is not None and not call.is_in_rows:
            step.set_numbers(selection.numbers)
        age = "known" if step is known else "new"
        kind = "a captured graph" if step.graph else "without a graph"
        debug.logger.debug("a %s step for %d rows: %s", age, len(call.seq_start), kind)
        return step

    def _new_step(
        self, call: Call, selection: Selection | None, failed: _Failed | None
    ) -> DecodeStep | _Failed:
        """A step, captured on a GPU, and verified; or its failure, with the attempts of `failed`
        counted in.
        """
        sums = _sums(call.cache)
        try:
            with _trial(call):
                return self._recorded_step(call, selection) or self._verified_step(call, selection)
        except Fallback:  # now, and perhaps not later
            raise
        except Exception as error:  # whatever a model does that a fixed step cannot do
            debug.logger.debug("A step could not be captured.", exc_info=True)
            if _sums(call.cache) != sums:
                if call.is_in_rows:
                    raise RowsOverwritten("The trial of a step has overwritten rows.") from error
                _forget_prompt(call)
            first_line = next(iter(str(error).splitlines()), "")
            reason = f"the step cannot be captured ({type(error).__name__}: {first_line})"
            if isinstance(error, torch.OutOfMemoryError):
                raise Fallback(reason) from error  # always tried again
            attempts = failed.attempts + 1 if failed else 1
            return _Failed(Fallback(reason), attempts, frozenset(call.given))

    def _recorded_step(self, call: Call, selection: Selection | None) -> DecodeStep | None:
        """A step that runs a program; None where the model itself must run."""
        # A trace records weights in Python, and hooks are called.
        if call.own_attention == TRACED_ATTENTION_NAME or call.has_hooks:
            return None
        try:
            return self._verified_step(call, selection, is_recorded=True)
        except (torch.OutOfMemoryError, Fallback, _OverwrittenError):
            raise
        except Exception:  # such as a kernel that torch does not see
            debug.logger.debug(
                "A pass could not be recorded, so the step runs the model itself.", exc_info=True
            )
            return None

    def _verified_step(
        self, call: Call, selection: Selection | None, is_recorded: bool = False
    ) -> DecodeStep:
        what = _what(call)
        step: DecodeStep
        if selection is None:
            step = DecodeStep(*what)
        elif selection.drafts is not None:
            how = {"kinds": selection.kinds, "draw": selection.draw}
            step = LookupStep(*what, drafts=selection.drafts, **how)
            needed = step.drafted.token.shape[1]
            if (free := call.cache.reserve(needed)) < needed:
                raise Fallback(f"a pass with drafts is tried with {needed} tokens, and {free} fit")
        else:
            kind = RowsStep if call.is_in_rows else SelectingStep
            kinds, bans, ngram, *_ = selection.kind
            step = kind(*what, kinds=kinds, bans=bans, ngram=ngram)
        self._make(step, call, is_recorded, verify)
        if isinstance(step, LookupStep):
            self._make(step.drafted, call, is_recorded, verify_drafts)
        return step

    def _make(
        self,
        step: DecodeStep,
        call: Call,
        is_recorded: bool,
        verify: Callable[[DecodeStep, Call], None],
    ) -> None:
        """Record, capture and verify a step."""
        at = _next_position(call)
        before = call.cache.snapshot()
        program = None
        with _unharmed(call.cache), step.on_shadow(call.own_attention) as shadow:
            try:
                with without_side_effects(shadow):
                    if is_recorded:
                        positions, token = unverified_inputs(call)
                        skipped = set() if call.has_usual_positions else {"angles_from_table"}
                        program = step.record(
                            *at[:2],
                            positions,
                            token[:, None].expand(-1, step.token.shape[1]),
                            is_exact=call.own_attention == EXACT_ATTENTION_NAME,
                            without=self._without | skipped,
                        )
                    if call.device.type == "cuda" and call.own_attention != TRACED_ATTENTION_NAME:
                        step.capture(*at)
            finally:  # passes without kernels leave anything in a recurrent state, nan too
                call.cache.restore(before)
            with without_side_effects(shadow):
                verify(step, call)
        if program is None:
            return
        if reason := self._why_no_kernel(step, call):
            refuse(step, reason)
        else:
            begin(step, program)

    def _why_no_kernel(self, step: DecodeStep, call: Call) -> str:
        if self._without:
            return "rules are left out"
        if not self._persistent:
            return "it is turned off"
        if call.own_attention == EXACT_ATTENTION_NAME:
            return "the step is exact"
        if call.is_in_rows or len(call.seq_start) > 1:
            return "it has several rows"
        return "" if type(step) in (DecodeStep, SelectingStep) else "a pass has several tokens"

    def _try_kernel(self, step: DecodeStep, call: Call) -> None:
        """Let one kernel compute the step, if it is compiled by now."""
        if not self._persistent or not is_ready(step, call.cache.seq_len):
            return
        if call.assumed is not None and call.assumed != call.state:
            return
        sums = _sums(call.cache)
        with _trial(call):
            # If it fails, the list goes on and the reason is kept.
            take_over(step, lambda: self._capture_and_verify(step, call, sums))
        if _sums(call.cache) != sums:
            _forget_prompt(call)
            raise Fallback("the trial of a kernel has overwritten the cache")

    def _capture_and_verify(self, step: DecodeStep, call: Call, sums: list[int]) -> None:
        before = call.cache.snapshot()
        with step.on_shadow(call.own_attention) as shadow, without_side_effects(shadow):
            try:
                if call.device.type == "cuda":
                    step.capture(*_next_position(call))
            finally:
                call.cache.restore(before)
            verify(step, call)
        # Verification computes on the same cache.
        if _sums(call.cache) != sums:
            raise RuntimeError("it writes over other tokens")

    def has_lost_kernel(self, step: DecodeStep) -> bool:
        """Whether the kernel of a step has failed since it serves. Then its list serves again."""
        if not give_up_if_failed(step):
            return False
        self._persistent = False
        for other in self.captured:
            refuse(other, "a kernel of another step has given up")
        self._warn(
            "a launch of the kernel for a whole step has given up, as other work may have kept it "
            "from running. Captured graphs take over"
        )
        return True

    def wait_for_kernels(self) -> None:
        """Until all kernels are compiled: a next call tries those of its step."""
        for step in self.captured:
            wait_for(step)

    def _evict(self, steps: dict[Any, DecodeStep | _Failed], most: int) -> None:
        """Drop steps whose model or storage is gone, and the oldest where there are too many:
        graphs take memory.
        """
        for key, step in list(steps.items()):
            if isinstance(step, DecodeStep) and step.is_orphan:
                del steps[key]
        while len(steps) >= most:
            del steps[next(iter(steps))]  # the oldest
            self._warn(
                f"one cache has more than {most} kinds of steps, so old ones are captured "
                "again. Weights that move from call to call, or a number that a module changes, "
                "may be the reason"
            )

    def check_failures(self, call: Call) -> None:
        """Raise `Fallback` if a call like this one could not be captured before.

        It may have been for either kind of step: what keeps one from being captured keeps the
        other, and fingerprints follow the kind.
        """
        failed = [
            (step, what[-1], state)
            for (what, state), step in self.by_cache.get(call.cache, {}).items()
            if isinstance(step, _Failed) and step.attempts >= _MAX_ATTEMPTS and not _drafts(what)
        ]
        given = frozenset(call.given)
        for step, fingerprint, state in failed:
            if (step.given, fingerprint, state) == (given, call.fingerprint, call.state):
                raise step.fallback


@contextmanager
def _trial(call: Call) -> Iterator[None]:
    """Where a step is made and tried."""
    with (
        # Tensors made in inference mode cannot be written outside of it, and a step outlives
        # such blocks.
        torch.inference_mode(False),
        torch.no_grad(),
        # A step that samples draws in each of its first runs.
        kept_random_state(call.device),
        decoding(call.model),
    ):
        yield


def _next_position(call: Call) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Where a new step is tried: length, beginning and position ids."""
    length = call.cache.seq_len
    return length, call.seq_start.to(call.device), call.position_ids(length)


def _forget_prompt(call: Call) -> None:
    """The trial of a step has written over it."""
    call.is_overwritten = True
    call.outputs = None  # the prompt is computed again


def _what(call: Call) -> tuple[Any, ...]:
    """The first arguments of a `DecodeStep`."""
    inputs = call.step_inputs
    parts = inputs.position_ids.shape[:-2]
    return call.model, call.cache, len(call.seq_start), parts, inputs.settings


def _drafts(what: Any) -> bool:
    """Whether a step of this kind has drafts: without, it may be captured."""
    return isinstance(what[0], tuple) and what[0][-1] is not None


@contextmanager
def _unharmed(cache: StaticContiguousCache) -> Iterator[None]:
    """Raise if the trial inside changes what the cache holds. Verification may not see that: it
    computes on the same cache.
    """
    sums = _sums(cache)
    words = "its trial has overwritten the cache"
    try:
        yield
    except (torch.OutOfMemoryError, Fallback):
        raise
    except Exception as error:
        if _sums(cache) != sums:
            raise _OverwrittenError(words) from error
        raise
    if _sums(cache) != sums:
        raise _OverwrittenError(words)


def _sums(cache: StaticContiguousCache) -> list[int]:
    """Of the bits that the cache holds, one for keys and one for values of each layer."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    layers = [layer for layer in cache.kv_layers if layer.group is not None]
    states = [own for layer in layers for own in layer.stored()]
    sums = [own.view(integers[own.dtype.itemsize]).sum() for own in states]
    return torch.stack([own.to(cache.kv_layers[0].device) for own in sums]).tolist()


def _assumed_state(steps: dict[Any, DecodeStep | _Failed], wanted: Any) -> State | None:
    """The state of the model in the newest step of this kind, if all memory that the step reads is
    still there.
    """
    for (what, state), step in reversed(steps.items()):
        if what == wanted and isinstance(step, DecodeStep):
            return state if step.is_in_place else None
    return None
