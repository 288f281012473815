"""Which calls select their tokens on the device, in the captured step itself, and the numbers that
they select with.
"""

from typing import Any, NamedTuple

import torch
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
)

from hf_static_kv.decoding.call import Call
from hf_static_kv.kernels.ban_tokens import MAX_NGRAM
from hf_static_kv.kernels.sample import Processors
from hf_static_kv.patching import EXACT_ATTENTION_NAME
from hf_static_kv.program.drafting import Drafts
from hf_static_kv.program.selecting import Draw, SelectingStep

_KNOWN_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)


class Selection(NamedTuple):
    """How a step selects: the most likely token (no kinds), or by sampling with these numbers.

    With `bans` tokens are removed first: `ngram` as `no_repeat_ngram_size`, 0: any may repeat. With
    `drafts` a pass may have several tokens. Inside `exact` tokens are drawn by `draw`.
    """

    kinds: Processors | None = None
    bans: bool = False
    ngram: int = 0
    numbers: tuple[tuple[str, float], ...] = ()  # by name
    drafts: Drafts | None = None
    draw: Draw | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for two selections that one captured step can serve."""
        return self.kinds, self.bans, self.ngram, self.draw, self.drafts

    @property
    def is_sampled(self) -> bool:
        return self.kinds is not None or self.draw is not None


# What they do depends on the newest logits alone.
_WARPERS = {"temperature", "top_k", "top_p", "min_p"}


def selection_of(call: Call, has_drafts: bool = False) -> Selection | None:
    """How a step can select the tokens of this call; None where the host must, since it is asked
    for more.
    """
    config = call.config
    ends = call.ends
    keeps = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    others = [c for c in call.criteria if type(c) not in _KNOWN_CRITERIA]
    has_few_ends = len(ends) <= 1 and sum(map(len, ends)) <= SelectingStep.MAX_EOS
    if keeps or others or not has_few_ends:
        return None
    found = [_kind_and_number(processor, call) for processor in call.processors]
    ngrams = [int(number) for kind, _, number in filter(None, found) if kind == "ngram"]
    if None in found or len(ngrams) > 1:
        return None
    found = [one for one in found if one is not None and one[0] != "ngram"]
    ngram = next(iter(ngrams), 0)
    if not config.do_sample:
        if any(one is None or one[0] != "min_length" for one in found):
            return None
        bans = bool(ngrams or found)
        numbers = _numbers([("min_length", "min_length", 0), *found])
        return Selection(None, bans, ngram, numbers if bans else ())
    # The kernels round sums in other places than `generate` does.
    if call.own_attention == EXACT_ATTENTION_NAME:
        return _drawn(call, found) if has_drafts and not ngrams else None
    kinds = [kind for kind, _, _ in filter(None, found)]
    order = [Processors._fields.index(kind) for kind in kinds]
    # Another order than `generate` has.
    if order != sorted(order):
        return None
    # A step has one number of a kind.
    if any(kinds.count(kind) > 1 and kind != "min_length" for kind in kinds):
        return None
    chosen = Processors(**dict.fromkeys(kinds, True))
    return Selection(chosen, bool(ngrams), ngram, _numbers(found))


def _drawn(call: Call, found: list[Any]) -> Selection | None:
    """A selection with drafts, whose tokens the processors of the call draw in the step."""
    numbers = tuple((kind, number) for kind, _, number in found)
    if any(kind not in _WARPERS for kind, _ in numbers):
        return None
    return Selection(draw=Draw(numbers, call.processors))


def _numbers(found: list[Any]) -> tuple[tuple[str, float], ...]:
    numbers: dict[str, float] = {}
    for _, name, number in found:
        # A least length may be given in two ways.
        numbers[name] = max(number, numbers.get(name, number))
    return tuple(numbers.items())


def _kind_and_number(processor: Any, call: Call) -> tuple[str, str, float] | None:
    """The kind of a processor, the name and the value of its number; None where it does more than
    the step knows.
    """
    keeps_one = getattr(processor, "min_tokens_to_keep", 1) == 1
    removes = getattr(processor, "filter_value", -torch.inf) == -torch.inf
    # Positions that are not part of `input_ids`.
    before = call.request.prompt_length - call.input_ids.shape[1]
    match type(processor):
        case processors.TemperatureLogitsWarper:
            return "temperature", "temperature", processor.temperature
        case processors.TopKLogitsWarper if removes:
            return "top_k", "top_k", processor.top_k
        case processors.TopPLogitsWarper if removes and keeps_one:
            return "top_p", "top_p", processor.top_p
        case processors.MinPLogitsWarper if removes and keeps_one:
            return "min_p", "min_p", processor.min_p
        case processors.RepetitionPenaltyLogitsProcessor if before == 0 and _is_plain_penalty(
            processor
        ):
            return "repetition", "repetition_penalty", processor.penalty
        case processors.NoRepeatNGramLogitsProcessor if (
            before == 0 and processor.ngram_size <= MAX_NGRAM
        ):
            return "ngram", "", processor.ngram_size
        case processors.MinLengthLogitsProcessor if _has_ends_of(call, processor):
            return "min_length", "min_length", before + processor.min_length
        case processors.MinNewTokensLengthLogitsProcessor if _has_ends_of(call, processor):
            least = processor.prompt_length_to_skip + processor.min_new_tokens
            return "min_length", "min_length", before + least
    return None


def _is_plain_penalty(processor: Any) -> bool:
    """Whether it counts all tokens: newer versions of transformers can leave out the prompt, or
    pack sequences.
    """
    return all(
        getattr(processor, name, None) is None
        for name in ("prompt_ignore_length", "logits_indices")
    )


def _has_ends_of(call: Call, processor: Any) -> bool:
    """Whether it holds back the very end tokens that the step knows."""
    ends = {int(token) for tokens in call.ends for token in tokens}
    return ends == {int(token) for token in processor.eos_token_id.reshape(-1)}
