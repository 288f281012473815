"""The tokens of one call: selects them from logits as `generate` does, and knows when the call is
over.
"""

import math
import time
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_static_kv import compat
from hf_static_kv.cache import storage
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.request import cache_is_full
from hf_static_kv.decoding.call import Call, random_state, set_random_state
from hf_static_kv.patching import TRACED_ATTENTION_NAME

MAX_AHEAD = 8  # tokens that a step may select before the host looks at them


class Mark(NamedTuple):
    """Where a call stands: what it needs to go on from there a second time."""

    length: int
    unfinished: Tensor
    num_scores: int
    num_logits: int
    drawn: Any  # of torch's generators
    drawn_by_own: Tensor | None


class Tokens:
    """The tokens of one call, selected greedily or by sampling, and what ends them."""

    def __init__(self, call: Call) -> None:
        self.config = call.config
        self.streamer = call.streamer
        # Its type asks for a class of tensors that no tensor has.
        self.processors: Any = call.processors
        batch_size, self.length = call.input_ids.shape
        self._prompt_length = self.length
        self.ids = call.input_ids.to(torch.long, copy=True)  # `generate` gives int64 for int32
        self.set_limit(*call.limits)
        # The loop counts the length itself; the other criteria look at the tokens.
        self.criteria = StoppingCriteriaList(
            c for c in call.criteria if type(c) is not MaxLengthCriteria
        )
        times = [c for c in call.criteria if type(c) is MaxTimeCriteria]
        self.deadline = min((c.initial_timestamp + c.max_time for c in times), default=math.inf)
        has_ends = any(hasattr(criterion, "eos_token_id") for criterion in call.criteria)
        pad = compat.pad_token(call.config) if has_ends else None
        self.pad = None if pad is None else pad.to(self.ids.device)
        self.unfinished = torch.ones(batch_size, dtype=torch.long, device=self.ids.device)
        # A streamer, a trace, and processors and criteria of the caller must not be given a token
        # too many.
        is_watched = call.streamer is not None or call.own_attention == TRACED_ATTENTION_NAME
        modules = (type(part).__module__ for part in (*call.processors, *call.criteria))
        is_known = all(module.startswith(("transformers.", "hf_static_kv.")) for module in modules)
        # It calls a function of the caller.
        constrained = logits_process.PrefixConstrainedLogitsProcessor
        is_known &= not any(isinstance(part, constrained) for part in call.processors)
        can_go_back = not call.cache.stateful_layers
        self.finished = StopFlags(is_deferred=is_known and not is_watched and can_go_back)
        self.overrun = 0  # tokens selected after the end
        # Where the generator stood before each token.
        self.drawn: deque[int] = deque(maxlen=MAX_AHEAD + 1)
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self._newest = self.unfinished  # tokens [B]
        self._own_generator: torch.Generator | None = None  # None: torch's
        if call.seed is not None:
            self._own_generator = torch.Generator(self.ids.device).manual_seed(call.seed)
        # Whether code of the caller sees tokens.
        self.is_watched = is_watched or not is_known

    def join_others(self, is_first: bool) -> None:
        """Others decode with this call: from now on its random numbers are its own.

        A call that began alone draws what it would have drawn. Others have a seed, which is drawn
        from torch's generator.
        """
        self.finished.is_deferred = False
        self.set_limit(self._asked, self._asked)
        if not self.config.do_sample or self._own_generator is not None:
            return
        own = torch.Generator(self.ids.device)
        if is_first or self.length > self._prompt_length:
            of_host, of_device = random_state(self.ids.device)
            own.set_state(of_host if of_device is None else of_device)
            # These numbers are taken: torch's generator goes on with others.
            shared = self.generator if self.ids.is_cuda else torch.default_generator
            shared.manual_seed(int(torch.randint(1 << 62, ())))
        else:
            own.manual_seed(int(torch.randint(1 << 62, ())))
        self._own_generator = own

    @property
    def generator(self) -> torch.Generator:
        """The one that tokens are drawn from, on a GPU."""
        if self._own_generator is not None:
            return self._own_generator
        index = self.ids.device.index
        return torch.cuda.default_generators[
            torch.cuda.current_device() if index is None else index
        ]

    def set_limit(self, asked: int, fitting: int) -> None:
        """How long the sequences may become: what the call asks for, what fits into the cache."""
        self._asked = asked
        self.max_length = min(asked, fitting)
        self.fits = asked <= fitting
        free = self.ids.new_zeros(len(self.ids), self.max_length - self.length)
        self.ids = torch.cat([self.ids[:, : self.length], free], dim=1)

    @property
    def sequences(self) -> Tensor:
        return self.ids[:, : self.length].contiguous()

    @property
    def last_tokens(self) -> Tensor:
        return self.ids[:, self.length - 1]  # [B]

    def append(self, logits: Tensor) -> bool:
        """Select and append one token for each batch row; whether the call is over."""
        self.select(logits)
        return self.deliver()

    def select(self, logits: Tensor) -> None:
        logits = logits.to(self.ids.device)
        scores = self.processors(self.sequences, logits) if self.processors else logits
        if self.config.return_dict_in_generate and self.config.output_scores:
            self.scores.append(scores.clone())  # a copy: the next step overwrites its logits
        if self.config.return_dict_in_generate and self.config.output_logits:
            self.logits.append(logits.clone())
        if self.config.do_sample:
            self.before_draw()
            drawn = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._own_generator)
            tokens = drawn.squeeze(1)
        else:
            tokens = scores.argmax(dim=-1)
        if self.pad is not None:
            tokens = tokens * self.unfinished + self.pad * (1 - self.unfinished)
        self.ids[:, self.length] = tokens
        self.length += 1
        self._newest = tokens

    def deliver(self) -> bool:
        """Show the selected tokens to those who watch; whether the call is over."""
        if self.streamer is not None:
            self.streamer.put(self._newest.cpu())
        if not self.criteria:
            return self.length >= self.max_length
        self.unfinished = self.unfinished & ~self.criteria(
            self.sequences, tuple(self.scores) or None
        )
        return self._is_over(self.unfinished.max() == 0)

    def stream(self, token: int) -> None:
        self.streamer.put(torch.tensor([token]))

    def extend(self, tokens: list[int]) -> None:
        """Append tokens of the one batch row."""
        end = self.length + len(tokens)
        self.ids[0, self.length : end] = torch.tensor(tokens)
        self.length = end

    def before_draw(self) -> None:
        """Note where the generator stands: tokens that are drawn too many are undone."""
        if self.config.do_sample and self.ids.is_cuda and self._own_generator is None:
            self.drawn.append(self.generator.get_offset())

    def may_be_ahead(self, num_tokens: int) -> bool:
        """Whether the step may select more tokens than these before anything of them leaves the
        loop.
        """
        is_last = self.length + 1 >= self.max_length
        return (
            self.finished.is_deferred and not is_last and num_tokens < min(MAX_AHEAD, storage.SLACK)
        )

    def restart(self, length: int) -> None:
        """Give up the tokens from `length` on, which a step has selected on the device."""
        self.length = length
        self.finished.forget_all_but_first()

    def mark(self) -> Mark:
        own = self._own_generator
        drawn = random_state(self.ids.device), None if own is None else own.get_state()
        kept = len(self.scores), len(self.logits)
        return Mark(self.length, self.unfinished, *kept, *drawn)

    def go_back(self, mark: Mark) -> bool:
        """Give up all tokens since the mark, which nobody has watched; whether there need no others."""
        self.length = mark.length
        self.unfinished = mark.unfinished
        del self.scores[mark.num_scores :], self.logits[mark.num_logits :]
        set_random_state(self.ids.device, mark.drawn)
        if self._own_generator is not None and mark.drawn_by_own is not None:
            self._own_generator.set_state(mark.drawn_by_own)
        self.overrun = 0
        self.drawn.clear()
        self.finished = StopFlags(self.finished.is_deferred)
        self.finished.is_set = not bool(self.unfinished.any())
        return self.finished.is_set

    def count_token(self, all_ended: Tensor, token: Tensor) -> bool:
        """Count one more token [B, 1], selected on the device; whether the call is over."""
        self.length += 1
        if self.streamer is not None:
            # A streamer may keep it, and the step overwrites it.
            self.streamer.put(token[:, 0].to("cpu", copy=True))
        if not self.criteria:
            return self.length >= self.max_length
        is_over = self._is_over(all_ended)
        return is_over or time.time() > self.deadline

    def _is_over(self, all_ended: Tensor) -> bool:
        self.overrun = self.finished.push(all_ended, is_last=self.length >= self.max_length)
        if self.overrun and self.drawn:
            self.generator.set_offset(self.drawn[-self.overrun])
        return self.overrun > 0 or self.finished.is_set or self.length >= self.max_length

    def is_cut_short(self) -> bool:
        """Whether the cache is full and nothing else ended the sequences."""
        is_full = not self.fits and self.length >= self.max_length
        return is_full and not self.overrun and not self.finished.newest()

    def result(self, cache: StaticContiguousCache) -> GenerateDecoderOnlyOutput | Tensor:
        """What `generate` returns.

        Raises where the cache is full and nothing ended the sequences; it keeps them.
        """
        if self.is_cut_short():
            raise cache_is_full(cache.seq_len, cache.max_cache_len)
        if self.streamer is not None:
            self.streamer.end()
        sequences = self.ids[:, : self.length - self.overrun].clone()
        if not self.config.return_dict_in_generate:
            return sequences
        scores, logits = (
            tuple(kept[: len(kept) - self.overrun]) for kept in (self.scores, self.logits)
        )
        return GenerateDecoderOnlyOutput(
            sequences=sequences,  # type: ignore[arg-type]  # as for the processors
            scores=scores if self.config.output_scores else None,  # type: ignore[arg-type]
            logits=logits if self.config.output_logits else None,  # type: ignore[arg-type]
            past_key_values=cache,
        )


