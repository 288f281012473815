"""What an attached model holds, and what becomes of its calls: a cache of the pool, the captured
step, or transformers' own way.
"""

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from threading import Lock
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from hf_static_kv import compat
from hf_static_kv.batching import BatchManager, refusal
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.codes import check_kv_dtype
from hf_static_kv.cache.identity import State, content_state
from hf_static_kv.cache.layout import check_positive, compute_device, plan_layers
from hf_static_kv.cache.passes import UnfinishedPass
from hf_static_kv.cache.pool import CachePool
from hf_static_kv.cache.prefixes import PrefixStore
from hf_static_kv.cache.ranks import OutOfMemoryOnAllRanks, num_ranks
from hf_static_kv.cache.request import Fallback, Request, running_request
from hf_static_kv.cache.states import continuation_of
from hf_static_kv.cache.storage import is_out_of_memory
from hf_static_kv.decoding.call import (
    Call,
    random_state,
    repeatable_state,
    set_random_state,
)
from hf_static_kv.decoding.decoder import GraphDecoder
from hf_static_kv.decoding.drafts import NUMBER, SIZE, drafts_by
from hf_static_kv.decoding.loop import MAX_ROWS
from hf_static_kv.decoding.prepared import PreparedConfigs
from hf_static_kv.decoding.turns import turns_of
from hf_static_kv.exactness.exact import exact as exact_context
from hf_static_kv.patching import (
    EXACT_ATTENTION_NAME,
    SharedContext,
    attention_of,
)
from hf_static_kv.program.drafting import Drafts

logger = logging.getLogger("hf_static_kv.attaching")  # one name for both files
ATTACHMENTS: WeakKeyDictionary[PreTrainedModel, "Attachment"] = WeakKeyDictionary()
CALL: ContextVar["Served | None"] = ContextVar("call", default=None)
_Function = Callable[..., Any]
# On a CPU our cache takes 0.89 to 1.00 of DynamicCache's time from this prompt on, and up to 1.05
# of it before (2 to 30 layers, batch 1 and 4, float32, four threads of the H200's host, 2026-11).
_MIN_PROMPT_ON_CPU = 512
_DECODER_DEVICES = ("cuda",)  # on others there is no graph to replay
_ONE_SEQUENCE_A_ROW = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_NUMBER = re.compile(r"\b\d[\d,.]*\b")  # of tokens or bytes in a reason
_LOOP_ONLY = {
    "assistant_model",
    "assistant_tokenizer",
    "inputs_tensor",
    "streamer",
    "synced_gpus",
    "tokenizer",
}  # the decoder reads them from the request
# What may come with the ids of a prompt without changing the states of its tokens.
_IDS_ALONE = {
    "attention_mask",
    "cache_position",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}


@dataclass(frozen=True)
class Settings:
    """The arguments of `attach`."""

    max_cache_len: int | None = None
    max_bytes: int | None = None
    reuse_prefix: bool | str | os.PathLike[str] | PrefixStore | None = False
    exact: bool = False
    max_rows: int = MAX_ROWS
    speculate: str | None = None
    assistant: PreTrainedModel | None = None
    kv_dtype: str | None = None
    persistent: bool = True

    @property
    def drafts(self) -> Drafts | None:
        """Of every call."""
        if self.assistant is not None:
            return drafts_by(self.assistant)
        return None if self.speculate is None else Drafts(NUMBER, SIZE)

    @property
    def store(self) -> PrefixStore | None:
        """Where prefixes are saved; None where they are kept in memory only."""
        folder = self.reuse_prefix
        if folder is None or isinstance(folder, bool):
            return None
        return folder if isinstance(folder, PrefixStore) else PrefixStore(folder)

    def __post_init__(self) -> None:
        sizes = {
            "max_cache_len": self.max_cache_len,
            "max_bytes": self.max_bytes,
            "max_rows": self.max_rows,
        }
        check_positive(**{name: size for name, size in sizes.items() if size is not None})
        if self.speculate not in (None, "prompt"):
            raise ValueError(
                f'speculate must be "prompt" (drafts from the text itself) or None, got '
                f"{self.speculate!r}."
            )
        if self.speculate is not None and self.assistant is not None:
            raise ValueError("Drafts come from the text or from an assistant: omit one of both.")
        check_kv_dtype(self.kv_dtype)
        if self.exact and self.kv_dtype is not None:
            raise ValueError(
                f"exact=True and kv_dtype={self.kv_dtype!r}: omit one of both. Inside exact keys and "
                "values are stored as they are."
            )


