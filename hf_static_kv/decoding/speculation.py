"""Decoding with drafts: passes of one token or of several, as the device reports that drafts pay.

    launch   pass 1 | pass 2 | pass 3 | ...
    read              pass 1 | pass 2 | ...      the host is one pass behind, and says what the next is

How many tokens a pass adds is known on the device. A row that has ended takes no part, so what is
launched too much changes nothing. The host waits for each pass if somebody watches, or if tokens are
sampled: random numbers that were drawn for wrong drafts are drawn again.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_static_kv.cache import debug
from hf_static_kv.decoding.call import Call
from hf_static_kv.decoding.tokens import Tokens
from hf_static_kv.kernels.drafts import MILLION
from hf_static_kv.program.drafting import LookupStep

_BEHIND = 1  # passes, where the host need not wait
# The rate of right drafts from which on looking up pays, if a pass of 9 tokens takes 1.25 times as long
# as one of one. By counts of passes (texts of the trained Llama miniature and of its corpus, 2026-11):
# 3.0 times as fast on text that is copied with changes in 7 % of its tokens, 1.6 on greedy text, 0.99 to
# 1.00 on sampled and on random text.
_PAYS = 0.2
_COST = 1.25  # of a pass with drafts, in passes of one token
# An assistant whose drafts do not pay is asked again after so many passes, for so many drafts.
_PASSES_WITHOUT = 24
_DRAFTS_OF_TRIAL = 2
# The rate of an assistant that nothing is known of, as if so many drafts had shown it, and what a pass
# takes from the weight of those before it. Simulated over 256 tokens with an assistant of 0.15 passes
# (2026-11): within 4 % of the best fixed number of drafts where 60 to 90 % are right, and 3 % slower than
# no drafts where none is right.
_EXPECTED = 0.6
_KNOWN = 8
_NEWEST = 0.0625


@dataclass
class Accepted:
    """What came of drafts so far, to tell a user."""

    passes: int = 0  # that had drafts
    tokens: int = 0  # drafts that were right
    # How many drafts were right, and how often, in a row of a pass.
    counts: Counter[int] = field(default_factory=Counter)
    numbers: Counter[int] = field(default_factory=Counter)  # of drafts in a pass, and how often


class Speculation:
    """One call, from its newest token on.

    Args:
        show: gives new tokens of the one batch row to those who watch.
        is_left: whether the call should go on elsewhere.
        accepted: is counted up.
    """

    def __init__(
        self,
        step: LookupStep,
        tokens: Tokens,
        call: Call,
        show: Callable[[list[int]], None],
        is_left: Callable[[], bool],
        accepted: Accepted,
    ) -> None:
        self._step = step
        self._tokens = tokens
        self._call = call
        self._show = show
        self._is_left = is_left
        self._accepted = accepted
        self._begun_at: int = call.cache.seq_len  # the position of the newest token
        self._lengths = [self._begun_at] * len(step.token)
        self._reports = _Reports(step.drafts.report)
        self._draws = _Draws(step) if step.draws else None
        self._behind = 0 if step.draws or tokens.is_watched else _BEHIND
        self._room = 0
        self._number = 0  # of drafts in the next pass
        self._has_ended = False
        self._most = int(step.drafts.drafts.shape[1])
        self._rate = _Rate()

    def run(self) -> bool:
        """False: the call is left before its end."""
        self._begin()
        # A pass after the end would draw a number.
        self._has_ended = self._draws is not None and self._tokens.finished.newest()
        is_left = False
        while not (self._has_ended or is_left):
            self._launch()
            self._call.confirm()  # while the device computes
            self._read(self._behind)
            is_left = not self._has_ended and self._is_left()
        self._read(0)
        self._finish()
        return self._has_ended

    def _begin(self) -> None:
        tokens = self._tokens
        position = self._begun_at + 1
        eos = next(iter(self._call.ends), None)
        begun = tokens.ids[:, : tokens.length]
        self._step.set_state(begun, position, tokens.unfinished, eos, tokens.pad)
        known_from = position - begun.shape[1]
        last = self._begun_at + tokens.max_length - tokens.length
        rate = _EXPECTED if self._call.assistant is not None else 0.0
        self._number = self._number_for(rate)
        self._step.begin(self._call.seq_start.clamp(min=known_from), last, rate)
        self._begun_length = tokens.length

    def _launch(self) -> None:
        number = self._number
        step = self._step.drafted if number else self._step
        needed = step.token.shape[1]
        if self._room < needed:
            self._read(0)  # layers are compacted up to the newest token
            if self._has_ended:
                return
            # Near its end the cache has fewer; drafts behind it are left out.
            self._room = max(needed, self._call.cache.reserve(needed))
            self._step.sync_offsets()
        self._room -= needed
        if self._draws is not None:
            self._draws.begin()
        if number and self._call.assistant is not None:
            self._call.assistant.draft(number)
        elif self._call.assistant is not None:
            self._call.assistant.num_unread += 1
        step.advance()
        self._reports.push(number)

    def _read(self, behind: int) -> None:
        """Take the reports of all passes but the newest ones."""
        while self._reports.num_pending > behind:
            number, (lengths, unfinished, rates) = self._reports.pop()
            new = [after - own for after, own in zip(lengths, self._lengths, strict=True)]
            self._lengths = lengths
            if number and self._draws is not None:
                self._draws.keep(new[0])
            right = [count - 1 for count in new if count]
            if number and right:
                self._accepted.passes += 1
                self._accepted.numbers[number] += 1
                self._accepted.tokens += sum(right)
                self._accepted.counts.update(right)
                self._rate.note(right, number)
            if self._call.assistant is None:
                rates = [rate for rate, goes_on in zip(rates, unfinished, strict=True) if goes_on]
                self._number = self._number_for(sum(rates) / max(1, len(rates)) / MILLION)
            else:
                self._number = self._number_for(self._rate.value)
            self._count(max(lengths))
            is_late = time.time() > self._tokens.deadline
            self._has_ended = self._has_ended or is_late or not any(unfinished)

    def _number_for(self, rate: float) -> int:
        """How many drafts the next pass has, where this part of the last ones was right."""
        assistant = self._call.assistant
        if assistant is None:
            return self._most if rate >= _PAYS else 0

        def gain(number: int) -> float:
            tokens = sum(rate**n for n in range(number + 1))
            return tokens / float(_COST + number * assistant.cost)

        if not assistant.can_follow:
            return 0
        best = max(range(1, self._most + 1), key=gain)
        if gain(best) > 1:
            return best
        return min(_DRAFTS_OF_TRIAL, self._most) if assistant.num_unread >= _PASSES_WITHOUT else 0

    def _count(self, length: int) -> None:
        cache = self._call.cache
        before = cache.seq_len
        debug.log_step(before, length - before, len(self._step.token), cache.max_cache_len)
        cache.mark_written(length - before)
        self._tokens.length = self._begun_length + length - self._begun_at
        if self._tokens.streamer is not None:
            new = self._step.state.sequences[0, before + 1 : length + 1]
            self._show(new.tolist())

    def _finish(self) -> None:
        """The tokens of all rows, as long as the longest; if some have not ended, as the shortest of
        these.
        """
        tokens = self._tokens
        state = self._step.state
        ids = state.sequences
        newest_at = self._step.drafts.ends  # [B]
        lengths = newest_at.tolist()
        unfinished = state.unfinished[:, 0].tolist()
        still = [n for n, goes_on in zip(lengths, unfinished, strict=True) if goes_on]
        end = min(still) if still else max(lengths)
        position = torch.arange(self._begun_at + 1, end + 1, device=ids.device)
        new = ids[:, position]
        if tokens.pad is not None:
            is_padding = position > newest_at[:, None]
            new = torch.where(is_padding, tokens.pad.to(new), new)
        tokens.length = self._begun_length + end - self._begun_at
        tokens.ids[:, self._begun_length : tokens.length] = new
        has_ended = (ids.gather(1, newest_at[:, None]) == state.eos).any(dim=1)
        tokens.unfinished = (~has_ended).to(tokens.unfinished)
        tokens.finished.pending.clear()
        tokens.finished.is_set = bool(has_ended.all())
        # A row that ended before the others has no states behind its end.
        self._call.cache.crop(min(*lengths, end) - self._call.cache.seq_len)


class _Rate:
    """The probability that a draft of the assistant is right.

    rate = right / tried, sums over passes. The mean of a pass's own part would be less: a pass with 60 %
    of right drafts ends at its first wrong one, and its own part is 0.4 to 0.5.
    """

    def __init__(self) -> None:
        self._right = _EXPECTED * _KNOWN
        self._tried = float(_KNOWN)

    def note(self, right: list[int], number: int) -> None:
        """A pass of so many drafts, and how many of each row were right."""
        self._right += sum(right) - _NEWEST * self._right
        tried = sum(min(count + 1, number) for count in right)
        self._tried += tried - _NEWEST * self._tried

    @property
    def value(self) -> float:
        return self._right / self._tried


class _Draws:
    """Where torch's generator stands: it goes on behind the numbers of the tokens that count."""

    def __init__(self, step: LookupStep) -> None:
        self._step = step
        device = step.token.device
        self._generator = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generator = torch.cuda.default_generators[index]

    def begin(self) -> None:
        """Before a pass."""
        if self._generator is not None:
            self._before = self._generator.get_offset()

    def keep(self, number: int) -> None:
        """Of the numbers that a pass with drafts has drawn, only those of the first tokens count."""
        drafted = self._step.drafted
        if self._generator is None:
            torch.set_rng_state(drafted.generator_states[number - 1])
            return
        of_a_token = (self._generator.get_offset() - self._before) // drafted.token.shape[1]
        self._generator.set_offset(self._before + number * of_a_token)


class _Reports:
    """What passes have reported, in their order; each is read when it has arrived on the host."""

    def __init__(self, report: Tensor) -> None:
        self._report = report
        self._free: list[Tensor] = []
        self._pending: deque[tuple[int, Tensor, Any]] = deque()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def push(self, num_drafts: int) -> None:
        if not self._report.is_cuda:
            self._pending.append((num_drafts, self._report.clone(), None))
            return
        on_host = self._free.pop() if self._free else self._pinned()
        on_host.copy_(self._report, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # The model may not be on the current device.
        arrived.record(torch.cuda.current_stream(self._report.device))
        self._pending.append((num_drafts, on_host, arrived))

    def _pinned(self) -> Tensor:
        return torch.empty(self._report.shape, dtype=self._report.dtype, pin_memory=True)

    def pop(self) -> tuple[int, list[list[int]]]:
        """How many drafts the oldest pass had, and its report."""
        num_drafts, on_host, arrived = self._pending.popleft()
        if arrived is not None:
            arrived.synchronize()
            self._free.append(on_host)
        return num_drafts, on_host.tolist()
