"""values in Triton: matmul's main loop once for every batch and head, stored with the heads side by side."""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.matmul.triton_ladder import dot_loop, require_dot_tile, shared_bytes
from gpukern.kernels.scores import require_groups
from gpukern.op import require


@triton.jit
def _values_kernel(
    p_ptr,
    v_ptr,
    out_ptr,  # [B, T, H*D] contiguous
    H,
    GROUP,  # heads of p that share one head of v
    T,
    S,
    D,
    stride_pb,
    stride_ph,
    stride_pt,
    stride_ps,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One tile [BM, BN] of the output of one head of one batch."""
    pid, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(T, BM), tl.cdiv(D, BN)
    head, tile = (pid // (tiles_m * tiles_n)).to(tl.int64), pid % (tiles_m * tiles_n)
    b, h = head // H, head % H
    m = (tile // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    n = (tile % tiles_n).to(tl.int64) * BN + tl.arange(0, BN)
    m_mask, n_mask = m < T, n < D

    p_rows = p_ptr + b * stride_pb + h * stride_ph + m * stride_pt
    v_cols = v_ptr + b * stride_vb + h // GROUP * stride_vh + n * stride_vd
    out = dot_loop(p_rows, stride_ps, m_mask, v_cols, stride_vs, n_mask, S, BM, BN, BK)

    out_ptrs = out_ptr + ((b * T + m) * H + h)[:, None] * D + n[None, :]
    tl.store(out_ptrs, out, mask=m_mask[:, None] & n_mask[None, :])


def values(
    p: torch.Tensor, v: torch.Tensor, BM: int = 64, BN: int = 64, BK: int = 32, warps: int = 4, stages: int = 3
) -> torch.Tensor:
    """p: `[B, H, T, S]`, v: `[B, H_kv, S, D]`, any strides; tile as for matmul. Returns p v, `[B, T, H*D]`."""
    require(p, "p", (None, None, None, None))
    B, H, T, S = p.shape
    require(v, "v", (B, None, S, None), like=p)
    H_kv, D = v.shape[1], v.shape[3]
    require_groups(H, H_kv)
    require_dot_tile(warps, stages, BM=BM, BN=BN, BK=BK)
    out = torch.empty((B, T, H * D), dtype=p.dtype, device=p.device)
    if out.numel() == 0:
        return out
    grid = (B * H * triton.cdiv(T, BM) * triton.cdiv(D, BN),)
    device.check_launch(grid, 32 * warps, shared_bytes(BM, BN, BK, warps, stages, p.dtype))
    _values_kernel[grid](
        p, v, out, H, H // max(H_kv, 1), T, S, D, *p.stride(), *v.stride(),
        BM=BM, BN=BN, BK=BK, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
