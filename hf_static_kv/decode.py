"""A decode loop for `custom_generate` that never waits: prefill as usual, then one captured step after the other.

    decoder = GraphDecoder()
    model.generate(**inputs, past_key_values=cache, custom_generate=decoder)

Tokens are those of `generate` without it. What cannot be captured runs in transformers' own loop, with one warning that
says why.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_static_kv.attention import ATTENTION_NAME
from hf_static_kv.cache import StaticContiguousCache
from hf_static_kv.step import COMPILE, DecodeStep

logger = logging.getLogger(__name__)

# What a decode step of a text model needs; anything else in the model's keywords (images, other positions) is unknown.
_KNOWN_KEYWORDS = {"attention_mask", "past_key_values", "position_ids", "use_cache", "logits_to_keep", "cache_position"}


class GraphDecoder:
    """Decodes by replaying one captured CUDA graph; keeps its graphs from call to call, and frees them with the cache.

    `compile` is for the captured step on a GPU: "none" captures it as it is; "layers" compiles a decoder layer for all
    that are like it; "model" compiles everything, for the best speed after a long first call. `streamer`: `generate`
    does not hand its own to a custom loop. `fallback_reason` says why the last call ran in transformers' loop, and is
    None when it did not.

    >>> from hf_static_kv import StaticContiguousCache
    >>> from hf_static_kv.testing import random_model, tiny_config
    >>> model = random_model(tiny_config("llama"))
    >>> cache, ids = StaticContiguousCache.from_model(model, max_cache_len=16), torch.tensor([[5, 6, 7]])
    >>> tokens = model.generate(ids, past_key_values=cache, custom_generate=GraphDecoder(), max_new_tokens=8)
    >>> torch.equal(tokens, model.generate(ids, use_cache=False, max_new_tokens=8))
    True
    """

    def __init__(self, compile: str = "none", streamer: BaseStreamer | None = None) -> None:
        if compile not in COMPILE:
            raise ValueError(f"compile must be one of {', '.join(map(repr, COMPILE))}, got {compile!r}.")
        self.compile, self.streamer = compile, streamer
        self.fallback_reason: str | None = None
        self._steps: WeakKeyDictionary[StaticContiguousCache, dict[tuple[Any, ...], DecodeStep]] = WeakKeyDictionary()
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
        """What `generate` calls once it has prepared everything."""
        call = _Call(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        call.refuse_beams()
        self.fallback_reason = call.why_not()
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())  # type: ignore[no-untyped-call]
        if self.fallback_reason is None:
            call.refuse_overflow()
            with _attention(model, ATTENTION_NAME):
                output = self._captured(call)
            if output is not None:
                return output
        self._warn(str(self.fallback_reason))
        return call.in_the_loop_of_generate(self.streamer)

    def _captured(self, call: _Call) -> GenerateDecoderOnlyOutput | torch.Tensor | None:
        """The whole generation; None, with the reason noted and the cache as it was, where the step cannot be had."""
        cache, before = call.cache, call.cache.seq_len
        logits = call.prefill()
        try:
            step = self._step(call) if call.longest > call.input_ids.shape[1] + 1 else None
        except Exception as error:  # whatever a model does that a fixed step cannot do
            first_line = next(iter(str(error).splitlines()), "")
            self.fallback_reason = f"the step cannot be captured ({type(error).__name__}: {first_line})"
            cache.crop(before - cache.seq_len)
            return None
        run = _Run(call, self.streamer)
        if step is not None:
            step.begin(cache.seq_len, call.origin)
        with call.model._optimize_model_for_decode():
            while not run.append(logits) and step is not None:
                logits = step.run(run.last_tokens)
                cache.mark_written(1)
        cache.crop(-run.overrun)
        return run.result(cache)

    def _step(self, call: _Call) -> DecodeStep:
        """The step for this cache, batch and model; at its first use captured, and compared with an ordinary step."""
        model, cache = call.model, call.cache
        addresses = tuple(tensor.data_ptr() for tensor in (*model.parameters(), cache.storage_groups[0].keys))
        key = (id(model), len(call.origin), hash(addresses))
        steps = self._steps.setdefault(cache, {})
        if key not in steps:
            step = DecodeStep(model, cache, len(call.origin))
            if call.origin.is_cuda:
                step.capture(cache.seq_len, call.origin, self.compile)
            _compare(step, call)
            steps[key] = step
        return steps[key]

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("GraphDecoder: %s. The tokens are the same; this runs in the loop of `generate`.", reason)


class _Call:
    """One call of `generate`, as it reaches a custom loop."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model: Any = model  # with generate's methods, which are not in the type
        self.input_ids, self.processors, self.criteria = input_ids, processors, criteria
        self.config, self.model_kwargs = config, model_kwargs
        self.cache: Any = model_kwargs.get("past_key_values")  # `why_not` looks whether it is ours
        self.mask: torch.Tensor | None = model_kwargs.get("attention_mask")  # [B, n], 1 where there is text

    @cached_property
    def origin(self) -> torch.Tensor:
        """Where the text of each row begins, [B]: after the padding to its left."""
        if self.mask is None:
            return torch.zeros_like(self.input_ids[:, 0])
        return self.mask.shape[1] - self.mask.sum(dim=1)

    @property
    def longest(self) -> int:
        """How long the text may become."""
        return self.criteria.max_length or self.cache.max_cache_len

    def refuse_beams(self) -> None:
        mode = self.config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"GraphDecoder decodes greedily or by sampling, and this is {mode.value}. Leave `custom_generate` out."
            )

    def refuse_overflow(self) -> None:
        longest, room = self.longest, self.cache.max_cache_len
        if longest > room:
            new = max(0, room - self.input_ids.shape[1])
            raise ValueError(
                f"The text may grow to {longest} tokens and the cache has room for {room}. Build it with "
                f"max_cache_len >= {longest}, or ask for at most {new} new tokens."
            )

    def why_not(self) -> str | None:
        """Why this call cannot run as a captured step, in words; None where it can."""
        model, config = self.model, self.model.config.get_text_config()
        devices = {str(parameter.device) for parameter in model.parameters()}
        unknown = sorted(k for k, v in self.model_kwargs.items() if v is not None and k not in _KNOWN_KEYWORDS)
        reasons = {
            f"past_key_values is {_kind(self.cache)}, not a StaticContiguousCache": not isinstance(
                self.cache, StaticContiguousCache
            ),
            "attention weights or hidden states are asked for": self.config.output_attentions
            or self.config.output_hidden_states,
            f"the model is given {', '.join(unknown)}": bool(unknown),
            f"the model is spread over {', '.join(sorted(devices))}": len(devices) > 1,
            f"{type(model).__name__} does not use transformers' attention interface": (
                not model._can_set_attn_implementation()
            ),
            f"{type(model).__name__} takes no position_ids": (
                "position_ids" not in inspect.signature(model.forward).parameters
            ),
            "layers attend in chunks": "chunked_attention" in (getattr(config, "layer_types", None) or ()),
            "layers share their keys and values": bool(getattr(config, "num_kv_shared_layers", None)),
            "the cache holds latents, not keys": bool(getattr(config, "kv_lora_rank", None)),
        }
        found = next((words for words, holds in reasons.items() if holds), None)
        return found or ("the attention mask has holes" if self._has_holes() else None)

    def _has_holes(self) -> bool:
        if self.mask is None:
            return False
        position = torch.arange(self.mask.shape[1], device=self.mask.device)
        return bool((self.mask.bool() != (position >= self.origin[:, None])).any())

    def prefill(self) -> torch.Tensor:
        """The logits [B, V] after the prompt."""
        outputs = self.model._prefill(self.input_ids, self.config, self.model_kwargs, is_first_iteration=True)
        logits: torch.Tensor = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        return logits

    def in_the_loop_of_generate(self, streamer: BaseStreamer | None) -> GenerateDecoderOnlyOutput | torch.Tensor:
        output: GenerateDecoderOnlyOutput | torch.Tensor = self.model._sample(
            self.input_ids,
            logits_processor=self.processors,
            stopping_criteria=self.criteria,
            generation_config=self.config,
            streamer=streamer,
            **self.model_kwargs,
        )
        return output


