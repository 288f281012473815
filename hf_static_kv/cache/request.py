"""What a call of `generate` asks for, who uses a cache, and what a cache refuses.

`generate` gives a cache nothing but states, and a custom loop neither streamer
nor assistant: both are read from the frames of the stack. If that fails, a call
is checked pass by pass.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any

import transformers
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_static_kv import compat

EXACT_ATTENTION_NAME = "static_contiguous_exact"  # of a model inside `exact`
# Chunked prefill goes on after cached tokens in 5.22, and not in 5.17.
_CHUNKS_CONTINUE = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 22)
PAIR_NEEDED = (
    "The model is an encoder-decoder, which caches the keys of its encoder as well: pass "
    "past_key_values=EncoderDecoderCache(cache, DynamicCache(config=model.config))."
)
CONTINUE_OR_RESET = (
    "Call reset() before another sequence, or pass the old tokens plus the new ones."
)


def cache_is_full(length: int, max_cache_len: int, tokens: int = 1) -> ValueError:
    return ValueError(
        f"The cache is full: it holds {length} of at most {max_cache_len} tokens and cannot take "
        f"{tokens} more. Build it with max_cache_len >= {length + tokens} (a generation writes "
        "prompt + max_new_tokens - 1 positions, with prompt lookup prompt + max_new_tokens + "
        "prompt_lookup_num_tokens - 2), or free positions with crop or reset. It still holds its "
        f"{length} tokens."
    )


def _model_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames that run a model's own methods, innermost first."""
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), PreTrainedModel):
            yield frame
        frame = frame.f_back


def running_model() -> PreTrainedModel | None:
    """The innermost model that calls this."""
    frame = next(_model_frames(sys._getframe(1)), None)
    return None if frame is None else frame.f_locals["self"]


def is_in_use(cache: Cache, thread: int) -> bool:
    for frame in _model_frames(sys._current_frames().get(thread)):
        if frame.f_code.co_name not in ("generate", "forward"):
            continue
        given = [frame.f_locals]
        for name in ("kwargs", "model_kwargs"):
            if isinstance(found := given[0].get(name), dict):
                given.append(found)
        if any(names.get("past_key_values") is cache for names in given):
            return True
    return False


class Fallback(Exception):
    """Why a call runs in transformers' own loop or with its own cache."""

    @property
    def reason(self) -> str:
        return str(self).rstrip(".")


