"""matmul in CUDA C++: the tiled kernel, with its epilogue. The kernel is in matmul.cu."""

from pathlib import Path

import torch

from gpukern import device
from gpukern.kernels.cpp import CppKernel
from gpukern.op import InputError, require

_matmul_kernel = CppKernel(Path(__file__).with_name("matmul.cu"), "matmul_kernel")


def matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    TILE: int = 16,
) -> torch.Tensor:
    """a: `[M, K]`, w: `[K, N]`, residual: `[M, N]`, all of any strides; bias: `[N]`, contiguous; activation: None, "gelu".

    One block of TILE x TILE threads for each tile of the output; TILE is 8, 16 or 32. Against TILE = 1, which would be
    the naive kernel, elements read from global memory go down by the factor TILE. Needs a CUDA card.
    Returns activation(a @ w + bias) + residual, `[M, N]`, added up in float32 and rounded once.
    """
    require(a, "a", (None, None))
    M, K = a.shape
    require(w, "w", (K, None), like=a)
    N = w.shape[1]
    if bias is not None:
        require(bias, "bias", (N,), like=a)
        if not bias.is_contiguous():
            raise InputError("bias is not contiguous; call .contiguous() first.")
    if activation not in (None, "gelu"):
        raise InputError(f'activation={activation!r} is not known; use None or "gelu".')
    if residual is not None:
        require(residual, "residual", (M, N), like=a)
    if TILE not in (8, 16, 32):
        raise InputError(f"TILE={TILE!r} is not one of 8, 16 and 32: a block has TILE x TILE threads, at most 1024.")
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    grid = (-(-M // TILE), -(-N // TILE))
    device.check_launch(grid, (TILE, TILE))
    r_m, r_n = (0, 0) if residual is None else residual.stride()
    _matmul_kernel[a.dtype, TILE, activation == "gelu"](
        grid, (TILE, TILE),
        a, *a.stride(), w, *w.stride(), bias, residual, r_m, r_n, out, M, N, K,
    )  # fmt: skip
    return out
