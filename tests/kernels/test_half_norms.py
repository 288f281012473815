"""A norm in two halves: what a linear layer gives of it, and what the next one makes of that. On a CPU
the kernels run in Triton's interpreter.
"""

import pytest
import torch
import torch.nn.functional as F

from hf_static_kv.kernels.linear import (
    Linear,
    activate,
    fused_linears,
    fused_linears_plain,
    linear_half_norm,
)
from hf_static_kv.kernels.norm import LAYER_NORM, STYLES, Norm
from tests.conftest import triton_module
from tests.kernels.test_step_kernels import DEVICE, DTYPES, normal

EPS = 1e-5
OTHER_DTYPES = [dtype for dtype in DTYPES if dtype != torch.float32]


def kernels():
    return triton_module("hf_static_kv.kernels.invariant_linear_triton")


def halves(tokens, dim, size, dtype, style=STYLES[0]):
    """x, weight, residual and norm of a first half, the numbers of a norm around 1."""
    x = normal(1, tokens, dim, dtype=dtype) / dim**0.5
    weight, residual = normal(size, dim, dtype=dtype), normal(1, tokens, size, dtype=dtype, seed=1)
    return x, weight, residual, Norm(normal(size, dtype=dtype, seed=7), EPS, style)


def exact_norm(total, norm):
    total = total.double()
    mean = total.square().mean(-1, keepdim=True)
    return total * torch.rsqrt(mean + norm.eps) * (norm.style.offset + norm.weight.double())


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("tokens", "dim", "size"), [(2, 72, 40), (8, 300, 16), (11, 64, 130)])
def test_the_first_half(tokens, dim, size, style, dtype):
    x, weight, residual, norm = halves(tokens, dim, size, dtype, style)
    total, weighed, squares = kernels().linear_half_norm_triton(
        x, weight, residual, norm.weight, style.offset
    )
    exact = residual.double() + F.linear(x.double(), weight.double())
    eps = torch.finfo(dtype).eps
    magnitudes = residual.abs().double() + F.linear(x.abs().double(), weight.abs().double())
    assert (total - exact).abs().le(2 * eps * magnitudes).all()
    by = style.offset + norm.weight.double()
    assert (weighed - total.double() * by).abs().le(eps * (total.double() * by).abs()).all()
    assert squares.dtype == torch.float32
    torch.testing.assert_close(squares.sum(0), total.float().square().sum(-1)[0])


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [2, 8, 16])
@pytest.mark.parametrize("kind", ["one", "three with biases", "gated"])
def test_both_halves_are_the_norm_and_the_layer_behind_it(kind, tokens, dtype):
    x, weight, residual, norm = halves(tokens, 72, 96, dtype)
    sizes = {"one": [37], "three with biases": [40, 16, 16], "gated": [24, 24]}[kind]
    weights = [normal(n, 96, dtype=dtype, seed=i) / 96**0.5 for i, n in enumerate(sizes)]
    biases = [normal(n, dtype=dtype, seed=i) for i, n in enumerate(sizes)] if len(sizes) > 2 else []
    activation = "silu" if kind == "gated" else ""
    total, weighed, squares = kernels().linear_half_norm_triton(
        x, weight, residual, norm.weight, 0.0
    )
    got = kernels().half_normed_linears_triton(weighed, weights, biases, activation, squares, EPS)
    exact = [F.linear(exact_norm(total, norm), w.double()) for w in weights]
    if kind == "gated":
        exact = [activate(exact[0], "silu") * exact[1]]
    exact = torch.cat(exact, dim=-1) + (torch.cat(biases).double() if biases else 0)
    layer = Linear(weights, biases, norm, activation, kind == "gated", None, squares)
    plain = fused_linears_plain(weighed, layer)
    bound = 8 * torch.finfo(dtype).eps * float(exact.abs().max())
    assert (got - exact).abs().max() <= bound
    assert (plain - exact).abs().max() <= bound


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_in_plain_pytorch(tokens):
    """Also on a GPU: what the kernels do not take is computed plainly."""
    x, weight, residual, norm = halves(tokens, 72, 96, torch.float32)
    total, weighed, squares = linear_half_norm(x, weight, residual, norm)
    expected = exact_norm(total, norm) @ weight.double()
    layer = Linear([weight.t().contiguous()], [], norm, squares=squares)
    torch.testing.assert_close(
        fused_linears(weighed, layer).double(), expected, rtol=1e-4, atol=1e-4
    )


def test_what_has_no_halves_is_refused():
    x, weight, residual, norm = halves(2, 72, 96, torch.float32)
    bias = normal(96)
    with pytest.raises(ValueError, match="without bias"):
        linear_half_norm(x, weight, residual, norm._replace(style=LAYER_NORM, bias=bias))
    squares = torch.ones(1, 2, device=DEVICE)
    for layer in (
        Linear([weight], [], None, squares=squares),
        Linear([weight], [], norm._replace(weight=normal(72)), "silu", squares=squares),
        Linear([weight], [], norm._replace(weight=normal(72)), residual=residual, squares=squares),
    ):
        with pytest.raises(ValueError, match="Half of a norm"):
            fused_linears(x, layer)
