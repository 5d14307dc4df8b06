"""gelu in Triton. `gelu_tile` is also the epilogue of matmul."""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.op import InputError, require, require_power_of_two


@triton.jit
def gelu_tile(x):
    """The tanh GELU of a float32 tile of any shape."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # the first factor is sqrt(2 / pi)
    return x * tl.sigmoid(2 * u)


@triton.jit
def _gelu_kernel(x_ptr, out_ptr, N, BN: tl.constexpr):
    """One program maps one tile of BN elements."""
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    mask = n < N
    x = tl.load(x_ptr + n, mask=mask).to(tl.float32)
    tl.store(out_ptr + n, gelu_tile(x), mask=mask)


def gelu(x: torch.Tensor, BN: int = 1024, warps: int = 4) -> torch.Tensor:
    """x: any shape, contiguous. Tiles of BN (a power of two) on `warps` warps. Returns gelu(x), same shape."""
    require(x, "x", (None,) * getattr(x, "ndim", 1))
    require_power_of_two(BN=BN, warps=warps)
    if not x.is_contiguous():
        raise InputError("gelu wants a contiguous tensor; call .contiguous() first.")
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(out.numel(), BN),)
    device.check_launch(grid, 32 * warps)
    _gelu_kernel[grid](x, out, out.numel(), BN=BN, num_warps=warps)
    return out
