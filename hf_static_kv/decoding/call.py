"""One call of `generate` as it reaches a custom loop: what it asks for, its prefill, its run in transformers' loop."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_static_kv import compat
from hf_static_kv.attention import ATTENTION_NAME, EXACT_ATTENTION_NAME, OWN_NAMES
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.layout import refuse_missing_layers
from hf_static_kv.cache.request import Request, running_request
from hf_static_kv.patching import attention_of, without_cudnn
from hf_static_kv.program.fingerprint import model_fingerprint
from hf_static_kv.program.step import GreedyStep


class NotCaptured(Exception):
    """Why a call falls back to transformers' loop."""


class Call:
    """One call of `generate`, as it reaches a custom loop."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model: Any = model  # with generate's methods, which are not in the type
        self.input_ids, self.processors, self.criteria = input_ids, processors, criteria
        self.config, self.model_kwargs = config, model_kwargs
        self.cache: Any = model_kwargs.get("past_key_values")  # eligibility.py looks whether it is ours
        self.request = _request(model, input_ids, config, model_kwargs)
        self.device = model.device  # where the model computes: `input_ids` may be on the CPU
        self.mask = self.request.mask  # [B, n], 1 where there is a token
        self.attention = attention_of(model)
        # The name under which this call runs: one of ours where the model has it already, as inside `exact`.
        self.own_attention = next((name for name in OWN_NAMES if name in self.attention.values()), ATTENTION_NAME)

    @property
    def brings_no_cache(self) -> bool:
        """Whether the cache is the one that `generate` makes for a call that brings none."""
        return (
            type(self.cache) is DynamicCache and not compat.is_callers(self.cache) and not self.cache.get_seq_length()
        )

    def use_cache(self, cache: StaticContiguousCache) -> None:
        self.cache = self.model_kwargs["past_key_values"] = cache

    @cached_property
    def modules(self) -> list[torch.nn.Module]:
        return compat.all_modules(self.model)

    @cached_property
    def parameters(self) -> list[Tensor]:
        return [parameter for module in self.modules for parameter in compat.own_parts(module, "parameters")]

    @cached_property
    def seq_start(self) -> Tensor:
        """Where the sequence of each batch row begins, [B]: after its left padding."""
        if self.mask is None:
            return self.input_ids.new_zeros(len(self.input_ids))
        return self.mask.shape[1] - self.mask.sum(dim=1)

    @property
    def lengths(self) -> tuple[int, int]:
        """How long `input_ids` may become: (what the call asks for, what fits into the cache)."""
        before = self.request.prompt_length - self.input_ids.shape[1]  # positions that are not part of `input_ids`
        fitting = int(self.cache.max_cache_len) - before + 1  # the last token is not written
        limits = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        return min(limits, default=fitting), fitting

    @property
    def last_tokens(self) -> Tensor:
        """Of each batch row, [B]; zeros where the prompt is `inputs_embeds`."""
        return self.input_ids[:, -1] if self.input_ids.shape[1] else self.input_ids.new_zeros(len(self.input_ids))

    @cached_property
    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for two calls that one captured step can serve."""
        is_exact, keys = self.own_attention == EXACT_ATTENTION_NAME, self.cache.storage_groups[0].keys
        return self.own_attention, len(self.seq_start), *model_fingerprint(self.model, self.modules, keys, is_exact)

    def is_plain_greedy(self) -> bool:
        """Whether the most likely token is all that is asked for, until a length or an end token."""
        config, ends = self.config, [c for c in self.criteria if type(c) is EosTokenCriteria]
        keeps = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        others = [c for c in self.criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        few = sum(c.eos_token_id.numel() for c in ends) <= GreedyStep.MAX_EOS
        return not (config.do_sample or self.processors or keeps or others) and len(ends) <= 1 and few

    @property
    def eos(self) -> Tensor | None:
        """The end tokens of a plain greedy call, [n]."""
        found = [c.eos_token_id for c in self.criteria if type(c) is EosTokenCriteria]
        return found[0].reshape(-1) if found else None

    def begin(self) -> None:
        """Raise a `ValueError` for other modes than greedy decoding and sampling, and for what the cache refuses."""
        mode = self.request.mode
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"GraphDecoder decodes greedily or by sampling, and this is {mode.value}. Leave `custom_generate` out."
            )
        if isinstance(self.cache, StaticContiguousCache):
            self.cache.begin_call(self.request)

    def prefill(self) -> Tensor:
        """The logits [B, V] after the prompt, which the model computes as in any other loop."""
        prefill = compat.prefill(self.model)
        assert prefill is not None, "eligibility.py has looked"
        with without_cudnn():
            # A copy: chunked prefill writes into it, and transformers' loop may still need it.
            outputs = prefill(self.input_ids, self.config, {**self.model_kwargs}, is_first_iteration=True)
        self._check_that_the_cache_was_used(outputs.get("past_key_values"))
        logits: Tensor = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        return logits

    def _check_that_the_cache_was_used(self, returned: Any) -> None:
        wanted, length = self.request.prompt_length, self.cache.seq_len
        if length != wanted:
            refuse_missing_layers(self.model, len(self.cache.layers))
        if returned is not self.cache:
            raise NotCaptured(f"the model returned {kind_of(returned)} in place of the cache")
        if length != wanted:
            raise NotCaptured(f"the cache holds {length} tokens after a prompt of {wanted}")

    def remember(self, ids: Tensor) -> None:
        """Tell the cache which tokens it holds, of `ids` [B, n] that begin with `input_ids`."""
        past = self.request.past
        if isinstance(self.cache, StaticContiguousCache) and self.request.tokens is not None:
            self.cache.remember(ids[:, : max(0, self.cache.seq_len - past)], past)

    def run_eagerly(self, streamer: BaseStreamer | None) -> GenerateDecoderOnlyOutput | Tensor:
        """The same call in transformers' own loop."""
        output: GenerateDecoderOnlyOutput | Tensor = compat.sampling_loop(self.model)(
            self.input_ids,
            logits_processor=self.processors,
            stopping_criteria=self.criteria,
            generation_config=self.config,
            synced_gpus=bool(self.request.synced_gpus),
            streamer=streamer,
            **self.model_kwargs,
        )
        self.remember(output if isinstance(output, Tensor) else output.sequences)
        return output


def _request(model: Any, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Request:
    """What was asked for, with what `generate` does not pass on where its frame can be read."""
    running = running_request()
    if running is None or running.input_ids is not input_ids:
        return Request(model, input_ids, config, model_kwargs)
    return replace(running, model=model, config=config, model_kwargs=model_kwargs)


def kind_of(thing: object) -> str:
    """What an error calls a thing that should be a cache."""
    return "None" if thing is None else f"a {type(thing).__name__}"
