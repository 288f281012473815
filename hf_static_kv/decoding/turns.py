"""Who may use a model now: one thread at a time, first come, first served.

    call A      prompt | A decodes, alone, until somebody waits
    call B              ------ waits | prompt |
    the loop                                  | pass of A and B | pass | ...
    call C                                       --- waits      | prompt |

The loop, which decodes for all, has a turn after each call that computes its prompt. A thread is
given the turn directly: nobody else wakes up.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

# By model.
_TURNS: WeakKeyDictionary[Any, "Turns"] = WeakKeyDictionary()


def turns_of(model: Any) -> "Turns":
    """Who may use the model now."""
    return _TURNS.setdefault(model, Turns())


class _Ticket:
    """A thread that waits for its turn."""

    def __init__(self, is_loop: bool, needs_room: bool) -> None:
        self.thread = get_ident()
        self.is_loop = is_loop
        self.needs_room = needs_room
        self.is_called = Event()


class Turns:
    """The turns of one model. `has_room` tells whether one more call of a thread may begin."""

    def __init__(self) -> None:
        self.has_room: Callable[[int], bool] = lambda thread: True
        self._lock = Lock()
        self._waiting: deque[_Ticket] = deque()
        self._owner: int | None = None
        self._was_loop = False  # the last one
        self._is_held = False  # the owner's calls keep the turn

    @property
    def num_waiting(self) -> int:
        """Calls that wait."""
        with self._lock:
            return sum(not ticket.is_loop for ticket in self._waiting)

    @property
    def is_wanted(self) -> bool:
        """Whether a thread waits that may have the next turn."""
        if not self._waiting or self.is_held:  # almost always
            return False
        with self._lock:
            return self._next() is not None

    @property
    def is_free(self) -> bool:
        return self._owner is None and not self._waiting

    @property
    def is_mine(self) -> bool:
        return self._owner == get_ident()

    @property
    def is_held(self) -> bool:
        """Whether this thread keeps the turn, whatever it calls."""
        return self._is_held and self.is_mine

    def take(self, is_loop: bool = False, needs_room: bool = False) -> None:
        if self.is_held:
            return
        with self._lock:
            own = get_ident()
            may_begin = not needs_room or self.has_room(own)
            if self._owner is None and not self._waiting and may_begin:
                self._owner = own
                self._was_loop = is_loop
                return
        ticket = _Ticket(is_loop, needs_room)
        try:
            with self._lock:
                self._waiting.append(ticket)
                self._call_next()
            # An interrupt in the thread that gives the turn may come before it calls.
            while not ticket.is_called.wait(1) and (self._owner != own or ticket in self._waiting):
                pass
        except BaseException:  # an interrupt
            with self._lock:
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
            self.release()
            raise

    def release(self) -> None:
        """Give the turn to the next one, if this thread has it."""
        with self._lock:
            if self._owner == get_ident() and not self._is_held:
                self._owner = None
            self._call_next()

    def give_way(self) -> None:
        """Let all those who wait go first, if this thread has the turn."""
        if self.is_mine:
            self.release()
            self.take()

    @contextmanager
    def turn(self, needs_room: bool = True) -> Iterator[None]:
        """A block in which this thread has the turn, or a part of it: `release` may end it before.

        Inside a turn: the same one.
        """
        if self.is_mine:
            yield
            return
        self.take(needs_room=needs_room)
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """A block in which others may have the turn. An error ends the turn: nothing is taken back
        for a call that is over, and an interrupt may come at any line.
        """
        self.release()
        yield
        self.take()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block in which nobody else has the turn, whatever is called in it."""
        with self.turn(needs_room=False):
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False

    def _next(self) -> _Ticket | None:
        loop = next((ticket for ticket in self._waiting if ticket.is_loop), None)
        if loop is not None and not self._was_loop:
            return loop
        calls = (ticket for ticket in self._waiting if not ticket.is_loop)
        able = (t for t in calls if not t.needs_room or self.has_room(t.thread))
        return next(able, loop)

    def _call_next(self) -> None:
        if self._owner is not None or (ticket := self._next()) is None:
            return
        self._waiting.remove(ticket)
        self._owner = ticket.thread
        self._was_loop = ticket.is_loop
        ticket.is_called.set()
