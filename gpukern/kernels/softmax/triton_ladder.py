"""softmax in Triton: one program a row, BN columns at a time, so that a row may have any width."""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.op import InputError, require, require_power_of_two


@triton.jit
def _softmax_kernel(x_ptr, out_ptr, T, S, CAUSAL: tl.constexpr, BN: tl.constexpr):
    """One row, read twice: the first pass finds max and sum together, the second writes the quotients.

    The sum is kept relative to the largest element so far; a larger one rescales it (the online softmax). Columns
    that the row does not see are never read.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * S
    out_ptr += row * S
    visible = S
    if CAUSAL:
        visible = tl.maximum(row % T + 1 + S - T, 0)  # never more than S, as row % T < T
    n = tl.arange(0, BN)

    top, shift, total = -float("inf"), 0.0, 0.0
    for n0 in tl.range(0, visible, BN):
        x = tl.load(x_ptr + n0 + n, mask=n0 + n < visible, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, axis=0))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf would be NaN
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), axis=0)
        top = new_top

    total = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing: all its weights are exp(-inf) = 0
    for n0 in tl.range(0, S, BN):
        x = tl.load(x_ptr + n0 + n, mask=n0 + n < visible, other=-float("inf")).to(tl.float32)
        out = tl.where(n0 + n < visible, tl.exp(x - shift) / total, 0.0)  # 0 also where a NaN made the total one
        tl.store(out_ptr + n0 + n, out, mask=n0 + n < S)


def softmax(x: torch.Tensor, causal: bool = False, BN: int = 4096, warps: int = 8) -> torch.Tensor:
    """x: `[..., T, S]`, contiguous. BN: columns at a time, a power of two. Returns the softmax over S, same shape.

    causal: row i sees column j if j <= i + S - T. A row that sees nothing, or only -inf, is 0.
    """
    require(x, "x", (None,) * max(2, getattr(x, "ndim", 2)))
    require_power_of_two(BN=BN, warps=warps)
    if not x.is_contiguous():
        raise InputError("softmax wants contiguous rows; call .contiguous() first.")
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    T, S = x.shape[-2:]
    grid = (out.numel() // S,)
    device.check_launch(grid, 32 * warps)
    BN = min(BN, triton.next_power_of_2(S))  # no lanes that a short row can not fill
    _softmax_kernel[grid](x, out, T, S, CAUSAL=causal, BN=BN, num_warps=warps)
    return out
