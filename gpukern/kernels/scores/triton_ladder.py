"""scores in Triton: matmul's main loop once for every batch and head, with k read as its transpose."""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.matmul.triton_ladder import dot_loop, require_dot_tile, shared_bytes
from gpukern.kernels.scores import require_groups, require_head_size
from gpukern.op import require


@triton.jit
def _scores_kernel(
    q_ptr,
    k_ptr,
    out_ptr,  # [B, H, T, S] contiguous
    H,
    GROUP,  # heads of q that share one head of k
    T,
    S,
    D,
    scale,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One tile [BM, BN] of the scores of one head of one batch."""
    pid, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(T, BM), tl.cdiv(S, BN)
    head, tile = (pid // (tiles_m * tiles_n)).to(tl.int64), pid % (tiles_m * tiles_n)
    b, h = head // H, head % H
    m = (tile // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    n = (tile % tiles_n).to(tl.int64) * BN + tl.arange(0, BN)
    m_mask, n_mask = m < T, n < S

    q_rows = q_ptr + b * stride_qb + h * stride_qh + m * stride_qt
    k_rows = k_ptr + b * stride_kb + h // GROUP * stride_kh + n * stride_ks  # row s of k is column s of k^T
    out = scale * dot_loop(q_rows, stride_qd, m_mask, k_rows, stride_kd, n_mask, D, BM, BN, BK)

    out_ptrs = out_ptr + (head * T + m)[:, None] * S + n[None, :]
    tl.store(out_ptrs, out, mask=m_mask[:, None] & n_mask[None, :])


def scores(
    q: torch.Tensor, k: torch.Tensor, BM: int = 64, BN: int = 64, BK: int = 32, warps: int = 4, stages: int = 2
) -> torch.Tensor:
    """q: `[B, H, T, D]`, k: `[B, H_kv, S, D]`, any strides; tile as in matmul. Returns q k^T / sqrt(D) of all heads.

    That is `[B, H, T, S]`, in the dtype of q.
    """
    require(q, "q", (None, None, None, None))
    require_head_size(q)
    B, H, T, D = q.shape
    require(k, "k", (B, None, None, D), like=q)
    H_kv, S = k.shape[1:3]
    require_groups(H, H_kv)
    require_dot_tile(warps, stages, BM=BM, BN=BN, BK=BK)
    out = torch.empty((B, H, T, S), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    grid = (B * H * triton.cdiv(T, BM) * triton.cdiv(S, BN),)
    device.check_launch(grid, 32 * warps, shared_bytes(BM, BN, BK, warps, stages, q.dtype))
    _scores_kernel[grid](
        q, k, out, H, H // max(H_kv, 1), T, S, D, D**-0.5, *q.stride(), *k.stride(),
        BM=BM, BN=BN, BK=BK, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
