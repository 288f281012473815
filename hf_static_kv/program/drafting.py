"""Steps over the same rows: one token a pass, or a token with its drafts.

    LookupStep     newest token          -> logits -> token  -> drafts for the next pass
    DraftedStep    newest token, drafts  -> logits -> tokens -> drafts for the next pass

Both move the same lengths on, and either may follow the other: the host takes the longer pass while
its drafts are right often enough. Drafts are looked up in the text, or an assistant makes them:

    AssistantStep  newest tokens         -> logits -> draft
    AssistantStep  draft                 -> logits -> draft      and so on
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_static_kv.kernels.drafts import (
    DraftedPass,
    DraftState,
    append_draft,
    end_pass,
    place_drafts,
    place_for_assistant,
)
from hf_static_kv.kernels.sample import SampleState, select_sampled
from hf_static_kv.kernels.select_greedy import GreedyState, most_likely
from hf_static_kv.program.selecting import NEVER, SelectingStep
from hf_static_kv.program.step import DecodeStep


class Drafts(NamedTuple):
    """How tokens are drafted."""

    num_tokens: int  # in a pass, at most
    size: int  # the longest text that is looked up; 0: an assistant drafts


class LookupStep(SelectingStep):
    """A selecting step that looks up drafts for the pass after it; a row that has ended takes no part."""

    rows_differ = True

    def __init__(self, *what: Any, drafts: Drafts, **how: Any) -> None:
        super().__init__(*what, spare=drafts.num_tokens, **how)
        self.state = self.state._replace(counts=self.positions.counts)
        if self.sampling is not None:
            self.sampling = self.sampling._replace(selection=self.state)
        self.size = drafts.size
        rows = len(self.token)
        self.drafts = DraftState(
            self.max_cache_len,
            self.state,
            lengths=self.positions.lengths,
            ends=self.token.new_zeros(rows),
            first=self.token.new_zeros(rows),
            drafts=self.token.new_zeros(rows, drafts.num_tokens),
            found=self.token.new_zeros(rows),
            rate=torch.zeros(rows, device=self.token.device),
            report=self.token.new_zeros(3, rows),
        )
        self.drafted = DraftedStep(*what, lookup=self)

    @property
    def buffers(self) -> list[Tensor]:
        return [*super().buffers, *self.drafts[2:], *self.drafted.buffers]

    @property
    def is_in_place(self) -> bool:
        return super().is_in_place and self.drafted.is_in_place

    def set_numbers(self, numbers: Iterable[tuple[str, float]]) -> None:
        numbers = list(numbers)
        super().set_numbers(numbers)
        self.drafted.set_numbers(numbers)

    def begin(self, first: Tensor, last: int, rate: float) -> None:
        """Before the first pass: rows are known from `first` [B] on, and end at the position `last`; so
        many drafts are expected to be right.
        """
        self.drafts.first.copy_(first)
        self.drafts.ends.copy_(self.drafts.lengths)
        self.state.last.fill_(last)
        self.state.counts.copy_(self.state.unfinished[:, 0])
        self.drafts.found.zero_()
        self.drafts.rate.fill_(rate)

    def _forward(self) -> Tensor:
        logits = super()._forward()
        end_pass(self.drafts, self.size)
        return logits


class DraftedStep(DecodeStep):
    """The same with the drafts of `lookup`, on whose state it works."""

    gives_all_logits = True
    rows_differ = True

    def __init__(self, *what: Any, lookup: LookupStep) -> None:
        state = lookup.drafts
        more: dict[str, Any] = {"num_tokens": state.drafts.shape[1] + 1, "beside": lookup}
        super().__init__(*what, **more)
        self.state = state
        self._size = lookup.size
        self._positions = self.token.new_zeros(self.token.numel())
        self.generator_states: list[Tensor] = []  # on a CPU, after each number of the newest pass
        self._draw = lookup.draw_exactly
        self._sampling: SampleState | None = None
        if lookup.sampling is not None:
            self._sampling = self._sampling_of_tokens(lookup.sampling)

    def _sampling_of_tokens(self, sampling: SampleState) -> SampleState:
        """A row for each token of the pass. None of them ends: `end_pass` looks at all at once."""
        zeros = torch.zeros_like(self._positions)
        flags = torch.ones_like(zeros, dtype=torch.bool)
        choice = GreedyState(
            sequences=zeros[:, None].clone(), token=zeros[:, None].clone(), unfinished=flags[:, None],
            eos=zeros[:, None] - 1, pad=zeros.clone(), is_over=flags[0].clone(), last=zeros + NEVER,
            counts=zeros.clone(), report=zeros.clone(),
        )  # fmt: skip
        numbers = (own.repeat_interleave(self.token.shape[1]) for own in sampling[2:])
        return SampleState(choice, sampling.kinds, *numbers)

    @property
    def buffers(self) -> list[Tensor]:
        choice = () if self._sampling is None else self._sampling.selection
        return [*super().buffers, *choice]

    def set_tokens(self, tokens: Tensor, position_ids: Tensor | None = None) -> None:
        """The next pass has these tokens [B, n]: the newest, and drafts after it."""
        selection = self.state.selection
        selection.token.copy_(tokens[:, :1])
        selection.unfinished.fill_(True)
        selection.last.fill_(NEVER)
        self.state.drafts[:, : tokens.shape[1] - 1] = tokens[:, 1:]
        self.state.found.fill_(tokens.shape[1] - 1)
        self._place()

    def set_numbers(self, numbers: Iterable[tuple[str, float]]) -> None:
        """Set numbers of the `SampleState`, by name."""
        for name, number in numbers:
            getattr(self._sampling, name).fill_(number)

    def _place(self) -> None:
        place_drafts(self.state, self.token, self.positions.counts)

    def _forward(self) -> Tensor:
        self._place()
        logits = super()._forward()  # [B, q, V]
        selected = self._select(logits)
        end_pass(self.state, self._size, DraftedPass(selected, self.token, self.positions.counts))
        return logits

    def _noise_for(self, rows: Tensor) -> Tensor:
        """For each token of the one batch row what the passes of one token would draw, in their order."""
        drawn = torch.empty_like(rows, dtype=torch.float32)
        self.generator_states = []
        for one in drawn.unbind():
            one.exponential_(1)
            if not rows.is_cuda:
                self.generator_states.append(torch.get_rng_state())
        # Padding comes first in a pass, and draws nothing.
        token = torch.arange(len(rows), device=rows.device) + self.positions.counts
        return drawn[token % len(rows)]

    def _select(self, logits: Tensor) -> Tensor:
        """The token [B, q] after each token of the pass."""
        rows = logits.flatten(0, 1)
        if self._draw is not None:
            rows = self._draw(rows, self._noise_for(rows))
        if self._sampling is None:
            return most_likely(rows).view(self.token.shape)
        select_sampled(rows, self._positions, self._sampling, self._noise_for(rows))
        return self._sampling.selection.token.view(self.token.shape)


class AssistantStep(DecodeStep):
    """A pass of an assistant over its own cache, which drafts a token for the rows of `drafts`.

    It has the `num_tokens` newest tokens of each row: those that it has not seen, and others again. Of
    one token it has the newest draft, behind the pass `beside`.
    """

    rows_differ = True

    def __init__(
        self,
        *what: Any,
        drafts: DraftState,
        num_tokens: int,
        beside: "AssistantStep | None" = None,
    ) -> None:
        more: dict[str, Any] = {"num_tokens": num_tokens, "beside": beside}
        super().__init__(*what, **more)
        self.state = drafts

    def set_tokens(self, tokens: Tensor, position_ids: Tensor | None = None) -> None:
        super().set_tokens(tokens, position_ids)
        self.positions.counts.zero_()  # a recording writes nothing: these are no tokens of a call

    def _forward(self) -> Tensor:
        places = self.positions
        own = self.token, places.counts, places.lengths
        place_for_assistant(self.state, *own, self.max_cache_len)
        logits = super()._forward()
        append_draft(self.state, most_likely(logits))
        return logits
