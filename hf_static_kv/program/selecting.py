"""A decode step that selects its tokens, on the device."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_static_kv.kernels.ban_tokens import ban_tokens
from hf_static_kv.kernels.sample import Processors, SampleState, select_sampled
from hf_static_kv.kernels.select_greedy import GreedyState, select_greedy
from hf_static_kv.program.step import DecodeStep

NEVER = 1 << 40  # a position that no sequence reaches
# Numbers with which sampling keeps all tokens, and with which it takes the most likely one.
NEUTRAL = (
    ("temperature", 1.0), ("top_k", 1 << 30), ("top_p", 1.0), ("min_p", 0.0),
    ("repetition_penalty", 1.0), ("min_length", 0),
)  # fmt: skip
GREEDY = (*NEUTRAL, ("top_k", 1))


@dataclass(frozen=True)
class Draw:
    """Draws the token of each row as `generate` does, with its own processors, inside `exact`.

    Two are equal if their processors have the same numbers.
    """

    numbers: tuple[tuple[str, float], ...]  # by kind, in the order of the processors
    processors: Callable[[Any, Tensor], Tensor] = field(compare=False)

    def __call__(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Scores [n, V] that leave one token of each row: argmax of probability / noise.

        That is the formula of `torch.multinomial`. Noise that is None is torch's own.
        """
        left = torch.full_like(logits, -torch.inf)
        # Each row alone: how a sum is rounded may depend on the number of rows.
        for row, scores in enumerate(logits.float().unsqueeze(1).unbind()):
            probability = self.processors(None, scores).softmax(dim=-1)
            own = torch.empty_like(probability).exponential_(1) if noise is None else noise[row]
            left[row].scatter_(0, (probability / own).argmax(dim=-1), 0.0)
        return left


class SelectingStep(DecodeStep):
    """A decode step that also selects the next token, or padding in a batch row that has ended, in
    the same graph.

    It selects the most likely token, or samples with the processors of `kinds`; `what` as for
    `DecodeStep`. With `bans` it first removes end tokens, up to the number `min_length`, and tokens
    that would repeat `ngram` ones. `draw` in the place of `kinds` samples inside `exact`. `spare`:
    columns of `sequences` beyond the capacity.
    """

    MAX_EOS = 16

    def __init__(
        self,
        *what: Any,
        kinds: Processors | None,
        bans: bool = False,
        ngram: int = 0,
        draw: Draw | None = None,
        spare: int = 0,
    ) -> None:
        super().__init__(*what)
        self._bans = bans
        self._ngram = ngram
        self.draw_exactly = draw
        rows = len(self.token)
        self.state = GreedyState(
            # The last token of a sequence is selected and not written to the cache: one position
            # more.
            sequences=self.token.new_zeros(rows, self.max_cache_len + 1 + spare),
            token=self.token,
            unfinished=torch.ones_like(self.token, dtype=torch.bool),
            eos=self.token.new_full((rows, self.MAX_EOS), -1),
            pad=self.token.new_zeros(rows),
            is_over=self.token.new_zeros((), dtype=torch.bool),
            last=self.token.new_full((rows,), NEVER),
            counts=self.token.new_zeros(rows),  # nobody asks
            report=self.token.new_zeros(rows),
        )
        real, whole = (
            self.token.new_zeros(rows, dtype=dtype) for dtype in (torch.float64, torch.int64)
        )
        self.min_length = whole.clone()
        numbers = (real + 1, whole + 1, real + 1, real.clone(), real + 1, self.min_length)
        self.sampling = None if kinds is None else SampleState(self.state, kinds, *numbers)

    @property
    def buffers(self) -> list[Tensor]:
        return [*super().buffers, *self.state]

    @property
    def draws(self) -> bool:
        """Whether it takes random numbers."""
        return self.sampling is not None or self.draw_exactly is not None

    def set_state(
        self, ids: Tensor, position: int, unfinished: Tensor, eos: Tensor | None, pad: Tensor | None
    ) -> None:
        """Set the state before the token at `position` is selected, where `ids` [B, n] are the
        tokens before it.

        `unfinished` rows [B] go on; `eos` are the end tokens, `pad` is the token after an end.
        """
        self.token.copy_(ids[:, -1:])
        self.state.sequences[:, position - ids.shape[1] : position].copy_(ids)
        self.state.unfinished.copy_(unfinished[:, None])
        self.state.eos.fill_(-1)
        if eos is not None:
            self.state.eos[:, : len(eos)].copy_(eos)
        if pad is not None:
            self.state.pad.copy_(pad.reshape(1))

    def set_numbers(self, numbers: Iterable[tuple[str, float]]) -> None:
        """Set `min_length`, and other numbers of the `SampleState`, by name."""
        for name, number in numbers:
            getattr(self.sampling or self, name).fill_(number)

    def replay(self) -> Tensor:
        """Append the selected tokens and select the next ones; a bool on the device: all rows have
        ended.
        """
        self._replay_or_forward()
        return self.state.is_over

    def _forward(self) -> Tensor:
        logits = super()._forward()
        newest = self.positions.full.slots[:, -1]  # [B]
        scores = logits
        if self._bans:
            scores = ban_tokens(logits, newest, self.state, self.min_length, self._ngram)
        if self.draw_exactly is not None:
            scores = self.draw_exactly(scores, None)
        if self.sampling is None:
            chunks = self._chunks if scores is logits else None
            select_greedy(scores, newest, self.state, chunks)
        else:
            select_sampled(scores, newest, self.sampling, self._noise_for(scores))
        return logits

    def _noise_for(self, scores: Tensor) -> Tensor | None:
        """What is drawn with [B, V]; None: from torch's own generator."""
        return None


