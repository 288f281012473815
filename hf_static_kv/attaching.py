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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakSet

from transformers import PreTrainedModel

from hf_static_kv import compat
from hf_static_kv.cache.prefixes import PrefixStore
from hf_static_kv.cache.request import reads_alike
from hf_static_kv.decoding.loop import MAX_ROWS
from hf_static_kv.exactness.exact import exact as exact_context
from hf_static_kv.patching import replaced, unwrapped
from hf_static_kv.served import ATTACHMENTS, CALL, Attachment, Settings, unserved

logger = logging.getLogger(__name__)
_Function = Callable[..., Any]


class _Hooks:
    """Called by an attached model in the place of its own methods."""

    @staticmethod
    def generate(model: PreTrainedModel, original: _Function, args: Any, kwargs: Any) -> Any:
        attachment = ATTACHMENTS.get(model)
        if attachment is None:
            return original(*args, **kwargs)
        return attachment.generate(model, original, args, kwargs)

    @staticmethod
    def batching(model: PreTrainedModel, original: _Function, args: Any, kwargs: Any) -> Any:
        attachment = ATTACHMENTS.get(model)
        if attachment is None:
            return original(*args, **kwargs)
        return attachment.batch_manager(model, original, args, kwargs)

    @staticmethod
    def config(model: PreTrainedModel, original: _Function, kwargs: dict[str, Any]) -> Any:
        attachment = ATTACHMENTS.get(model)
        if attachment is None:
            return original(None, **kwargs)
        return attachment.configs.prepare(model, original, kwargs)

    @staticmethod
    def knows_cache(model: PreTrainedModel) -> bool:
        attachment = ATTACHMENTS.get(model)
        return attachment is not None and attachment.makes_default

    @staticmethod
    def cache(model: PreTrainedModel, model_kwargs: dict[str, Any], made: type) -> None:
        call = CALL.get()
        if call is not None and call.attachment is ATTACHMENTS.get(model):
            call.attachment.lend(call, model, model_kwargs, made)

    @staticmethod
    def loop(model: PreTrainedModel, original: _Function, args: Any, kwargs: Any) -> Any:
        call = CALL.get()
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
        output = call.attachment.run_loop(call, model, original, args, kwargs)
        if entry is not None and entry.identity is not None:
            call.attachment.state = entry.identity
        # Not if it is back in the pool, where another call may use it.
        is_own = entry is not None and call.attachment.pool.entry_of(cache) is entry
        if is_own and cache.is_unfinished:  # the loop has gone on with another
            call.attachment.remember_skipping(str(cache.unfinished_pass()))
        return output


def attach(
    model: Any,
    *,
    max_cache_len: int | None = None,
    max_bytes: int | None = None,
    reuse_prefix: bool | str | os.PathLike[str] | PrefixStore | None = False,
    exact: bool = False,
    max_rows: int = MAX_ROWS,
    speculate: str | None = None,
    assistant: Any = None,
    kv_dtype: str | None = None,
    persistent: bool = True,
) -> Attachment:
    """Make every later `model.generate(...)` use a cache from a pool and, on a GPU, `GraphDecoder`.

    A call that brings its own `past_key_values`, `custom_generate` or `cache_implementation` is not
    touched. Calls that the decoder does not serve (beam search) run in transformers' loop on our
    cache. A second `attach` replaces the settings of the first.

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
        speculate: "prompt" drafts tokens of every call from its text, as `prompt_lookup_num_tokens`.
        assistant: a smaller model that drafts tokens of every call, as `assistant_model`.
        kv_dtype: "int8" stores keys and values in 8 bits: about half the memory, and other tokens.
            Inside `exact` they are stored as they are.
        persistent: whether one kernel may compute a whole step, as for `GraphDecoder`.

    >>> import torch
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
    inner = _generating(model)
    helper = _helper(inner, assistant)
    sizes = max_cache_len, max_bytes
    drafts = speculate, helper
    return _attached(
        inner, Settings(*sizes, reuse_prefix, exact, max_rows, *drafts, kv_dtype, persistent)
    )


def _attached(model: PreTrainedModel, settings: Settings) -> Attachment:
    """What is kept for the model; that of an earlier `attach` if the settings are the same."""
    if settings.exact:
        with exact_context(model):  # raises for a model that cannot be exact
            pass
    known = ATTACHMENTS.get(model)
    if known is not None and known.settings == settings:
        known.why_unserved = None
        return known
    if (reason := unserved(model, settings.kv_dtype)) is not None:
        logger.warning("attach: calls of this model run with transformers' own cache. %s", reason)
    return _hook(model, Attachment(settings))


def _generating(model: Any) -> PreTrainedModel:
    """The model without wrappers; a `ValueError` if it does not generate."""
    inner = unwrapped(model, "attach")
    if not inner.can_generate():
        raise ValueError(
            f"{type(inner).__name__} has no `generate`: attach a model with a language modeling "
            "head."
        )
    return inner


def _helper(model: PreTrainedModel, assistant: Any) -> PreTrainedModel | None:
    """The assistant without wrappers, if it can draft for the model."""
    helper = None if assistant is None else unwrapped(assistant, "attach")
    if helper is model:
        raise ValueError("The assistant is the model itself: its drafts would cost what they save.")
    if helper is not None and not reads_alike(model, helper):
        raise ValueError(
            f"{type(helper).__name__} cannot assist {type(model).__name__}: both need the same "
            "vocabulary, and neither may be an encoder-decoder."
        )
    return helper


def _hook(model: PreTrainedModel, attachment: Attachment) -> Attachment:
    if not isinstance(model, compat.Hooked):
        model.__class__ = compat.hooked_class(type(model), _Hooks)
    ATTACHMENTS[model] = attachment
    return attachment


def detach(model: Any) -> None:
    """Undo `attach`: the model has its own class again, and its pool is freed. Without `attach`
    before: nothing.
    """
    inner = unwrapped(model, "detach")
    ATTACHMENTS.pop(inner, None)
    # Else another class is on top, and the hooks do nothing.
    if compat.Hooked in type(inner).__bases__:
        _, inner.__class__ = type(inner).__bases__


@contextmanager
def attached(model: Any, **settings: Any) -> Iterator[Attachment]:
    """A model that is attached inside the context, with the arguments of `attach`, and as before
    after it.
    """
    inner = unwrapped(model, "attached")
    before = ATTACHMENTS.get(inner)
    try:
        yield attach(inner, **settings)
    finally:
        if before is None:
            detach(inner)
        else:
            _hook(inner, before)


def attachment(model: Any) -> Attachment:
    """What `attach` keeps for this model; a `ValueError` where it is not attached."""
    found = ATTACHMENTS.get(unwrapped(model, "attachment"))
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
