"""`GraphDecoder`: a decode loop for `custom_generate`. Prefill as usual, then replays of one
captured step.

Tokens are those of `generate` without it in float32, and inside `exact`; in bf16 and fp16 its
kernels round differently. What cannot be captured falls back to transformers' loop, with one
warning that says why.
"""

import logging
import sys
import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

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

from hf_static_kv.cache import debug
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.pool import CachePool
from hf_static_kv.cache.request import Fallback
from hf_static_kv.decoding.assistant import Assistant
from hf_static_kv.decoding.call import (
    Call,
    ModelChanged,
    PrefixChanged,
    random_state,
    set_random_state,
)
from hf_static_kv.decoding.drafts import drafts_of
from hf_static_kv.decoding.eligibility import check_mask, check_model, check_request
from hf_static_kv.decoding.loop import MAX_ROWS, Loop
from hf_static_kv.decoding.prompts import Prompts
from hf_static_kv.decoding.seats import Cancelled, Seat, refusal
from hf_static_kv.decoding.selection import selection_of
from hf_static_kv.decoding.speculation import Accepted, Speculation
from hf_static_kv.decoding.steps import Steps, decoding
from hf_static_kv.decoding.tokens import Tokens
from hf_static_kv.decoding.turns import turns_of
from hf_static_kv.program.drafting import Drafts, LookupStep
from hf_static_kv.program.preload import TRITON, load
from hf_static_kv.program.rules import RULES
from hf_static_kv.program.selecting import SelectingStep
from hf_static_kv.program.step import DecodeStep
from hf_static_kv.program.takeover import choose_by_length, compile_kernel, why_no_kernel

logger = logging.getLogger(__name__)
# What `generate` does to a model while it decodes.
_Output = GenerateDecoderOnlyOutput | Tensor


class Warnings:
    """Logs each message once. `are_shown` False: as a debug message."""

    def __init__(self) -> None:
        self.are_shown = True
        self._known: set[str] = set()

    def __call__(self, message: str) -> None:
        if message not in self._known:
            self._known.add(message)
            level = logging.WARNING if self.are_shown else logging.DEBUG
            logger.log(level, "GraphDecoder: %s.", message)


