"""`GraphDecoder`: a decode loop for `custom_generate`. Prefill as usual, then replays of one
captured step.

Tokens are those of `generate` without it in float32, and inside `exact`; in bf16 and fp16 its
kernels round differently. What cannot be captured falls back to transformers' loop, with one
warning that says why.
"""

import logging
from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
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
from hf_static_kv.decoding.loop import MAX_ROWS, Loop, Request, refusal
from hf_static_kv.decoding.prompts import Prompts
from hf_static_kv.decoding.selection import Selection, selection_of
from hf_static_kv.decoding.tokens import Tokens
from hf_static_kv.decoding.turns import Turns
from hf_static_kv.decoding.verification import unverified_inputs, verify, without_side_effects
from hf_static_kv.patching import EXACT_ATTENTION_NAME, TRACED_ATTENTION_NAME, SharedContext
from hf_static_kv.program.preload import TRITON, load
from hf_static_kv.program.rules import RULES
from hf_static_kv.program.selecting import RowsStep, SelectingStep
from hf_static_kv.program.step import DecodeStep

logger = logging.getLogger(__name__)
_MAX_STEPS = 8  # captured for one cache
_MAX_STEPS_OF_ROWS = 16  # greedy and sampling ones for 1, 2, 4, ... 64 rows
_MAX_ATTEMPTS = 2  # to capture one step: the first failure may be temporary
_TURNS: WeakKeyDictionary[PreTrainedModel, Turns] = WeakKeyDictionary()
# What `generate` does to a model while it decodes.
_DECODING: WeakKeyDictionary[PreTrainedModel, SharedContext] = WeakKeyDictionary()
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
        self._loops: WeakKeyDictionary[PreTrainedModel, Loop] = WeakKeyDictionary()
        self.max_rows = MAX_ROWS  # calls that decode together
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
        """What `generate` calls once it has prepared everything."""
        loop = logits_processor, stopping_criteria, generation_config
        return self.run(Call(model, input_ids, *loop, model_kwargs))

    def run(self, call: Call) -> _Output:
        """One call, alone or among those of other threads; `call.fallback_reason` tells if it ran
        in transformers' loop.
        """
        with turns_of(call.model).turn(), ExitStack() as own_cache:
            refused = None
            if call.brings_no_cache:
                try:
                    call.use_cache(own_cache.enter_context(self.pool.cache_for(call.request)))
                except Fallback as fallback:
                    refused = fallback
            call.entry = self.pool.entry_of(call.cache)
            output = self.pool.hand_over(self._generate(call, refused))
            self.fallback_reason = call.fallback_reason
            return output  # type: ignore[no-any-return]

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
            self._note(call, fallback, "This call falls back to the loop of `generate`")
            if call.start is not None and call.outputs is None:
                call.cache.restore(call.start)  # the prompt is computed again
        turns_of(call.model).release()
        output = call.run_eagerly()
        call.fallback_reason = call.why_replaced or call.fallback_reason
        return output

    def _note(self, call: Call, fallback: Fallback, consequence: str) -> None:
        call.fallback_reason = fallback.reason
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
        needs_step = min(call.limits) > call.input_ids.shape[1] + 1
        with _DECODING.setdefault(call.model, SharedContext(compat.optimized_for_decode))(
            call.model
        ):
            if needs_step and self._is_among_others(call):
                tokens = Tokens(call)
                if (output := self._in_company(call, tokens, logits)) is not None:
                    return output
            step = self._step(call) if needs_step else None
            call.outputs = None  # from here on there is no way back to the prompt
            tokens = Tokens(call)
            if step is None or not tokens.may_be_ahead(0):
                call.confirm_prefix()
            with self._watched(tokens, call):
                is_over = tokens.append(logits)
            drawn = random_state(call.device) if call.assumed is not None else None
            while not is_over:
                try:
                    has_ended = self._run(step, tokens, call)
                    if not has_ended:
                        if (output := self._in_company(call, tokens)) is not None:
                            return output
                        continue
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

    # --- among calls of other threads

    def loop_of(self, model: PreTrainedModel) -> Loop:
        if (loop := self._loops.get(model)) is None:
            how = self._rows_step, self.pool.free_bound, self.max_rows
            loop = self._loops[model] = Loop(turns_of(model), *how)
        return loop

    def _is_among_others(self, call: Call) -> bool:
        """Whether the call goes on in a row beside others; if it cannot, it lets them go first."""
        turns = turns_of(call.model)
        loop = self.loop_of(call.model)
        if not turns.is_wanted and (call.is_alone or not loop.num_rows):
            return False
        call.is_alone = call.is_alone or self.max_rows < 2 or refusal(call) is not None
        if call.is_alone or loop.is_full:
            turns.give_way()
            return False
        return True

    def _in_company(
        self, call: Call, tokens: Tokens, logits: Tensor | None = None
    ) -> _Output | None:
        """The rest of the call in a row; None: it stays alone."""
        call.confirm()
        request = Request(call, tokens, selection_of(call))
        if not self.loop_of(call.model).run(request, logits):
            call.is_alone = True
            return None
        if call.keeps_cache:
            call.remember(tokens.ids)
        return tokens.result(call.cache)

    def _watched(self, tokens: Tokens, call: Call) -> AbstractContextManager[None]:
        """Code of the caller runs inside: others need not wait for it."""
        return turns_of(call.model).released() if tokens.is_watched else nullcontext()

    def _rows_step(self, call: Call, selection: Selection) -> RowsStep:
        step = self._step_of(call, selection)
        assert isinstance(step, RowsStep)
        return step

    # --- a call alone

    def _run(self, step: DecodeStep | None, tokens: Tokens, call: Call) -> bool:
        """From the newest token to the last one, or until the cache is full; False: only until
        others wait, who can decode with this call.
        """
        if step is None:
            return self._run_model(tokens, call)
        length = call.cache.seq_len
        step.set_position(length, call.seq_start, call.position_ids(length))
        with step.on_shadow(call.own_attention) if step.runs_model else nullcontext():
            if isinstance(step, SelectingStep):
                return self._run_on_device(step, tokens, call)
            return self._run_on_host(step, tokens, call)

    def _run_on_host(self, step: DecodeStep, tokens: Tokens, call: Call) -> bool:
        room = 0
        while True:
            room = _room(step, call, room)
            logits = step.run(tokens.last_tokens)
            _mark_written(call)
            call.confirm()  # while the device computes
            with self._watched(tokens, call):
                is_over = tokens.append(logits)
            if is_over or self._is_among_others(call):
                return is_over

    def _run_model(self, tokens: Tokens, call: Call) -> bool:
        """As `_run`, by ordinary passes."""
        is_over = False
        while not is_over:
            logits = call.next_logits(tokens.sequences)
            with self._watched(tokens, call):
                is_over = tokens.append(logits)
        return True

    def _run_on_device(self, step: SelectingStep, tokens: Tokens, call: Call) -> bool:
        """The tokens of a call in which the step itself selects: the host only counts."""
        start = tokens.length  # where the next token goes in `ids`
        position = call.cache.seq_len + 1  # and in `sequences`
        eos = next(iter(call.ends), None)
        step.set_state(tokens.ids[:, :start], position, tokens.unfinished, eos, tokens.pad)
        is_over = is_left = False
        room = 0
        while not (is_over or is_left):
            room = _room(step, call, room)
            tokens.before_draw()
            flag = step.replay()
            _mark_written(call)
            num_selected = tokens.length - start + 1
            tokens.finished.is_busy = call.is_assuming and tokens.may_be_ahead(num_selected)
            if not tokens.finished.is_busy:
                call.confirm()  # while the device computes
            with self._watched(tokens, call):
                is_over = tokens.count_token(flag, step.token)
            if not is_over and self._is_among_others(call):
                is_left = not tokens.finished.newest()
        selected = step.state.sequences[:, position : call.cache.seq_len + 1]
        tokens.ids[:, start : tokens.length] = selected
        tokens.unfinished = step.state.unfinished[:, 0].to(tokens.unfinished)
        return is_over

    # --- steps

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
            self._note(call, fallback, "The rest of this call is computed by the model itself")
            return None

    def _step(self, call: Call) -> DecodeStep:
        """The step for this call, captured at its first use."""
        return self._step_of(call, selection_of(call))

    def _step_of(self, call: Call, selection: Selection | None) -> DecodeStep:
        call.cache.reserve()  # a new step is tried at the next position
        steps = self._steps.setdefault(call.cache, {})
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
            self._evict(steps, _MAX_STEPS_OF_ROWS if call.is_in_rows else _MAX_STEPS)
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
                if call.is_in_rows:
                    raise RuntimeError("The trial of a step has overwritten rows.") from error
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
            kind = RowsStep if call.is_in_rows else SelectingStep
            step = kind(*what, kinds=kinds, bans=bans, ngram=ngram)
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

    def _evict(self, steps: dict[Any, DecodeStep | _Failed], most: int) -> None:
        """Drop steps whose model or storage is gone, and the oldest where there are too many:
        graphs take memory.
        """
        for key, step in list(steps.items()):
            if isinstance(step, DecodeStep) and step.is_orphan:
                del steps[key]
        while len(steps) >= most:
            del steps[next(iter(steps))]  # the oldest
            self._warn_once(
                f"one cache has more than {most} kinds of steps, so old ones are captured "
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
        return {**self.__dict__, "_steps": None, "_loops": None, "pool": None, "prompts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._steps = WeakKeyDictionary()
        self._loops = WeakKeyDictionary()
        self.pool = CachePool()
        self.prompts = Prompts(self.without)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            level = logging.WARNING if self.warns else logging.DEBUG
            logger.log(level, "GraphDecoder: %s.", message)


def turns_of(model: PreTrainedModel) -> Turns:
    """Who may use the model now."""
    return _TURNS.setdefault(model, Turns())


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
