"""Compiles the kernel of persistent_step.cu for a plan, in a thread, and launches it.

NVRTC compiles it in two to four seconds for each shape of a model (H200, 2026-11-18). What it gives
is kept on disk beside Triton's kernels. The launch is cooperative: all blocks run at the same time,
or none starts.
"""

import ctypes
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from hf_static_kv import compat
from hf_static_kv.kernels.packed import Packed, Weight
from hf_static_kv.kernels.persistent_macros import exchanged_bytes, macros, used_shared_bytes
from hf_static_kv.kernels.persistent_step import Plan, check_plan

_SOURCE = Path(__file__).with_name("persistent_step.cu")
_NAME = b"persistent_step"
COMPILER = "hf_static_kv compiler"  # the name of its threads
_THREADS = 288  # of a block: eight warps that compute, and one that reads
_CAPABILITY = (9, 0)  # the only one where the kernel was measured
_OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "-default-device")


def refusal(plan: Plan) -> str:
    """Why no kernel serves this plan on its device; "" if one does."""
    device = plan.token.device
    if device.type != "cuda" or torch.version.hip is not None:
        return "the device is no GPU of NVIDIA"
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return "the compute capability is not 9.0"
    if not compat.has_cuda_bindings():
        return "there is no package cuda.bindings"
    try:
        check_plan(plan)
        _macros(plan)
    except ValueError as error:
        return str(error)
    return ""


class Build:
    """The kernel of a plan, while a thread compiles it. One with marks notes its times."""

    def __init__(self, plan: Plan, has_marks: bool = False) -> None:
        self.plan = plan
        self._has_marks = has_marks
        self._compilation = _compilation(_defines(_macros(plan) | {"PROFILE": int(has_marks)}))

    @property
    def is_ready(self) -> bool:
        return self._compilation.is_ready

    def wait(self) -> None:
        self._compilation.wait()

    def step(self) -> "PersistentStep":
        """The kernel, loaded. Raises what the compiler has raised."""
        return PersistentStep(self.plan, self._compilation.result(), self._has_marks)


class PersistentStep:
    """The kernel of one plan on one device. Its launch gives the logits [1, V].

    It holds every tensor that the kernel reads. `chunks` are the largest logit of each block and its
    token, as `select_greedy` takes them. `marks` [blocks, layers + 1, 16] are the cycles at which each
    block came to each MARK of the source.
    """

    def __init__(self, plan: Plan, cubin: bytes, has_marks: bool = False) -> None:
        device = plan.token.device
        own = _macros(plan)
        self.plan = plan
        self._shared_bytes = used_shared_bytes(own)
        self._blocks = _blocks(device)
        with torch.cuda.device(device):
            self._function = _loaded(cubin, self._shared_bytes, device)
        memory = Memory(plan, own, has_marks)
        self.error, self.logits, self.marks = memory.error, memory.logits, memory.marks
        self.chunks = memory.chunks
        self.buffers = memory.tensors
        self._args = memory.args

    def __call__(self) -> Tensor:
        """Launch the kernel on the current stream; `logits` are there when it has run."""
        from hf_static_kv.kernels.launch_triton import is_launching

        if is_launching():  # else positions are not placed
            self._launch()
        return self.logits

    def has_failed(self) -> bool:
        """Whether a launch has given up. Waits for the device."""
        return bool(self.error.item())

    def _launch(self) -> None:
        driver, _ = _bindings()
        config = driver.CUlaunchConfig()
        config.gridDimX = self._blocks
        config.gridDimY = config.gridDimZ = 1
        config.blockDimX = _THREADS
        config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = torch.cuda.current_stream(self.logits.device).cuda_stream
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        config.attrs = [attribute]
        config.numAttrs = 1
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._args))
        with torch.cuda.device(self.logits.device):
            _checked(
                driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(parameters), 0)
            )


class Memory:
    """What a kernel reads and writes beside the tensors of its plan, and `struct Args`."""

    def __init__(self, plan: Plan, macros: dict[str, int | str], has_marks: bool = False) -> None:
        device = plan.token.device
        blocks = int(macros["BLOCKS"])
        words = torch.full((exchanged_bytes(macros),), -1, dtype=torch.int8, device=device)
        step = torch.zeros(1, dtype=torch.int32, device=device)
        self.error = torch.zeros_like(step)  # 1: a block has waited in vain
        self.logits = plan.head.new_zeros(1, len(plan.head))
        # Of the blocks, and of none up to a power of two.
        maxima = torch.full((1, 1 << (blocks - 1).bit_length()), -torch.inf, device=device)
        tokens = torch.full_like(maxima, len(plan.head) - 1, dtype=torch.int32)
        self.chunks = maxima, tokens
        layers = _table_of_layers(plan)
        inputs = [plan.embedding, plan.norm, plan.head, plan.token, plan.position]
        self.tensors = [layers, words, step, self.error, self.logits, maxima, tokens]
        pointers = [t.data_ptr() for t in (layers, *inputs, *self.tensors[1:])]
        self.marks = step.new_zeros(blocks if has_marks else 0, len(plan.layers) + 1, 16).long()
        pointers.append(self.marks.data_ptr())
        if (packed := plan.packed) is not None:
            tables = [packed.table, None if packed.nested is None else packed.nested.table]
            pointers += [0 if table is None else table.data_ptr() for table in tables]
        self.args = (ctypes.c_uint64 * len(pointers))(*pointers)


