"""What compiles, brought up in threads of its own while the prompt is read: a second of a cold start, or three."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from threading import Thread


def load_triton() -> None:
    """Begin to bring Triton up, once in a process; where it is not installed this does nothing."""
    for part in (_build_driver, _hash_triton, _import_gluon):
        _thread(part)


def load_inductor() -> None:
    """Begin to bring up the compiler of `torch.compile`."""
    _thread(_import_inductor)


def wait_for_triton() -> None:
    """Threads that bring up the same would each do the work."""
    for part in (_build_driver, _hash_triton, _import_gluon):
        _thread(part).join()


def wait_for_inductor() -> None:
    _thread(_import_inductor).join()


@lru_cache
def _thread(part: Callable[[], None]) -> Thread:
    thread = Thread(target=_without_errors, args=(part,), daemon=True)
    thread.start()
    return thread


def _without_errors(part: Callable[[], None]) -> None:
    with suppress(Exception):  # what is wrong here is raised where it is used
        part()


def _build_driver() -> None:
    from triton.runtime import driver

    driver.active.utils  # noqa: B018  # a C module, built at the first look


def _hash_triton() -> None:
    """Every compiled kernel is kept under a hash of all that Triton consists of."""
    from triton.runtime.cache import triton_key

    triton_key()
    from hf_static_kv.kernels import launch_triton  # noqa: F401


def _import_gluon() -> None:
    """Triton's second language: at the first launch some versions look whether an argument is one of its own."""
    import triton.experimental.gluon  # noqa: F401


def _import_inductor() -> None:
    import torch._inductor.compile_fx  # noqa: F401
    from torch._inductor.async_compile import AsyncCompile

    # It starts the processes that compile. Until they are up, kernels are compiled one after the other.
    AsyncCompile.use_process_pool()  # type: ignore[no-untyped-call]
