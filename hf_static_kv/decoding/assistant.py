"""An assistant of a call: a smaller model that drafts tokens, with a cache and captured passes of its
own.

    main model    pass | ........................ | pass with drafts | ...
    assistant          | newest tokens, draft, ... |                 | newest tokens, ...

It reads the newest tokens again, so its cache need not go back when a draft was wrong.
"""

import inspect
from contextlib import ExitStack

from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_static_kv.cache.pool import CachePool
from hf_static_kv.cache.request import Fallback
from hf_static_kv.cache.unserved import positions_of_table
from hf_static_kv.decoding.call import Call
from hf_static_kv.decoding.eligibility import check_model, check_request
from hf_static_kv.decoding.steps import Steps
from hf_static_kv.decoding.turns import turns_of
from hf_static_kv.program.drafting import LookupStep

_GIVEN = {"attention_mask", "cache_position", "logits_to_keep", "position_ids", "use_cache"}
# It reads so many tokens again: two after a pass with drafts, more after passes of one token.
_NEWEST = 2
_MANY_NEWEST = 32


class Assistant:
    """The assistant of one call, after the prompt. Raises `Fallback` if it cannot draft.

    Args:
        caches: gives its cache back at the end of the call.
        prompts: captured passes for its prompt.
    """

    def __init__(
        self, call: Call, steps: Steps, pool: CachePool, caches: ExitStack, prompts: object
    ) -> None:
        self._steps = steps
        self._lookup: LookupStep | None = None
        model = call.assistant_model
        if unknown := sorted(call.given.keys() - _GIVEN):
            raise Fallback(f"the model is given {', '.join(unknown)}")
        if call.request.past or not call.input_ids.shape[1]:
            raise Fallback("an assistant needs all tokens of the prompt")
        takes = inspect.signature(model.forward).parameters
        given = {name: value for name, value in call.given.items() if name in takes}
        loop = LogitsProcessorList(), StoppingCriteriaList(), call.config
        self._call = own = Call(model, call.input_ids, *loop, given)
        own.request.is_decoded = True
        own.request.keeps_all_positions = True  # it reads tokens again
        own.request.is_assistants = True
        table = positions_of_table(model.config)
        if table is not None and table < call.request.max_positions:
            raise Fallback(
                f"the assistant has {table} positions and the call {call.request.max_positions}"
            )
        own.request.starts = list(call.request.starts)
        own.prompts = prompts
        if own.device != call.device:
            raise Fallback(f"the assistant is on {own.device} and the model on {call.device}")
        with turns_of(model).turn():
            own.use_cache(caches.enter_context(pool.cache_for(own.request)))
            own.use_pool(pool)
            check_request(own)
            check_model(own)
            own.begin()
            own.prefill()
        if own.cache.stateful_layers:
            raise Fallback("a recurrent state of the assistant cannot go back")
        sizes = [sum(p.numel() for p in one.parameters()) for one in (model, call.model)]
        self.cost = sizes[0] / sizes[1]  # of a pass, in passes of the model
        self.num_unread = 0  # tokens since its last draft, beside the two newest

    @property
    def can_follow(self) -> bool:
        """Whether it can still read all tokens that it has not seen."""
        return self.num_unread + _NEWEST <= _MANY_NEWEST

    def use_state_of(self, lookup: LookupStep) -> None:
        """Draft for this step of the model. Raises `Fallback`."""
        if lookup is not self._lookup:
            own = self._call
            begin = (
                own.cache.seq_len,
                own.seq_start.to(own.device),
                own.position_ids(own.cache.seq_len),
            )
            self._passes = self._steps.get_assistant(own, lookup, (_NEWEST, _MANY_NEWEST))
            self._lookup = lookup
            for step in self._passes:
                step.set_position(*begin)

    def draft(self, number: int) -> None:
        """Launch the passes for so many drafts."""
        few, many, following = self._passes
        with ExitStack() as shadows:
            for step in self._passes:
                if step.runs_model:
                    shadows.enter_context(step.on_shadow(self._call.own_attention))
            (many if self.num_unread else few).advance()
            for _ in range(number - 1):
                following.advance()
        self.num_unread = 0
