"""attention in Triton: as three kernels, and as one (flash attention)."""

import math

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.matmul.triton_ladder import buffers, require_dot_tile
from gpukern.kernels.scores import require_groups
from gpukern.kernels.scores.triton_ladder import scores
from gpukern.kernels.softmax.triton_ladder import softmax
from gpukern.kernels.values.triton_ladder import values
from gpukern.op import InputError, require

HEAD_SIZES = (16, 32, 64, 128)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """q: `[B, H, T, D]`, k, v: `[B, H_kv, S, D]`, any strides. Returns `[B, T, H*D]`.

    Three kernels: the scores and the weights, `[B, H, T, S]` each, go to memory and come back.
    """
    require(k, "k", (None, None, None, None))
    require(v, "v", (*k.shape[:3], None), like=k)  # before anything is computed; the kernels check the rest
    return values(softmax(scores(q, k), causal), v)


@triton.jit
def _attend(
    acc,  # [BM, D] sum of weights times values so far
    top,  # [BM] largest score so far
    total,  # [BM] sum of weights so far
    q,  # [BM, D]
    k_ptr,
    v_ptr,
    stride_ks,
    stride_vs,
    m,  # [BM] rows
    first,
    last,
    T,
    S,
    scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
):
    """Attend to columns first .. last, BN at a time, with the online softmax. Returns the new acc, top and total.

    Without MASKED every row sees all of these columns, and nothing is compared.
    """
    d = tl.arange(0, D)
    for n0 in tl.range(first, last, BN):
        n = n0 + tl.arange(0, BN)
        k_ptrs = k_ptr + n.to(tl.int64)[None, :] * stride_ks + d[:, None]  # [D, BN], a tile of k^T
        v_ptrs = v_ptr + n.to(tl.int64)[:, None] * stride_vs + d[None, :]  # [BN, D]
        if MASKED:
            k = tl.load(k_ptrs, mask=(n < S)[None, :], other=0.0)
            v = tl.load(v_ptrs, mask=(n < S)[:, None], other=0.0)
        else:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        s = scale * tl.dot(q, k, input_precision="ieee")  # [BM, BN], in units of log2(e), for exp2
        if MASKED:
            sees = (n < S)[None, :]
            if CAUSAL:
                sees = sees & (n[None, :] <= m[:, None] + S - T)
            s = tl.where(sees, s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf would be NaN
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _attention_flash_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # [B, T, H*D] contiguous
    H,
    GROUP,  # heads that share one head of k and v
    T,
    S,
    scale,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
):
    """BM rows of one head of one batch: first the tiles that every row sees whole, then the ones under a mask."""
    pid, tiles = tl.program_id(0), tl.cdiv(T, BM)
    head = (pid // tiles).to(tl.int64)
    b, h = head // H, head % H
    tile = tiles - 1 - pid % tiles  # the last rows see the most, and start first
    m, d = tile * BM + tl.arange(0, BM), tl.arange(0, D)
    m_mask = (m < T)[:, None]
    q_ptrs = q_ptr + b * stride_qb + h * stride_qh + m.to(tl.int64)[:, None] * stride_qt + d[None, :]
    q = tl.load(q_ptrs, mask=m_mask, other=0.0)  # [BM, D]
    k_ptr += b * stride_kb + h // GROUP * stride_kh
    v_ptr += b * stride_vb + h // GROUP * stride_vh

    whole, last = S // BN * BN, S
    if CAUSAL:  # row i sees i + S - T + 1 columns; tiles that not even the last row sees are skipped
        whole = tl.maximum(tile * BM + S - T + 1, 0) // BN * BN
        last = tl.minimum((tile + 1) * BM + S - T, S)
    acc = tl.zeros((BM, D), dtype=tl.float32)
    top = tl.full((BM,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc, top, total = _attend(
        acc, top, total, q, k_ptr, v_ptr, stride_ks, stride_vs, m, 0, whole, T, S, scale, False, CAUSAL, BN, D
    )
    acc, top, total = _attend(
        acc, top, total, q, k_ptr, v_ptr, stride_ks, stride_vs, m, whole, last, T, S, scale, True, CAUSAL, BN, D
    )

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row that sees nothing stays 0
    out_ptrs = out_ptr + ((b * T + m) * H + h)[:, None] * D + d[None, :]
    tl.store(out_ptrs, out, mask=m_mask)


def attention_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    BM: int = 64,
    BN: int = 64,
    warps: int = 4,
    stages: int = 3,
) -> torch.Tensor:
    """q: `[B, H, T, D]`, k, v: `[B, H_kv, S, D]`; D is 16, 32, 64 or 128 and its elements lie side by side.

    One kernel: scores and weights never leave the SM. BM rows and BN columns at a time, powers of two from 16.
    Returns `[B, T, H*D]`. Raises InputError for arguments that do not fit, LimitError for a tile the card cannot hold.
    """
    B, H, T, D, H_kv, S = require_heads(q, k, v)
    require_dot_tile(warps, stages, BM=BM, BN=BN)
    out = torch.empty((B, T, H * D), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    grid = (B * H * triton.cdiv(T, BM),)
    device.check_launch(grid, 32 * warps, shared_bytes(BM, BN, D, warps, stages, q.dtype))
    _attention_flash_kernel[grid](
        q, k, v, out, H, H // H_kv, T, S, D**-0.5 * math.log2(math.e),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        CAUSAL=causal, BM=BM, BN=BN, D=D, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def require_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    """(B, H, T, D, H_kv, S) of q `[B, H, T, D]` and k, v `[B, H_kv, S, D]`; refuses what flash attention cannot take.

    H must be a multiple of H_kv: H / H_kv neighbouring heads of q share one of k and v.
    """
    require(q, "q", (None, None, None, None))
    B, H, T, D = q.shape
    require(k, "k", (B, None, None, D), like=q)
    H_kv, S = k.shape[1:3]
    require(v, "v", (B, H_kv, S, D), like=q)
    require_groups(H, H_kv)
    if D not in HEAD_SIZES:
        raise InputError(f"heads of {D} are not supported; use one of {HEAD_SIZES}, or the version in three kernels.")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(3) != 1:
            raise InputError(f"{name} must have the elements of a head side by side; call .contiguous() first.")
    return B, H, T, D, H_kv, S


def shared_bytes(
    BM: int, BN: int, D: int, warps: int, stages: int, dtype: torch.dtype, on: device.Card | None = None
) -> int:
    """Shared memory of one flash program on `on` (default: this machine's card), in bytes.

    The tile of q, the tiles of k and v in flight, and the tile of weights where it cannot stay in registers on its way
    into the second product. With wgmma it is what Triton reports; without, to within one tile of weights.
    """
    weights = 0 if dtype.itemsize == 2 and BM >= 64 else BM * BN
    return ((BM + 2 * buffers(BM, warps, stages, dtype, on) * BN) * D + weights) * dtype.itemsize
