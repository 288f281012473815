"""Launches kernels with PDL, and compiles them in parallel before their first run.

PDL (programmatic dependent launch, compute capability 9.0 or higher) starts a kernel while the
previous one still runs. `pdl_wait` waits until the previous kernel has finished: a kernel calls it
before it reads what that one writes. `pdl_launch_next` lets the next kernel start once every
instance of this one has arrived there. Every kernel waits before it lets the next one start, so all
but the previous kernel have finished when a kernel starts: older results, and weights, may be read
before the wait.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial
from threading import Semaphore
from typing import Any

import torch
import triton
import triton.language as tl

from hf_static_kv import compat

# Compiling holds the GIL for half of its time, so few threads compile. A launcher waits for a C
# compiler in Triton 3.6: 0.3 to 0.5 s a kernel on the H200's host (2026-11-15), so many threads
# build launchers and load.
_COMPILE_THREADS = 4
_LOAD_THREADS = 32
pdl_wait, pdl_launch_next = compat.pdl_instructions()
_MODE: ContextVar[str] = ContextVar("launches", default="run")  # "run", "compile" or "skip"


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel`, which has a constexpr `PDL`, on the device of its first argument."""
    on: torch.Tensor = args[0]
    if _MODE.get() == "skip":
        return
    pdl = on.is_cuda and _supports_pdl(on.device)
    options |= {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
    run = partial(kernel.warmup, grid=grid) if _MODE.get() == "compile" else kernel[grid]
    is_current = not on.is_cuda or on.device.index == torch.cuda.current_device()
    with nullcontext() if is_current else torch.cuda.device(on.device):
        run(*args, **options)


@contextmanager
def compile_only() -> Iterator[None]:
    """Launches compile their kernels in parallel, without running them; on exit all are loaded."""
    compiler = _CompileAndLoad(torch.cuda.current_device())
    with _mode("compile"), compiler as pool, compat.parallel_compiling(pool):
        yield


def skipped_launches() -> AbstractContextManager[None]:
    """Inside the context nothing is launched: for a pass whose values nobody reads."""
    return _mode("skip")


def is_launching() -> bool:
    """Whether launches run their kernels."""
    return _MODE.get() == "run"


@contextmanager
def _mode(name: str) -> Iterator[None]:
    token = _MODE.set(name)
    try:
        yield
    finally:
        _MODE.reset(token)


class _CompileAndLoad(ThreadPoolExecutor):
    """Runs Triton's compilations and loads each kernel, which Triton would do at its first run."""

    def __init__(self, device: int) -> None:
        super().__init__(_LOAD_THREADS)
        self.device = device
        self.may_compile = Semaphore(_COMPILE_THREADS)

    def submit(self, compile: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        launcher = super().submit(compat.build_launcher, compile)

        def compile_and_load() -> Any:
            with self.may_compile:
                kernel = compile(*args, **kwargs)
            launcher.result()  # another thread would build it again
            with torch.cuda.device(self.device):
                compat.load_kernel(kernel)
            return kernel

        return super().submit(compile_and_load)


@lru_cache
def _supports_pdl(device: torch.device) -> bool:
    return (
        pdl_wait is not None
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


@triton.jit
def pdl_sync(PDL: tl.constexpr):
    """Wait for the previous kernel, then let the next one start."""
    if PDL:
        pdl_wait()
        pdl_launch_next()


@triton.jit
def prefetch_lines(at):
    """Prefetch the cache lines of these addresses into the L2 cache. Not in Triton's interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