@dataclass(eq=False)
class Served:
    """One call of `generate` on an attached model."""

    attachment: "Attachment"
    caches: ExitStack  # gives them back
    began: float
    cache: StaticContiguousCache | None = None
    is_decoded: bool = False  # by the decoder, as far as that is known before the prompt
    is_in_loop: bool = False
    # The attention mask and whether it hides more than padding, if that was looked at.
    mask: Tensor | None = None
    has_holes: bool = False


class Attachment:
    """The caches and captured steps of an attached model, and what became of its calls.

    `calls` counts calls that brought no cache of their own, `hits` those that were given a cache of
    an earlier call, `reused_tokens` the tokens of prompts that were not computed again; of a batch
    the positions.
    `fallback_reason` says why the last call did not run as a captured step; None when it did.
    `fallbacks` counts these reasons over all calls, with # for their numbers.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.calls = 0
        self._counting = Lock()  # calls of several threads
        self.fallback_reason: str | None = None
        self.fallbacks: Counter[str] = Counter()
        self.decoder = GraphDecoder(persistent=settings.persistent)
        self.decoder.max_rows = settings.max_rows
        self.decoder.drafts = settings.drafts
        self.decoder.assistant = settings.assistant
        # Nobody has asked for a captured step; `fallback_reason` tells.
        self.decoder.show_no_warnings()
        self.pool = CachePool(
            settings.max_cache_len, settings.max_bytes, settings.store, settings.kv_dtype
        )
        self.decoder.use_pool(self.pool)
        # Exact changes the model.
        self._exact = SharedContext(exact_context if settings.exact else nullcontext)
        self.configs = PreparedConfigs()
        self._is_short_of_memory = False
        self.state: State | None = None  # of the model in the last call
        self.makes_default = False  # whether `generate` makes a `DynamicCache` for this model
        self.why_unserved: str | None = None  # found in a call; a later `attach` forgets it

    @property
    def hits(self) -> int:
        return self.pool.hits

    @property
    def reused_tokens(self) -> int:
        return self.pool.reused_tokens

    @property
    def caches(self) -> list[StaticContiguousCache]:
        """The caches of the pool, those in use included."""
        return [entry.cache for entry in (*self.pool.free, *self.pool.in_use)]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the caches, and of what captured steps hold beside them."""
        return self.pool.num_bytes + self.decoder.memory_bytes

    @property
    def rows(self) -> int:
        """Calls of several threads that decode together now."""
        return sum(loop.num_rows for loop in self.decoder.loops)

    @property
    def queue(self) -> int:
        """Calls that wait for others to compute their prompts, or for a row."""
        return sum(loop.num_waiting for loop in self.decoder.loops)

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together, in the last second in which there were several."""
        return max([0.0, *(loop.tokens_per_second for loop in self.decoder.loops)])

    @property
    def captured_steps(self) -> int:
        return self.decoder.num_steps

    @property
    def captured_prompts(self) -> int:
        """Sizes of prompts that have a captured pass, of all caches."""
        return len(self.decoder.prompts.steps)

    @property
    def prompt_reason(self) -> str | None:
        """Why the model had to compute the last prompt; None: it did not, or its size was new."""
        return self.decoder.prompts.reason

    @property
    def draft_reason(self) -> str | None:
        """Why no tokens were drafted in the last call that should have them; None: they were."""
        return self.decoder.draft_reason

    @property
    def kernel_reason(self) -> str | None:
        """Why no single kernel computed the steps of the last call; None: one did."""
        return self.decoder.kernel_reason

    @property
    def drafted_passes(self) -> int:
        """Passes over several tokens, the newest and drafts."""
        return self.decoder.accepted.passes

    @property
    def accepted_drafts(self) -> int:
        """Drafts that were the tokens which the model selects."""
        return self.decoder.accepted.tokens

    def __repr__(self) -> str:
        caches = ", ".join(
            f"{cache.batch_size} x {cache.max_cache_len} tokens" for cache in self.caches
        )
        counts = f"calls={self.calls}, hits={self.hits}, reused_tokens={self.reused_tokens}"
        figures = f"{counts}, caches=[{caches}], {self.memory_bytes:,} bytes"
        reasons = f", fallbacks={dict(self.fallbacks)}" if self.fallbacks else ""
        captured = f"captured_steps={self.captured_steps}, captured_prompts={self.captured_prompts}"
        together = f", rows={self.rows}, queue={self.queue}" if self.rows or self.queue else ""
        if self.drafted_passes:
            together += f", {self.accepted_drafts} drafts accepted in {self.drafted_passes} passes"
        return f"Attachment({figures}, {captured}{together}{reasons})"

    def save(self, input_ids: Tensor | None = None) -> Path:
        """Save a prefix to the folder of `reuse_prefix`: later calls find it, in other processes
        too.

        The prefix is all that the last call has kept, or as much of `input_ids` [B, n] (or [n]: one
        row) as is kept of some call. A call with `inputs_embeds`, beams or `return_dict_in_generate`
        keeps nothing; of one with padding the rows are kept, for `input_ids` that begin like them.
        """
        model = next((model for model, own in ATTACHMENTS.items() if own is self), None)
        if model is None:
            raise ValueError(
                "The model is detached, and nothing is kept of it: call attach, and generate, "
                "again."
            )
        with self._in_exact(model):
            return self.pool.save(model, content_state(model), input_ids)

    def _in_exact(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """What a call runs in. A caller's own block of `exact` is another one, which may end first."""
        is_exact = EXACT_ATTENTION_NAME in attention_of(model).values()
        return nullcontext() if is_exact and not self._exact.is_entered else self._exact(model)

    # --- a call

    def generate(self, model: PreTrainedModel, original: _Function, args: Any, kwargs: Any) -> Any:
        """The call, and the same call with transformers' own cache if ours ran out of memory or
        cannot serve it.
        """
        device = compute_device(model)
        call = Served(self, ExitStack(), time.monotonic())
        before = random_state(device)
        try:
            with self._in_exact(model), call.caches:
                token = CALL.set(call)
                try:
                    return self.pool.hand_over(original(*args, **kwargs))
                finally:
                    CALL.reset(token)
        except UnfinishedPass as reason:
            if call.cache is None:
                raise
            self.remember_skipping(str(reason))
            if kwargs.get("streamer") is not None:  # it has been given tokens already
                raise
        except (RuntimeError, MemoryError) as error:
            if call.cache is None or not is_out_of_memory(error):
                raise
            if num_ranks(model) > 1 and not isinstance(error, OutOfMemoryOnAllRanks):
                raise  # the other ranks are amid the call, and would not begin it again
            call.cache = None
            self.pool.clear()
            for loop in self.decoder.loops:
                loop.free_memory()
            if kwargs.get("streamer") is not None:  # it has been given tokens already
                raise
            self._warn_of_memory()
        # Outside of the handler, whose traceback holds the tensors of the failed call.
        set_random_state(device, before)
        with self._in_exact(model):
            return original(*args, **kwargs)

    def lend(
        self, call: Served, model: PreTrainedModel, model_kwargs: dict[str, Any], made: type
    ) -> None:
        """Put a cache of the pool in the place of the one that `generate` makes, of type `made`."""
        request = running_request()
        if request is None or request.model is not model or request.custom_generate is not None:
            return
        with self._counting:
            self.calls += 1
        self.fallback_reason = None
        self.pool.last = None
        call.is_decoded = request.is_decoded = self._decodes(request)
        try:
            self._check(request, made)
            has_ids_alone = self._has_ids_alone(request)
            if call.is_decoded:
                self._take_turn(call, request)
            identity = self._identity(request) if has_ids_alone else None
            cache = call.caches.enter_context(self.pool.cache_for(request, identity))
        except (Fallback, ValueError) as reason:
            self._note(str(reason))
            turns_of(model).release()
            return
        call.cache = cache
        model_kwargs["past_key_values"] = cache
        if not _has_one_sequence_a_row(request):
            self._note(f"the mode is {request.mode.value}")

    def _take_turn(self, call: Served, request: Request) -> None:
        """Before a cache is taken: calls that wait need none."""
        turns = turns_of(request.model)
        if not turns.is_free:  # what waits for the device is done meanwhile
            call.mask = request.mask
            call.has_holes = request.has_holes
        call.caches.enter_context(turns.turn())

    def _check(self, request: Request, made: type) -> None:
        """Raise `Fallback` if the call keeps the cache that `generate` makes for it."""
        self.makes_default = made is DynamicCache
        if made is not DynamicCache:
            kept = f"`generate` makes a {made.__name__} for this model"
            instead = "the call uses no cache" if made is NoneType else kept
            raise Fallback(unserved(request.model, self.settings.kv_dtype) or instead)
        if request.prompt_length == 0:
            raise Fallback("the prompt has no tokens")  # an error, and transformers' own
        if self.why_unserved is not None:
            raise Fallback(self.why_unserved)
        if not self._pays(request):
            device = compute_device(request.model).type
            raise Fallback(f"on a {device} our cache is no faster for a prompt this short")

    def _note(self, reason: str) -> None:
        """Count why a call is not a captured step; the first one is logged."""
        reason = reason.rstrip(".")
        self.fallback_reason = reason
        with self._counting:
            self.fallbacks[_NUMBER.sub("#", reason)] += 1
            is_first = self.fallbacks.total() == 1
        if is_first:
            logger.info("attach: a call falls back: %s. `attachment(model)` counts them.", reason)

    def run_loop(
        self, served: Served, model: PreTrainedModel, original: _Function, args: Any, kwargs: Any
    ) -> Any:
        """The decoder on a GPU, else transformers' loop."""
        device = compute_device(model).type
        given = {key: value for key, value in kwargs.items() if key not in _LOOP_ONLY}
        call = Call.of(model, *args, **given)
        if call.request.mode not in _ONE_SEQUENCE_A_ROW and not served.is_decoded:
            if call.request.has_drafts:
                self._note(f"there are no graphs on {device}")
            return original(*args, **kwargs)
        call.began = served.began
        if served.mask is not None and served.mask is call.request.mask:
            call.has_holes = served.has_holes
        if device in _DECODER_DEVICES:
            output = self.decoder.run(call)
            if call.fallback_reason is not None:
                self._note(call.fallback_reason)
            return output
        self._note(f"there are no graphs on {device}")
        call.use_pool(self.pool)
        return call.run_eagerly()

    def batch_manager(
        self, model: PreTrainedModel, original: _Function, args: Any, kwargs: Any
    ) -> Any:
        """Of `generate_batch`: ours, or transformers' own if it cannot serve these requests."""
        given = signature(original).bind(*args, **kwargs).arguments
        config = given.get("generation_config") or model.generation_config
        how = config, given.get("continuous_batching_config")
        device = compute_device(model).type
        reason = unserved(model, self.settings.kv_dtype) or refusal(*how)
        if num_ranks(model) > 1:
            reason = "the model is split over processes"
        if reason is None and device not in _DECODER_DEVICES:
            reason = f"there are no graphs on {device}"
        if reason is None:
            return BatchManager(model, *how, self.decoder)
        self._note(f"generate_batch: {reason}")
        return original(*args, **kwargs)

    def _decodes(self, request: Request) -> bool:
        is_served = _has_one_sequence_a_row(request) and compat.has_common_loop(request.model)
        return is_served and compute_device(request.model).type in _DECODER_DEVICES

    def _pays(self, request: Request) -> bool:
        """Whether our cache is no slower than transformers' own, or is needed for what was asked
        for.
        """
        settings = self.settings
        return (
            bool(settings.reuse_prefix or settings.exact or settings.kv_dtype)
            or compute_device(request.model).type == "cuda"
            or request.prompt_length >= _MIN_PROMPT_ON_CPU
        )

    def _has_ids_alone(self, request: Request) -> bool:
        """Whether tokens may be reused. Notes them; before the turn, as this waits for the device."""
        # Transformers' loop for drafted tokens computes the whole prompt.
        is_continued = request.mode in _ONE_SEQUENCE_A_ROW or request.is_decoded
        is_wanted = is_continued and self.settings.reuse_prefix
        starts = _starts_of_ids_alone(request) if is_wanted else None
        if starts is None:
            return False
        request.starts = starts
        return bool(request.host_ids)

    def _identity(self, request: Request) -> Any:
        """What the states of the prompt depend on beside its ids; None if that is not known.

        It is as the last call found it: `Call` looks again while the device computes the prompt. A
        loop of the model's own does not.
        """
        has_states = any(plan.num_states for plan in plan_layers(request.model.config))
        if any(request.starts) and (has_states or num_ranks(request.model) > 1):
            return None  # no copies are kept of these, and two batches are rarely padded alike
        if has_states:
            continuation = continuation_of(request.model)
            if continuation is None or not all(continuation):
                return None  # the new tokens of a prompt would not be those of one pass
        if self.state is None or not compat.has_common_loop(request.model):
            self.state = repeatable_state(request.model)
        return self.state

    def remember_skipping(self, reason: str) -> None:
        """The model skips layers: later calls begin with transformers' cache."""
        self._note(reason)
        if self.why_unserved is None:
            self.why_unserved = reason
            logger.warning(
                "attach: calls of this model run with transformers' own cache. %s", reason
            )

    def _warn_of_memory(self) -> None:
        self._note("out of memory")
        if not self._is_short_of_memory:
            self._is_short_of_memory = True
            logger.warning(
                "attach: out of memory. The pool is emptied, and the call runs with "
                "transformers' own cache. A smaller max_bytes leaves more for the model."
            )


