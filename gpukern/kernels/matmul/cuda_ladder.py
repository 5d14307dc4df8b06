"""matmul in CUDA C++: the tiled kernel, with its epilogue. The kernel is in matmul.cu."""

from pathlib import Path

import torch

from gpukern import device
from gpukern.kernels.cpp import CppKernel
from gpukern.op import InputError, require, require_whole

_matmul_kernel = CppKernel(Path(__file__).with_name("matmul.cu"), "matmul_kernel")


def matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    BM: int = 16,
    BN: int = 16,
    BK: int = 16,
) -> torch.Tensor:
    """a: `[M, K]`, w: `[K, N]`, residual: `[M, N]`, all of any strides; bias: `[N]`, contiguous; activation: None or
    "gelu".

    Blocks of (BN, BM) threads, one an element of the output; K is walked in steps of BK. The tiled kernel of Numba,
    statement by statement: the same sectors and bank conflicts; the compiler unrolls the loop over BK by itself, and
    pointers bring no array headers along, so it should need fewer registers. Needs a CUDA card.
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
    require_whole(BM=BM, BN=BN, BK=BK)
    device.check_launch(1, (BN, BM))
    shared, most = shared_bytes(BM, BN, BK, a.dtype), device.card().shared_static
    if shared > most:
        raise device.LimitError(
            f"the tile {(BM, BN, BK)} wants {shared:,} bytes of static shared memory; a block has {most:,}. Choose a "
            "smaller BK."
        )
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    grid = (-(-M // BM), -(-N // BN))
    device.check_launch(grid, (BN, BM))
    r_m, r_n = (0, 0) if residual is None else residual.stride()
    _matmul_kernel[a.dtype, BM, BN, BK, activation == "gelu"](
        grid, (BN, BM),
        a, *a.stride(), w, *w.stride(), bias, residual, r_m, r_n, out, M, N, K,
    )  # fmt: skip
    return out


def shared_bytes(BM: int, BN: int, BK: int, dtype: torch.dtype, on: device.Card | None = None) -> int:
    """Static shared memory of one block, in bytes: the tiles of a and w, in float32 whatever the dtype and the card."""
    return 4 * BK * (BM + BN)
