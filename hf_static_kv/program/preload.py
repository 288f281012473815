"""Starts Triton in threads while the prompt is computed.

That saves one to three seconds of the first call.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from threading import Thread

from hf_static_kv import compat

TRITON = (compat.load_triton_driver, compat.hash_triton, compat.load_gluon)


def load(parts: tuple[Callable[[], None], ...]) -> None:
    """Begin to load these, once per process; what is not installed is left out."""
    for part in parts:
        _thread(part)


def wait_for(parts: tuple[Callable[[], None], ...]) -> None:
    for part in parts:
        _thread(part).join()


@lru_cache
def _thread(part: Callable[[], None]) -> Thread:
    def run() -> None:
        with suppress(Exception):  # an error is raised again where the compiler is used
            part()

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread
