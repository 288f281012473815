"""Turns: one at a time, in the order of arrival, the loop between two calls."""

import threading
import time
from contextlib import suppress

import pytest

from hf_static_kv.decoding import turns as turns_module
from hf_static_kv.decoding.turns import Turns


def waiting(turns, number):
    """Wait until so many threads wait."""
    deadline = time.monotonic() + 10
    while len(turns._waiting) < number:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def start(turns, name, order, *, is_loop=False, needs_room=False):
    """A thread that notes its name when it has the turn."""

    def run():
        turns.take(is_loop, needs_room)
        order.append(name)
        turns.release()

    before = len(turns._waiting)
    thread = threading.Thread(target=run)
    thread.start()
    waiting(turns, before + 1)
    return thread


def test_in_the_order_of_arrival():
    turns, order = Turns(), []
    turns.take()
    threads = [start(turns, n, order) for n in range(5)]
    assert turns.num_waiting == 5
    assert turns.is_wanted
    turns.release()
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, 4]
    assert not turns.is_wanted


def test_the_loop_has_a_turn_after_each_call():
    turns, order = Turns(), []
    turns.take()
    threads = [start(turns, n, order) for n in range(2)]
    threads.append(start(turns, "loop", order, is_loop=True))
    turns.release()
    for thread in threads:
        thread.join(10)
    assert order == ["loop", 0, 1]
    turns.take(is_loop=True)
    threads = [start(turns, "loop", order, is_loop=True), start(turns, 2, order)]
    turns.release()
    for thread in threads:
        thread.join(10)
    assert order[3:] == [2, "loop"]


def test_without_room_a_new_call_waits_and_others_do_not():
    turns, order = Turns(), []
    turns.has_room = lambda thread: False
    turns.take()
    first = start(turns, "new", order, needs_room=True)
    second = start(turns, "old", order)
    assert turns.is_wanted
    turns.release()
    second.join(10)
    assert order == ["old"]
    assert not turns.is_wanted
    turns.has_room = lambda thread: True
    turns.release()  # of a thread that has no turn: it only calls the next
    first.join(10)
    assert order == ["old", "new"]


def test_a_turn_inside_a_turn_is_the_same():
    turns = Turns()
    with turns.turn():
        with turns.turn():
            assert turns.is_mine
        assert turns.is_mine
        with turns.released():
            assert not turns.is_mine
        assert turns.is_mine
        turns.release()
    assert not turns.is_mine


def test_giving_way_lets_the_others_go_first():
    turns, order = Turns(), []
    turns.take()
    threads = [start(turns, n, order) for n in range(2)]
    turns.give_way()
    order.append("own")
    turns.release()
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, "own"]


def test_an_error_gives_the_turn_back():
    turns = Turns()
    with suppress(ZeroDivisionError), turns.turn():
        raise ZeroDivisionError
    with turns.turn():
        assert turns.is_mine


def test_an_interrupt_while_waiting_leaves_the_queue(monkeypatch):
    turns, order = Turns(), []
    is_held, done = threading.Event(), threading.Event()

    def hold():
        turns.take()
        is_held.set()
        assert done.wait(10)
        turns.release()

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            raise KeyboardInterrupt

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(10)
    with monkeypatch.context() as patch:
        patch.setattr(turns_module, "Event", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            turns.take()
    assert turns.num_waiting == 0
    next_one = start(turns, "next", order)
    done.set()
    holder.join(10)
    next_one.join(10)
    assert order == ["next"]


def test_an_interrupt_at_the_end_of_a_released_block_takes_no_turn():
    """A block that is not left, as after an interrupt in `__exit__`, is closed later."""
    turns = Turns()
    with turns.turn():
        block = turns.released()
        block.__enter__()
    del block
    assert turns.is_free


def test_a_held_turn_is_kept_whatever_is_called():
    turns, order = Turns(), []
    with turns.held():
        thread = start(turns, "other", order)
        with turns.turn():
            turns.release()
        with turns.released():
            pass
        turns.give_way()
        assert turns.is_mine
        assert not turns.is_wanted
        assert order == []
    thread.join(10)
    assert order == ["other"]
    assert turns.is_free


def test_only_one_at_a_time():
    turns, inside, most = Turns(), 0, 0

    def run():
        nonlocal inside, most
        for _ in range(200):
            with turns.turn():
                inside += 1
                most = max(most, inside)
                inside -= 1
                with turns.released():
                    pass

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1
    assert turns._owner is None
