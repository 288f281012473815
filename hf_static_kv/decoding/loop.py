"""Calls of several threads, decoded together: each is a row of one cache, and one pass serves all.

    row 0   [ A's tokens ............ ]      a pass appends a token to each row, at its own length
    row 1   [ B's .... ]
    row 2   (free)                           the next call takes it

A call computes its prompt as if it were alone, in a cache of the pool. Its states are then copied to
a row, and the cache is free for the next call. What a call has of its own (a streamer, processors and
criteria of the caller) runs in its own thread, and no other call waits for it: a row whose tokens are
selected there takes no part in passes meanwhile.

The loop has a thread as long as there are calls. It is one pass ahead of what it has read.
"""

import atexit
import copy
import time
import weakref
from collections import deque
from collections.abc import Callable
from threading import Event, Thread
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from hf_static_kv.cache import debug
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.request import Fallback
from hf_static_kv.cache.rows import (
    Row,
    allocated,
    copy_rows,
    fill,
    num_rows,
    power_of_two,
    put_row,
)
from hf_static_kv.decoding.call import Call
from hf_static_kv.decoding.seats import TAKES_THE_LARGEST, Cancelled, Seat, kind_of
from hf_static_kv.decoding.selection import Selection
from hf_static_kv.decoding.steps import RowsOverwritten
from hf_static_kv.decoding.turns import Turns
from hf_static_kv.kernels.sample import Processors
from hf_static_kv.program.selecting import GREEDY, RowsStep

MAX_ROWS = 64
_FIRST_ROWS = 8  # of the storage, until there are more calls
# Positions beyond those that calls need. A step is tried where no row has a token, and the device
# may be two passes ahead of what the host knows.
_SPARE = 8
_CAPACITY = 2048  # if there is memory: longer storage is another storage, with other steps
_AHEAD = 2
# Of each row, between two pieces of its stream: to wake a thread takes time of all others.
_SECONDS_TO_WAKE = 1e-4
_SAMPLES = Selection(Processors(*[True] * len(Processors._fields)))
_DRIVERS: WeakSet[Thread] = WeakSet()


@atexit.register
def _join_drivers() -> None:
    # A thread inside torch at the end of the interpreter would abort it.
    for thread in list(_DRIVERS):
        thread.join(5)


