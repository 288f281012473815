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
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from queue import SimpleQueue
from threading import Event, Thread, get_ident
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from hf_static_kv.cache import debug
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.pool import Entry
from hf_static_kv.cache.request import Fallback
from hf_static_kv.cache.rows import Row, fill, oldest_of, put_row
from hf_static_kv.cache.storage import is_out_of_memory
from hf_static_kv.decoding.call import Call
from hf_static_kv.decoding.selection import Selection
from hf_static_kv.decoding.tokens import Tokens
from hf_static_kv.decoding.turns import Turns
from hf_static_kv.kernels.sample import Processors
from hf_static_kv.patching import TRACED_ATTENTION_NAME
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
_TAKES_THE_LARGEST = Selection()


# What a call was made for, if somebody may cancel it: an object with `is_cancelled`.
OWNER: ContextVar[Any] = ContextVar("owner", default=None)
_DRIVERS: WeakSet[Thread] = WeakSet()


class Cancelled(Exception):
    """The owner of a call has no more use for it."""


@atexit.register
def _join_drivers() -> None:
    # A thread inside torch at the end of the interpreter would abort it.
    for thread in list(_DRIVERS):
        thread.join(5)


class Request:
    """A call in a row. `selection` None: its own thread selects the tokens."""

    def __init__(self, call: Call, tokens: Tokens, selection: Selection | None) -> None:
        self.call = call
        self.tokens = tokens
        # Passes know no n-grams of their rows.
        self.selection = None if selection is not None and selection.ngram else selection
        # By the kernels of sampling, which also know a least length.
        self.is_sampled = self.selection is not None and self.selection != _TAKES_THE_LARGEST
        self.draws = self.is_sampled and bool(tokens.config.do_sample)
        self.length = int(call.cache.seq_len)  # tokens in the row
        # Compact layers have dropped what is before; the rows do not know.
        self.oldest = oldest_of(call.cache)
        self.row = -1
        self.is_running = False  # it takes part in passes
        self.selected: list[int] = []
        self.unsent: list[int] = []  # of a stream
        self.sent = 0.0  # when the last piece was
        self.inbox: SimpleQueue[Any] = SimpleQueue()  # what its thread waits for
        self.thread = get_ident()
        self.owner = OWNER.get()
        self.returns_cache = bool(call.config.return_dict_in_generate)
        # Of a call whose sequence is kept; it goes on without this cache.
        is_kept = call.entry is not None and call.entry.identity is not None
        self.kept: Entry | None = call.entry if is_kept else None

    @property
    def keeps_row(self) -> bool:
        """Whether the sequence is read from the row after its last token."""
        return self.returns_cache or self.kept is not None

    @property
    def last(self) -> int:
        """The position of its last token; of the next one, if its thread selects."""
        following = self.length + 1
        if self.selection is None:
            return following
        return following + self.tokens.max_length - self.tokens.length - 1

    def received(self) -> Any:
        message = self.inbox.get()
        if isinstance(message, BaseException):
            raise message
        return message


