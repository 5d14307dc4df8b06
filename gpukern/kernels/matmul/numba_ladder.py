"""matmul in Numba-CUDA."""

import functools
from collections.abc import Callable

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.kernels.gelu.numba_ladder import tanh_gelu
from gpukern.op import InputError, require, require_whole


@functools.cache
def _matmul_kernel(BM, BN, BK, has_bias, has_gelu, has_residual):
    """The kernel of one tile and one epilogue: shared arrays want constant sizes, so each is compiled on its own."""

    @cuda.jit(launch_bounds=BM * BN)  # so few registers a thread that a block of that size fits
    def matmul_kernel(a, w, bias, residual, out):
        """One block computes one BM x BN tile of the output, one thread an element of it."""
        a_tile = cuda.shared.array((BM, BK), float32)
        w_tile = cuda.shared.array((BK, BN), float32)
        M, K = a.shape
        N = w.shape[1]
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        m = cuda.blockIdx.x * BM + ty
        n = cuda.blockIdx.y * BN + tx
        acc = float32(0)
        for k0 in range(0, K, BK):
            # Together the threads load a tile of each; past the edge of a matrix a tile holds zeros.
            for k in range(tx, BK, BN):
                a_tile[ty, k] = float32(a[m, k0 + k]) if m < M and k0 + k < K else float32(0)
            for k in range(ty, BK, BM):
                w_tile[k, tx] = float32(w[k0 + k, n]) if n < N and k0 + k < K else float32(0)
            cuda.syncthreads()  # the tiles are full
            i = 0
            while i < BK:  # not `for i in range(BK)`, of which Numba unrolls less and checks each index for its sign
                acc += a_tile[ty, i] * w_tile[i, tx]
                i += 1
            cuda.syncthreads()  # the tiles are used up
        if m < M and n < N:
            if has_bias:
                acc += float32(bias[n])
            if has_gelu:
                acc = tanh_gelu(acc)
            if has_residual:
                acc += float32(residual[m, n])
            out[m, n] = acc

    return matmul_kernel


def shared_bytes(BM: int, BN: int, BK: int, dtype: torch.dtype, on: device.Card | None = None) -> int:
    """Static shared memory of one block, in bytes: the tiles of a and w, in float32 whatever the dtype and the card."""
    return 4 * BK * (BM + BN)


def fit_tile(tile: tuple, shape: tuple, shared: Callable[..., int], dtype: torch.dtype, **more) -> tuple:
    """The tile (BM, BN, BK) for a product of `shape` (M, N, K): checked as it is given, then cut to what is needed.

    An axis shorter than its tile gets the next power of two, so that a single row (decode) runs in blocks of one row
    instead of blocks of idle threads, and few different kernels are compiled. `shared`: the kernel's `shared_bytes`,
    which gets the tile, dtype and `more`. Raises InputError for a size that is not a whole number of at least 1,
    LimitError for a tile that no launch can have.
    """
    BM, BN, BK = tile
    require_whole(BM=BM, BN=BN, BK=BK)
    device.check_launch(1, (BN, BM))
    wanted, static = shared(BM, BN, BK, dtype=dtype, **more), device.card().shared_static
    if wanted > static:
        raise device.LimitError(
            f"the tile {tile} wants {wanted:,} bytes of static shared memory; a block has {static:,}. "
            "Choose a smaller BK."
        )
    return tuple(min(n, 1 << max(size - 1, 0).bit_length()) for n, size in zip(tile, shape, strict=True))


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
    """a: `[M, K]`, w: `[K, N]`, bias: `[N]`, residual: `[M, N]`, all of any strides; activation: None or "gelu".

    Blocks of (BN, BM) threads, cut where M or N is smaller (see `fit_tile`); K is walked in steps of BK.
    Returns activation(a @ w + bias) + residual, `[M, N]`, added up in float32 and rounded once.
    """
    require(a, "a", (None, None))
    M, K = a.shape
    require(w, "w", (K, None), like=a)
    N = w.shape[1]
    if bias is not None:
        require(bias, "bias", (N,), like=a)
    if activation not in (None, "gelu"):
        raise InputError(f'activation={activation!r} is not known; use None or "gelu".')
    if residual is not None:
        require(residual, "residual", (M, N), like=a)
    BM, BN, BK = fit_tile((BM, BN, BK), (M, N, K), shared_bytes, a.dtype)
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    grid = (-(-M // BM), -(-N // BN))  # the rows on x: y and z allow 65,535 blocks only
    device.check_launch(grid, (BN, BM))
    kernel = _matmul_kernel(BM, BN, BK, bias is not None, activation == "gelu", residual is not None)
    # A kernel that has no use for an argument still wants an array in its place.
    arrays = (a, w, out if bias is None else bias, out if residual is None else residual, out)
    kernel[grid, (BN, BM), device.numba_stream()](*map(device.numba_array, arrays))
    return out
