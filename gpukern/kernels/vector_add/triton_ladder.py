"""vector_add in Triton."""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.op import InputError, require, require_power_of_two


@triton.jit
def _vector_add_kernel(x_ptr, y_ptr, out_ptr, N, BN: tl.constexpr):
    """One program adds one tile of BN elements; the mask keeps the last program off the end."""
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    mask = n < N
    x = tl.load(x_ptr + n, mask=mask).to(tl.float32)
    y = tl.load(y_ptr + n, mask=mask).to(tl.float32)
    tl.store(out_ptr + n, x + y, mask=mask)


def vector_add(x: torch.Tensor, y: torch.Tensor, BN: int = 1024, warps: int = 4) -> torch.Tensor:
    """x, y: `[N]`, contiguous. Tiles of BN (a power of two) on `warps` warps. Returns x + y, `[N]`."""
    require(x, "x", (None,))
    require(y, "y", tuple(x.shape), like=x)
    require_power_of_two(BN=BN, warps=warps)
    if not (x.is_contiguous() and y.is_contiguous()):
        raise InputError("vector_add wants contiguous vectors; call .contiguous() first.")
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(out.numel(), BN),)
    device.check_launch(grid, 32 * warps)
    _vector_add_kernel[grid](x, y, out, out.numel(), BN=BN, num_warps=warps)
    return out