def _has_one_sequence_a_row(request: Request) -> bool:
    return request.mode in _ONE_SEQUENCE_A_ROW or request.has_drafts


def _starts_of_ids_alone(request: Request) -> list[int] | None:
    """Where the rows of a prompt begin, if it is its ids in a mode that can continue a sequence:
    after padding at the left, at positions from 0 on. Else None.
    """
    model = request.model
    ids = request.tokens
    mask = request.mask
    given = {key for key, value in request.model_kwargs.items() if value is not None}
    if ids is None or ids.ndim != 2 or request.past or not given <= _IDS_ALONE:
        return None
    # PEFT's prompt tuning puts tokens of its own before the prompt, in this method of the instance.
    prepare = getattr(model.prepare_inputs_for_generation, "__func__", None)
    if prepare is not type(model).prepare_inputs_for_generation:
        return None
    if not _has_one_sequence_a_row(request) or request.config.prefill_chunk_size is not None:
        return None
    positions = request.model_kwargs.get("position_ids")
    unusual: Tensor | bool = False
    if positions is not None:
        expected = torch.arange(ids.shape[1], device=positions.device)
        if positions.ndim != 2 or positions.shape[1] != len(expected):
            return None
        unusual = (positions != expected).any()
    if mask is not None:
        unusual = unusual | (mask != 1).any()
    if not unusual:  # once: the host waits for it
        return [0] * len(ids)
    is_padded = mask is not None and mask.ndim == 2 and mask.shape == ids.shape
    # A model that is given no positions may count the padding (Bart).
    if not is_padded or positions is None or request.has_own_positions or request.has_holes:
        return None
    assert mask is not None
    starts: list[int] = (mask == 0).sum(dim=1).tolist()
    return starts if max(starts) < ids.shape[1] else None


def unserved(model: PreTrainedModel, kv_dtype: str | None) -> str | None:
    """Why no call of this model is given a cache of ours; None where calls are."""
    try:
        plan_layers(model.config, kv_dtype=kv_dtype)
    except ValueError as reason:
        return str(reason)
    # Its prompts are a few tokens long: there our cache alone is no faster.
    if model.config.is_encoder_decoder:
        return "There is no captured step for an encoder-decoder."
    return None
