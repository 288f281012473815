"""`attach(model)`: every later `generate` uses a cache from the model's pool and, on a GPU, the
captured step.

    attach(model)                                # from here on: model.generate(...), pipelines, trainers
    model.generate(**inputs, max_new_tokens=200)
    attachment(model)                            # what it holds, and why a call fell back
    detach(model)

The model's class is replaced by a subclass of the same name, as torch's parametrizations and FSDP
do. Nothing is stored on the model: copies, pickles and checkpoints are those of the model without
it.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from threading import Lock
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from hf_static_kv import compat
from hf_static_kv.batching import BatchManager, refusal
from hf_static_kv.cache.cache import StaticContiguousCache
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
from hf_static_kv.decoding.loop import MAX_ROWS
from hf_static_kv.decoding.prepared import PreparedConfigs
from hf_static_kv.decoding.turns import turns_of
from hf_static_kv.exactness.exact import exact as exact_context
from hf_static_kv.patching import (
    EXACT_ATTENTION_NAME,
    SharedContext,
    attention_of,
    replaced,
    unwrapped,
)

logger = logging.getLogger(__name__)
_ATTACHMENTS: WeakKeyDictionary[PreTrainedModel, "Attachment"] = WeakKeyDictionary()
_CALL: ContextVar["_Served | None"] = ContextVar("call", default=None)
_Function = Callable[..., Any]
# On a CPU our cache takes 0.89 to 1.00 of DynamicCache's time from this prompt on, and up to 1.05
# of it before (2 to 30 layers, batch 1 and 4, float32, four threads of the H200's host, 2026-11).
_MIN_PROMPT_ON_CPU = 512
_DECODER_DEVICES = ("cuda",)  # on others there is no graph to replay
_ONE_SEQUENCE_A_ROW = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_LOOP_ONLY = {
    "assistant_tokenizer",
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


@dataclass(eq=False)
class _Served:
    """One call of `generate` on an attached model."""

    attachment: "Attachment"
    caches: ExitStack  # gives them back
    began: float
    cache: StaticContiguousCache | None = None
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
    `fallbacks` counts these reasons over all calls.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.calls = 0
        self._counting = Lock()  # calls of several threads
        self.fallback_reason: str | None = None
        self.fallbacks: Counter[str] = Counter()
        self.decoder = GraphDecoder()
        self.decoder.max_rows = settings.max_rows
        # Nobody has asked for a captured step; `fallback_reason` tells.
        self.decoder.show_no_warnings()
        self.pool = CachePool(settings.max_cache_len, settings.max_bytes, settings.store)
        self.decoder.use_pool(self.pool)
        # Exact changes the model.
        self._exact = SharedContext(_exact if settings.exact else nullcontext)
        self.configs = PreparedConfigs()
        self._is_short_of_memory = False
        self._state: State | None = None  # of the model in the last call
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

    def __repr__(self) -> str:
        caches = ", ".join(
            f"{cache.batch_size} x {cache.max_cache_len} tokens" for cache in self.caches
        )
        counts = f"calls={self.calls}, hits={self.hits}, reused_tokens={self.reused_tokens}"
        figures = f"{counts}, caches=[{caches}], {self.memory_bytes:,} bytes"
        reasons = f", fallbacks={dict(self.fallbacks)}" if self.fallbacks else ""
        captured = f"captured_steps={self.captured_steps}, captured_prompts={self.captured_prompts}"
        together = f", rows={self.rows}, queue={self.queue}" if self.rows or self.queue else ""
        return f"Attachment({figures}, {captured}{together}{reasons})"

    def save(self, input_ids: Tensor | None = None) -> Path:
        """Save a prefix to the folder of `reuse_prefix`: later calls find it, in other processes
        too.

        The prefix is all that the last call has kept, or as much of `input_ids` [B, n] (or [n]: one
        row) as is kept of some call. A call with `inputs_embeds`, beams or `return_dict_in_generate`
        keeps nothing; of one with padding the rows are kept, for `input_ids` that begin like them.
        """
        model = next((model for model, own in _ATTACHMENTS.items() if own is self), None)
        if model is None:
            raise ValueError(
                "The model is detached, and nothing is kept of it: call attach, and generate, "
                "again."
            )
        with self._exact(model):
            return self.pool.save(model, content_state(model), input_ids)

    # --- a call

    def generate(self, model: PreTrainedModel, original: _Function, args: Any, kwargs: Any) -> Any:
        """The call, and the same call with transformers' own cache if ours ran out of memory or
        cannot serve it.
        """
        device = compute_device(model)
        call = _Served(self, ExitStack(), time.monotonic())
        before = random_state(device)
        try:
            with self._exact(model), call.caches:
                token = _CALL.set(call)
                try:
                    return self.pool.hand_over(original(*args, **kwargs))
                finally:
                    _CALL.reset(token)
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
        with self._exact(model):
            return original(*args, **kwargs)

    def lend(
        self, call: _Served, model: PreTrainedModel, model_kwargs: dict[str, Any], made: type
    ) -> None:
        """Put a cache of the pool in the place of the one that `generate` makes, of type `made`."""
        request = running_request()
        if request is None or request.model is not model or request.custom_generate is not None:
            return
        with self._counting:
            self.calls += 1
        self.fallback_reason = None
        self.pool.last = None
        try:
            self._check(request, made)
            has_ids_alone = self._has_ids_alone(request)
            if self._decodes(request):
                self._take_turn(call, request)
            identity = self._identity(request) if has_ids_alone else None
            cache = call.caches.enter_context(self.pool.cache_for(request, identity))
        except (Fallback, ValueError) as reason:
            self._note(str(reason))
            turns_of(model).release()
            return
        call.cache = cache
        model_kwargs["past_key_values"] = cache
        if request.mode not in _ONE_SEQUENCE_A_ROW:
            self._note(f"the mode is {request.mode.value}")

    def _take_turn(self, call: _Served, request: Request) -> None:
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
            raise Fallback(_unserved(request.model) or instead)
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
            self.fallbacks[reason] += 1
            is_first = self.fallbacks.total() == 1
        if is_first:
            logger.info("attach: a call falls back: %s. `attachment(model)` counts them.", reason)

    def run_loop(self, served: _Served, model: PreTrainedModel, args: Any, kwargs: Any) -> Any:
        """The decoder on a GPU, else transformers' loop."""
        device = compute_device(model).type
        given = {key: value for key, value in kwargs.items() if key not in _LOOP_ONLY}
        call = Call.of(model, *args, **given)
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
        reason = _unserved(model) or refusal(*how)
        if num_ranks(model) > 1:
            reason = "the model is split over processes"
        if reason is None and device not in _DECODER_DEVICES:
            reason = f"there are no graphs on {device}"
        if reason is None:
            return BatchManager(model, *how, self.decoder)
        self._note(f"generate_batch: {reason}")
        return original(*args, **kwargs)

    def _decodes(self, request: Request) -> bool:
        is_served = request.mode in _ONE_SEQUENCE_A_ROW and compat.has_common_loop(request.model)
        return is_served and compute_device(request.model).type in _DECODER_DEVICES

    def _pays(self, request: Request) -> bool:
        """Whether our cache is no slower than transformers' own, or is needed for what was asked
        for.
        """
        is_wanted = bool(self.settings.reuse_prefix) or self.settings.exact
        return (
            is_wanted
            or compute_device(request.model).type == "cuda"
            or request.prompt_length >= _MIN_PROMPT_ON_CPU
        )

    def _has_ids_alone(self, request: Request) -> bool:
        """Whether tokens may be reused. Notes them; before the turn, as this waits for the device."""
        starts = _starts_of_ids_alone(request) if self.settings.reuse_prefix else None
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
        if self._state is None or not compat.has_common_loop(request.model):
            self._state = repeatable_state(request.model)
        return self._state

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


