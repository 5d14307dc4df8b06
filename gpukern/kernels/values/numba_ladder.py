"""values in Numba-CUDA."""

import functools

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.kernels.matmul.numba_ladder import fit_tile, shared_bytes
from gpukern.op import require


@functools.cache
def _values_kernel(BM, BN, BK):
    """The kernel of one tile."""

    @cuda.jit(launch_bounds=BM * BN)
    def values_kernel(p, v, out):
        """The tiled product of matmul for one head, stored where the heads stand side by side."""
        p_tile = cuda.shared.array((BM, BK), float32)
        v_tile = cuda.shared.array((BK, BN), float32)
        _, H, T, S = p.shape
        D = v.shape[3]
        b, h = cuda.blockIdx.x // H, cuda.blockIdx.x % H
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        t = cuda.blockIdx.y * BM + ty
        d = cuda.blockIdx.z * BN + tx
        acc = float32(0)
        for s0 in range(0, S, BK):
            for s in range(tx, BK, BN):
                p_tile[ty, s] = float32(p[b, h, t, s0 + s]) if t < T and s0 + s < S else float32(0)
            for s in range(ty, BK, BM):
                v_tile[s, tx] = float32(v[b, h, s0 + s, d]) if d < D and s0 + s < S else float32(0)
            cuda.syncthreads()
            i = 0
            while i < BK:
                acc += p_tile[ty, i] * v_tile[i, tx]
                i += 1
            cuda.syncthreads()
        if t < T and d < D:
            out[b, t, h * D + d] = acc

    return values_kernel


def values(p: torch.Tensor, v: torch.Tensor, BM: int = 16, BN: int = 16, BK: int = 16) -> torch.Tensor:
    """p: `[B, H, T, S]`, v: `[B, H, S, D]`, any strides (a cache cut to S tokens, for one).

    Blocks of (BN, BM) threads, cut where T or D is smaller (see `fit_tile`). Returns p v with its heads merged,
    `[B, T, H D]`.
    """
    require(p, "p", (None, None, None, None))
    B, H, T, S = p.shape
    require(v, "v", (B, H, S, None), like=p)
    D = v.shape[3]
    BM, BN, BK = fit_tile((BM, BN, BK), (T, D, S), shared_bytes, p.dtype)
    out = torch.empty(B, T, H * D, dtype=p.dtype, device=p.device)
    if out.numel() == 0:
        return out
    grid = (B * H, -(-T // BM), -(-D // BN))
    device.check_launch(grid, (BN, BM))
    kernel = _values_kernel(BM, BN, BK)
    kernel[grid, (BN, BM), device.numba_stream()](*map(device.numba_array, (p, v, out)))
    return out
