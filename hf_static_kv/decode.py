"""A decode loop for `custom_generate` that never waits: prefill as usual, then one captured step after the other.

    decoder = GraphDecoder()
    model.generate(**inputs, past_key_values=cache, custom_generate=decoder)

Tokens are those of `generate` without it in float32, and inside `exact`; in bf16 and fp16 its kernels round in another
way. What cannot be captured runs in transformers' own loop, with one warning that says why.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_static_kv import debug
from hf_static_kv.attention import EXACT_ATTENTION_NAME, TRACED_ATTENTION_NAME, trial_pass
from hf_static_kv.cache import StaticContiguousCache
from hf_static_kv.generation import Call, NotCaptured
from hf_static_kv.loading import load_inductor, load_triton
from hf_static_kv.patching import attention_for_a_while
from hf_static_kv.run import Run
from hf_static_kv.step import COMPILE, DecodeStep, GreedyStep
from hf_static_kv.steps import StepRecorder
from hf_static_kv.trial import compare

logger = logging.getLogger(__name__)
_MOST_STEPS = 8  # of one cache
_ATTEMPTS = 2  # at one step: what failed once may have been something that passes
_LOCKS: WeakKeyDictionary[PreTrainedModel, Any] = WeakKeyDictionary()


class _Failure(NamedTuple):
    """Why a step could not be made, and how often that was tried."""

    reason: str
    attempts: int


class GraphDecoder:
    """Decodes by replaying one captured CUDA graph; keeps its graphs from call to call, and frees them with the cache.

    `compile` is for the captured step on a GPU: "none" captures it with our own kernels for the parts that are known;
    "layers" leaves what lies between the matrices to `torch.compile`, one decoder layer for all that are like it.
    `streamer` is for calls that bring none. `record_steps=k` keeps in `steps` what was chosen and from what in the last
    call: for each row its steps with token, probability, the k best and the entropy (and their text, with a
    `tokenizer`). `fallback_reason` says why the last call ran in transformers' loop; None when it did not.

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
        self,
        compile: str = "none",
        streamer: BaseStreamer | None = None,
        record_steps: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if compile not in COMPILE:
            raise ValueError(f"compile must be one of {', '.join(map(repr, COMPILE))}, got {compile!r}.")
        if record_steps < 0:
            raise ValueError(f"record_steps is how many of the best tokens to record at each step, got {record_steps}.")
        self.compile, self.streamer = compile, streamer
        self.record_steps, self.tokenizer = record_steps, tokenizer
        self.steps: list[list[dict[str, Any]]] = []
        self.fallback_reason: str | None = None
        self._steps: WeakKeyDictionary[StaticContiguousCache, dict[Any, DecodeStep | _Failure]] = WeakKeyDictionary()
        self._warned: set[str] = set()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What `generate` calls once it has prepared everything; one call at a time for a model, which it changes."""
        recorder = StepRecorder(self.record_steps, self.tokenizer) if self.record_steps else None
        if recorder is not None:
            logits_processor = LogitsProcessorList([*logits_processor, recorder])
        with _LOCKS.setdefault(model, RLock()):
            call = Call(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
            output = self._generate(call)
        if recorder is not None:
            self.steps = recorder.steps(output if isinstance(output, torch.Tensor) else output.sequences)
        return output

    def _generate(self, call: Call) -> GenerateDecoderOnlyOutput | torch.Tensor:
        call.refuse_what_is_not_decoding()
        if call.own_attention == EXACT_ATTENTION_NAME and self.compile != "none":
            raise ValueError(f'GraphDecoder("{self.compile}") is not exact: inside exact use GraphDecoder().')
        if call.device.type == "cuda" and not self._steps:
            self._load_compilers()
        streamer = call.request.streamer
        if streamer is None and self.streamer is not None:  # to its own `generate` has given the prompt
            streamer = self.streamer
            streamer.put(call.input_ids.cpu())  # type: ignore[no-untyped-call]
        self.fallback_reason = call.why_not() or self._refused(call)
        if self.fallback_reason is None:
            before = call.cache.seq_len
            try:
                return self._captured(call, streamer)
            except NotCaptured as reason:
                self.fallback_reason = str(reason)
                call.cache.crop(before - call.cache.seq_len)
        self._warn_once(f"{self.fallback_reason}. This call runs in the loop of `generate`, at its pace")
        output = call.run_in_generate(streamer)
        call.remember(output if isinstance(output, torch.Tensor) else output.sequences)
        return output

    def _load_compilers(self) -> None:
        load_triton()
        if self.compile == "layers":
            load_inductor()

    def _captured(self, call: Call, streamer: BaseStreamer | None) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """The whole generation. Raises `NotCaptured` before its first token where the step cannot be had."""
        cache, logits = call.cache, call.prefill()
        with call.model._optimize_model_for_decode():
            is_greedy = streamer is None and call.is_plain_greedy()  # a streamer is given every token as it comes
            step = self._step(call, is_greedy) if call.max_length > call.input_ids.shape[1] + 1 else None
            run = Run(call, streamer)
            # A replay does not look at the model, and to give it another attention takes a millisecond.
            is_replayed = step is None or step.graph is not None
            with nullcontext() if is_replayed else attention_for_a_while(call.model, call.own_attention):
                _run_on(step, run, call, logits)
        cache.crop(-run.overrun)
        run.refuse_to_be_cut_short(cache)
        call.remember(run.ids)
        return run.result(cache)

    def _step(self, call: Call, is_greedy: bool) -> DecodeStep:
        """The step for this call, made at the first use of its kind."""
        steps = self._steps.setdefault(call.cache, {})
        key = (is_greedy, *call.fingerprint)
        known = steps.pop(key, None)
        if known is None:
            self._make_room(steps)
        step = known if isinstance(known, DecodeStep) else self._try_new_step(call, is_greedy, known)
        steps[key] = step  # the newest now
        if isinstance(step, _Failure):
            raise NotCaptured(step.reason)
        age, kind = "known" if step is known else "new", "a captured graph" if step.graph else "without a graph"
        debug.logger.debug("a %s step for %d rows: %s", age, len(call.origin), kind)
        return step

    def _try_new_step(self, call: Call, is_greedy: bool, before: _Failure | None) -> DecodeStep | _Failure:
        try:
            # Tensors born in inference mode could not be filled outside it, and a step outlives such blocks.
            with torch.inference_mode(False), torch.no_grad():
                return self._new_step(call, is_greedy)
        except Exception as error:  # whatever a model does that a fixed step cannot do
            first_line = next(iter(str(error).splitlines()), "")
            reason = f"the step cannot be captured ({type(error).__name__}: {first_line})"
            if isinstance(error, torch.OutOfMemoryError):
                raise NotCaptured(reason) from error  # which may pass, as often as it happens
            return _Failure(reason, before.attempts + 1 if before else 1)

    def _make_room(self, steps: dict[Any, DecodeStep | _Failure]) -> None:
        """Drop steps whose model is gone, and the oldest where there are too many.

        A model that is changed between calls, or batches of ever other sizes, would fill the memory with graphs.
        """
        for key in [key for key, step in steps.items() if isinstance(step, DecodeStep) and step.is_orphan]:
            del steps[key]
        while len(steps) >= _MOST_STEPS:
            del steps[next(iter(steps))]  # the oldest
            self._warn_once(
                f"more than {_MOST_STEPS} kinds of steps for one cache, so old ones are made again. Weights that move "
                "from call to call, or a number that a module keeps, may be why"
            )

    def _new_step(self, call: Call, is_greedy: bool) -> DecodeStep:
        """A step, captured on a GPU, and compared with an ordinary one."""
        kind = GreedyStep if is_greedy else DecodeStep
        step = kind(call.model, call.cache, len(call.origin))
        with attention_for_a_while(call.model, call.own_attention):
            # A trace takes its rows as they are made, so that its step runs without a graph.
            if call.device.type == "cuda" and call.own_attention != TRACED_ATTENTION_NAME:
                step.capture(call.cache.seq_len, call.origin.to(call.device), self.compile)
            with trial_pass():
                compare(step, call)
        return step

    def _refused(self, call: Call) -> str | None:
        """Why a call like this one could not be captured before, so that it is not tried again."""
        steps = self._steps.get(call.cache) or {}
        failures = {key[1:]: step for key, step in steps.items() if isinstance(step, _Failure)}
        failure = failures.get(call.fingerprint) if failures else None
        return failure.reason if failure and failure.attempts >= _ATTEMPTS else None

    @property
    def memory_bytes(self) -> int:
        """Bytes that the captured steps hold beside the model and the caches: rotary tables and inputs.

        What a graph computes with in between is not among them; torch counts it as reserved memory.
        """
        kept = (
            t for steps in self._steps.values() for s in steps.values() if isinstance(s, DecodeStep) for t in s.kept
        )
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())

    def __getstate__(self) -> dict[str, Any]:
        # A graph belongs to one process: a copy captures its own.
        return {**self.__dict__, "_steps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._steps = WeakKeyDictionary()

    def _warn_once(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            logger.warning("GraphDecoder: %s.", words)


def _run_on(step: DecodeStep | None, run: Run, call: Call, logits: torch.Tensor) -> None:
    """From the logits after the prompt to the last token; no step is needed where one token is all."""
    if step is not None:
        step.begin(call.cache.seq_len, call.origin)
    if isinstance(step, GreedyStep):
        _run_greedily(step, run, call, logits)
        return
    while not run.append(logits) and step is not None:
        logits = step.run(run.last_tokens)
        _count(call)


def _count(call: Call) -> None:
    """One more token is in the cache."""
    debug.log_step(call.cache.seq_len, 1, len(call.origin), call.cache.max_cache_len)
    call.cache.mark_written(1)


def _run_greedily(step: GreedyStep, run: Run, call: Call, logits: torch.Tensor) -> None:
    """The rest of a run in which the step itself chooses: the host only counts."""
    if run.append(logits):
        return
    first = call.cache.seq_len + 1  # where the second token of the run stands
    step.start(run.last_tokens, run.unfinished, call.eos, run.pad)
    is_over = False
    while not is_over:
        flag = step.run_on()
        _count(call)
        is_over = run.advance(flag)
    run.take(step.state.sequences[:, first : call.cache.seq_len + 1])