def _exact(model: PreTrainedModel) -> AbstractContextManager[None]:
    is_exact = EXACT_ATTENTION_NAME in attention_of(model).values()
    return nullcontext() if is_exact else exact_context(model)


class _Hooks:
    """Called by an attached model in the place of its own methods."""

    @staticmethod
    def generate(model: PreTrainedModel, original: _Function, args: Any, kwargs: Any) -> Any:
        attachment = _ATTACHMENTS.get(model)
        if attachment is None:
            return original(*args, **kwargs)
        return attachment.generate(model, original, args, kwargs)

    @staticmethod
    def batching(model: PreTrainedModel, original: _Function, args: Any, kwargs: Any) -> Any:
        attachment = _ATTACHMENTS.get(model)
        if attachment is None:
            return original(*args, **kwargs)
        return attachment.batch_manager(model, original, args, kwargs)

    @staticmethod
    def config(model: PreTrainedModel, original: _Function, kwargs: dict[str, Any]) -> Any:
        attachment = _ATTACHMENTS.get(model)
        if attachment is None:
            return original(None, **kwargs)
        return attachment.configs.prepare(model, original, kwargs)

    @staticmethod
    def knows_cache(model: PreTrainedModel) -> bool:
        attachment = _ATTACHMENTS.get(model)
        return attachment is not None and attachment.makes_default

    @staticmethod
    def cache(model: PreTrainedModel, model_kwargs: dict[str, Any], made: type) -> None:
        call = _CALL.get()
        if call is not None and call.attachment is _ATTACHMENTS.get(model):
            call.attachment.lend(call, model, model_kwargs, made)

    @staticmethod
    def loop(model: PreTrainedModel, original: _Function, args: Any, kwargs: Any) -> Any:
        call = _CALL.get()
        cache = None if call is None else call.cache
        if (
            call is None
            or call.is_in_loop
            or cache is None
            or kwargs.get("past_key_values") is not cache
        ):
            return original(*args, **kwargs)
        call.is_in_loop = True  # the decoder may fall back to it
        entry = call.attachment.pool.entry_of(cache)
        output = call.attachment.run_loop(call, model, args, kwargs)
        if entry is not None and entry.identity is not None:
            call.attachment._state = entry.identity
        # Not if it is back in the pool, where another call may use it.
        is_own = entry is not None and call.attachment.pool.entry_of(cache) is entry
        if is_own and cache.is_unfinished:  # the loop has gone on with another
            call.attachment.remember_skipping(str(cache.unfinished_pass()))
        return output


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
    if request.mode not in _ONE_SEQUENCE_A_ROW or request.config.prefill_chunk_size is not None:
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


