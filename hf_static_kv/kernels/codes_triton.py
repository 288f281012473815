"""States in 8 bits in Triton, for kernels that read and write them. Formula in cache/codes.py.

A code is exact in half precision. So a kernel multiplies codes, and then the product by the scale
of its token: of a key the score, of a value the weight.
"""

import triton
import triton.language as tl

# Added to a number below 2^22 in float32 and taken away again, it rounds to the nearest even.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def aligned(offset):
    """An offset in bytes, which is a multiple of 4: so the compiler knows, and loads four codes at once."""
    return offset // 4 * 4


@triton.jit
def head_of(states, b, h, states_b, states_h, IS_CODED: tl.constexpr):
    """Where the rows of a head begin, in states or codes."""
    if IS_CODED:
        return states + aligned(b * states_b + h * states_h)
    else:
        return states + b * states_b + h * states_h


@triton.jit
def load_codes(states, row, d, mask, D: tl.constexpr, dtype: tl.constexpr):
    """The codes of the rows that begin `row` bytes behind `states`, at the dims d."""
    return tl.load(states + aligned(row) + d, mask=mask & (d < D), other=0).to(dtype)


@triton.jit
def load_scales(states, row, mask, D: tl.constexpr):
    """The scales of these rows, in float32."""
    at = (states + row + D).to(tl.pointer_type(tl.float32))
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def load_coded_split(
    keys, values, k_row, v_row, d, dv, mask, scale,
    D: tl.constexpr, DV: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Of positions [N]: codes of keys [D, N] and of values [N, DV], and the factors [1, N] of scores
    and of weights.
    """
    k = load_codes(keys, k_row[None, :], d[:, None], mask[None, :], D, dtype)
    v = load_codes(values, v_row[:, None], dv[None, :], mask[:, None], DV, dtype)
    k_scale = scale * load_scales(keys, k_row, mask, D)[None, :]
    return k, v, k_scale, load_scales(values, v_row, mask, DV)[None, :]


@triton.jit
def store_codes(row, d, x, mask, D: tl.constexpr):
    """Write the codes and scales of x [.., TILE] to rows [.., 1], or of one head to one row."""
    if len(x.shape) == 1:
        row += tl.arange(0, 1)
    x = tl.where(d < D, x.to(tl.float32), 0.0)
    axis: tl.constexpr = len(x.shape) - 1
    scale = tl.math.div_rn(tl.max(tl.abs(x), axis, keep_dims=True), 127.0)
    # Not finite if a number is not.
    scale += tl.sum(x * 0.0, axis, keep_dims=True)
    code = tl.math.div_rn(x, tl.where(scale > 0.0, scale, 1.0) + tl.zeros_like(x))
    code = (code + _ROUND) - _ROUND
    tl.store(row + d, code.to(tl.int8), mask=mask & (d < D))
    tl.store((row + D).to(tl.pointer_type(tl.float32)), scale, mask=mask)
