"""One call of `generate` as it reaches a custom loop: what it asks for, its prefill, its run in
transformers' loop.
"""

import copy
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from types import NoneType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_static_kv import compat
from hf_static_kv.cache.cache import Snapshot, StaticContiguousCache
from hf_static_kv.cache.entry import Entry
from hf_static_kv.cache.identity import (
    State,
    content_state,
    draws_random_numbers,
    pass_state,
)
from hf_static_kv.cache.layout import compute_device, refuse_missing_layers
from hf_static_kv.cache.passes import UnfinishedPass
from hf_static_kv.cache.pool import CachePool
from hf_static_kv.cache.ranks import least, num_ranks
from hf_static_kv.cache.request import Fallback, Request, running_request
from hf_static_kv.cache.states import state_tensors
from hf_static_kv.patching import ATTENTION_NAME, OWN_NAMES, attention_of, without_cudnn
from hf_static_kv.program.drafting import Drafts
from hf_static_kv.program.record import leaves
from hf_static_kv.program.rotary import frequencies_depend_on_length

# What a step gives to a model by itself, or has no use for.
_OWN_INPUTS = {
    "attention_mask", "cache_position", "input_ids", "inputs_embeds", "logits_to_keep", "past_key_values",
    "position_ids", "use_cache",
}  # fmt: skip
_SETTINGS = (bool, int, float, str, NoneType)
# cuDNN's attention builds a plan for each new length, 40 to 55 ms on an H200, and is then 1.6 to
# 1.9 times as fast as flash attention. From this length on 16 layers of 32 heads gain more than
# that.
_TOKENS_FOR_CUDNN = 32768
# The newest look at each model: when, and its state.
_LOOKS: WeakKeyDictionary[Any, tuple[float, State]] = WeakKeyDictionary()


class Owner:
    """What a call was made for, if somebody may cancel it."""

    is_cancelled = False
    seed: int | None = None  # of the numbers that it draws; None: they are torch's


OWNER: ContextVar[Owner | None] = ContextVar("owner", default=None)


class ModelChanged(Exception):
    """A step ran that was captured of the model as it was before."""


class PrefixChanged(ModelChanged):
    """The prompt was computed on a prefix of the model as it was before."""


class StepInputs(NamedTuple):
    """What a model's own code gives to the step after the prompt, beside the token, the mask and
    the cache.
    """

    position_ids: Tensor  # [B, 1], or [P, B, 1] where a position has P parts
    settings: dict[str, Any]  # numbers, strings, and lists of them: a step is given the same
    # Such as the sizes of images. A step is not given them, and must not need them.
    tensors: dict[str, Any]


