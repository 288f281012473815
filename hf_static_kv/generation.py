"""One call of `generate` as it reaches a custom loop: what it asks for, and the text that it grows.

`Call` is what `generate` has prepared, and whether a fixed step can serve it. `Run` picks tokens from logits and knows
when to stop, as the loop of `generate` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_static_kv.attention import ATTENTION_NAME, EXACT_ATTENTION_NAME, OWN_NAMES, TRACED_ATTENTION_NAME, without_cudnn
from hf_static_kv.cache import StaticContiguousCache
from hf_static_kv.layout import plan_layers
from hf_static_kv.step import GreedyStep

# What a prompt and a decode step of a text model need; anything else in the model's keywords (images, other positions)
# is unknown. A prompt may be given as vectors: what follows are tokens.
_KNOWN_KEYWORDS = {
    "attention_mask",
    "cache_position",
    "inputs_embeds",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}


# What of an adapter a replay does not see: a merged one has changed the weights where they are.
_ADAPTER_STATES = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


class Call:
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
        self.attention = attention_of(model)
        # The name under which this call runs: one of ours where the model has it, as inside `exact`.
        names = {self.attention} if isinstance(self.attention, str) else set(self.attention.values())
        self.own_attention = next((name for name in OWN_NAMES if name in names), ATTENTION_NAME)

    @cached_property
    def modules(self) -> list[torch.nn.Module]:
        """Those of the model; `model.modules()` takes three times as long, and this is before every prompt."""
        found: list[torch.nn.Module] = [self.model]
        for module in found:  # which grows meanwhile
            found += [part for part in module._modules.values() if part is not None]
        return found

    @cached_property
    def parameters(self) -> list[torch.Tensor]:
        return [own for module in self.modules for own in module._parameters.values() if own is not None]

    @cached_property
    def origin(self) -> torch.Tensor:
        """Where the text of each row begins, [B]: after the padding to its left."""
        if self.mask is None:
            return self.input_ids.new_zeros(len(self.input_ids))
        return self.mask.shape[1] - self.mask.sum(dim=1)

    @property
    def longest(self) -> int:
        """How long the text may become."""
        return self.criteria.max_length or self.cache.max_cache_len - self.past

    @property
    def past(self) -> int:
        """Tokens before `input_ids`, when only the new ones were passed, or vectors for them: the mask covers all."""
        # Newer versions leave out a mask of ones and note its length.
        length = getattr(self.config, "_mask_length", 0) if self.mask is None else self.mask.shape[1]
        return max(0, length - self.input_ids.shape[1])

    @property
    def last_tokens(self) -> torch.Tensor:
        """Of each row, [B]; any where the prompt is vectors."""
        return self.input_ids[:, -1] if self.input_ids.shape[1] else self.input_ids.new_zeros(len(self.input_ids))

    @cached_property
    def fingerprint(self) -> tuple[Any, ...]:
        """What a captured step holds for good: addresses, and states of the model that a replay does not see."""
        buffers = [own for module in self.modules for own in module._buffers.values() if own is not None]
        tensors = (*self.parameters, *buffers, self.cache.storage_groups[0].keys)
        adapters = [
            tuple(str(getattr(module, name, None)) for name in _ADAPTER_STATES)
            for module in self.modules
            # Looked up past `Module.__getattr__`, which is slow.
            if hasattr(type(module), "active_adapters") or "active_adapters" in module.__dict__
            # A whole model has a method of this name, which says nothing and prints all of it.
            if not callable(module.active_adapters)
        ]
        # Other parts, or with another eps or factor. Whole numbers are left out: some models count their calls.
        kinds = [type(module) for module in self.modules]
        settings = [v for module in self.modules for v in module.__dict__.values() if type(v) in (bool, float, str)]
        configs = {id(c): c for c in (self.model.config, self.model.config.get_text_config())}.values()
        settings += [v for c in configs for v in c.__dict__.values() if type(v) in (bool, int, float, str)]
        state = (self.own_attention, *kinds, *settings, *adapters)
        addresses = hash(tuple(tensor.data_ptr() for tensor in tensors))
        return id(self.model), len(self.origin), addresses, hash(state), self._patches()

    def _patches(self) -> tuple[Any, ...]:
        """What stands in the place of a module's `forward`; inside `exact` that is ours, and new each time."""
        if self.own_attention == EXACT_ATTENTION_NAME:
            return ()
        return tuple(module.__dict__["forward"] for module in self.modules if "forward" in module.__dict__)

    def is_plain_greedy(self) -> bool:
        """Whether the likeliest token is all that is asked for, until a length or an end token."""
        config, ends = self.config, [c for c in self.criteria if type(c) is EosTokenCriteria]
        kept = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        others = [c for c in self.criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        few = sum(c.eos_token_id.numel() for c in ends) <= GreedyStep.MAX_EOS
        return not (config.do_sample or self.processors or kept or others) and len(ends) <= 1 and few

    @property
    def eos(self) -> torch.Tensor | None:
        """The end tokens of a plain greedy call, [n]."""
        found = [c.eos_token_id for c in self.criteria if type(c) is EosTokenCriteria]
        return found[0].reshape(-1) if found else None

    def refuse_beams(self) -> None:
        mode = self.config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"GraphDecoder decodes greedily or by sampling, and this is {mode.value}. Leave `custom_generate` out."
            )

    def refuse_overflow(self) -> None:
        if not isinstance(self.cache, StaticContiguousCache):
            return
        longest, room = self.past + self.longest, self.cache.max_cache_len
        if longest > room:
            new = max(0, room - self.past - self.input_ids.shape[1])
            raise ValueError(
                f"The text may grow to {longest} tokens and the cache has room for {room}. Build it with "
                f"max_cache_len >= {longest}, or ask for at most {new} new tokens."
            )

    def refuse_to_go_without(self) -> None:
        if self.model_kwargs.get("use_cache") is False or self.config.use_cache is False:
            raise ValueError(
                "GraphDecoder decodes from a cache, and use_cache=False asks for none. Leave `past_key_values` and "
                "`custom_generate` out to compute the whole text at every step."
            )

    def why_not(self) -> str | None:
        """Why this call cannot run as a captured step, in words; None where it can."""
        model, config = self.model, self.model.config.get_text_config()
        devices = {parameter.device for parameter in self.parameters}
        given = {k: v for k, v in self.model_kwargs.items() if v is not None and not (isinstance(v, dict) and not v)}
        unknown = sorted(given.keys() - _KNOWN_KEYWORDS)
        reasons = {
            f"past_key_values is {_kind(self.cache)}, not a StaticContiguousCache": not isinstance(
                self.cache, StaticContiguousCache
            ),
            "attention weights or hidden states are asked for": self.config.output_attentions
            or self.config.output_hidden_states,
            f"the model is given {', '.join(unknown)}": bool(unknown),
            f"the model is spread over {', '.join(sorted(map(str, devices)))} (device_map=0 keeps it on one)": (
                len(devices) > 1
            ),
            f"{type(model).__name__} does not use transformers' attention interface": (
                not model._can_set_attn_implementation()
            ),
            f"{type(model).__name__} takes no position_ids": (
                "position_ids" not in inspect.signature(model.forward).parameters
            ),
            "a replayed graph would not call the model's hooks": self.input_ids.is_cuda and has_hooks(self.modules),
            "the rotary frequencies depend on the length": frequencies_depend_on_length(config),
            "layers attend in chunks": "chunked_attention" in (getattr(config, "layer_types", None) or ()),
            "layers share their keys and values": bool(getattr(config, "num_kv_shared_layers", None)),
            "the cache holds latents, not keys": bool(getattr(config, "kv_lora_rank", None)),
        }
        return next((words for words, holds in reasons.items() if holds), None) or self._what_does_not_fit()

    def _what_does_not_fit(self) -> str | None:
        windows = [plan.sliding_window for plan in plan_layers(self.model.config)]
        if windows != [layer.sliding_window for layer in self.cache.layers]:
            return "the windows of the cache are not those of the model"
        if self._has_holes():
            return "the attention mask has holes"
        return None if self._counts_from_the_origin() else "position_ids do not count from where the text begins"

    def _counts_from_the_origin(self) -> bool:
        positions = self.model_kwargs.get("position_ids")
        if positions is None:
            return True
        last = self.past + self.input_ids.shape[1] - 1 - self.origin
        return positions.ndim == 2 and bool((positions[:, -1] == last).all())

    def _has_holes(self) -> bool:
        if self.mask is None:
            return False
        position = torch.arange(self.mask.shape[1], device=self.mask.device)
        return bool((self.mask.bool() != (position >= self.origin[:, None])).any())

    def prefill(self) -> torch.Tensor:
        """The logits [B, V] after the prompt, which the model reads as it would in any other loop."""
        with without_cudnn():
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