@dataclass(eq=False)
class Request:
    model: Any
    input_ids: Tensor  # [B, n]; n = 0 if the prompt is `inputs_embeds` alone
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: bool | None = None
    custom_generate: Any = None
    stopping_criteria: Sequence[Any] = ()  # the caller's own
    has_own_limit: bool = True  # False: only the model's defaults limit the length
    has_own_positions: bool = True  # False: `generate` has made them
    keeps_all_positions: bool = False  # also in layers with a window
    is_assistants: bool = False  # of a call that drafts tokens for another one
    is_decoded: bool = False  # by GraphDecoder, which places drafted tokens itself

    def __post_init__(self) -> None:
        self.mask: Tensor | None = self.model_kwargs.get("attention_mask")  # [B, n]
        # [B, n, hidden], from position 0 on
        self.embeds: Tensor | None = self.model_kwargs.get("inputs_embeds")
        # [B, n], from `past` on
        self.tokens = self.input_ids if self.embeds is None else None
        passed: int = self.input_ids.shape[1]
        # Newer versions of transformers leave out a mask of ones and record its length.
        length: int = compat.mask_length(self.config)
        if self.mask is not None:
            length = self.mask.shape[1]
        self.past = max(0, length - passed)  # the mask covers these tokens too
        # Whether cached tokens are passed again; `generate` removes them.
        self.is_whole = self.embeds is not None or length == passed
        self.prompt_length = self.past + passed if self.embeds is None else self.embeds.shape[1]
        # Where the sequence of each row begins, if that was looked at: after the left padding.
        self.starts = [0] * len(self.input_ids)

    @cached_property
    def host_ids(self) -> list[list[int]]:
        """The tokens of each row. Waits for the device."""
        ids: list[list[int]] = [] if self.tokens is None else self.tokens.tolist()
        return ids

    @property
    def has_holes(self) -> bool:
        """Whether the attention mask hides more than the padding at the left. Waits for the device."""
        return self.mask is not None and bool((self.mask[:, 1:] < self.mask[:, :-1]).any())

    @property
    def max_new_tokens(self) -> int:
        rules = [rule for rule in self.stopping_criteria if type(rule) is MaxLengthCriteria]
        longest = min([int(self.config.max_length), *(rule.max_length for rule in rules)])
        return max(0, longest - self.input_ids.shape[1])

    @property
    def max_positions(self) -> int:
        """Positions that the longest generation writes; its last token has none."""
        # Prompt lookup may propose so many tokens when two are missing, and writes them all.
        proposed = 1 if self.is_decoded else int(self.config.prompt_lookup_num_tokens or 1)
        return self.prompt_length + self.max_new_tokens + proposed - 2

    @property
    def mode(self) -> GenerationMode:
        return self.config.get_generation_mode(self.assistant_model)

    @property
    def looks_up(self) -> bool:
        """Whether tokens are drafted from the text itself (prompt lookup)."""
        is_assisted = self.mode == GenerationMode.ASSISTED_GENERATION
        number = self.config.prompt_lookup_num_tokens
        return is_assisted and number is not None and self.assistant_model is None

    @property
    def has_assistant(self) -> bool:
        """Whether another model drafts tokens: one that reads tokens as this one does, and no more."""
        if self.mode != GenerationMode.ASSISTED_GENERATION or self.assistant_model is None:
            return False
        unusual = ("assistant_early_exit", "assistant_ensemble_weight", "prompt_lookup_num_tokens",
                   "speculation_type")  # fmt: skip
        if any(getattr(self.config, name, None) is not None for name in unusual):
            return False
        return reads_alike(self.model, self.assistant_model)

    @property
    def has_drafts(self) -> bool:
        """Whether tokens are drafted in a way that GraphDecoder knows."""
        return self.looks_up or self.has_assistant


def reads_alike(model: Any, assistant: Any) -> bool:
    """Whether an assistant reads the tokens of a model, and nothing else of it (Gemma4Assistant)."""
    both = [own.config for own in (model, assistant)]
    sizes = {config.get_text_config(decoder=True).vocab_size for config in both}
    is_plain = "Assistant" not in type(assistant).__name__
    return is_plain and len(sizes) == 1 and not any(own.is_encoder_decoder for own in both)


def running_request() -> Request | None:
    """The request of the innermost `generate`, if it can be read."""
    if (names := compat.generate_locals()) is None:
        return None
    try:
        return Request(
            names["self"],
            names["input_ids"],
            names["generation_config"],
            names["model_kwargs"],
            names["streamer"],
            names["assistant_model"],
            names["synced_gpus"],
            names["custom_generate"],
            tuple(names["stopping_criteria"] or ()),
            _has_own_limit(names),
            compat.has_own_positions(names),
        )
    except KeyError:  # a version of transformers with other variable names
        return None


def _has_own_limit(names: dict[str, Any]) -> bool:
    config = names["generation_config"]
    default = names["self"].generation_config
    if any(names["kwargs"].get(name) is not None for name in ("max_new_tokens", "max_length")):
        return True
    if config.max_new_tokens is not None:
        return bool(config.max_new_tokens != default.max_new_tokens)
    return not names["has_default_max_length"] and bool(config.max_length != default.max_length)


def is_exact(model: PreTrainedModel) -> bool:
    """Whether the model is inside `exact`."""
    configs = model.config, model.config.get_text_config(decoder=True)
    return any(compat.attention_name(config) == EXACT_ATTENTION_NAME for config in configs)


