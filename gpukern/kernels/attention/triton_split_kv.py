"""Decode attention: few rows of q, a long cache. The cache is split over programs, and the last of them combines.

Source: Dao et al., *Flash-Decoding* (2023); the combination in the same kernel by the last program to arrive is that
of the CUDA sample threadFenceReduction.
"""

import math

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.attention.triton_ladder import require_heads
from gpukern.kernels.matmul.triton_ladder import buffers, require_dot_tile
from gpukern.kernels.tickets import tickets
from gpukern.op import require_power_of_two

ROWS = 16  # of q in one tile: the least that tl.dot takes
_ROWS = tl.constexpr(ROWS)
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32; -inf - -inf would be NaN, this minus itself is 0


@triton.jit
def attend_to_part(
    q,  # [16, D]
    k_ptr,  # of one head, [S, D]
    v_ptr,
    stride_ks,
    stride_vs,
    sees,  # [16] how many columns each row sees
    first,
    last,
    scale,
    BN: tl.constexpr,
    D: tl.constexpr,
):
    """Columns first .. last of the cache: (acc [16, D], top [16], total [16]), as in flash attention.

    Past the L1 (.cg): another SM may have written the last row of the cache in this very launch (decode_layer).
    """
    d = tl.arange(0, D)
    top = tl.full((_ROWS,), _LOWEST, dtype=tl.float32)
    total = tl.zeros((_ROWS,), dtype=tl.float32)
    acc = tl.zeros((_ROWS, D), dtype=tl.float32)
    for n0 in tl.range(first, last, BN):
        n = n0 + tl.arange(0, BN)
        k_ptrs = k_ptr + n.to(tl.int64)[:, None] * stride_ks + d[None, :]  # [BN, D]
        v_ptrs = v_ptr + n.to(tl.int64)[:, None] * stride_vs + d[None, :]
        k = tl.load(k_ptrs, mask=(n < last)[:, None], other=0.0, cache_modifier=".cg")
        v = tl.load(v_ptrs, mask=(n < last)[:, None], other=0.0, cache_modifier=".cg")
        s = scale * tl.dot(q, k.T, input_precision="ieee")  # [16, BN], in units of log2(e)
        s = tl.where((n < last)[None, :] & (n[None, :] < sees[:, None]), s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def combine_row(acc_ptr, top_ptr, total_ptr, stride, r, SPLITS: tl.constexpr, D: tl.constexpr):
    """Row r of the whole: the parts' sums, each rescaled from its own largest score to the largest of all. [D]

    acc_ptr   `[SPLITS, 16, D]` of one group of programs, top_ptr, total_ptr `[SPLITS, 16]`; stride: 16
    """
    part = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    top = tl.load(top_ptr + part * stride + r, cache_modifier=".cg")  # .cg: other SMs wrote them; L1 may be stale
    total = tl.load(total_ptr + part * stride + r, cache_modifier=".cg")
    acc = tl.load(acc_ptr + (part * stride + r)[:, None] * D + d[None, :], cache_modifier=".cg")
    weight = tl.exp2(top - tl.max(top, axis=0))
    whole = tl.sum(weight * total, axis=0)
    return tl.sum(acc * weight[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)  # sees nothing: 0


@triton.jit
def _attention_split_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # [B, T, H*D] contiguous
    acc_ptr,  # [groups, SPLITS, 16, D] float32, what the programs of a group leave for the last of them
    top_ptr,  # [groups, SPLITS, 16]
    total_ptr,
    ticket_ptr,  # [groups], 0 before and after
    H_kv,
    GROUP,  # heads of q that share one head of k and v
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
    SPLITS: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
):
    """One part of the columns, for up to 16 rows of the heads that share one head of k and v.

    Row r of a group is token r % T of its head r // T: with grouped heads a tile of k is read once for all of them.
    """
    pid, tiles = tl.program_id(0), tl.cdiv(GROUP * T, _ROWS)
    group, part = (pid // SPLITS).to(tl.int64), pid % SPLITS
    head = group // tiles
    b, h_kv = head // H_kv, head % H_kv
    first_row = group % tiles * _ROWS
    r, d = first_row + tl.arange(0, _ROWS), tl.arange(0, D)
    h, t = h_kv * GROUP + r // T, r % T
    exists = r < GROUP * T
    q_rows = q_ptr + b * stride_qb + h * stride_qh + t * stride_qt
    q = tl.load(q_rows[:, None] + d[None, :], mask=exists[:, None], other=0.0)

    chunk = tl.cdiv(tl.cdiv(S, SPLITS), BN) * BN
    first, last = part * chunk, tl.minimum((part + 1) * chunk, S)
    sees = tl.zeros((_ROWS,), dtype=tl.int64) + S
    if CAUSAL:
        sees = t + S - T + 1
    k_ptr += b * stride_kb + h_kv * stride_kh
    v_ptr += b * stride_vb + h_kv * stride_vh
    acc, top, total = attend_to_part(q, k_ptr, v_ptr, stride_ks, stride_vs, sees, first, last, scale, BN, D)

    row = (group * SPLITS + part) * _ROWS + tl.arange(0, _ROWS)
    tl.store(acc_ptr + row[:, None] * D + d[None, :], acc, mask=exists[:, None])
    tl.store(top_ptr + row, top, mask=exists)
    tl.store(total_ptr + row, total, mask=exists)
    tl.debug_barrier()  # all threads have stored before one of them takes the ticket
    ticket = tl.atomic_add(ticket_ptr + group, 1, sem="acq_rel")
    if ticket == SPLITS - 1:
        acc_ptr += group * SPLITS * _ROWS * D
        top_ptr += group * SPLITS * _ROWS
        total_ptr += group * SPLITS * _ROWS
        for i in tl.range(0, tl.minimum(_ROWS, GROUP * T - first_row)):
            out = combine_row(acc_ptr, top_ptr, total_ptr, _ROWS, i, SPLITS, D)
            one = first_row + i
            out_row = (b * T + one % T) * H_kv * GROUP + h_kv * GROUP + one // T
            tl.store(out_ptr + out_row * D + d, out)
        tl.store(ticket_ptr + group, 0)  # for the next launch


def attention_split_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    BN: int = 64,
    splits: int = 8,
    warps: int = 4,
    stages: int = 3,
) -> torch.Tensor:
    """As attention_flash, with the columns of one tile of rows split over `splits` programs (a power of two).

    In decode q has one row, and flash attention starts B*H programs, fewer than a card has SMs; here it is `splits`
    times as many, so that enough loads are on their way to keep memory busy. Bytes grow by the parts that go to memory
    and come back; the atomics are B*H*splits. Heads that share one head of k and v are the rows of one tile: k and v
    are read once for all of them.

    q: `[B, H, T, D]`, k, v: `[B, H_kv, S, D]`; D is 16, 32, 64 or 128 and its elements lie side by side. Returns
    `[B, T, H*D]`. Raises InputError for arguments that do not fit, LimitError for a tile the card cannot hold.
    """
    B, H, T, D, H_kv, S = require_heads(q, k, v)
    require_dot_tile(warps, stages, BN=BN)
    require_power_of_two(splits=splits)
    out = torch.empty((B, T, H * D), dtype=q.dtype, device=q.device)
    if out.numel() == 0 or S == 0:
        return out.zero_()
    groups = B * H_kv * triton.cdiv(H // H_kv * T, ROWS)
    grid = (groups * splits,)
    device.check_launch(grid, 32 * warps, split_kv_shared_bytes(BN, splits, D, warps, stages, q.dtype))
    acc = torch.empty((groups, splits, ROWS, D), dtype=torch.float32, device=q.device)
    top, total = torch.empty((2, groups, splits, ROWS), dtype=torch.float32, device=q.device)
    _attention_split_kv_kernel[grid](
        q, k, v, out, acc, top, total, tickets(groups), H_kv, H // H_kv, T, S, D**-0.5 * math.log2(math.e),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        CAUSAL=causal, SPLITS=splits, BN=BN, D=D, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def split_kv_shared_bytes(
    BN: int, splits: int, D: int, warps: int, stages: int, dtype: torch.dtype, on: device.Card | None = None
) -> int:
    """Shared memory of one program, in bytes, at the least: the tiles of k and v in flight."""
    return 2 * buffers(ROWS, warps, stages, dtype, on) * BN * D * dtype.itemsize