class _Pass(NamedTuple):
    """A pass that was launched: its requests by row, and what it gives when it has run."""

    requests: dict[int, Request]
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
        self._most = _power_of_two(max_rows)  # of a step and of the storage
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
        self._seated: dict[int, Request] = {}  # by row
        self._launched: deque[_Pass] = deque()
        self._asked: deque[tuple[Request, Tensor | None, Any]] = deque()  # see `_obey`
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

    def cancel(self, owner: object) -> None:
        """End the call of this owner, if it has a row; else it ends when it gets one."""
        for request in list(self._seated.values()):
            if request.owner is owner:
                request.inbox.put(Cancelled())

    # --- in the thread of a call

    def run(self, request: Request, logits: Tensor | None = None) -> bool:
        """The rest of a call, after the prompt's `logits` [1, V] or after its newest token.

        The thread has the turn, and gives it up. False: nothing is done, the call must stay alone.
        """
        tokens = request.tokens
        try:
            step, cache = self._fitting(request)
        except Fallback as fallback:
            debug.logger.debug("A call stays alone: %s", fallback)
            return False
        tokens.join_others(is_first=not self._seated)
        try:
            if request.selection is not None and logits is not None:
                tokens.select(logits)
            self._seat(request, step, cache)
            if getattr(request.owner, "is_cancelled", False):
                raise Cancelled
            if not request.returns_cache:
                request.call.remember(tokens.ids)
                request.call.give_back_cache()
            self._turns.release()
            if request.selection is None:
                self._select_all(request, logits)
            else:
                self._receive_all(request, logits is not None and tokens.deliver())
            if request.keeps_row:
                self._keep(request)
            return True
        finally:
            self._ask(request, None)

    def _receive_all(self, request: Request, is_over: bool) -> None:
        while not is_over:
            message = request.received()
            if isinstance(message, list):
                request.tokens.extend(message)
                return
            for token in message:
                request.tokens.stream(token)

    def _select_all(self, request: Request, logits: Tensor | None) -> None:
        tokens = request.tokens
        is_over = logits is not None and tokens.append(logits)
        while not is_over:
            self._ask(request, tokens.last_tokens.to(request.call.device))
            is_over = tokens.append(request.received())

    def _ask(self, request: Request, token: Tensor | None) -> None:
        if self._seated.get(request.row) is request:
            self._asked.append((request, token, None if token is None else _event(token)))
            self._wake.set()

    def _keep(self, request: Request) -> None:
        """The sequence of a row goes to the cache of its call, or to a history of the pool."""
        call = request.call
        # The last token is not written.
        length = call.request.prompt_length - call.input_ids.shape[1] + request.tokens.length - 1
        # Before the turn: this waits for the device.
        ids = [] if request.kept is None else request.tokens.ids[0, :length].tolist()
        with self._turns.turn(needs_room=False):
            if self._cache is None or self._seated.get(request.row) is not request:
                # A pass has failed since, and with it the storage.
                if request.returns_cache:
                    raise RuntimeError(
                        "A pass of several calls has failed, and this cache with it."
                    )
                return
            self.follow(call.device)
            if request.returns_cache:
                row = Row(self._cache, request.row, 0, request.oldest)
                if length > call.cache.max_cache_len:  # it was made for less, and rows were not
                    call.cache.grow(max(2 * call.cache.max_cache_len, length))
                fill(call.cache, [row], [0], length)
            elif request.kept is not None and request.kept.pool is not None:
                (start,) = request.kept.starts
                row = Row(self._cache, request.row, start, request.oldest)
                request.kept.pool.keep_row(row, ids[start:], request.kept.origin)
            self._be_followed(call.device)

    # --- rows; the thread has the turn

    def _seat(self, request: Request, step: RowsStep, cache: StaticContiguousCache) -> None:
        call = request.call
        put_row(call.cache, cache, request.row)
        self._cache = cache
        self._use(step)
        self._sit_down(request)
        self._kind = _kind(call)
        self._be_followed(call.device)
        if self._thread is None:
            thread = Thread(target=self._drive, name="hf_static_kv loop", daemon=True)
            _DRIVERS.add(thread)
            thread.start()  # it waits for its turn
            self._thread = thread
        self._seated[request.row] = request
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

    def _fitting(self, request: Request) -> tuple[RowsStep, StaticContiguousCache]:
        """A step and storage with a row for this request, as long as it needs."""
        call = request.call
        if self._seated and _kind(call) != self._kind:
            raise Fallback("the other calls have other settings")
        self.follow(call.device)
        request.row = next(row for row in range(self.max_rows) if row not in self._seated)
        rows = _power_of_two(max(request.row, *self._seated, 0) + 1)
        cache = self._storage(call, rows)
        requests = [*self._seated.values(), request]
        longest = max(own.length for own in requests) + _AHEAD
        is_sampled = any(own.is_sampled for own in requests)
        in_rows = call.in_rows(cache, rows, longest)
        step = self._step_for(in_rows, _SAMPLES if is_sampled else _TAKES_THE_LARGEST)
        if step.runs_model:
            raise Fallback("the step runs the model itself, as each call sets it")
        return step, cache

    def _storage(self, call: Call, rows: int) -> StaticContiguousCache:
        """The storage, or a larger one with the same sequences."""
        before = self._cache
        needed = _power_of_two(call.request.max_positions)
        wanted = min(_FIRST_ROWS, self._most) if rows <= _FIRST_ROWS else self._most
        if before is not None and self._seated:
            needed = max(needed, before.max_cache_len - _SPARE)
            wanted = max(wanted, _num_rows(before))
        if before is not None and not self._seated and not before.is_like(call.cache):
            before = None
        is_long = before is not None and before.max_cache_len >= needed + _SPARE
        if before is not None and is_long and _num_rows(before) >= rows:
            return before
        if not self._seated:
            before = self._cache = self._step = None  # frees its memory first
        sizes = [
            (capacity + _SPARE, number)
            for number in (wanted, rows)
            for capacity in (max(needed, _CAPACITY), needed)
        ]
        cache = _allocated(call.cache, sizes, self._bound(call.device))
        if before is not None:
            _copy_all(before, cache)
        return cache

    def _use(self, step: RowsStep) -> None:
        if step is not self._step:
            step.clear()
            if self._seated and self._step is not None:
                step.take_over(self._step)
            self._step = step

    def _sit_down(self, request: Request) -> None:
        call, tokens, step = request.call, request.tokens, self._step
        assert step is not None
        start = call.seq_start[0].to(call.device)
        position_id = call.position_ids(request.length)[0, 0]
        step.seat(request.row, request.length, start, position_id)
        if request.selection is None:
            return
        numbers = (*(() if request.draws else GREEDY), *request.selection.numbers)
        step.set_ends(request.row, next(iter(call.ends), None), numbers)
        ids = tokens.ids[0, : tokens.length].to(call.device)
        step.resume(request.row, ids, request.length, request.last)
        request.is_running = True

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
    def _running(self) -> dict[int, Request]:
        return {row: own for row, own in self._seated.items() if own.is_running}

    def _obey(self) -> None:
        """What threads of calls have asked for: to go on with a token, or to leave."""
        while self._asked:
            request, token, is_there = self._asked.popleft()
            if self._seated.get(request.row) is not request:
                continue
            assert self._step is not None
            if token is None:
                self._step.end(request.row)
                del self._seated[request.row]
            else:
                if is_there is not None:  # another stream may have written it
                    is_there.wait()
                self._step.resume(request.row, token, request.length, request.last)
                request.is_running = True

    def _launch(self) -> _Pass:
        step = self._step
        assert step is not None
        requests = self._running
        for row, request in requests.items():
            if request.draws:
                step.draw(row, request.tokens.generator)
        report, logits = step.replay_rows()
        own = {
            row: logits[row : row + 1].float().clone()
            for row, request in requests.items()
            if request.selection is None
        }
        for row in own:
            requests[row].is_running = False
        return _Pass(requests, self._to_host(report), own, _event(report))

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
        """Give the requests of a pass what it has computed."""
        tokens = done.report.tolist()
        now = time.time()
        self._count()
        for row, request in done.requests.items():
            if self._seated.get(request.row) is not request:
                continue  # it has left
            if request.selection is None:
                request.length += 1
                request.inbox.put(done.logits[row])
            elif request.is_running:
                request.length += 1
                self._receive(request, tokens[row], now)

    def _count(self) -> None:
        now = time.monotonic()
        since, before = self._counted
        if now - since >= 1:
            self.tokens_per_second = (self.num_tokens - before) / (now - since)
            self._counted = now, self.num_tokens

    def _receive(self, request: Request, token: int, now: float) -> None:
        is_last = token < 0
        token = ~token if is_last else token
        request.selected.append(token)
        self.num_tokens += 1
        is_over = is_last or now > request.tokens.deadline
        if request.tokens.streamer is not None:
            request.unsent.append(token)
            # `abs`: a clock may be set back.
            if is_over or abs(now - request.sent) > _SECONDS_TO_WAKE * len(self._seated):
                request.inbox.put(tuple(request.unsent))
                request.unsent.clear()
                request.sent = now
        if not is_over:
            return
        assert self._step is not None
        self._step.end(request.row)  # of a deadline the device knows nothing
        request.is_running = False
        if not request.keeps_row:
            del self._seated[request.row]
        request.inbox.put(request.selected)

    def _fail(self, error: BaseException) -> None:
        """All calls end with this error."""
        self._turns.take(is_loop=True)
        try:
            for request in self._seated.values():
                request.inbox.put(error)
            self._seated.clear()
            self._launched.clear()
            self._thread = self._step = self._cache = None
        finally:
            self._turns.release()