class GraphDecoder:
    """Decodes by replaying one captured CUDA graph.

    It keeps its graphs from call to call, and frees them with the cache. `fallback_reason` says why
    the last call ran in transformers' loop; None: it did not. `kernel_reason` says why no single
    kernel computed its steps; None: one did.

    Args:
        streamer: for calls that bring none.
        without: rewrite rules of the step to leave out (`program.rules`).
        persistent: whether one kernel may compute a whole step, on the GPUs and models where that
            was measured to be faster. It is compiled while the captured graph serves, and takes over
            in a later call, which rounds differently. Without any `without` only.

    `generate` finds no tokenizer for `stop_strings` beside a custom loop: pass
    `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`.

    >>> import torch
    >>> from hf_static_kv import StaticContiguousCache
    >>> from hf_static_kv.testing import random_model, tiny_config
    >>> model = random_model(tiny_config("llama"))
    >>> cache, ids = StaticContiguousCache.from_model(model, max_cache_len=16), torch.tensor([[5, 6, 7]])
    >>> tokens = model.generate(ids, past_key_values=cache, custom_generate=GraphDecoder(), max_new_tokens=8)
    >>> torch.equal(tokens, model.generate(ids, use_cache=False, max_new_tokens=8))
    True
    """

    def __init__(
        self,
        streamer: BaseStreamer | None = None,
        *,
        without: Collection[str] = (),
        persistent: bool = True,
    ) -> None:
        if unknown := sorted(set(without) - set(RULES)):
            raise ValueError(
                f"There is no rule {', '.join(unknown)}: choose among {', '.join(RULES)}."
            )
        self.streamer = streamer
        self.without = frozenset(without)
        self.persistent = persistent
        self._loops: WeakKeyDictionary[PreTrainedModel, Loop] = WeakKeyDictionary()
        self.use_pool(CachePool())
        self.prompts = Prompts(self.without)
        self._warn = Warnings()
        self.fallback_reason: str | None = None
        self.kernel_reason: str | None = "nothing was decoded"
        self.steps = Steps(self.without, self._warn, self.persistent)
        self.max_rows = MAX_ROWS  # calls that decode together
        self.drafts: Drafts | None = None  # of calls that do not ask for any
        self.assistant: PreTrainedModel | None = None  # that makes these
        self.accepted = Accepted()
        self.draft_reason: str | None = None  # why the last call had none that asked for them

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
            self.loop_of(call.model).follow(call.device)
            call.request.is_decoded = True
            refused = None
            if call.brings_no_cache:
                try:
                    call.use_cache(own_cache.enter_context(self.pool.cache_for(call.request)))
                except Fallback as fallback:
                    refused = fallback
            call.use_pool(self.pool)
            call.more_caches = own_cache
            output = self.pool.hand_over(self._generate(call, refused))
            self.fallback_reason = call.fallback_reason
            return output  # type: ignore[no-any-return]

    def _generate(self, call: Call, refused: Fallback | None) -> _Output:
        mode = call.request.mode
        call.drafts = drafts_of(call)
        call.assistant_model = call.request.assistant_model
        if call.drafts is None:
            call.drafts = self.drafts
            call.assistant_model = self.assistant
        self.draft_reason = None
        is_undrafted = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        if not is_undrafted and not call.request.has_drafts:
            raise ValueError(
                f"GraphDecoder decodes greedily or by sampling, and this is {mode.value}. Leave "
                "`custom_generate` out."
            )
        if isinstance(call.cache, StaticContiguousCache):
            call.begin()
        if call.device.type == "cuda" and not self.steps.by_cache:
            load(TRITON)
        if call.streamer is None and self.streamer is not None:
            # `generate` gives the prompt to a streamer of its own only.
            call.streamer = self.streamer
            with turns_of(call.model).released():
                call.streamer.put(call.input_ids.cpu())
        try:
            if refused is not None:
                raise refused
            check_request(call)
            # A known pass tells that the model was served as it is.
            if not self.prompts.begin(call):
                check_model(call)
            check_mask(call)
            self.steps.check_failures(call)
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
        self.kernel_reason = fallback.reason
        if call.drafts is not None:
            self.draft_reason = fallback.reason
        self._warn(f"{fallback.reason}. {consequence}")

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
        is_full = cache.grows and cache.seq_len == cache.max_cache_len
        if is_full and call.request.max_new_tokens > 1:
            call.grow()
        needs_step = min(call.limits) > call.input_ids.shape[1] + 1
        if needs_step and self._is_among_others(call):
            tokens = Tokens(call)
            if (output := self._in_company(call, tokens, logits)) is not None:
                return output
        step = self._first_step(call) if needs_step else None
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
        if tokens.is_watched:  # for the end of its stream nobody waits
            turns_of(call.model).release()
        return tokens.result(call.cache)

    def use_pool(self, pool: CachePool) -> None:
        """For calls that bring no cache. Its bound is that of the rows, too."""
        self.pool = pool
        loops = weakref.ref(self._loops)
        pool.bytes_beside = lambda: sum(loop.memory_bytes for loop in (loops() or {}).values())
        pool.free_beside = lambda: sum(loop.free_idle() for loop in (loops() or {}).values()) > 0

    def show_no_warnings(self) -> None:
        self._warn.are_shown = False

    # --- among calls of other threads

    @property
    def loops(self) -> list[Loop]:
        return list(self._loops.values())

    def loop_of(self, model: PreTrainedModel) -> Loop:
        if (loop := self._loops.get(model)) is None:
            how = self.steps.get_for_rows, self.pool.free_bound, self.max_rows
            loop = self._loops[model] = Loop(turns_of(model), *how)
        return loop

    def _is_among_others(self, call: Call) -> bool:
        """Whether the call goes on in a row beside others; if it cannot, it lets them go first."""
        if call.owner is not None and call.owner.is_cancelled:
            raise Cancelled
        turns = turns_of(call.model)
        if turns.is_held:
            return False
        loop = self.loop_of(call.model)
        is_company = turns.is_wanted or (loop.num_rows and not call.is_alone)
        # A row can draw from a generator of its own.
        if not is_company and (call.is_alone or call.seed is None):
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
        seat = Seat(call, tokens, selection_of(call))
        self.kernel_reason = "it decodes together with other calls"
        if call.drafts is not None:
            self.draft_reason = "it decodes together with other calls"
        if not self.loop_of(call.model).run(seat, logits):
            call.is_alone = True
            return None
        if seat.returns_cache:
            call.remember(tokens.ids)
        return tokens.result(call.cache)

    def _watched(self, tokens: Tokens, call: Call) -> AbstractContextManager[None]:
        """Code of the caller runs inside: others need not wait for it."""
        return turns_of(call.model).released() if tokens.is_watched else nullcontext()

    # --- a call alone

    def _run(self, step: DecodeStep | None, tokens: Tokens, call: Call) -> bool:
        """From the newest token to the last one, or until the cache is full; False: only until
        others wait, who can decode with this call.
        """
        if step is None:
            return self._run_model(tokens, call)
        while True:
            end = choose_by_length(step, call.cache.seq_len)
            self.kernel_reason = why_no_kernel(step)
            if end is None:
                is_over = self._run_step(step, tokens, call)
                compile_kernel(step)
                return is_over
            is_over = self._run_kernel(step, tokens, call, end)
            if is_over or call.cache.seq_len < end:
                return is_over

    def _run_kernel(self, step: DecodeStep, tokens: Tokens, call: Call, end: int) -> bool:
        """As `_run_step`, and again by the list if the kernel gives up."""
        before = call.cache.snapshot()
        mark = tokens.mark()
        is_over = self._run_step(step, tokens, call, end)
        if not self.steps.has_lost_kernel(step):
            return is_over
        self.kernel_reason = why_no_kernel(step)
        if tokens.is_watched:
            if call.start is not None:
                call.cache.restore(call.start)
            raise RuntimeError(
                "The kernel of a decode step has given up, so these tokens are wrong. Call again: "
                "the captured graph computes them."
            )
        call.cache.restore(before)
        return tokens.go_back(mark) or self._run_step(step, tokens, call)

    def _run_step(
        self, step: DecodeStep, tokens: Tokens, call: Call, end: int = sys.maxsize
    ) -> bool:
        """As `_run`, but not beyond the length `end`. If a kernel gives up, the tokens are wrong."""
        length = call.cache.seq_len
        step.set_position(length, call.seq_start, call.position_ids(length))
        with ExitStack() as running:
            if step.runs_model:
                running.enter_context(decoding(call.model))
                running.enter_context(step.on_shadow(call.own_attention))
            if isinstance(step, LookupStep):
                return self._run_with_drafts(step, tokens, call)
            if isinstance(step, SelectingStep):
                return self._run_on_device(step, tokens, call, end)
            return self._run_on_host(step, tokens, call, end)

    def _run_on_host(self, step: DecodeStep, tokens: Tokens, call: Call, end: int) -> bool:
        room = 0
        while True:
            room = _room(step, call, room)
            logits = step.run(tokens.last_tokens)
            _mark_written(call)
            call.confirm()  # while the device computes
            with self._watched(tokens, call):
                is_over = tokens.append(logits)
            if is_over or call.cache.seq_len >= end or self._is_among_others(call):
                return is_over

    def _run_model(self, tokens: Tokens, call: Call) -> bool:
        """As `_run`, by ordinary passes."""
        is_over = False
        while not is_over:
            with decoding(call.model):
                logits = call.next_logits(tokens.sequences)
            with self._watched(tokens, call):
                is_over = tokens.append(logits)
        return True

    def _run_on_device(self, step: SelectingStep, tokens: Tokens, call: Call, end: int) -> bool:
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
            if not is_over and (call.cache.seq_len >= end or self._is_among_others(call)):
                is_left = not tokens.finished.newest()
        selected = step.state.sequences[:, position : call.cache.seq_len + 1]
        tokens.ids[:, start : tokens.length] = selected
        tokens.unfinished = step.state.unfinished[:, 0].to(tokens.unfinished)
        return is_over

    def _run_with_drafts(self, step: LookupStep, tokens: Tokens, call: Call) -> bool:
        """As `_run_on_device`; a pass may have several tokens."""

        def show(new: list[int]) -> None:
            with self._watched(tokens, call):
                for token in new:
                    tokens.stream(token)

        if call.assistant is not None:
            try:
                call.assistant.use_state_of(step)  # another one in the middle of a call
            except Fallback as fallback:
                self._warn(f"{fallback.reason}. No tokens are drafted")
                call.assistant = None
        with step.drafted.on_shadow(call.own_attention) if step.runs_model else nullcontext():
            return Speculation(
                step, tokens, call, show, lambda: self._is_among_others(call), self.accepted
            ).run()

    # --- steps

    def _first_step(self, call: Call) -> DecodeStep:
        """The step after the prompt, without drafts if the call can have none. Raises `Fallback`."""
        if call.drafts is not None:
            try:
                if call.assistant_model is not None and call.assistant is None:
                    how = self.steps, self.pool, call.more_caches, self.prompts
                    call.assistant = Assistant(call, *how)
                step = self.steps.get(call)
                if isinstance(step, LookupStep) and call.assistant is not None:
                    call.assistant.use_state_of(step)
                return step
            except Fallback as fallback:
                if call.is_overwritten:
                    raise
                call.assistant = None
                self.draft_reason = fallback.reason
                self._warn(f"{fallback.reason}. No tokens are drafted")
                call.drafts = None
        return self.steps.get(call)

    def _later_step(self, call: Call) -> DecodeStep | None:
        """Another step in the middle of a call; None where the model itself goes on: tokens are
        drawn and streamed.
        """
        try:
            return self._first_step(call)
        except Fallback as fallback:
            if call.is_overwritten:
                raise RuntimeError(
                    f"{fallback.reason}, and its trial has overwritten the cache: call again with "
                    "an empty one."
                ) from fallback
            self._note(call, fallback, "The rest of this call is computed by the model itself")
            return None

    @property
    def num_steps(self) -> int:
        """Captured steps that are kept."""
        return len(self.steps.captured)

    @property
    def memory_bytes(self) -> int:
        """Bytes of rotary tables and inputs of all steps, and of the rows of several calls.

        Torch counts memory that graphs compute in as reserved.
        """
        steps = self.steps.captured + self.prompts.steps
        buffers = [buffer for step in steps for buffer in step.buffers]
        of_steps = sum({buffer.data_ptr(): buffer.nbytes for buffer in buffers}.values())
        return of_steps + sum(loop.memory_bytes for loop in self.loops)

    def __getstate__(self) -> dict[str, Any]:
        # A graph belongs to one process.
        gone = dict.fromkeys(("steps", "_loops", "pool", "prompts", "assistant", "drafts"))
        return {**self.__dict__, **gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.steps = Steps(self.without, self._warn, self.persistent)
        self._loops = WeakKeyDictionary()
        self.use_pool(CachePool())
        self.prompts = Prompts(self.without)


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
