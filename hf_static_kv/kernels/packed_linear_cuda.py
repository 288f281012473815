"""Linear layers of one token with weights of four bits, in CUDA C++. See packed.py for the formula.

Values of codes and inputs are rounded to bfloat16, as tensor cores take them. Their products are
exact, sums and scales are float32.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from struct import pack, unpack

import torch
from torch import Tensor

from hf_static_kv.kernels import launch_cuda
from hf_static_kv.kernels.launch_cuda import Compilation, Grid
from hf_static_kv.kernels.norm import Norm
from hf_static_kv.kernels.packed import Packed

_SOURCE = Path(__file__).with_name("packed_linear.cu")
_NAME = "packed_linear"
_ACTIVATIONS = ("", "silu", "gelu_tanh", "gelu", "relu")  # by their numbers in the source
_LAYOUTS = ("high_first", "low_first", "tiles")
_STEP = 128  # columns
_GROUPS = (32, 64)  # or multiples of a step
_MAX_COLUMNS = 32768  # whose inputs fit beside the table
_MAX_WEIGHTS = 3
_ROWS = 16  # of a tile
_WARPS = 8
_DEPTH = 4  # steps that are read ahead
_BLOCKS = 2  # of a launch, on a multiprocessor
_MIN_BLOCKS = 2  # on a multiprocessor: the next kernel reads ahead beside this one
_TABLE_BYTES = 65536
_NESTED_FLOATS = 260


def is_served(x: Tensor, weights: Sequence[Packed]) -> bool:
    """Whether the kernel takes these weights, which have one kind."""
    one = weights[0]
    fits = one.group in _GROUPS or one.group % _STEP == 0
    return (
        x.numel() == x.shape[-1] <= _MAX_COLUMNS
        and x.dtype == torch.bfloat16
        and one.layout in _LAYOUTS
        and fits
        and one.columns % _STEP == 0
        and one.scales.dtype in (torch.float32, torch.bfloat16, torch.uint8)
        and (one.scales.dtype == torch.uint8) == (one.nested is not None)
        and (one.zeros is None or one.zeros.dtype == one.scales.dtype)
        and not launch_cuda.refusal(x.device)
        and all(weight.codes.data_ptr() % 16 == 0 for weight in weights)
    )


def packed_linears_cuda(
    x: Tensor,
    weights: Sequence[Packed],
    biases: Sequence[Tensor],
    norm: Norm | None = None,
    activation: str = "",
    is_gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`fused_linears` of one token. The arguments after x are the fields of `Linear`."""
    from hf_static_kv.kernels.launch_triton import is_launching

    y = x.new_empty(
        *x.shape[:-1], sum(weight.rows for weight in weights[: 1 if is_gated else None])
    )
    own = _macros(
        weights, bool(biases), norm is not None, activation, is_gated, residual is not None
    )
    compilation = _compilation(tuple(own.items()))
    if is_launching():  # else it is compiled, or not even that
        tiles = _tiles(weights, is_gated)
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        grid = Grid(min(tiles, _BLOCKS * processors), 32 * _WARPS, _shared_bytes(own), has_pdl=True)
        function = launch_cuda.loaded(compilation.result(), _NAME, grid.shared_bytes, x.device)
        inputs = [None if t is None else _aligned(t) for t in (x, norm and norm.weight, residual)]
        args = _arguments(weights, biases, inputs, y, tiles, norm)
        launch_cuda.launch_cuda(function, grid, args, x.device)
    return y


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on."""
    tensor = tensor.detach().contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _tiles(weights: Sequence[Packed], is_gated: bool) -> int:
    if is_gated:
        return -(-weights[0].rows // (_ROWS // 2))
    return sum(-(-weight.rows // _ROWS) for weight in weights)


def _arguments(
    weights: Sequence[Packed],
    biases: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    y: Tensor,
    tiles: int,
    norm: Norm | None,
) -> "ctypes.Array[ctypes.c_uint64]":
    """`struct Args`, as words of eight bytes."""
    words: list[int] = []
    for i in range(_MAX_WEIGHTS):
        if i < len(weights):
            own = weights[i]
            nested = own.nested or (None, None, None)
            parts = [own.codes, own.scales, own.zeros, *nested, biases[i] if biases else None]
            words += [*map(_address, parts), own.rows, *own.scales.stride()]
        else:
            words += [0] * 10
    words += [*map(_address, [weights[0].table, *inputs, y]), tiles]
    one = weights[0]
    of_norm = (norm.eps, norm.style.offset) if norm else (0.0, 0.0)
    words += unpack("2Q", pack("4f", one.midpoint, one.factor, *of_norm))
    return (ctypes.c_uint64 * len(words))(*words)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _macros(
    weights: Sequence[Packed],
    has_bias: bool,
    has_norm: bool,
    activation: str,
    is_gated: bool,
    has_residual: bool,
) -> dict[str, int | str]:
    one = weights[0]
    return {
        "K": one.columns,
        "GROUP": one.group,
        "NUM_WEIGHTS": len(weights),
        "IS_TILED": int(one.layout == "tiles"),
        "IS_HIGH_FIRST": int(one.layout == "high_first"),
        "HAS_TABLE": int(one.table is not None),
        "IS_NESTED": int(one.nested is not None),
        "HAS_HALF_SCALES": int(one.scales.dtype == torch.bfloat16),
        "HAS_ZEROS": int(one.zeros is not None),
        "ADDS_ZEROS": int(one.added),
        "ACTIVATION": _ACTIVATIONS.index(activation),
        "IS_GATED": int(is_gated),
        "HAS_NORM": int(has_norm),
        "HAS_BIAS": int(has_bias),
        "HAS_RESIDUAL": int(has_residual),
        "WARPS": _WARPS,
        "DEPTH": _DEPTH,
        "MIN_BLOCKS": _MIN_BLOCKS,
    }


def _shared_bytes(macros: dict[str, int | str]) -> int:
    """SHARED_BYTES of the source."""
    nested = 4 * _NESTED_FLOATS * int(macros["NUM_WEIGHTS"]) * int(macros["IS_NESTED"])
    sums = (_WARPS * _ROWS + 1) * _WARPS * 4
    return _TABLE_BYTES + 2 * int(macros["K"]) + 64 + nested + sums


@lru_cache(maxsize=1024)
def _compilation(macros: tuple[tuple[str, int | str], ...]) -> Compilation:
    return Compilation(_SOURCE, dict(macros))