class RowsStep(SelectingStep):
    """A selecting step whose rows have nothing in common but the pass.

    Each has numbers, ends, and noise of its own. A row that has ended takes no part: it writes
    nothing and its length stays.
    """

    rows_differ = True

    def __init__(self, *what: Any, **how: Any) -> None:
        super().__init__(*what, **how)
        self.state = self.state._replace(counts=self.positions.counts)
        if self.sampling is not None:
            self.sampling = self.sampling._replace(selection=self.state)
        self._noise: Tensor | None = None

    def _noise_for(self, scores: Tensor) -> Tensor:
        if self._noise is None:
            self._noise = torch.ones_like(scores, dtype=torch.float32)
        return self._noise

    @property
    def _tensors_of_rows(self) -> list[Tensor]:
        places = self.positions
        numbers = [] if self.sampling is None else self.sampling[2:]
        state = [tensor for tensor in self.state if tensor.ndim]
        return [places.lengths, places.seq_start, places.shift, *state, *numbers]

    def clear(self) -> None:
        """End all rows."""
        self.state.unfinished.zero_()
        self.positions.counts.zero_()
        if self._noise is not None:
            self._noise.fill_(1)

    def take_over(self, other: "RowsStep") -> None:
        """Go on where another step stands, with as many of its rows as there are; further ones are
        idle.
        """
        pairs = zip(self._tensors_of_rows, other._tensors_of_rows, strict=False)
        for own, theirs in pairs:
            common = tuple(slice(min(sizes)) for sizes in zip(own.shape, theirs.shape, strict=True))
            own[common].copy_(theirs[common])
        if self.sampling is not None and other.sampling is None:
            self.set_numbers(GREEDY)

    def end(self, row: int) -> None:
        self.state.unfinished[row] = False
        self.positions.counts[row] = 0

    def seat(self, row: int, length: int, seq_start: Tensor, position_id: Tensor) -> None:
        """The next token of a row that is idle goes to `length`, and its sequence begins at
        `seq_start` []. The model is told that its position is `position_id` [].
        """
        self.end(row)
        places = self.positions
        places.lengths[row] = length
        places.seq_start[row].copy_(seq_start)
        places.shift[row].copy_(position_id - (length - seq_start))
        if self._noise is not None:
            self._noise[row].fill_(1)

    def resume(self, row: int, ids: Tensor, length: int, last: int) -> None:
        """The row goes on with the tokens `ids` [n], of which the newest goes to `length`; its last
        token is at the position `last`.
        """
        self.state.sequences[row, length + 1 - len(ids) : length + 1].copy_(ids)
        self.token[row].copy_(ids[-1:])
        self.state.last[row] = last
        self.state.unfinished[row] = True
        self.positions.counts[row] = 1

    def set_ends(self, row: int, eos: Tensor | None, numbers: Iterable[tuple[str, float]]) -> None:
        """What ends the row, and its numbers of sampling; those that are missing are neutral."""
        self.state.eos[row].fill_(-1)
        if eos is not None:
            self.state.eos[row, : len(eos)].copy_(eos)
        if self.sampling is None:
            return
        for name, number in {**dict(NEUTRAL), **dict(numbers)}.items():
            getattr(self.sampling, name)[row] = number

    def draw(self, row: int, generator: torch.Generator) -> None:
        """The noise of the row in the next pass."""
        if self._noise is not None:
            self._noise[row].exponential_(1, generator=generator)

    def replay_rows(self) -> tuple[Tensor, Tensor]:
        """Append the selected tokens and select the next ones; `state.report`, and the logits
        [B, V].
        """
        logits = self._replay_or_forward()
        return self.state.report, logits