class _Pass(NamedTuple):
    """A pass that was launched: the calls by row, and what it gives when it has run."""

    seats: dict[int, Seat]
    report: Tensor  # [B], on the host
    logits: dict[int, Tensor]  # [1, V], of the rows whose threads select
    event: Any  # None: it has run

    @property
    def has_run(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class Loop:
    """The rows of one model.

    Args:
        step_for: gives the step for a call in rows and a selection. Raises `Fallback`.
        bound: how many bytes the storage may take on a device.
    """

    def __init__(
        self,
        turns: Turns,
        step_for: Callable[[Call, Selection], RowsStep],
        bound: Callable[[torch.device], int],
        max_rows: int,
    ) -> None:
        self.max_rows = max_rows
        self._most = power_of_two(max_rows)  # of a step and of the storage
        self.num_tokens = 0  # that passes have selected
        self.tokens_per_second = 0.0
        self._counted = time.monotonic(), 0  # when, and how many tokens there were
        self._turns = turns
        own = weakref.ref(self)  # turns are those of the model, which may outlive this
        turns.has_room = lambda thread: (loop := own()) is None or loop.has_room_for(thread)
        self._step_for = step_for
        self._bound = bound
        self._cache: StaticContiguousCache | None = None
        self._step: RowsStep | None = None
        self._seated: dict[int, Seat] = {}  # by row
        self._launched: deque[_Pass] = deque()
        self._asked: deque[tuple[Seat, Tensor | None, Any]] = deque()  # see `_obey`
        self._kind: Any = None  # of the calls that have a row
        self._wake = Event()
        self._thread: Thread | None = None
        self._stream: Any = None
        self._pinned: list[Tensor] = []  # reports on the host, in turn

    @property
    def num_rows(self) -> int:
        """Calls that have a row."""
        return len(self._seated)

    @property
    def num_waiting(self) -> int:
        """Calls that wait for their turn."""
        return self._turns.num_waiting

    @property
    def is_full(self) -> bool:
        return len(self._seated) >= self.max_rows

    def has_room_for(self, thread: int) -> bool:
        """Whether a new call of the thread may begin; one inside a call that has a row need not
        wait for that row.
        """
        return not self.is_full or any(own.thread == thread for own in list(self._seated.values()))

    @property
    def memory_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.memory_bytes

    def free_memory(self) -> None:
        """Give up the storage, unless there are calls."""
        with self._turns.turn(needs_room=False):
            if not self._seated:
                self._cache = self._step = None

    def free_idle(self) -> bool:
        """Give up the storage if there are no calls, and whether it was given up. The thread has the
        turn; without it: nothing.
        """
        if self._seated or self._cache is None or not self._turns.is_mine:
            return False
        self._cache = self._step = None
        return True

    def cancel(self, owner: object) -> None:
        """End the call of this owner, if it has a row; else it ends when it gets one."""
        for seat in list(self._seated.values()):
            if seat.owner is owner:
                seat.inbox.put(Cancelled())

    # --- in the thread of a call

    def run(self, seat: Seat, logits: Tensor | None = None) -> bool:
        """The rest of a call, after the prompt's `logits` [1, V] or after its newest token.

        The thread has the turn, and gives it up. False: nothing is done, the call must stay alone.
        """
        tokens = seat.tokens
        try:
            step, cache = self._fitting(seat)
        except Fallback as fallback:
            debug.logger.debug("A call stays alone: %s", fallback)
            return False
        except RowsOverwritten as error:
            self._end_all(error)
            raise
        tokens.join_others(is_first=not self._seated)
        try:
            if seat.selection is not None and logits is not None:
                tokens.select(logits)
            self._seat(seat, step, cache)
            if seat.owner is not None and seat.owner.is_cancelled:
                raise Cancelled
            if not seat.returns_cache:
                seat.call.remember(tokens.ids)
                seat.call.give_back_cache()
            self._turns.release()
            if seat.selection is None:
                self._select_all(seat, logits)
            else:
                self._receive_all(seat, logits is not None and tokens.deliver())
            if seat.keeps_row:
                self._keep(seat)
            return True
        finally:
            self._ask(seat, None)

    def _receive_all(self, seat: Seat, is_over: bool) -> None:
        while not is_over:
            message = seat.received()
            if isinstance(message, list):
                seat.tokens.extend(message)
                return
            for token in message:
                seat.tokens.stream(token)

    def _select_all(self, seat: Seat, logits: Tensor | None) -> None:
        tokens = seat.tokens
        is_over = logits is not None and tokens.append(logits)
        while not is_over:
            self._ask(seat, tokens.last_tokens.to(seat.call.device))
            is_over = tokens.append(seat.received())

    def _ask(self, seat: Seat, token: Tensor | None) -> None:
        if self._thread is not None and self._seated.get(seat.row) is seat:
            self._asked.append((seat, token, None if token is None else _event(token)))
            self._wake.set()

    def _keep(self, seat: Seat) -> None:
        """The sequence of a row goes to the cache of its call, or to a history of the pool."""
        call = seat.call
        # The last token is not written.
        length = call.request.prompt_length - call.input_ids.shape[1] + seat.tokens.length - 1
        # Before the turn: this waits for the device.
        ids = [] if seat.kept is None else seat.tokens.ids[0, :length].tolist()
        with self._turns.turn(needs_room=False):
            if self._cache is None or self._seated.get(seat.row) is not seat:
                # A pass has failed since, and with it the storage.
                if seat.returns_cache:
                    raise RuntimeError(
                        "A pass of several calls has failed, and this cache with it."
                    )
                return
            self.follow(call.device)
            if seat.returns_cache:
                row = Row(self._cache, seat.row, 0, seat.oldest)
                if length > call.cache.max_cache_len:  # it was made for less, and rows were not
                    call.cache.grow_for(length)
                fill(call.cache, [row], [0], length)
            elif seat.kept is not None and call.pool is not None:
                (start,) = seat.kept.starts
                row = Row(self._cache, seat.row, start, seat.oldest)
                call.pool.keep_row(row, ids[start:], seat.kept.origin)
            self._be_followed(call.device)

    # --- rows; the thread has the turn

    def _seat(self, seat: Seat, step: RowsStep, cache: StaticContiguousCache) -> None:
        call = seat.call
        put_row(call.cache, cache, seat.row)
        self._cache = cache
        self._use(step)
        self._sit_down(seat)
        self._kind = kind_of(call)
        self._be_followed(call.device)
        if self._thread is None:
            thread = Thread(target=self._drive, name="hf_static_kv loop", daemon=True)
            _DRIVERS.add(thread)
            thread.start()  # it waits for its turn
            self._thread = thread
        self._seated[seat.row] = seat
        self._wake.set()

    def follow(self, device: torch.device) -> None:
        """What this thread launches comes after what the loop has launched."""
        if self._stream is not None and self._stream != torch.cuda.current_stream(device):
            torch.cuda.current_stream(device).wait_stream(self._stream)

    def _be_followed(self, device: torch.device) -> None:
        """What the loop launches comes after what this thread has launched."""
        if device.type != "cuda":
            return
        current = torch.cuda.current_stream(device)
        if self._thread is None:
            self._stream = current
        elif self._stream != current:
            self._stream.wait_stream(current)

    def _fitting(self, seat: Seat) -> tuple[RowsStep, StaticContiguousCache]:
        """A step and storage with a row for this call, as long as it needs."""
        call = seat.call
        if self._seated and kind_of(call) != self._kind:
            raise Fallback("the other calls have other settings")
        self.follow(call.device)
        seat.row = next(row for row in range(self.max_rows) if row not in self._seated)
        rows = power_of_two(max(seat.row, *self._seated, 0) + 1)
        cache = self._storage(call, rows)
        seats = [*self._seated.values(), seat]
        longest = max(own.length for own in seats) + _AHEAD
        is_sampled = any(own.is_sampled for own in seats)
        in_rows = call.in_rows(cache, rows, longest)
        step = self._step_for(in_rows, _SAMPLES if is_sampled else TAKES_THE_LARGEST)
        if step.runs_model:
            raise Fallback("the step runs the model itself, as each call sets it")
        return step, cache

    def _storage(self, call: Call, rows: int) -> StaticContiguousCache:
        """The storage, or a larger one with the same sequences."""
        before = self._cache
        needed = power_of_two(call.request.max_positions)
        wanted = min(_FIRST_ROWS, self._most) if rows <= _FIRST_ROWS else self._most
        if before is not None and self._seated:
            needed = max(needed, before.max_cache_len - _SPARE)
            wanted = max(wanted, num_rows(before))
        if before is not None and not self._seated and not before.is_like(call.cache):
            before = None
        is_long = before is not None and before.max_cache_len >= needed + _SPARE
        if before is not None and is_long and num_rows(before) >= rows:
            return before
        if not self._seated:
            before = self._cache = self._step = None  # frees its memory first
        sizes = [
            (capacity + _SPARE, number)
            for number in (wanted, rows)
            for capacity in (max(needed, _CAPACITY), needed)
        ]
        cache = allocated(call.cache, sizes, self._bound(call.device))
        if before is not None:
            copy_rows(before, cache)
        return cache

    def _use(self, step: RowsStep) -> None:
        if step is not self._step:
            step.clear()
            if self._seated and self._step is not None:
                step.take_over(self._step)
            self._step = step

    def _sit_down(self, seat: Seat) -> None:
        call, tokens, step = seat.call, seat.tokens, self._step
        assert step is not None
        start = call.seq_start[0].to(call.device)
        position_id = call.position_ids(seat.length)[0, 0]
        step.seat(seat.row, seat.length, start, position_id)
        if seat.selection is None:
            return
        numbers = (*(() if seat.draws else GREEDY), *seat.selection.numbers)
        step.set_ends(seat.row, next(iter(call.ends), None), numbers)
        ids = tokens.ids[0, : tokens.length].to(call.device)
        step.resume(seat.row, ids, seat.length, seat.last)
        seat.is_running = True

    # --- the thread of the loop

    def _drive(self) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                while self._advance():
                    if len(self._launched) > 1 or (self._launched and not self._running):
                        self._launched[0].wait()
                    elif not self._launched:
                        self._wake.wait()
        except BaseException as error:
            self._fail(error)

    def _advance(self) -> bool:
        """Read what has been computed and launch a pass; whether there are calls."""
        self._wake.clear()
        self._turns.take(is_loop=True)
        try:
            while self._launched and (len(self._launched) > 1 or self._launched[0].has_run):
                self._launched[0].wait()
                self._collect(self._launched.popleft())
            self._obey()
            if self._running:
                self._launched.append(self._launch())
            if not self._seated and not self._launched:
                self._thread = None
                self._asked.clear()  # they hold the model
            return self._thread is not None
        finally:
            self._turns.release()

    @property
    def _running(self) -> dict[int, Seat]:
        # Read without the turn, too, while another call sits down.
        return {row: own for row, own in list(self._seated.items()) if own.is_running}

    def _obey(self) -> None:
        """What threads of calls have asked for: to go on with a token, or to leave."""
        while self._asked:
            seat, token, is_there = self._asked.popleft()
            if self._seated.get(seat.row) is not seat:
                continue
            assert self._step is not None
            if token is None:
                self._step.end(seat.row)
                del self._seated[seat.row]
            else:
                if is_there is not None:  # another stream may have written it
                    is_there.wait()
                self._step.resume(seat.row, token, seat.length, seat.last)
                seat.is_running = True

    def _launch(self) -> _Pass:
        step = self._step
        assert step is not None
        seats = self._running
        for row, seat in seats.items():
            if seat.draws:
                step.draw(row, seat.tokens.generator)
        report, logits = step.replay_rows()
        own = {
            row: logits[row : row + 1].float().clone()
            for row, seat in seats.items()
            if seat.selection is None
        }
        for row in own:
            seats[row].is_running = False
        return _Pass(seats, self._to_host(report), own, _event(report))

    def _to_host(self, report: Tensor) -> Tensor:
        if not report.is_cuda:
            return report.clone()
        if not self._pinned:
            pinned = torch.zeros(_AHEAD + 2, self._most, dtype=report.dtype, pin_memory=True)
            self._pinned = list(pinned.unbind())
        self._pinned.append(self._pinned.pop(0))
        self._pinned[-1][: len(report)].copy_(report, non_blocking=True)
        return self._pinned[-1]

    def _collect(self, done: _Pass) -> None:
        """Give the calls of a pass what it has computed."""
        tokens = done.report.tolist()
        now = time.time()
        self._count()
        for row, seat in done.seats.items():
            if self._seated.get(seat.row) is not seat:
                continue  # it has left
            if seat.selection is None:
                seat.length += 1
                seat.inbox.put(done.logits[row])
            elif seat.is_running:
                seat.length += 1
                self._receive(seat, tokens[row], now)

    def _count(self) -> None:
        now = time.monotonic()
        since, before = self._counted
        if now - since >= 1:
            self.tokens_per_second = (self.num_tokens - before) / (now - since)
            self._counted = now, self.num_tokens

    def _receive(self, seat: Seat, token: int, now: float) -> None:
        is_last = token < 0
        token = ~token if is_last else token
        seat.selected.append(token)
        self.num_tokens += 1
        is_over = is_last or now > seat.tokens.deadline
        if seat.tokens.streamer is not None:
            seat.unsent.append(token)
            # `abs`: a clock may be set back.
            if is_over or abs(now - seat.sent) > _SECONDS_TO_WAKE * len(self._seated):
                seat.inbox.put(tuple(seat.unsent))
                seat.unsent.clear()
                seat.sent = now
        if not is_over:
            return
        assert self._step is not None
        self._step.end(seat.row)  # of a deadline the device knows nothing
        seat.is_running = False
        if not seat.keeps_row:
            del self._seated[seat.row]
        seat.inbox.put(seat.selected)

    def _fail(self, error: BaseException) -> None:
        """All calls end with this error."""
        self._turns.take(is_loop=True)
        try:
            self._end_all(error)
            self._thread = None
        finally:
            self._turns.release()

    def _end_all(self, error: BaseException) -> None:
        for seat in self._seated.values():
            seat.inbox.put(_copied(error))
        self._seated.clear()
        self._launched.clear()
        self._asked.clear()  # they hold the model
        self._step = self._cache = None
        self._wake.set()


def _copied(error: BaseException) -> BaseException:
    """The error for one of several threads, each of which adds its frames to the traceback."""
    try:
        own = copy.copy(error).with_traceback(None)
    except Exception:  # an error of the caller's, with arguments of its own
        own = RuntimeError(f"A pass of several calls has failed: {error}")
    own.__cause__ = error
    return own


def _event(written: Tensor) -> Any:
    """When this is there; None: now."""
    if not written.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(written.device))
    return event
