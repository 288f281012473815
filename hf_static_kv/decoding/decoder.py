"""`GraphDecoder`: a decode loop for `custom_generate`. Prefill as usual, then replays of one
captured step.

Tokens are those of `generate` without it in float32, and inside `exact`; in bf16 and fp16 its
kernels round differently. What cannot be captured falls back to transformers' loop, with one
warning that says why.
"""

import logging
from collections.abc import Collection
from contextlib import ExitStack, nullcontext
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_static_kv import compat
from hf_static_kv.cache import debug
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.identity import State
from hf_static_kv.cache.pool import CachePool
from hf_static_kv.cache.request import Fallback
from hf_static_kv.decoding.call import (
    Call,
    ModelChanged,
    PrefixChanged,
    random_state,
    set_random_state,
)
from hf_static_kv.decoding.eligibility import check_mask, check_model, check_request
from hf_static_kv.decoding.prompts import Prompts
from hf_static_kv.decoding.selection import Selection, selection_of
from hf_static_kv.decoding.tokens import Tokens
from hf_static_kv.decoding.verification import unverified_inputs, verify, without_side_effects
from hf_static_kv.patching import EXACT_ATTENTION_NAME, TRACED_ATTENTION_NAME
from hf_static_kv.program.preload import TRITON, load
from hf_static_kv.program.rules import RULES
from hf_static_kv.program.selecting import SelectingStep
from hf_static_kv.program.step import DecodeStep

logger = logging.getLogger(__name__)
_MAX_STEPS = 8  # captured for one cache
_MAX_ATTEMPTS = 2  # to capture one step: the first failure may be temporary
_LOCKS: WeakKeyDictionary[PreTrainedModel, Any] = WeakKeyDictionary()
_Output = GenerateDecoderOnlyOutput | Tensor


class _Failed(NamedTuple):
    """A step that could not be captured."""

    fallback: Fallback
    attempts: int  # how often that was tried
    given: frozenset[str]  # the keywords of the call