def refuse_codes(model: PreTrainedModel | None) -> None:
    """Raise ValueError inside `exact`: a pass with a cache of codes has other states than one
    without a cache.
    """
    if model is not None and is_exact(model):
        raise ValueError(
            "Inside exact keys and values are stored as they are, and this cache has a kv_dtype: "
            "build it without."
        )


def check_request(
    request: Request, seq_len: int, max_cache_len: int | None, known_ids: Tensor | None
) -> None:
    """Raise a `ValueError` if a cache of `seq_len` tokens cannot serve the request.

    Args:
        max_cache_len: None for a cache that grows.
        known_ids: [B, k], the first cached tokens.
    """
    config = request.config
    model = request.model
    if config.use_cache is False or request.model_kwargs.get("use_cache") is False:
        raise ValueError(
            "use_cache=False, and a cache is passed. Pass use_cache=True to `generate` (the "
            "model's own config may say False, for instance after gradient checkpointing), or "
            "leave `past_key_values` and `custom_generate` out."
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(PAIR_NEEDED)
    if model.training and compat.checkpoints_activations(model):
        raise ValueError(
            "A model that trains with gradient checkpointing writes to no cache. Call "
            "model.eval() first."
        )
    new = request.input_ids.shape[1]
    if request.embeds is None and request.past and request.past != seq_len:
        raise ValueError(
            f"The attention mask covers {request.past} tokens before the {new} that are passed, "
            f"and the cache holds {seq_len}. Pass all tokens from there on, or the whole sequence."
        )
    if request.embeds is not None and not new and config.prefill_chunk_size is not None:
        raise ValueError(
            "Chunked prefill needs input_ids, and the prompt is inputs_embeds: omit "
            "prefill_chunk_size."
        )
    if seq_len:
        _check_continuation(request, seq_len, known_ids)
    if max_cache_len is None or not request.has_own_limit:
        return
    positions = request.max_positions
    if positions <= max_cache_len:
        return
    fitting = max(0, request.max_new_tokens - (positions - max_cache_len))
    proposed = 1 if request.is_decoded else config.prompt_lookup_num_tokens or 1
    lookup = f", and prompt lookup may write {proposed - 1} beyond its end" if proposed > 1 else ""
    raise ValueError(
        f"A prompt of {request.prompt_length} and {request.max_new_tokens} new tokens take "
        f"{positions} positions (the last token is not written{lookup}), and the cache has "
        f"{max_cache_len}. Build it with max_cache_len >= {positions}, or ask for at most "
        f"{fitting} new tokens."
    )


def _check_continuation(request: Request, seq_len: int, known_ids: Tensor | None) -> None:
    if request.mode == GenerationMode.ASSISTED_GENERATION and not request.is_decoded:
        raise ValueError(
            "Assisted and prompt-lookup decoding compute the whole prompt, and the cache already "
            f"holds {seq_len} tokens. Call reset() first."
        )
    if request.config.prefill_chunk_size is not None and not _CHUNKS_CONTINUE:
        raise ValueError(
            f"Chunked prefill of transformers {transformers.__version__} starts at position 0, "
            f"and the cache already holds {seq_len} tokens. Omit it, or call reset() first."
        )
    if request.is_whole and request.prompt_length <= seq_len:
        raise ValueError(
            f"A prompt of {request.prompt_length} has no new tokens: the cache already holds "
            f"{seq_len}. {CONTINUE_OR_RESET}"
        )
    ids = request.tokens
    if ids is None or known_ids is None or not request.is_whole:
        return
    if len(ids) != len(known_ids) or ids.device != known_ids.device:
        return
    length = min(known_ids.shape[1], ids.shape[1], seq_len)
    differs = ids[:, :length] != known_ids[:, :length]
    if request.mask is not None:
        # Ids under padding do not count.
        differs &= request.mask[:, :length].bool()
    if bool(differs.any()):
        row, position = differs.nonzero()[0].tolist()
        raise ValueError(
            f"The prompt does not continue the cached sequence: token {position} of row {row} is "
            f"{int(ids[row, position])}, and the cache holds {int(known_ids[row, position])} "
            f"there. {CONTINUE_OR_RESET}"
        )