def refusal(call: Call) -> str | None:
    """Why a call has no row among others; None: it may have one."""
    if call.entry is None:
        return "it brings its own cache"
    if len(call.input_ids) != 1 or len(call.seq_start) != 1:
        return "it has several rows"
    if call.cache.stateful_layers or call.cache.index_layers:
        return "a layer keeps more than keys and values"
    if call.own_attention == TRACED_ATTENTION_NAME or call.has_hooks:
        return "the model is watched"
    if torch.is_autocast_enabled(call.device.type):
        return "autocast belongs to one thread"
    inputs = call.step_inputs
    if inputs.tensors or inputs.position_ids.ndim != 2 or not call.has_usual_positions:
        return "its steps are given more than tokens"
    return None


def _kind(call: Call) -> Any:
    """Equal for two calls that one pass can serve."""
    return call.own_attention, repr(sorted(call.step_inputs.settings.items()))


def _event(written: Tensor) -> Any:
    """When this is there; None: now."""
    if not written.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(written.device))
    return event


def _power_of_two(number: int) -> int:
    """That is at least this number."""
    return 1 << (number - 1).bit_length()


def _num_rows(cache: StaticContiguousCache) -> int:
    return int(cache.kv_layers[0].max_batch_size)


def _allocated(
    like: StaticContiguousCache, sizes: Sequence[tuple[int, int]], bound: int
) -> StaticContiguousCache:
    """Storage of the first of these sizes (max_cache_len, rows) that fits."""
    for max_cache_len, rows in sizes:
        if like.bytes_of_rows(max_cache_len, rows) <= bound:
            try:
                return like.for_rows(max_cache_len, rows)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
    length, rows = sizes[-1]
    raise Fallback(
        f"{rows} rows of {length} tokens, for calls of several threads, do not fit into {bound:,} "
        "bytes"
    )


def _copy_all(source: StaticContiguousCache, target: StaticContiguousCache) -> None:
    for theirs, own in zip(source.storage_groups, target.storage_groups, strict=True):
        _, rows, _, slots, _ = theirs.keys.shape
        own.keys[:, :rows, :, :slots] = theirs.keys
        own.values[:, :rows, :, :slots] = theirs.values