def _macros(plan: Plan) -> dict[str, int | str]:
    device = plan.token.device
    properties: Any = torch.cuda.get_device_properties(device)
    return macros(plan, _blocks(device), properties.shared_memory_per_block_optin)


def _blocks(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _table_of_layers(plan: Plan) -> Tensor:
    """Every `struct Layer`, as one tensor of addresses."""
    rows = []
    for layer in plan.layers:
        row: list[int] = []
        for name, part in zip(layer._fields, layer, strict=True):
            row += _addresses(part)
            if name == "values":
                row.append(layer.keys.stride(0))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64, device=plan.token.device)


def _addresses(part: Weight | None) -> list[int]:
    """Of a tensor, or of what `struct Weight` has of packed weights."""
    if not isinstance(part, Packed):
        return [0 if part is None else part.data_ptr()]
    nested = part.nested
    outer = [0, 0] if nested is None else [nested.absmax.data_ptr(), nested.offset.data_ptr()]
    return [part.codes.data_ptr(), part.scales.data_ptr(), *outer]


# --- compiling


def source() -> str:
    """persistent_step.cu, with the files that it includes."""

    def included(line: re.Match[str]) -> str:
        return _SOURCE.with_name(line[1]).read_text()

    return re.sub(r'^#include "(.*)"$', included, _SOURCE.read_text(), flags=re.MULTILINE)


def _defines(macros: dict[str, int | str]) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in macros.items())


@lru_cache(maxsize=32)  # the steps of a model share one
def _compilation(defines: str) -> "_Compilation":
    return _Compilation(defines)


class _Compilation:
    """What the compiler gives for these macros, from a thread."""

    def __init__(self, defines: str) -> None:
        self._defines = defines
        self._cubin = b""
        self._error: Exception | None = None
        # No daemon: inside the compiler at the end of the interpreter it would abort the process.
        self._thread = Thread(target=self._run, name=COMPILER, daemon=False)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def result(self) -> bytes:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._cubin

    def _run(self) -> None:
        try:
            self._cubin = kept_or_compiled(self._defines + source())
        except Exception as error:
            self._error = error


def kept_or_compiled(source: str) -> bytes:
    """The compiled source, from the disk if it was compiled before."""
    path = compat.triton_cache_dir() / f"hf_static_kv-{_key(source)}.cubin"
    with suppress(OSError):
        return path.read_bytes()
    cubin = _compiled(source)
    with suppress(OSError):  # a disk that is full or not writable
        _write(path, cubin)
    return cubin


def _key(source: str) -> str:
    driver, nvrtc = _bindings()
    versions = _checked(driver.cuDriverGetVersion()), _checked(nvrtc.nvrtcVersion())
    return sha256(repr((source, _OPTIONS, versions)).encode()).hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Another process sees all of the file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _compiled(source: str) -> bytes:
    _, nvrtc = _bindings()
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), _SOURCE.name.encode(), 0, [], []))
    try:
        options = [option.encode() for option in _OPTIONS]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if int(status):
            raise RuntimeError(f"NVRTC: {_log(program)}")
        cubin = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(program: Any) -> str:
    _, nvrtc = _bindings()
    log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    lines = log.decode(errors="replace").splitlines()
    return next((line for line in lines if "error" in line), "no message")


@lru_cache(maxsize=32)
def _loaded(cubin: bytes, shared_bytes: int, device: torch.device) -> Any:
    """The function, on this device, with so much shared memory."""
    driver, _ = _bindings()
    module = _checked(driver.cuModuleLoadData(cubin))
    function = _checked(driver.cuModuleGetFunction(module, _NAME))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, most, shared_bytes))
    occupancy = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
    if _checked(occupancy(function, _THREADS, shared_bytes)) < 1:
        raise RuntimeError("a block of the kernel does not fit on a multiprocessor")
    return function


def _bindings() -> tuple[Any, Any]:
    if (found := compat.cuda_bindings()) is None:
        raise RuntimeError("The persistent step needs the package cuda.bindings.")
    return found


def _checked(result: Sequence[Any]) -> Any:
    """What a function of CUDA gives, after its status."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA: {status}")
    return values[0] if len(values) == 1 else tuple(values)