def _unserved(model: PreTrainedModel) -> str | None:
    """Why no call of this model is given a cache of ours; None where calls are."""
    try:
        plan_layers(model.config)
    except ValueError as reason:
        return str(reason)
    # Its prompts are a few tokens long: there our cache alone is no faster.
    if model.config.is_encoder_decoder:
        return "There is no captured step for an encoder-decoder."
    return None


def attach(
    model: Any,
    *,
    max_cache_len: int | None = None,
    max_bytes: int | None = None,
    reuse_prefix: bool | str | os.PathLike[str] | PrefixStore | None = False,
    exact: bool = False,
    max_rows: int = MAX_ROWS,
) -> Attachment:
    """Make every later `model.generate(...)` use a cache from a pool and, on a GPU, `GraphDecoder`.

    A call that brings its own `past_key_values`, `custom_generate` or `cache_implementation` is not
    touched. Calls that the decoder does not serve (beam search, an assistant model, prompt lookup)
    run in transformers' loop on our cache. A second `attach` replaces the settings of the first.

    Args:
        max_cache_len: the least capacity of a cache: calls of up to that many tokens share one.
        max_bytes: of all caches of the model; by default half of the free memory of its GPU (a
            quarter of the memory of the host).
        reuse_prefix: True keeps the tokens of earlier calls: a prompt that begins with them
            computes the rest only, as in a chat; in bf16 this may round differently. With a folder
            (or a `PrefixStore`) the prefixes that `attachment(model).save()` wrote there are found
            as well, by every process. None is False.
        exact: run every call inside `exact(model)`.
        max_rows: of several threads so many calls at most decode together, 64 at most; others wait
            for a row. 1: each call by itself.

    >>> from hf_static_kv.testing import random_model, tiny_config
    >>> model, ids = random_model(tiny_config("llama")), torch.tensor([[5, 6, 7]])
    >>> before = model.generate(ids, max_new_tokens=8)
    >>> info = attach(model)
    >>> torch.equal(model.generate(ids, max_new_tokens=8), before)
    True
    >>> info.calls
    1
    >>> detach(model)
    """
    inner = unwrapped(model, "attach")
    if not inner.can_generate():
        raise ValueError(
            f"{type(inner).__name__} has no `generate`: attach a model with a language modeling "
            "head."
        )
    settings = Settings(max_cache_len, max_bytes, reuse_prefix, exact, max_rows)
    if exact:
        with exact_context(inner):  # raises for a model that cannot be exact
            pass
    known = _ATTACHMENTS.get(inner)
    if known is not None and known.settings == settings:
        known.why_unserved = None
        return known
    if (reason := _unserved(inner)) is not None:
        logger.warning("attach: calls of this model run with transformers' own cache. %s", reason)
    return _hook(inner, Attachment(settings))


