"""Linear layers of 2 to 16 tokens on tensor cores, in CUDA C++. Formulas are in linear.py."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_static_kv.kernels import launch_cuda
from hf_static_kv.kernels.launch_cuda import Compilation, Grid

_SOURCE = Path(__file__).with_name("tensor_core_linear.cu")
_NAME = "tensor_core_linear"
_ACTIVATIONS = ("", "silu", "gelu_tanh", "gelu", "relu")  # by their numbers in the source
_DTYPES = (torch.bfloat16, torch.float16)
_TOKENS = range(2, 17)
_ROWS = 16  # of a tile
_SPAN = 32  # columns of a step
_MAX_WEIGHTS = 3


class Tiles(NamedTuple):
    row_tiles: int  # of a cluster
    cluster: int  # blocks that share K
    warps: int  # of a block
    depth: int  # steps that a warp reads ahead
    min_blocks: int  # on a multiprocessor: bounds the registers of a thread


def is_served(x: Any, weights: Sequence[Tensor]) -> bool:
    """Whether the kernel takes these weights for x, or for a tensor with its shape, dtype and device."""
    tokens = x.shape.numel() // x.shape[-1]
    if tokens not in _TOKENS or x.dtype not in _DTYPES or x.shape[-1] % _SPAN:
        return False
    if launch_cuda.refusal(x.device):
        return False
    return all(weight.is_contiguous() and weight.data_ptr() % 16 == 0 for weight in weights)


def tensor_core_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str = ""
) -> Tensor:
    """`linears`, or with an activation `gated_linear` of the weights gate and up."""
    from hf_static_kv.kernels.launch_triton import is_launching

    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    is_gated = bool(activation)
    tokens = x.numel() // x.shape[-1]
    sizes = [weight.shape[0] for weight in (weights[:1] if is_gated else weights)]
    y = x.new_empty(*x.shape[:-1], sum(sizes))
    tiles = tiles_of(x.shape[-1], sum(weight.shape[0] for weight in weights), tokens, is_gated)
    macros = _macros(tiles, x, len(weights), activation, bool(biases))
    compilation = _compilation(tuple(macros.items()))
    if is_launching():  # else it is compiled, or not even that
        function = launch_cuda.loaded(compilation.result(), _NAME, 0, x.device)
        rows = tiles.row_tiles * (_ROWS // 2 if is_gated else _ROWS)
        blocks = tiles.cluster * sum(-(-size // rows) for size in sizes)
        grid = Grid(blocks, 32 * tiles.warps, has_pdl=True)
        launch_cuda.launch_cuda(function, grid, _arguments(x, y, weights, biases), x.device)
    return y


def _arguments(
    x: Tensor, y: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> "ctypes.Array[ctypes.c_uint64]":
    """`struct Args`."""
    words = []
    for i in range(_MAX_WEIGHTS):
        bias = biases[i].contiguous().data_ptr() if i < len(biases) else 0
        words += [weights[i].data_ptr(), bias, weights[i].shape[0]] if i < len(weights) else [0] * 3
    words += [x.data_ptr(), y.data_ptr(), x.numel() // x.shape[-1], y.shape[-1]]
    return (ctypes.c_uint64 * len(words))(*words)


def _macros(
    tiles: Tiles, x: Tensor, num_weights: int, activation: str, has_bias: bool
) -> dict[str, int | str]:
    return {
        "K": x.shape[-1],
        "TOKEN_TILES": -(-x.shape[:-1].numel() // 8),
        "NUM_WEIGHTS": num_weights,
        "ACTIVATION": _ACTIVATIONS.index(activation),
        "IS_GATED": int(bool(activation)),
        "IS_HALF": int(x.dtype == torch.float16),
        "HAS_BIAS": int(has_bias),
        "ROW_TILES": tiles.row_tiles,
        "CLUSTER": tiles.cluster,
        "WARPS": tiles.warps,
        "DEPTH": tiles.depth,
        "MIN_BLOCKS": tiles.min_blocks,
    }


@lru_cache(maxsize=1024)
def _compilation(macros: tuple[tuple[str, int | str], ...]) -> Compilation:
    return Compilation(_SOURCE, dict(macros))


def tiles_of(dim: int, size: int, tokens: int, is_gated: bool) -> Tiles:
    return Tiles(1, 1, 8, 4, 2)
