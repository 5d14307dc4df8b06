"""qkv in Numba-CUDA."""

import functools

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.kernels.layernorm.numba_ladder import row_stats
from gpukern.kernels.matmul.numba_ladder import fit_tile
from gpukern.kernels.qkv import require_caches
from gpukern.op import InputError, require


@functools.cache
def _qkv_kernel(BM, BN, BK, has_norm):
    """The kernel of one tile, with or without LayerNorm as its prologue."""

    @cuda.jit(launch_bounds=BM * BN)
    def qkv_kernel(x, w, bias, gamma, beta, eps, position, q, k_cache, v_cache):
        """The tiled product of matmul; row m is token t of sequence b, column n an element of Q, K or V of a head."""
        a_tile = cuda.shared.array((BM, BK), float32)
        w_tile = cuda.shared.array((BK, BN), float32)
        B, T, C = x.shape
        D = q.shape[3]
        M, N = B * T, 3 * C
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        m = cuda.blockIdx.x * BM + ty
        n = cuda.blockIdx.y * BN + tx
        row = min(m, M - 1)  # rows past the end share the last row's statistics and store nothing
        b, t = row // T, row % T

        mean, rstd = float32(0), float32(1)
        if has_norm:
            partial = cuda.shared.array((BM, BN), float32)
            mean, rstd = row_stats(x[b, t], eps, partial[ty])

        acc = float32(0)
        for c0 in range(0, C, BK):
            for c in range(tx, BK, BN):
                a = float32(0)
                if m < M and c0 + c < C:
                    a = float32(x[b, t, c0 + c])
                    if has_norm:
                        a = (a - mean) * rstd * float32(gamma[c0 + c]) + float32(beta[c0 + c])
                a_tile[ty, c] = a
            for c in range(ty, BK, BM):
                w_tile[c, tx] = float32(w[c0 + c, n]) if n < N and c0 + c < C else float32(0)
            cuda.syncthreads()
            i = 0
            while i < BK:
                acc += a_tile[ty, i] * w_tile[i, tx]
                i += 1
            cuda.syncthreads()

        if m < M and n < N:
            acc += float32(bias[n])
            h, d = n % C // D, n % D
            if n < C:
                q[b, h, t, d] = acc
            elif n < 2 * C:
                k_cache[b, h, position + t, d] = acc
            else:
                v_cache[b, h, position + t, d] = acc

    return qkv_kernel


def shared_bytes(
    BM: int, BN: int, BK: int, dtype: torch.dtype, on: device.Card | None = None, norm: bool = True
) -> int:
    """Static shared memory of one block, in bytes: as for matmul, and with a `norm` one number a thread to reduce."""
    return 4 * (BK * (BM + BN) + norm * BM * BN)


def qkv(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: int,
    norm: tuple | None = None,
    BM: int = 16,
    BN: int = 16,
    BK: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x: `[B, T, C]`, w: `[C, 3C]` (columns: Q's heads, K's, V's), bias: `[3C]`, caches: `[B, H, S, D]`; any strides.

    norm: None, or (gamma `[C]`, beta `[C]`, eps) for a LayerNorm of x on the way in. Blocks of (BN, BM) threads, cut
    where B T or 3C is smaller (see `fit_tile`). The new keys and values go into rows `position` ... `position` + T - 1
    of the caches. Returns (q `[B, H, T, D]`, k_cache, v_cache), the caches being the ones given.
    """
    require(x, "x", (None, None, None))
    B, T, C = x.shape
    require(w, "w", (C, 3 * C), like=x)
    require(bias, "bias", (3 * C,), like=x)
    require(k_cache, "k_cache", (B, None, None, None), like=x)
    require(v_cache, "v_cache", tuple(k_cache.shape), like=x)
    _, H, S, D = k_cache.shape
    if H * D != C:
        raise InputError(f"the caches have {H} heads of {D}, together {H * D}; x has width {C}.")
    require_caches(k_cache, v_cache, position, T)
    gamma, beta, eps = (bias, bias, 0.0) if norm is None else norm  # stand-ins, which the kernel then does not read
    if norm is not None:
        require(gamma, "gamma", (C,), like=x)
        require(beta, "beta", (C,), like=x)
    tile = BM, BN, BK
    BM, BN, BK = fit_tile(tile, (B * T, 3 * C, C), shared_bytes, x.dtype, norm=norm is not None)
    q = torch.empty(B, H, T, D, dtype=x.dtype, device=x.device)
    if q.numel() == 0:
        return q, k_cache, v_cache
    grid = (-(-B * T // BM), -(-3 * C // BN))
    device.check_launch(grid, (BN, BM))
    kernel = _qkv_kernel(BM, BN, BK, norm is not None)
    x, w, bias, gamma, beta = map(device.numba_array, (x, w, bias, gamma, beta))
    outputs = map(device.numba_array, (q, k_cache, v_cache))
    kernel[grid, (BN, BM), device.numba_stream()](x, w, bias, gamma, beta, eps, position, *outputs)
    return q, k_cache, v_cache
