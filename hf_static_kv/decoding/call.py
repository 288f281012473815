"""One call of `generate` as it reaches a custom loop: what it asks for, and whether a fixed step can serve it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.nn.modules import module as torch_module
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

from hf_static_kv.attention import ATTENTION_NAME, EXACT_ATTENTION_NAME, OWN_NAMES, without_cudnn
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.layout import plan_layers, refuse_missing_layers
from hf_static_kv.cache.request import Request, running_request
from hf_static_kv.patching import attention_of
from hf_static_kv.program.fingerprint import all_modules, model_fingerprint, without_address
from hf_static_kv.program.step import GreedyStep

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
_MEDIA_WORDS = ("pixel", "image", "video", "audio", "mm_encoder", "input_features", "input_values")


class NotCaptured(Exception):
    """Why a call runs in the loop of `generate`."""


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
        self.request = _request(model, input_ids, config, model_kwargs)
        self.device = model.device  # where the model computes: `input_ids` may be on the CPU
        self.mask = self.request.mask  # [B, n], 1 where there is text
        self.attention = attention_of(model)
        # The name under which this call runs: one of ours where the model has it, as inside `exact`.
        names = {self.attention} if isinstance(self.attention, str) else set(self.attention.values())
        self.own_attention = next((name for name in OWN_NAMES if name in names), ATTENTION_NAME)

    @cached_property
    def modules(self) -> list[torch.nn.Module]:
        return all_modules(self.model)

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
    def max_length(self) -> int:
        """How long `input_ids` may become: what the call asks for, or what the cache has positions for."""
        return min(self.asked_length, self.fitting_length)

    @property
    def asked_length(self) -> int:
        limits = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        return min(limits, default=self.fitting_length)

    @property
    def fitting_length(self) -> int:
        before = self.request.prompt_length - self.input_ids.shape[1]  # positions that are no part of `input_ids`
        return int(self.cache.max_cache_len) - before + 1  # the last token is not written

    @property
    def last_tokens(self) -> torch.Tensor:
        """Of each row, [B]; any where the prompt is vectors."""
        return self.input_ids[:, -1] if self.input_ids.shape[1] else self.input_ids.new_zeros(len(self.input_ids))

    @cached_property
    def fingerprint(self) -> tuple[Any, ...]:
        """What a captured step for this call holds for good."""
        is_exact, keys = self.own_attention == EXACT_ATTENTION_NAME, self.cache.storage_groups[0].keys
        return self.own_attention, len(self.origin), *model_fingerprint(self.model, self.modules, keys, is_exact)

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

    def refuse_what_is_not_decoding(self) -> None:
        """Raise a `ValueError` for what this loop never does, and for what the cache cannot hold."""
        mode = self.request.mode
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"GraphDecoder decodes greedily or by sampling, and this is {mode.value}. Leave `custom_generate` out."
            )
        if isinstance(self.cache, StaticContiguousCache):
            self.cache.begin_call(self.request)

    def why_not(self) -> str | None:
        """Why this call cannot run as a captured step, in words; None where it can."""
        return self._why_not_asked() or self._why_not_model() or self._why_not_text()

    def _why_not_asked(self) -> str | None:
        given = {k for k, v in self.model_kwargs.items() if v is not None and not (isinstance(v, dict) and not v)}
        unknown = sorted(given - _KNOWN_KEYWORDS)
        if not isinstance(self.cache, StaticContiguousCache):
            return f"past_key_values is {_kind(self.cache)}, not a StaticContiguousCache"
        if self.config.output_attentions or self.config.output_hidden_states:
            return "attention weights or hidden states are asked for"
        if media := [name for name in unknown if name.startswith(_MEDIA_WORDS)]:
            return f"the prompt has images, video or audio ({', '.join(media)})"
        if unknown:
            return f"the model is given {', '.join(unknown)}"
        return "synced_gpus is asked for" if self.request.synced_gpus else None

    def _why_not_model(self) -> str | None:
        model, config = self.model, self.model.config.get_text_config()
        name, devices = type(model).__name__, sorted({str(parameter.device) for parameter in self.parameters})
        if "meta" in devices:
            return "a part of the model is offloaded to the CPU or the disk, and is not at a fixed address"
        if len(devices) > 1:
            return f"the model is spread over {', '.join(devices)} (device_map=0 keeps it on one)"
        if (kind := without_address(self.parameters)) is not None:
            return f"weights of type {kind} have no address of their own"
        if not model._can_set_attn_implementation():
            return f"{name} does not use transformers' attention interface"
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return f"{name} takes no position_ids"
        if self.device.type == "cuda" and has_hooks(self.modules):
            return "a replayed graph would not call the model's hooks"
        if frequencies_depend_on_length(config):
            return "the rotary frequencies depend on the length"
        if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
            return "layers attend in chunks"
        if getattr(config, "num_kv_shared_layers", None):
            return "layers share their keys and values"
        return "the cache holds latents, not keys" if getattr(config, "kv_lora_rank", None) else None

    def _why_not_text(self) -> str | None:
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
        last = self.request.past + self.input_ids.shape[1] - 1 - self.origin
        return positions.ndim == 2 and bool((positions[:, -1] == last).all())

    def _has_holes(self) -> bool:
        if self.mask is None:
            return False
        position = torch.arange(self.mask.shape[1], device=self.mask.device)
        return bool((self.mask.bool() != (position >= self.origin[:, None])).any())

    def prefill(self) -> torch.Tensor:
        """The logits [B, V] after the prompt, which the model reads as it would in any other loop."""
        with without_cudnn():
            # A copy: a prefill in chunks writes into it, and the loop of `generate` may still need it.
            outputs = self.model._prefill(self.input_ids, self.config, {**self.model_kwargs}, is_first_iteration=True)
        self._check_that_the_cache_was_used(outputs.get("past_key_values"))
        logits: torch.Tensor = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        return logits

    def _check_that_the_cache_was_used(self, returned: Any) -> None:
        wanted, length = self.request.prompt_length, self.cache.seq_len
        if length != wanted:
            refuse_missing_layers(self.model, len(self.cache.layers))
        if returned is not self.cache:
            raise NotCaptured(f"the model went on with {_kind(returned)} of its own in the place of this cache")
        if length != wanted:
            raise NotCaptured(f"the cache holds {length} tokens after a prompt of {wanted}")

    def remember(self, ids: torch.Tensor) -> None:
        """Tell the cache which tokens it holds now, of `ids` [B, n] that begin as `input_ids` do."""
        past = self.request.past
        if isinstance(self.cache, StaticContiguousCache) and self.request.tokens is not None:
            self.cache.remember(ids[:, : max(0, self.cache.seq_len - past)], past)

    def run_in_generate(self, streamer: BaseStreamer | None) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """The same call in transformers' own loop."""
        output: GenerateDecoderOnlyOutput | torch.Tensor = self.model._sample(
            self.input_ids,
            logits_processor=self.processors,
            stopping_criteria=self.criteria,
            generation_config=self.config,
            synced_gpus=bool(self.request.synced_gpus),
            streamer=streamer,
            **self.model_kwargs,
        )
        return output


def _request(model: Any, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Request:
    """What was asked for, with what `generate` does not hand on where its frame can be read."""
    own = Request(model, input_ids, config, model_kwargs)
    running = running_request()
    if running is None or running.input_ids is not input_ids:
        return own
    return replace(running, model=model, config=config, model_kwargs=model_kwargs)


def has_hooks(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether a pass calls something beside these: hooks, but for those with which transformers collects outputs.

    It leaves such behind once attentions or hidden states were asked for; they do nothing in any other call.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return True
    return any(
        hook.__module__ != "transformers.utils.output_capturing"
        for module in modules
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


def frequencies_depend_on_length(config: PreTrainedConfig) -> bool:
    """Whether a longer text turns earlier tokens by other angles: then nothing that was kept is right."""
    return any(words in str(getattr(config, "rope_parameters", "")) for words in ("longrope", "dynamic"))


def _kind(thing: object) -> str:
    return "absent" if thing is None else f"a {type(thing).__name__}"
