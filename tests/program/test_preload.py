"""Compilers are loaded in threads, once per process; an error there is raised where the compiler is
used.
"""

import sys
import threading
from threading import Event, Timer

from hf_static_kv.program import preload


def test_a_part_is_loaded_once_and_waited_for():
    goes_on, runs = Event(), []

    def part():
        goes_on.wait(60)
        runs.append("ran")

    threads = [preload._thread(part) for _ in range(3)]
    assert runs == []
    goes_on.set()
    preload._thread(part).join()
    assert runs == ["ran"]
    assert threads == [threads[0]] * 3


def test_an_error_is_left_to_the_place_of_use(monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)

    def part():
        raise ImportError("not installed")

    preload._thread(part).join()
    assert said == []


def test_parts_are_loaded_in_threads_and_complete_after_the_wait():
    goes_on, done = Event(), []
    parts = [lambda n=n: (goes_on.wait(60), done.append(n)) for n in range(3)]
    preload.load(parts)
    assert done == []
    Timer(0.2, goes_on.set).start()
    preload.wait_for(parts)
    assert sorted(done) == [0, 1, 2]


def test_without_triton_nothing_is_logged(monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    preload._thread.cache_clear()  # it may be loaded in this process
    try:
        preload.load(preload.TRITON)
        preload.wait_for(preload.TRITON)
        assert not any(preload._thread(part).is_alive() for part in preload.TRITON)
        assert said == []
    finally:
        preload._thread.cache_clear()
