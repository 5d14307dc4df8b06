"""layernorm in CUDA C++: one warp a row, reduced by shuffles. The kernel is in layernorm.cu."""

from pathlib import Path

import torch

from gpukern import device
from gpukern.kernels.cpp import CppKernel
from gpukern.op import InputError, require, require_whole

_layernorm_kernel = CppKernel(Path(__file__).with_name("layernorm.cu"), "layernorm_kernel")


def layernorm(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-5, warps: int = 4
) -> torch.Tensor:
    """x: `[..., C]`, gamma, beta: `[C]`, contiguous. Returns the normalised rows, shape of x.

    Blocks of `warps` warps, each of which normalises one row. Against a block a row with a tree in shared memory: no
    barrier and no shared memory; a row is read three times, from the L1 after the first. Needs a CUDA card.
    """
    require(x, "x", (None,) * max(1, getattr(x, "ndim", 1)))
    C = x.shape[-1]
    require(gamma, "gamma", (C,), like=x)
    require(beta, "beta", (C,), like=x)
    require_whole(warps=warps)
    device.check_launch(1, 32 * warps)
    if not (x.is_contiguous() and gamma.is_contiguous() and beta.is_contiguous()):
        raise InputError("layernorm wants contiguous tensors; call .contiguous() first.")
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    rows = out.numel() // C
    grid = (-(-rows // warps),)
    device.check_launch(grid, 32 * warps)
    _layernorm_kernel[x.dtype](grid, (32 * warps,), x, gamma, beta, out, float(eps), rows, C)
    return out