@dataclass(eq=False)
class Call:
    """One call of `generate`, as it reaches a custom loop."""

    model: Any  # with generate's methods, which are not in the type
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        # Has what `generate` does not pass on, where its frame can be read.
        request = running_request()
        if request is None or request.input_ids is not self.input_ids:
            request = Request(self.model, self.input_ids, self.config, self.model_kwargs)
        self.request = replace(
            request, model=self.model, config=self.config, model_kwargs=self.model_kwargs
        )
        # The decoder puts its own here where this is None.
        self.streamer: Any = self.request.streamer
        # eligibility.py looks whether it is ours.
        self.cache: Any = self.model_kwargs.get("past_key_values")
        self.pool: CachePool | None = None  # that has the cache
        self.entry: Entry | None = None  # of the pool: another can take its place
        # Where torch's generators stood before the prompt, if that may be computed again.
        self._drawn: Any = None
        self.why_replaced: str | None = None  # where it did: the model skips layers
        self.outputs: Any = None  # of the prompt, until a loop goes on from there
        # Of the model, where the prefix is not of this one.
        self.identity: State | None = None
        # Of the model: a known step runs before its state is compared.
        self.assumed: State | None = None
        # Of the cache, when the call began; None: it is not ours.
        self.start: Snapshot | None = None
        # By the trial of a step that could not be captured.
        self.is_overwritten = False
        # Captured passes for the prompt (`Prompts`), and the logits [B, V] that they have given.
        self.prompts: Any = None
        self.prompt_logits: Tensor | None = None
        self.is_prompt_captured = False
        self.began = math.inf  # `generate`; inf: that is not known
        self.is_in_rows = False  # see `in_rows`
        self.is_alone = False  # whatever other calls there are
        self.drafts: Drafts | None = None  # the tokens of a pass beside the newest one
        self.more_caches = ExitStack()  # given back at the end of the call
        self.assistant_model: Any = None  # which drafts them; None: they are looked up
        self.assistant: Any = None  # the same in this call (assistant.py)
        self.owner = OWNER.get()
        self.fallback_reason: str | None = None  # why it runs in transformers' loop
        # To be that of the model as it is.
        self.is_prefix_assumed = False
        self.is_prefix_confirmed = False
        self.device = compute_device(self.model)  # `input_ids` may be on the CPU
        self.attention = attention_of(self.model)
        # What the model is given with the prompt, beside the tokens and the cache.
        self.given = {
            k: v for k, v in self.model_kwargs.items() if v is not None and k != "past_key_values"
        }
        # The name under which this call runs: one of ours where the model has it already, as inside
        # `exact`.
        self.own_attention = next(
            (name for name in OWN_NAMES if name in self.attention.values()), ATTENTION_NAME
        )

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> "Call":
        """The call with the arguments that `generate` gives to a loop."""
        return cls(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )

    @property
    def seed(self) -> int | None:
        """Of the numbers that it draws; None: it draws none, or from torch's generator."""
        return None if self.owner is None or not self.config.do_sample else self.owner.seed

    @property
    def brings_no_cache(self) -> bool:
        """Whether the cache is the one that `generate` makes for a call that brings none."""
        is_asked_for = self.config.cache_implementation is not None or compat.is_callers(self.cache)
        # An offloaded one is of this type, too.
        return type(self.cache) is DynamicCache and not is_asked_for

    def use_cache(self, cache: Cache) -> None:
        self.cache = self.model_kwargs["past_key_values"] = cache

    def use_pool(self, pool: CachePool) -> None:
        """The cache may be one of this pool."""
        self.pool = pool
        self.entry = pool.entry_of(self.cache)

    def give_back_cache(self) -> None:
        """To its pool: the sequence goes on elsewhere."""
        if self.entry is not None and self.pool is not None:
            self.pool.give_back(self.entry)
        self.entry = None

    def in_rows(self, cache: StaticContiguousCache, rows: int, length: int) -> "Call":
        """A call whose step decodes so many rows of another cache, each of `length` tokens: calls
        like this one have a row each.
        """
        call = copy.copy(self)
        call.request = copy.copy(self.request)
        call.request.prompt_length = length
        call.cache = cache
        call.is_in_rows = True
        # Any token: the prompt may have none.
        call.input_ids = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        positions = torch.full((rows, 1), length, device=self.device)
        call.seq_start = torch.zeros_like(positions[:, 0])
        call.step_inputs = StepInputs(positions, self.step_inputs.settings, {})
        call.has_usual_positions = True
        call.state = self.state
        call.assumed = None
        call.__dict__.pop("fingerprint", None)
        cache.reset()
        cache.mark_written(length, rows)
        return call

    def grow(self) -> None:
        """Make room for more tokens in the cache, whose storage moves."""
        self.cache.grow_for(self.cache.max_cache_len + 1)
        self.__dict__.pop("fingerprint", None)

    @cached_property
    def modules(self) -> list[torch.nn.Module]:
        found = () if self.entry is None else self.entry.modules
        return list(found) or compat.all_modules(self.model)

    @cached_property
    def has_hooks(self) -> bool:
        return compat.has_hooks(self.modules)

    @cached_property
    def seq_start(self) -> Tensor:
        """Where the sequence of each batch row begins, [B]: after its left padding."""
        ids = self.input_ids
        mask = self.request.mask
        return ids.new_zeros(len(ids)) if mask is None else mask.shape[1] - mask.sum(dim=1)

    @property
    def limits(self) -> tuple[int, int]:
        """How long `input_ids` may become: (what the call asks for, what fits into the cache)."""
        # Positions that are not part of `input_ids`.
        before = self.request.prompt_length - self.input_ids.shape[1]
        fitting = int(self.cache.max_cache_len) - before + 1  # the last token is not written
        limits = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        return min(limits, default=fitting), fitting

    @cached_property
    def state(self) -> State:
        """What a pass of the model reads beside its inputs.

        Takes milliseconds: ask while the device computes. Another call may have looked since this
        one began.
        """
        at, state = _LOOKS.get(self.model, (0.0, None))
        if state is None or at < self.began:
            at = time.monotonic()  # before the look: it takes a while
            state = pass_state(self.model, self.modules)
            _LOOKS[self.model] = at, state
        return state

    @cached_property
    def has_holes(self) -> bool:
        return self.request.has_holes

    def has_own_prefix(self) -> bool:
        """Whether what the cache held before is of the model as it is; confirmed from here on."""
        has_identity = self.entry is not None and self.entry.identity is not None
        return not has_identity or self._is_prefix_valid()

    @property
    def is_device_idle(self) -> bool:
        """Whether a GPU waits for the host, which then looks at the model later, while known steps
        run.
        """
        return self.device.type == "cuda" and torch.cuda.current_stream(self.device).query()

    @property
    def must_assume(self) -> bool:
        """Whether a known step runs before `state` is looked at."""
        return "state" not in self.__dict__ and self.is_device_idle

    @property
    def is_assuming(self) -> bool:
        """Whether a prefix or a step is used that is not confirmed."""
        return self.is_prefix_assumed or self.assumed is not None

    def confirm_prefix(self) -> None:
        """Raise `PrefixChanged` if the model is not as it was when the prefix was computed."""
        if self.is_prefix_assumed and not self._is_prefix_valid():
            raise PrefixChanged

    def confirm(self) -> None:
        """Raise `ModelChanged` if the model is not as it was assumed to be."""
        self.confirm_prefix()
        assumed = self.assumed
        self.assumed = None
        if assumed is not None and assumed != self.state:
            raise ModelChanged

    @cached_property
    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for two calls that one captured step can serve, if the model has the same `state`."""
        keys = tuple(group.keys.data_ptr() for group in self.cache.storage_groups)
        states = tuple(
            tensor.data_ptr()
            for layer in self.cache.stateful_layers
            for tensor in state_tensors(layer)
        )
        # The capacity: a cache of compact layers alone grows in place.
        sizes = len(self.seq_start), self.cache.max_cache_len
        return self.own_attention, sizes, keys, states

    @cached_property
    def has_usual_positions(self) -> bool:
        """Whether a table of angles as long as the cache has all positions of this call.

        Waits for the prompt, if the caller gives them.
        """
        if not self.request.has_own_positions and compat.has_common_positions(self.model):
            return True
        positions = self.step_inputs.position_ids
        length = self.request.prompt_length
        return bool(((positions >= 0) & (positions <= length)).all())

    @property
    def step_kind(self) -> tuple[Any, ...]:
        """Equal for two calls whose steps the model is given the same. Known after the prompt."""
        inputs = self.step_inputs
        parts = tuple(inputs.position_ids.shape[:-2])
        settings = repr(sorted(inputs.settings.items()))
        return self.has_usual_positions, parts, settings, tuple(sorted(inputs.tensors))

    def position_ids(self, length: int) -> Tensor:
        """The positions [..., B, 1] that the model's own code gives to the token at `length`."""
        return self.step_inputs.position_ids + (length - self.request.prompt_length)

    @property
    def ends(self) -> list[Tensor]:
        """The end tokens [n] of each criterion that has them."""
        return [c.eos_token_id.reshape(-1) for c in self.criteria if type(c) is EosTokenCriteria]

    def prefill(self) -> Tensor:
        """The logits [B, V] after the prompt, which the model computes as in any other loop.

        After `Fallback`, `run_eagerly` goes on from there.
        """
        new = self.request.prompt_length - self.cache.seq_len
        is_long = min(new, self.config.prefill_chunk_size or new) >= _TOKENS_FOR_CUDNN
        with nullcontext() if is_long else without_cudnn():
            self._read_prompt()
        outputs = self.outputs
        if not compat.has_common_loop(self.model):
            self.outputs = None  # another loop begins with the prompt
        if self.why_replaced is not None:
            raise Fallback(self.why_replaced)
        if (returned := outputs.get("past_key_values")) is not self.cache:
            raise Fallback(f"the model returned {kind_of(returned)} in place of the cache")
        if (length := self.cache.seq_len) != (wanted := self.request.prompt_length):
            raise Fallback(f"the cache holds {length} tokens after a prompt of {wanted}")
        self._last_outputs = outputs
        self.__dict__.pop("step_inputs", None)
        if self.prompts is not None and not self.is_prompt_captured:
            self.prompts.note(self)
        # Kept while a step is captured, and those of a whole prompt are large.
        if outputs.logits.shape[1] > 1:
            outputs.logits = outputs.logits[:, -1:].clone()
        return outputs.logits[:, -1].to(copy=True, dtype=torch.float32)  # type: ignore[no-any-return]

    def _read_prompt(self) -> None:
        """Compute the prompt.

        A model that skips layers does so with transformers' own cache, if ours is of a pool.
        """
        self._drawn = before = None if self.entry is None else random_state(self.device)
        try:
            self._compute_prompt()
            has_identity = self.entry is not None and self.entry.identity is not None
            self.is_prefix_assumed = has_identity and not self.is_prefix_confirmed
            if self.is_prefix_assumed and not self.is_device_idle and not self._is_prefix_valid():
                self.forget_prefix()
                self._compute_prompt()
        except UnfinishedPass as reason:
            if before is None or not compat.has_common_loop(self.model):
                raise
            self.why_replaced = str(reason)
            set_random_state(self.device, before)
            self.cache = self.model_kwargs["past_key_values"] = DynamicCache(
                config=self.model.config
            )
            self._compute_prompt()

    def _is_prefix_valid(self) -> bool:
        """Whether the model is as it was when a prefix in the cache was computed.

        The device computes meanwhile.
        """
        self.is_prefix_assumed = False
        self.is_prefix_confirmed = True
        assert self.entry is not None
        state = repeatable_state(self.model, self.modules)
        if state is not None:
            self.state = state.of_pass
            self.has_hooks = False
        if state == self.entry.identity:
            state = self.entry.identity  # the same object: the next comparison takes no time
        self.identity = state
        is_valid = state is self.entry.identity or not self.entry.num_reused
        if num_ranks(self.model) > 1:
            is_valid = bool(least(self.model, int(is_valid)))
        if is_valid:
            self.entry.identity = state
        return is_valid

    def forget_prefix(self) -> None:
        """Begin the call again with another cache: empty, or with a prefix of the model as it is."""
        assert self.entry is not None
        assert self.pool is not None
        self.pool.exchange(self.entry, self.request, self.identity)
        self.use_cache(self.entry.cache)
        self.__dict__.pop("fingerprint", None)
        self.begin()

    def begin(self) -> None:
        """Tell the cache of the call, and note where it stands."""
        if self.entry is None:  # else its pool has done so
            self.cache.begin_call(self.request)
        self.start = self.cache.snapshot()

    def _compute_prompt(self) -> None:
        self._left_kwargs = {**self.model_kwargs}  # chunked prefill writes into them
        logits = None if self.prompts is None else self.prompts.run(self)
        self.is_prompt_captured = logits is not None
        if logits is not None:
            self.outputs = CausalLMOutputWithPast(
                logits=logits[:, None], past_key_values=self.cache
            )
            return
        # Not None: eligibility.py or `run_eagerly` has looked.
        prefill: Any = compat.prefill(self.model)
        is_first = not self.config.is_assistant
        outputs = prefill(
            self.input_ids, self.config, self._left_kwargs, is_first_iteration=is_first
        )
        if isinstance(self.cache, StaticContiguousCache) and self.cache.is_unfinished:
            refuse_missing_layers(self.model, len(self.cache.layers))
            raise self.cache.unfinished_pass()
        self.outputs = outputs

    def _take_outputs(
        self, input_ids: Tensor, config: Any, model_kwargs: dict[str, Any], **how: Any
    ) -> Any:
        """In the place of the model's prefill: the outputs of the prompt, which is computed once in
        a call.
        """
        if self.outputs is None:
            self._read_prompt()
        if self.is_prefix_assumed and not self._is_prefix_valid():
            self.forget_prefix()
            self._read_prompt()
        model_kwargs.update(self._left_kwargs)
        outputs = self.outputs
        self.outputs = None
        return outputs

    @cached_property
    def step_inputs(self) -> StepInputs:
        """What transformers' loop would give to the model in the step after the prompt."""
        ids = self.input_ids
        self._next_length = ids.shape[1]
        self._next_kwargs = {**self.model_kwargs}
        # The token itself does not matter.
        ids = torch.cat([ids, ids.new_zeros(len(ids), 1, *ids.shape[2:])], dim=1)
        inputs = self._next_inputs(ids)
        others = {
            key: value
            for key, value in inputs.items()
            if value is not None and key not in _OWN_INPUTS
        }
        if unknown := [key for key, value in others.items() if not is_plain(value)]:
            raise Fallback(
                f"the model is given {unknown[0]}, {kind_of(others[unknown[0]])}, in every step"
            )
        tensors = {
            k: v for k, v in others.items() if any(isinstance(leaf, Tensor) for leaf in leaves(v))
        }
        settings = {key: value for key, value in others.items() if key not in tensors}
        position_ids = inputs.get("position_ids")
        if position_ids is None:
            position_ids = self.cache.seq_len - self.seq_start[:, None]
        if position_ids.ndim < 2 or position_ids.shape[-1] != 1:
            raise Fallback(f"the positions of one token are {list(position_ids.shape)}")
        position_ids = position_ids.expand(*position_ids.shape[:-2], len(ids), 1).to(self.device)
        return StepInputs(position_ids, settings, tensors)

    def _next_inputs(self, ids: Tensor) -> Any:
        """What transformers' loop gives to the model for the newest token of `ids`."""
        update = compat.next_model_kwargs(self.model)
        while self._next_length < ids.shape[1]:
            self._next_kwargs = update(
                self._last_outputs, self._next_kwargs, is_encoder_decoder=False
            )
            self._next_length += 1
        return self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=1, **self._next_kwargs
        )

    def next_logits(self, ids: Tensor) -> Tensor:
        """The logits [B, V] after the newest token of `ids`, by an ordinary pass."""
        self._last_outputs = self.model(**self._next_inputs(ids), return_dict=True)
        return self._last_outputs.logits[:, -1].float()  # type: ignore[no-any-return]

    def remember(self, ids: Tensor) -> None:
        """Tell the cache which tokens it holds, of `ids` [B, n] that begin with `input_ids`."""
        past = self.request.past
        if isinstance(self.cache, StaticContiguousCache) and self.request.tokens is not None:
            self.cache.remember(ids[:, : max(0, self.cache.seq_len - past)], past)

    def run_eagerly(self) -> GenerateDecoderOnlyOutput | Tensor:
        """The same call in transformers' own loop, after the prompt if that is computed."""
        loop = self._loop_with_drafts()
        more = {}
        if loop is not None:
            more = {"assistant_model": self.request.assistant_model}
        else:
            prefill = None if compat.prefill(self.model) is None else self._take_outputs
            loop = compat.sampling_loop(self.model, prefill)
        output: Any = loop(
            self.input_ids,
            logits_processor=self.processors,
            stopping_criteria=self.criteria,
            generation_config=self.config,
            synced_gpus=bool(self.request.synced_gpus),
            streamer=self.streamer,
            **more,
            **self.model_kwargs,
        )
        self.remember(output if isinstance(output, Tensor) else output.sequences)
        return output  # type: ignore[no-any-return]

    def _loop_with_drafts(self) -> Any:
        """Transformers' own, if the call asks for it: it takes one row, and computes the whole prompt.
        It draws other numbers than a loop without drafts.
        """
        if not self.request.has_drafts or len(self.input_ids) != 1 or self.config.do_sample:
            return None
        self.request.is_decoded = False  # it writes drafts beyond the end
        if isinstance(self.cache, StaticContiguousCache):
            capacity = self.cache.max_cache_len
            is_long = self.request.max_positions > capacity and not self.cache.grows
            if is_long or self.start is None or self.start[0]:
                return None
            self.cache.restore(self.start)
        elif self.outputs is not None:
            self.use_cache(DynamicCache(config=self.model.config))
        set_random_state(self.device, self._drawn)
        return compat.assisted_loop(self.model)