class _Run:
    """The text of one call and what ends it: picks tokens from logits, as `generate` does."""

    def __init__(self, call: _Call, streamer: BaseStreamer | None) -> None:
        self.config, self.streamer = call.config, streamer
        self.processors: Any = call.processors  # its type asks for a class of tensors that no tensor has
        batch_size, self.length = call.input_ids.shape
        self.max_length = call.longest
        self.ids = call.input_ids.new_zeros(batch_size, self.max_length)
        self.ids[:, : self.length] = call.input_ids
        # The loop counts for itself; what is left of the criteria has to look at the tokens.
        self.criteria = StoppingCriteriaList(c for c in call.criteria if not isinstance(c, MaxLengthCriteria))
        ends = any(hasattr(criterion, "eos_token_id") for criterion in call.criteria)
        pad = call.config._pad_token_tensor if ends else None
        self.pad = None if pad is None else pad.to(self.ids.device)
        self.unfinished = torch.ones(batch_size, dtype=torch.long, device=self.ids.device)
        # A streamer waits for every token anyway, and must not be given one too many.
        self.finished = _Flag(deferred=self.ids.is_cuda and streamer is None)
        self.overrun = 0
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []

    @property
    def text(self) -> torch.Tensor:
        return self.ids[:, : self.length].contiguous()

    @property
    def last_tokens(self) -> torch.Tensor:
        return self.ids[:, self.length - 1]

    def append(self, logits: torch.Tensor) -> bool:
        """Choose and append one token for each row; whether the run is over."""
        scores = self.processors(self.text, logits) if self.processors else logits
        if self.config.return_dict_in_generate:
            self._keep(scores, logits)
        if self.config.do_sample:
            tokens = torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = scores.argmax(dim=-1)
        if self.pad is not None:
            tokens = tokens * self.unfinished + self.pad * (1 - self.unfinished)
        self.ids[:, self.length] = tokens
        self.length += 1
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())  # type: ignore[no-untyped-call]
        return self._is_over()

    def _keep(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        # Copies: the step's logits are a buffer that the next step overwrites.
        if self.config.output_scores:
            self.scores.append(scores.clone())
        if self.config.output_logits:
            self.logits.append(logits.clone())

    def _is_over(self) -> bool:
        if self.criteria:
            self.unfinished = self.unfinished & ~self.criteria(self.text, tuple(self.scores) or None)
            if self.finished.was_up(self.unfinished.max() == 0):  # known one token late
                self.overrun = 1
        return self.overrun > 0 or self.finished.is_up or self.length >= self.max_length

    def result(self, cache: StaticContiguousCache) -> GenerateDecoderOnlyOutput | torch.Tensor:
        if self.streamer is not None:
            self.streamer.end()  # type: ignore[no-untyped-call]
        sequences = self.ids[:, : self.length - self.overrun].clone()
        if not self.config.return_dict_in_generate:
            return sequences
        scores, logits = (kept[: len(kept) - self.overrun] for kept in (self.scores, self.logits))
        return GenerateDecoderOnlyOutput(
            sequences=sequences,  # type: ignore[arg-type]  # as for the processors
            scores=tuple(scores) if self.config.output_scores else None,  # type: ignore[arg-type]
            logits=tuple(logits) if self.config.output_logits else None,  # type: ignore[arg-type]
            past_key_values=cache,
        )


class _Flag:
    """A truth that a device computes. Deferred, it is read one step late: the host waits for no step just sent."""

    def __init__(self, deferred: bool) -> None:
        self.is_up = False
        self.on_host = torch.zeros((), dtype=torch.bool, pin_memory=True) if deferred else None
        self.arrived: torch.cuda.Event | None = None

    def was_up(self, flag: torch.Tensor) -> bool:
        """Take this step's flag; whether the one before was up. Not deferred: `is_up` is this step's, at once."""
        if self.on_host is None:
            self.is_up = bool(flag)
            return False
        earlier = False
        if self.arrived is not None:
            self.arrived.synchronize()
            earlier = bool(self.on_host)
        self.on_host.copy_(flag, non_blocking=True)
        self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.arrived.record()
        return earlier


def _compare(step: DecodeStep, call: _Call) -> None:
    """Run the step beside an ordinary one and raise where they agree in less than half of their digits.

    That is far above rounding and far below what a step does that computes something else: one in which the model took
    a length from the host, say, which the graph would hold for ever.
    """
    model, cache = call.model, call.cache
    length, tokens = cache.seq_len, call.input_ids[:, -1]
    step.begin(length, call.origin)
    got = step.run(tokens).clone()  # before the ordinary step, which would write the keys that this one must write
    mask = torch.arange(length + 1, device=tokens.device) >= call.origin[:, None]
    positions = length - call.origin[:, None]
    ordinary = model(
        input_ids=tokens[:, None], attention_mask=mask.long(), position_ids=positions, past_key_values=cache
    )
    cache.crop(length - cache.seq_len)
    expected = ordinary.logits[:, -1].float()
    bound = torch.finfo(model.dtype).eps ** 0.5 * expected.abs().max().item()
    difference = (got - expected).abs().max().item()
    if not difference <= bound:
        raise RuntimeError(f"its logits are {difference:.2g} from those of an ordinary step, more than {bound:.2g}")


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with this attention implementation, and afterwards with its own again."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _kind(thing: object) -> str:
    return "absent" if thing is None else f"a {type(thing).__name__}"