class Run:
    """The text of one call and what ends it: picks tokens from logits, as `generate` does."""

    def __init__(self, call: Call, streamer: BaseStreamer | None) -> None:
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
        # A streamer waits for every token anyway, and must not be given one too many; nor must a trace.
        waits = streamer is not None or call.own_attention == TRACED_ATTENTION_NAME
        self.finished = _Flag(deferred=self.ids.is_cuda and not waits)
        self.overrun = 0
        self.rng_state: torch.Tensor | None = None
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
            if self.finished.on_host is not None:
                self.rng_state = torch.cuda.get_rng_state(self.ids.device)
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
                if self.rng_state is not None:  # the sample that was one too many was never drawn
                    torch.cuda.set_rng_state(self.rng_state, self.ids.device)
        return self.overrun > 0 or self.finished.is_up or self.length >= self.max_length

    def count_on(self, is_over: torch.Tensor) -> bool:
        """One more token, chosen elsewhere; whether the run is over."""
        self.length += 1
        if self.criteria and self.finished.was_up(is_over):
            self.overrun = 1
        return self.overrun > 0 or self.finished.is_up or self.length >= self.max_length

    def take(self, tokens: torch.Tensor) -> None:
        """Tokens [B, n] chosen elsewhere, which are the last ones of the text."""
        self.ids[:, self.length - tokens.shape[1] : self.length] = tokens

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


def has_hooks(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether a pass calls something beside these: hooks, but for those with which transformers collects outputs.

    It leaves such behind once attentions or hidden states were asked for; they do nothing in any other call.
    """
    return any(
        hook.__module__ != "transformers.utils.output_capturing"
        for module in modules
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


def frequencies_depend_on_length(config: PreTrainedConfig) -> bool:
    """Whether a longer text turns earlier tokens by other angles: then nothing that was kept is right."""
    return any(words in str(getattr(config, "rope_parameters", "")) for words in ("longrope", "dynamic"))


def attention_of(model: PreTrainedModel) -> str | dict[str, str | None]:
    """The attention implementation, or those of a model's parts by name, None for a part that has none."""
    config = model.config
    parts = {key: getattr(config, key) for key in config.sub_configs}
    own = {key: part._attn_implementation for key, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **own} if own else config._attn_implementation


def _kind(thing: object) -> str:
    return "absent" if thing is None else f"a {type(thing).__name__}"
