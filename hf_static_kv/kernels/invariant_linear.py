"""Batch-invariant linear layers and sums: a token's bits do not depend on the other tokens.

    invariant_linear(x, weight, bias)    y = x weight^T + bias
    expert_linear(x, weight, experts)    y[m] = x[m] weight[experts[m]]^T + bias[experts[m]]
    invariant_sum(x)                     the sum over the last dim, in float32 at least

    x: [M, K], a token each   weight: [N, K], of any strides   bias: [N]   y: [M, N]
    of E experts: weight [E, N, K], of any strides   experts: [M]   bias: [E, N]

On a GPU all numbers of tokens are summed in one order. On a CPU tokens are padded to tiles of one
shape, so that the library runs the same code for all of them.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

_TILE = 16


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        shapes = f"x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        raise ValueError(f"{shapes} do not fit: [M, K] and [N, K].")
    if x.is_cuda:
        from hf_static_kv.kernels.invariant_linear_triton import invariant_linears_triton

        return invariant_linears_triton(x, [weight], [] if bias is None else [bias])
    return invariant_linear_plain(x, weight, bias)


def invariant_linear_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    tile = _TILE if _is_index_invariant(*weight.shape, weight.stride(), weight.dtype) else 1
    y = torch.cat([torch.mm(tokens, weight.t()) for tokens in padded_tiles(x, tile)])[: len(x)]
    return y if bias is None else y + bias


@torch.library.custom_op("hf_static_kv::expert_linear", mutates_args=())
def expert_linear(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer of one expert for each token."""
    has_dims = x.ndim == 2 and weight.ndim == 3
    if not has_dims or x.shape[1] != weight.shape[2] or experts.shape != x.shape[:1]:
        others = f"weight {tuple(weight.shape)} and experts {tuple(experts.shape)}"
        raise ValueError(f"x {tuple(x.shape)}, {others} do not fit: [M, K], [E, N, K] and [M].")
    if x.is_cuda:
        from hf_static_kv.kernels.invariant_linear_triton import expert_linear_triton

        return expert_linear_triton(x, weight, experts, bias)
    return _by_expert(invariant_linear_plain, x, weight, experts, bias)


def expert_linear_plain(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None) -> Tensor:
    """In torch's own operations, which are not batch-invariant and have gradients."""
    return _by_expert(torch.nn.functional.linear, x, weight, experts, bias)


def _by_expert(
    linear: Callable[..., Tensor], x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None
) -> Tensor:
    order = experts.argsort()
    counts = experts.bincount(minlength=len(weight)).tolist()
    biases = [None] * len(weight) if bias is None else bias.unbind()
    # `unbind`: each gradient of a `weight[expert]` would be as large as that of all experts.
    groups = zip(torch.split(x[order], counts), weight.unbind(), biases, strict=True)
    return torch.cat([linear(*group) for group in groups if len(group[0])])[order.argsort()]


def padded_tiles(x: Tensor, tile: int = _TILE) -> list[Tensor]:
    """`x` [M, K] as copies of the shape [tile, K], with zeros after the last token."""
    tiles = []
    for begin in range(0, len(x), tile):
        tokens = x.new_zeros(tile, x.shape[1])
        tokens[: len(x) - begin] = x[begin : begin + tile]
        tiles.append(tokens)
    return tiles


@lru_cache(maxsize=1024)
def _is_index_invariant(size: int, dim: int, stride: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether the library gives equal tokens of a tile equal bits: tried on random numbers."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        elements = 1 + (size - 1) * stride[0] + (dim - 1) * stride[1]
        token = torch.randn(dim, generator=generator).to(dtype)
        base = torch.randn(elements, generator=generator).to(dtype)
        y = torch.mm(token.repeat(_TILE, 1), base.as_strided((size, dim), stride).t())
    return bool((y == y[:1]).all())


def invariant_sum(x: Tensor) -> Tensor:
    """The sum over the last dim of x [..., D]."""
    vectors = x.reshape(-1, x.shape[-1])
    if not x.is_cuda:
        return invariant_sum_plain(vectors).view(x.shape[:-1])
    from hf_static_kv.kernels.invariant_linear_triton import invariant_sum_triton

    return invariant_sum_triton(vectors).view(x.shape[:-1])


def invariant_sum_plain(vectors: Tensor) -> Tensor:
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    return torch.cat([tile.to(dtype).sum(dim=-1) for tile in padded_tiles(vectors)])[: len(vectors)]