def repeatable_state(model: Any, modules: list[torch.nn.Module] | None = None) -> State | None:
    """What the states of tokens depend on beside the tokens; None if they may differ in the next
    call.

    They do with random numbers, hooks, and if they depend on later tokens. Writes into weights that
    were made in inference mode cannot be seen.
    """
    config = model.config.get_text_config(decoder=True)
    modules = modules or compat.all_modules(model)
    sees_later = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    depends_on_later = sees_later or frequencies_depend_on_length(config)
    if depends_on_later or draws_random_numbers(modules) or compat.has_hooks(modules):
        return None
    tensors = compat.named_tensors(modules)[1]
    if any(tensor is not None and tensor.is_inference() for tensor in tensors):
        return None
    return content_state(model, modules)


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), of_device


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """A block that leaves the generator of a device as it was. Other threads may draw from that of
    the host meanwhile.
    """
    of_host, of_device = random_state(device)
    try:
        yield
    finally:
        if of_device is None:
            torch.set_rng_state(of_host)
        else:
            torch.cuda.set_rng_state(of_device, device)


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None] | None) -> None:
    """Put back what `random_state` gave; None: leave the generators as they are."""
    if state is None:
        return
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def is_plain(value: object) -> bool:
    """Whether a keyword of the model is made of tensors, numbers and strings.

    Any other object may have a state.
    """
    return all(isinstance(leaf, (Tensor, *_SETTINGS)) for leaf in leaves(value))


def kind_of(thing: object) -> str:
    """What an error calls a thing that should be a cache."""
    return "None" if thing is None else f"a {type(thing).__name__}"