def _hook(model: PreTrainedModel, attachment: Attachment) -> Attachment:
    if not isinstance(model, compat.Hooked):
        model.__class__ = compat.hooked_class(type(model), _Hooks)
    _ATTACHMENTS[model] = attachment
    return attachment


def detach(model: Any) -> None:
    """Undo `attach`: the model has its own class again, and its pool is freed. Without `attach`
    before: nothing.
    """
    inner = unwrapped(model, "detach")
    _ATTACHMENTS.pop(inner, None)
    # Else another class is on top, and the hooks do nothing.
    if compat.Hooked in type(inner).__bases__:
        inner.__class__ = type(inner).__bases__[0]


@contextmanager
def attached(model: Any, **settings: Any) -> Iterator[Attachment]:
    """A model that is attached inside the context, with the arguments of `attach`, and as before
    after it.
    """
    inner = unwrapped(model, "attached")
    before = _ATTACHMENTS.get(inner)
    try:
        yield attach(inner, **settings)
    finally:
        if before is None:
            detach(inner)
        else:
            _hook(inner, before)


def attachment(model: Any) -> Attachment:
    """What `attach` keeps for this model; a `ValueError` where it is not attached."""
    found = _ATTACHMENTS.get(unwrapped(model, "attachment"))
    if found is None:
        raise ValueError("This model is not attached: call attach(model) first.")
    return found


@contextmanager
def attaching_loaded_models(**settings: Any) -> Iterator[None]:
    """Attach every model that `from_pretrained` loads inside the block, in any thread.

    On exit `from_pretrained` is transformers' own again, and these models are detached. It is a
    block and not an environment variable, because child processes inherit a variable: it would act
    in programs that nobody had in mind. A block ends where the code says so.

    Args:
        settings: the arguments of `attach`.

    Example:

        with attaching_loaded_models(reuse_prefix=True):
            main()
    """
    Settings(**settings)  # a wrong argument raises here, not at the first model
    target: Any = PreTrainedModel
    original = vars(target)["from_pretrained"].__func__
    loaded: WeakSet[PreTrainedModel] = WeakSet()

    @wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(cls, *args, **kwargs)
        model = output[0] if isinstance(output, tuple) else output  # output_loading_info=True
        if model.can_generate():
            attach(model, **settings)
            loaded.add(model)
        return output

    try:
        with replaced("from_pretrained", {target: classmethod(from_pretrained)}):
            yield
    finally:
        for model in list(loaded):
            detach(model)
