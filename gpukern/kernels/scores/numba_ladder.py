"""scores in Numba-CUDA."""

import functools
import math

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.kernels.matmul.numba_ladder import fit_tile
from gpukern.kernels.scores import require_head_size
from gpukern.op import require


@functools.cache
def _scores_kernel(BM, BN, BK):
    """The kernel of one tile."""
    # Rows one longer than needed: the threads of a warp read down a column of K's tile, which then lies in 32 banks.
    PITCH = BK + 1

    @cuda.jit(launch_bounds=BM * BN)
    def scores_kernel(q, k, out):
        """One block computes a BM x BN tile of the scores of one head; row t of Q meets row s of K."""
        q_tile = cuda.shared.array((BM, BK), float32)
        k_tile = cuda.shared.array((BN, PITCH), float32)
        _, H, T, D = q.shape
        S = k.shape[2]
        b, h = cuda.blockIdx.x // H, cuda.blockIdx.x % H
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        s0 = cuda.blockIdx.y * BN
        t = cuda.blockIdx.z * BM + ty
        acc = float32(0)
        for d0 in range(0, D, BK):
            # K is read along its rows, as it lies in memory, and so transposed in passing.
            for d in range(tx, BK, BN):
                q_tile[ty, d] = float32(q[b, h, t, d0 + d]) if t < T and d0 + d < D else float32(0)
                for s in range(ty, BN, BM):
                    k_tile[s, d] = float32(k[b, h, s0 + s, d0 + d]) if s0 + s < S and d0 + d < D else float32(0)
            cuda.syncthreads()
            i = 0
            while i < BK:
                acc += q_tile[ty, i] * k_tile[tx, i]
                i += 1
            cuda.syncthreads()
        if t < T and s0 + tx < S:
            out[b, h, t, s0 + tx] = acc / math.sqrt(float32(D))

    return scores_kernel


def shared_bytes(BM: int, BN: int, BK: int, dtype: torch.dtype, on: device.Card | None = None) -> int:
    """Static shared memory of one block, in bytes: as for matmul, and a spare element for each row of K's tile."""
    return 4 * (BM * BK + BN * (BK + 1))


def scores(q: torch.Tensor, k: torch.Tensor, BM: int = 16, BN: int = 16, BK: int = 16) -> torch.Tensor:
    """q: `[B, H, T, D]`, k: `[B, H, S, D]`, any strides (a cache cut to S tokens, for one).

    Blocks of (BN, BM) threads, cut where T or S is smaller (see `fit_tile`). Returns q k^T / sqrt(D), `[B, H, T, S]`.
    """
    require(q, "q", (None, None, None, None))
    require_head_size(q)
    B, H, T, D = q.shape
    require(k, "k", (B, H, None, D), like=q)
    S = k.shape[2]
    BM, BN, BK = fit_tile((BM, BN, BK), (T, S, D), shared_bytes, q.dtype)
    out = torch.empty(B, H, T, S, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    grid = (B * H, -(-S // BN), -(-T // BM))
    device.check_launch(grid, (BN, BM))
    kernel = _scores_kernel(BM, BN, BK)
    kernel[grid, (BN, BM), device.numba_stream()](*map(device.numba_array, (q, k, out)))
    return out