class StopFlags:
    """Bools that the device computes, one a step. Deferred, each is read later: the host waits for
    no step just sent.

    The host is one step behind, or up to `MAX_AHEAD` while it has something else to do (`is_busy`).
    """

    def __init__(self, is_deferred: bool) -> None:
        self.is_deferred = is_deferred  # flags on a GPU only
        self.is_set = self.is_busy = False
        self.slots: list[Tensor] = []
        self.pending: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self.num_pushed = 0

    def push(self, flag: Tensor, is_last: bool) -> int:
        """Take the flag of the newest step. Returns how many steps ran after one whose flag was
        set.

        Not deferred: `is_set` is this step's flag, at once.
        """
        if not (self.is_deferred and flag.is_cuda):
            self.is_set = bool(flag)
            return 0
        if not self.slots:
            self.slots = list(
                torch.zeros(MAX_AHEAD + 2, dtype=torch.bool, pin_memory=True).unbind()
            )
        on_host = self.slots[self.num_pushed % len(self.slots)]
        self.num_pushed += 1
        on_host.copy_(flag, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # The model may not be on the current device.
        arrived.record(torch.cuda.current_stream(flag.device))
        self.pending.append((arrived, on_host))
        while len(self.pending) > (MAX_AHEAD if self.is_busy and not is_last else 1):
            if self._oldest():
                return len(self.pending)
        return 0

    def _oldest(self) -> bool:
        arrived, on_host = self.pending.popleft()
        arrived.synchronize()
        return bool(on_host)

    def newest(self) -> bool:
        """Whether the newest flag is set; synchronizes with it."""
        if self.pending:
            arrived, on_host = self.pending[-1]
            arrived.synchronize()
            return bool(on_host)
        return self.is_set

    def forget_all_but_first(self) -> None:
        """Only the flag of the first token counts, which no step has selected."""
        while len(self.pending) > 1:
            self.pending.pop()
