"""Starts the compilers in threads while the prompt is computed. That saves one to three seconds of the first call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from threading import Thread

from hf_static_kv import compat

_TRITON = (compat.build_triton_driver, compat.hash_triton, compat.import_gluon)


def load_triton() -> None:
    """Begin to load Triton, once per process; does nothing where it is not installed."""
    for part in _TRITON:
        _thread(part)


def load_inductor() -> None:
    """Begin to load the compiler of `torch.compile`, once per process."""
    _thread(compat.load_inductor)


def wait_for_triton() -> None:
    for part in _TRITON:
        _thread(part).join()


def wait_for_inductor() -> None:
    _thread(compat.load_inductor).join()


@lru_cache
def _thread(part: Callable[[], None]) -> Thread:
    thread = Thread(target=_without_errors, args=(part,), daemon=True)
    thread.start()
    return thread


def _without_errors(part: Callable[[], None]) -> None:
    with suppress(Exception):  # what is wrong here is raised where it is used
        part()
