"""Which calls pass drafted tokens to the model, and how many."""

from transformers import PreTrainedModel

from hf_static_kv.cache.request import Fallback
from hf_static_kv.decoding.call import Call
from hf_static_kv.decoding.selection import Selection
from hf_static_kv.program.drafting import Drafts

_MOST = 63  # a compact layer goes back by 64 tokens
# The kernels of few tokens take 16. How many of these are drafted follows how many are right.
MOST_OF_ASSISTANT = 15
NUMBER = 8  # where the call gives none
_LONGEST = 16  # text that is looked up
SIZE = 2  # of the text that is looked up, as transformers has it


def drafts_of(call: Call) -> Drafts | None:
    """What the call asks for (`prompt_lookup_num_tokens`, `assistant_model`); None: no drafts."""
    if call.request.has_assistant:
        return drafts_by(call.request.assistant_model)
    if not call.request.looks_up:
        return None
    number = int(call.config.prompt_lookup_num_tokens)
    given = call.config.max_matching_ngram_size
    size = SIZE if given is None else int(given)
    if number < 1 or size < 1:
        raise ValueError(
            f"prompt_lookup_num_tokens={number} and max_matching_ngram_size={size} must be positive."
        )
    return Drafts(min(number, _MOST), min(size, _LONGEST))


def drafts_by(assistant: PreTrainedModel) -> Drafts:
    number = getattr(assistant.generation_config, "num_assistant_tokens", None)
    return Drafts(max(1, min(number or MOST_OF_ASSISTANT, MOST_OF_ASSISTANT)), 0)


def check_drafts(call: Call, selection: Selection | None) -> None:
    """Raise `Fallback` if the call must go on with one token a pass."""
    if (reason := _refused(call, selection)) is not None:
        raise Fallback(reason)


def _refused(call: Call, selection: Selection | None) -> str | None:
    inputs = call.step_inputs
    if selection is None or call.seed is not None:
        return "the host selects the tokens"
    kinds = selection.kinds
    if selection.bans or (kinds is not None and (kinds.repetition or kinds.min_length)):
        return "which tokens may come next depends on those before"
    if selection.is_sampled and len(call.input_ids) > 1:
        return "the rows of a batch draw their random numbers together"
    if call.cache.stateful_layers:
        return "a recurrent state cannot go back"
    if inputs.tensors or inputs.position_ids.ndim != 2 or not call.has_usual_positions:
        return "its steps are given more than tokens"
    if call.request.embeds is not None and not call.drafts.size:  # type: ignore[union-attr]
        return "an assistant reads tokens, and the prompt is embeddings"
    if call.has_hooks:
        return "hooks see one token at a time"
    asked, fitting = call.limits
    if len(call.input_ids) > 1 and asked > fitting:
        return "a batch may outgrow the cache"
    if len(call.input_ids) > 1 and any(layer.is_compact for layer in call.cache.kv_layers):
        return "rows of compact layers go on alike"
    if len(call.input_ids) > 1 and call.streamer is not None:
        return "a streamer is given a token of each row at once"
    return None
