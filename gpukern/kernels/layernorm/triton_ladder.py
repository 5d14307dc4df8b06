"""layernorm in Triton: one program a row, which it keeps in registers."""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.op import InputError, require, require_power_of_two


@triton.jit
def _layernorm_kernel(x_ptr, gamma_ptr, beta_ptr, out_ptr, C, eps, BC: tl.constexpr):
    """One row of C elements in a tile of BC; it is read once, both passes of the variance are over registers."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    mask = c < C
    x = tl.load(x_ptr + row * C + c, mask=mask, other=0.0).to(tl.float32)
    gamma = tl.load(gamma_ptr + c, mask=mask, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + c, mask=mask, other=0.0).to(tl.float32)

    mean = tl.sum(x, axis=0) / C
    centred = tl.where(mask, x - mean, 0.0)  # a lane past the end is not a 0 - mean
    variance = tl.sum(centred * centred, axis=0) / C
    out = centred * tl.rsqrt(variance + eps) * gamma + beta
    tl.store(out_ptr + row * C + c, out, mask=mask)


def layernorm(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-5, warps: int = 4
) -> torch.Tensor:
    """x: `[..., C]`, gamma, beta: `[C]`, contiguous. Returns the normalised rows, shape of x.

    Raises LimitError for a row that `warps` warps have no registers for.
    """
    require(x, "x", (None,) * max(1, getattr(x, "ndim", 1)))
    C = x.shape[-1]
    require(gamma, "gamma", (C,), like=x)
    require(beta, "beta", (C,), like=x)
    require_power_of_two(warps=warps)
    if not (x.is_contiguous() and gamma.is_contiguous() and beta.is_contiguous()):
        raise InputError("layernorm wants contiguous tensors; call .contiguous() first.")
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    grid = (out.numel() // C,)
    device.check_launch(grid, 32 * warps)
    BC = triton.next_power_of_2(C)
    most = device.card().registers_per_thread
    if BC // (32 * warps) > most:
        raise device.LimitError(
            f"a row of {C} is {BC // (32 * warps)} values for each thread of {warps} warps, and a thread has {most} "
            "registers. Use more warps."
        )
    _layernorm_kernel[grid](x, gamma, beta, out, C, eps, BC=BC, num_warps=warps)
    return out
