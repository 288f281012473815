"""Compiles kernels in CUDA C++ with NVRTC, in threads, and launches them.

What the compiler gives is kept on disk beside Triton's kernels.
"""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Thread
from typing import Any, NamedTuple

import torch

from hf_static_kv import compat

_CAPABILITY = (9, 0)  # the only one where these kernels were measured
_OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "-default-device")


@lru_cache
def refusal(device: torch.device) -> str:
    """Why no kernel of CUDA C++ runs on a device; "" if they do."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "the device is no GPU of NVIDIA"
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return "the compute capability is not 9.0"
    try:
        versions()
    except Exception:  # no package cuda.bindings, or no library behind it
        return "there is no package cuda.bindings"
    return ""


# --- compiling


class Compilation:
    """The compiled source of a kernel, while a thread compiles it.

    Args:
        source: the file.
        macros: what its names stand for.
    """

    def __init__(self, source: Path, macros: dict[str, int | str]) -> None:
        self._text = defines(macros) + source.read_text()
        self._cubin = b""
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, name="hf_static_kv compiler", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> bytes:
        """Waits for the thread. Raises what the compiler has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._cubin

    def _run(self) -> None:
        try:
            self._cubin = kept_or_compiled(self._text)
        except Exception as error:
            self._error = error


def defines(macros: dict[str, int | str]) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in macros.items())


def kept_or_compiled(source: str) -> bytes:
    """The compiled source, from the disk if it was compiled before."""
    path = compat.triton_cache_dir() / f"hf_static_kv-{_key(source)}.cubin"
    with suppress(OSError):
        return path.read_bytes()
    cubin = _compiled(source)
    with suppress(OSError):  # a disk that is full or not writable
        _write(path, cubin)
    return cubin


def versions() -> tuple[int, int]:
    """Of the driver and of NVRTC. Raises if there is none."""
    driver, nvrtc = _bindings()
    return checked(driver.cuDriverGetVersion()), checked(nvrtc.nvrtcVersion())


def _key(source: str) -> str:
    return sha256(repr((source, _OPTIONS, versions())).encode()).hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Another process sees all of the file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _compiled(source: str) -> bytes:
    _, nvrtc = _bindings()
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        options = [option.encode() for option in _OPTIONS]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if int(status):
            raise RuntimeError(f"NVRTC: {_log(program)}")
        cubin = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(program: Any) -> str:
    _, nvrtc = _bindings()
    log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    lines = log.decode(errors="replace").splitlines()
    return next((line for line in lines if "error" in line), "no message")


# --- launching


class Grid(NamedTuple):
    """How a kernel is launched."""

    blocks: int
    threads: int  # of a block
    shared_bytes: int = 0  # of a block, beside those that the source declares
    is_cooperative: bool = False  # all blocks run at the same time, or none starts
    has_pdl: bool = False  # starts while the previous kernel still runs (launch_triton.py)


@lru_cache(maxsize=256)
def loaded(cubin: bytes, name: str, shared_bytes: int, device: torch.device) -> Any:
    """The function, on this device, with so much shared memory."""
    driver, _ = _bindings()
    with torch.cuda.device(device):
        module = checked(driver.cuModuleLoadData(cubin))
        function = checked(driver.cuModuleGetFunction(module, name.encode()))
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, most, shared_bytes))
    return function


def resident_blocks(function: Any, grid: Grid) -> int:
    """How many blocks a multiprocessor runs at the same time."""
    driver, _ = _bindings()
    occupancy = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
    return int(checked(occupancy(function, grid.threads, grid.shared_bytes)))


def launch_cuda(function: Any, grid: Grid, args: Any, device: torch.device) -> None:
    """Launch a function on the current stream of a device.

    `args` is an array of ctypes that holds the only parameter.
    """
    driver, _ = _bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX = grid.blocks
    config.gridDimY = config.gridDimZ = 1
    config.blockDimX = grid.threads
    config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes = grid.shared_bytes
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    config.attrs = list(_attributes(driver, grid))
    config.numAttrs = len(config.attrs)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
    with torch.cuda.device(device):
        checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0))


def _attributes(driver: Any, grid: Grid) -> Any:
    names = driver.CUlaunchAttributeID
    if grid.is_cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        yield attribute
    if grid.has_pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        yield attribute


def _bindings() -> tuple[Any, Any]:
    if (found := compat.cuda_bindings()) is None:
        raise RuntimeError("Kernels in CUDA C++ need the package cuda.bindings.")
    return found


def checked(result: Sequence[Any]) -> Any:
    """What a function of CUDA gives, after its status."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA: {status}")
    return values[0] if len(values) == 1 else tuple(values)
