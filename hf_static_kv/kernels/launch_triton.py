"""How kernels are launched: early, and, before their first run, compiled side by side.

Early ("programmatic dependent launch", compute capability 9.0 on): a kernel begins while the one before it still runs.
Short kernels in a row are mostly waiting, for the launch and for the first bytes. In the kernel, before anything that
another one has written:

    after_previous(EARLY)

What no kernel writes, such as the weights, may be read before that. Every kernel lets the next one begin only after its
own wait, so whatever is older than the kernel before is complete from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from threading import Semaphore
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime._async_compile import AsyncCompileMode, active_mode

# Half of compiling is Python, where one thread runs at a time: with one for each kernel all are ready late. Loading
# waits for a C compiler in some versions of Triton, which is a process of its own.
_COMPILERS, _LOADERS = 4, 16
_COMPILE_ONLY: ContextVar[bool] = ContextVar("compile_only", default=False)


def launch(kernel: Any, grid: tuple[int, ...], on: torch.Tensor, *args: Any, **options: Any) -> None:
    """Run `kernel` on the device of the tensor `on`; it has a constexpr `EARLY`."""
    early = on.is_cuda and _knows_early_launch(on.device)
    options |= {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
    run = partial(kernel.warmup, grid=grid) if _COMPILE_ONLY.get() else kernel[grid]
    if not on.is_cuda or on.device.index == torch.cuda.current_device():
        run(*args, **options)
        return
    with torch.cuda.device(on.device):
        run(*args, **options)


@contextmanager
def compile_only() -> Iterator[None]:
    """Inside, a launch compiles its kernel and does not run it. All are ready on exit, compiled side by side."""
    before = _COMPILE_ONLY.set(True)
    try:
        with _CompileAndLoad(torch.cuda.current_device()) as pool, AsyncCompileMode(pool):
            yield
    finally:
        _COMPILE_ONLY.reset(before)
        active_mode.set(None)  # Triton leaves it where a kernel failed, and could compile no other


class _CompileAndLoad(ThreadPoolExecutor):
    """Triton gives it what compiles a kernel. It loads the kernel too, which Triton leaves to the first run."""

    def __init__(self, device: int) -> None:
        super().__init__(_LOADERS)
        self.device, self.may_compile = device, Semaphore(_COMPILERS)

    def submit(self, compile: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._compiled_and_loaded, partial(compile, *args, **kwargs))

    def _compiled_and_loaded(self, compile: Callable[[], Any]) -> Any:
        with self.may_compile:
            kernel = compile()
        with torch.cuda.device(self.device):
            kernel._init_handles()  # some versions compile a C function in it
        return kernel


@lru_cache
def _knows_early_launch(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Wait until the kernel before this one is complete."""
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Let the next kernel begin, once every program of this one has come here."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """Both, one after the other."""
    wait_for_previous(EARLY)
    let_next_begin(EARLY)
