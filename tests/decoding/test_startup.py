"""What is brought up in threads: once in a process, and what fails there is told where it is used."""

import sys
import threading
from threading import Event, Timer

import pytest

from hf_static_kv import loading


def test_a_part_is_loaded_once_and_waited_for():
    goes_on, runs = Event(), []

    def part():
        goes_on.wait(60)
        runs.append("ran")

    threads = [loading._thread(part) for _ in range(3)]
    assert runs == []
    goes_on.set()
    loading._thread(part).join()
    assert runs == ["ran"]
    assert threads == [threads[0]] * 3


def test_an_error_is_left_to_the_place_of_use(monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)

    def part():
        raise ImportError("not installed")

    loading._thread(part).join()
    assert said == []


@pytest.mark.parametrize(
    ("load", "wait", "parts"),
    [
        (loading.load_triton, loading.wait_for_triton, ["_build_driver", "_hash_triton", "_import_gluon"]),
        (loading.load_inductor, loading.wait_for_inductor, ["_import_inductor"]),
    ],
)
def test_each_is_begun_early_and_complete_when_it_was_waited_for(monkeypatch, load, wait, parts):
    goes_on, done = Event(), []
    for name in parts:
        monkeypatch.setattr(loading, name, lambda name=name: (goes_on.wait(60), done.append(name)))
    load()
    assert done == []
    Timer(0.2, goes_on.set).start()
    wait()
    assert sorted(done) == parts


def test_without_triton_nothing_is_said_before_it_is_used(monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    with pytest.raises(ImportError):
        loading._build_driver()
    loading._thread.cache_clear()  # it may be loaded in this process
    try:
        loading.load_triton()
        loading.wait_for_triton()
        assert not loading._thread(loading._build_driver).is_alive()
        assert said == []
    finally:
        loading._thread.cache_clear()