class GraphDecoder:
    """Decodes by replaying one captured CUDA graph.

    It keeps its graphs from call to call, and frees them with the cache. `fallback_reason` says why
    the last call ran in transformers' loop; None: it did not.

    Args:
        streamer: for calls that bring none.
        without: rewrite rules of the step to leave out (`program.rules`).

    `generate` finds no tokenizer for `stop_strings` beside a custom loop: pass
    `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`.

    >>> from hf_static_kv import StaticContiguousCache
    >>> from hf_static_kv.testing import random_model, tiny_config
    >>> model = random_model(tiny_config("llama"))
    >>> cache, ids = StaticContiguousCache.from_model(model, max_cache_len=16), torch.tensor([[5, 6, 7]])
    >>> tokens = model.generate(ids, past_key_values=cache, custom_generate=GraphDecoder(), max_new_tokens=8)
    >>> torch.equal(tokens, model.generate(ids, use_cache=False, max_new_tokens=8))
    True
    """

    def __init__(
        self, streamer: BaseStreamer | None = None, *, without: Collection[str] = ()
    ) -> None:
        if unknown := sorted(set(without) - set(RULES)):
            raise ValueError(
                f"There is no rule {', '.join(unknown)}: choose among {', '.join(RULES)}."
            )
        self.streamer = streamer
        self.without = frozenset(without)
        self.pool = CachePool()  # for calls that bring no cache
        self.prompts = Prompts(self.without)
        self.warns = True  # False: what would be a warning is a debug message
        self.fallback_reason: str | None = None
        self._steps: WeakKeyDictionary[StaticContiguousCache, dict[Any, DecodeStep | _Failed]] = (
            WeakKeyDictionary()
        )
        self._warned: set[str] = set()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> _Output:
        """What `generate` calls once it has prepared everything.

        A model serves one call at a time.
        """
        with _LOCKS.setdefault(model, RLock()), ExitStack() as own_cache:
            loop = logits_processor, stopping_criteria, generation_config
            call = Call(model, input_ids, *loop, model_kwargs)
            refused = None
            if call.brings_no_cache:
                try:
                    call.use_cache(own_cache.enter_context(self.pool.cache_for(call.request)))
                except Fallback as fallback:
                    refused = fallback
            call.entry = self.pool.entry_of(call.cache)
            return self.pool.hand_over(self._generate(call, refused))  # type: ignore[no-any-return]

    def _generate(self, call: Call, refused: Fallback | None) -> _Output:
        mode = call.request.mode
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"GraphDecoder decodes greedily or by sampling, and this is {mode.value}. Leave "
                "`custom_generate` out."
            )
        if isinstance(call.cache, StaticContiguousCache):
            call.begin()
        if call.device.type == "cuda" and not self._steps:
            load(TRITON)
        if call.streamer is None and self.streamer is not None:
            # `generate` gives the prompt to a streamer of its own only.
            call.streamer = self.streamer
            call.streamer.put(call.input_ids.cpu())
        self.fallback_reason = None
        try:
            if refused is not None:
                raise refused
            check_request(call)
            # A known pass tells that the model was served as it is.
            if not self.prompts.begin(call):
                check_model(call)
            check_mask(call)
            self._check_failures(call)
            call.prompts = self.prompts
            return self._decode(call)
        except Fallback as fallback:
            self._note(fallback, "This call falls back to the loop of `generate`")
            if call.start is not None and call.outputs is None:
                call.cache.restore(call.start)  # the prompt is computed again
        output = call.run_eagerly()
        self.fallback_reason = call.why_replaced or self.fallback_reason
        return output

    def _note(self, fallback: Fallback, consequence: str) -> None:
        self.fallback_reason = fallback.reason
        self._warn_once(f"{fallback.reason}. {consequence}")

    def _decode(self, call: Call) -> _Output:
        """The whole generation.

        Raises `Fallback` before its first token if there is no step for it.
        """
        may_begin_again = call.entry is not None and call.entry.num_reused
        drawn = random_state(call.device) if may_begin_again else None
        try:
            return self._decode_on(call)
        except PrefixChanged:
            call.forget_prefix()
            set_random_state(call.device, drawn)
            return self._decode_on(call)

    def _decode_on(self, call: Call) -> _Output:
        """The generation on the prefix that the cache holds.

        Raises `PrefixChanged` if the model has changed since.
        """
        logits = call.prefill()
        cache = call.cache  # another one if the prefix was of the model as it was before
        if cache.grows and cache.seq_len == cache.max_cache_len:
            call.grow()
        with compat.optimized_for_decode(call.model):
            step = self._step(call) if min(call.limits) > call.input_ids.shape[1] + 1 else None
            call.outputs = None  # from here on there is no way back to the prompt
            tokens = Tokens(call)
            if step is None or not tokens.may_be_ahead(0):
                call.confirm_prefix()
            is_over = tokens.append(logits)
            drawn = random_state(call.device) if call.assumed is not None else None
            while not is_over:
                try:
                    _run_model(tokens, call) if step is None else _run(step, tokens, call)
                except PrefixChanged:
                    raise
                except ModelChanged:
                    cache.crop(call.request.prompt_length - cache.seq_len)
                    tokens.restart(call.input_ids.shape[1] + 1)
                    set_random_state(call.device, drawn)
                    step = self._later_step(call)
                    continue
                is_over = not (cache.grows and tokens.is_cut_short())
                if not is_over:
                    call.grow()
                    tokens.set_limit(*call.limits)
                    step = self._later_step(call)
        call.confirm_prefix()  # the first token may have been the last
        cache.crop(-tokens.overrun)
        call.remember(tokens.ids)
        return tokens.result(call.cache)

    def _later_step(self, call: Call) -> DecodeStep | None:
        """Another step in the middle of a call; None where the model itself goes on: tokens are
        drawn and streamed.
        """
        try:
            return self._step(call)
        except Fallback as fallback:
            if call.is_overwritten:
                raise RuntimeError(
                    f"{fallback.reason}, and its trial has overwritten the cache: call again with "
                    "an empty one."
                ) from fallback
            self._note(fallback, "The rest of this call is computed by the model itself")
            return None

    def _step(self, call: Call) -> DecodeStep:
        """The step for this call, captured at its first use."""
        call.cache.reserve()  # a new step is tried at the next position
        steps = self._steps.setdefault(call.cache, {})
        selection = selection_of(call)
        # First: the device computes the prompt meanwhile.
        state = None if call.must_assume else call.state
        has_hooks = call.has_hooks
        selects = selection and selection.kind
        what = selects, call.step_kind, has_hooks, call.fingerprint
        if state is None:
            state = call.assumed = _assumed_state(steps, what)
        key = what, state or call.state
        known = steps.pop(key, None)
        if known is None:
            self._evict(steps)
        step = known if isinstance(known, DecodeStep) else self._new_step(call, selection, known)
        steps[key] = step  # the newest now
        if isinstance(step, _Failed):
            raise step.fallback
        if isinstance(step, SelectingStep) and selection is not None:
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
        devices = [call.device] if call.device.type == "cuda" else []
        sums = _sums(call.cache)
        try:
            # Tensors made in inference mode cannot be written outside of it, and a step outlives
            # such blocks.
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                # A step that samples draws in each of its first runs.
                torch.random.fork_rng(devices),
            ):
                return self._recorded_step(call, selection) or self._verified_step(call, selection)
        except Exception as error:  # whatever a model does that a fixed step cannot do
            debug.logger.debug("A step could not be captured.", exc_info=True)
            if _sums(call.cache) != sums:
                call.is_overwritten = True
                call.outputs = None  # the prompt is computed again
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
        except torch.OutOfMemoryError:
            raise
        except Exception:  # such as a kernel that torch does not see
            debug.logger.debug(
                "A pass could not be recorded, so the step runs the model itself.", exc_info=True
            )
            return None

    def _verified_step(
        self, call: Call, selection: Selection | None, is_recorded: bool = False
    ) -> DecodeStep:
        length = call.cache.seq_len
        inputs = call.step_inputs
        parts = inputs.position_ids.shape[:-2]
        what = call.model, call.cache, len(call.seq_start), parts, inputs.settings
        at = length, call.seq_start.to(call.device), call.position_ids(length)
        if selection is None:
            step = DecodeStep(*what)
        else:
            kinds, bans, ngram = selection.kind
            step = SelectingStep(*what, kinds=kinds, bans=bans, ngram=ngram)
        before = call.cache.snapshot()
        with step.on_shadow(call.own_attention) as shadow:
            try:
                with without_side_effects(shadow):
                    if is_recorded:
                        skipped = set() if call.has_usual_positions else {"angles_from_table"}
                        step.record(
                            *at[:2],
                            *unverified_inputs(call),
                            is_exact=call.own_attention == EXACT_ATTENTION_NAME,
                            without=self.without | skipped,
                        )
                    if call.device.type == "cuda" and call.own_attention != TRACED_ATTENTION_NAME:
                        step.capture(*at)
            finally:  # passes without kernels leave anything in a recurrent state, nan too
                call.cache.restore(before)
            with without_side_effects(shadow):
                verify(step, call)
        return step

    def _evict(self, steps: dict[Any, DecodeStep | _Failed]) -> None:
        """Drop steps whose model or storage is gone, and the oldest where there are too many:
        graphs take memory.
        """
        for key, step in list(steps.items()):
            if isinstance(step, DecodeStep) and step.is_orphan:
                del steps[key]
        while len(steps) >= _MAX_STEPS:
            del steps[next(iter(steps))]  # the oldest
            self._warn_once(
                f"one cache has more than {_MAX_STEPS} kinds of steps, so old ones are captured "
                "again. Weights that move from call to call, or a number that a module changes, "
                "may be the reason"
            )

    def _check_failures(self, call: Call) -> None:
        """Raise `Fallback` if a call like this one could not be captured before.

        It may have been for either kind of step: what keeps one from being captured keeps the
        other, and fingerprints follow the kind.
        """
        failed = [
            (step, what[-1], state)
            for (what, state), step in self._steps.get(call.cache, {}).items()
            if isinstance(step, _Failed) and step.attempts >= _MAX_ATTEMPTS
        ]
        given = frozenset(call.given)
        for step, fingerprint, state in failed:
            if (step.given, fingerprint, state) == (given, call.fingerprint, call.state):
                raise step.fallback

    @property
    def _captured(self) -> list[DecodeStep]:
        kept = [step for steps in self._steps.values() for step in steps.values()]
        return [step for step in kept if isinstance(step, DecodeStep)]

    @property
    def num_steps(self) -> int:
        """Captured steps that are kept."""
        return len(self._captured)

    @property
    def memory_bytes(self) -> int:
        """Bytes of rotary tables and inputs of all steps.

        Torch counts memory that graphs compute in as reserved.
        """
        steps = self._captured + self.prompts.steps
        buffers = [buffer for step in steps for buffer in step.buffers]
        return sum({buffer.data_ptr(): buffer.nbytes for buffer in buffers}.values())

    def __getstate__(self) -> dict[str, Any]:
        # A graph belongs to one process.
        return {**self.__dict__, "_steps": None, "pool": None, "prompts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._steps = WeakKeyDictionary()
        self.pool = CachePool()
        self.prompts = Prompts(self.without)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            level = logging.WARNING if self.warns else logging.DEBUG
            logger.log(level, "GraphDecoder: %s.", message)


def _sums(cache: StaticContiguousCache) -> list[int]:
    """Of the bits that the cache holds, one for keys and one for values of each layer."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    both = [own for layer in cache.kv_layers for own in (layer.keys, layer.values)]
    states = [own for own in both if own is not None]
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


def _run(step: DecodeStep, tokens: Tokens, call: Call) -> None:
    """From the newest token to the last one, or until the cache is full."""
    step.set_position(call.cache.seq_len, call.seq_start, call.position_ids(call.cache.seq_len))
    with step.on_shadow(call.own_attention) if step.runs_model else nullcontext():
        if isinstance(step, SelectingStep):
            _run_on_device(step, tokens, call)
        else:
            _run_on_host(step, tokens, call)


def _run_on_host(step: DecodeStep, tokens: Tokens, call: Call) -> None:
    is_over = False
    room = 0
    while not is_over:
        room = _room(step, call, room)
        logits = step.run(tokens.last_tokens)
        _mark_written(call)
        call.confirm()  # while the device computes
        is_over = tokens.append(logits)


def _run_model(tokens: Tokens, call: Call) -> None:
    """As `_run`, by ordinary passes."""
    is_over = False
    while not is_over:
        is_over = tokens.append(call.next_logits(tokens.sequences))


def _run_on_device(step: SelectingStep, tokens: Tokens, call: Call) -> None:
    """The tokens of a call in which the step itself selects: the host only counts."""
    start = tokens.length  # where the next token goes in `ids`
    position = call.cache.seq_len + 1  # and in `sequences`
    eos = next(iter(call.ends), None)
    step.set_state(tokens.ids[:, :start], position, tokens.unfinished, eos, tokens.pad)
    is_over = False
    room = 0
    while not is_over:
        room = _room(step, call, room)
        tokens.before_draw()
        flag = step.replay()
        _mark_written(call)
        num_selected = tokens.length - start + 1
        tokens.finished.is_busy = call.is_assuming and tokens.may_be_ahead(num_selected)
        if not tokens.finished.is_busy:
            call.confirm()  # while the device computes
        is_over = tokens.count_token(flag, step.token)
    selected = step.state.sequences[:, position : call.cache.seq_len + 1]
    tokens.ids[:, start : tokens.length] = selected
    tokens.unfinished = step.state.unfinished[:, 0].to(tokens.unfinished)


def _room(step: DecodeStep, call: Call, room: int) -> int:
    """How many more tokens fit. `room` is the previous answer; at 0 layers are compacted."""
    if room > 1:
        return room - 1
    room = call.cache.reserve()
    step.sync_offsets()
    return room


def _mark_written(call: Call) -> None:
    debug.log_step(call.cache.seq_len, 1, len(call.seq_start), call.cache.max_cache_len)
    call.cache.mark_written(1)
