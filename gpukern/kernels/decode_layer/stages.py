"""The stages of the one-kernel layer: a share of each for every program, and what lies between two of them."""

import triton
import triton.language as tl

from gpukern.kernels.attention.triton_split_kv import ROWS, attend_to_part, combine_row
from gpukern.kernels.decode_layer.vector import row_dots
from gpukern.kernels.gelu.triton_ladder import gelu_tile

COLUMNS = 64  # of the cache in one tile
_COLUMNS, _ROWS = tl.constexpr(COLUMNS), tl.constexpr(ROWS)


@triton.jit
def grid_barrier(arrived_ptr, meeting):
    """Wait until all programs of the grid have come here, at their barrier number `meeting`, counted from 1.

    The counter is never set back in between, so a program that runs ahead to the next barrier does no harm. It works
    only if all programs run at once: one that waits for a place on an SM would never arrive.
    """
    tl.debug_barrier()  # all threads have stored before one of them says so
    arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") + 1
    while arrived < meeting * tl.num_programs(0):
        arrived = tl.atomic_add(arrived_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def my_rows(N, BN: tl.constexpr):
    """(first, last) of the outputs of this program, a whole number of tiles, neighbours in memory."""
    share = tl.cdiv(tl.cdiv(N, tl.num_programs(0)), BN) * BN
    first = tl.program_id(0) * share
    return first, tl.minimum(first + share, N)


@triton.jit
def prefetch(ptr, n, BYTES: tl.constexpr):
    """Ask for the n elements from `ptr` on, or the first BYTES of them: they will be in L2 when the barrier opens."""
    size = n.to(tl.int64) * (ptr.dtype.element_ty.primitive_bitwidth // 8)
    if size > 0:
        line = ptr.to(tl.int64) + tl.arange(0, BYTES // 128) * 128 % size
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch_rows(w_ptr, N, K, BN: tl.constexpr, BYTES: tl.constexpr):
    """Ask for this program's weights of a matrix whose outputs' weights lie side by side."""
    first, last = my_rows(N, BN)
    prefetch(w_ptr + first.to(tl.int64) * K, (last - first) * K, BYTES)


@triton.jit
def prefetch_cache(ptr, stride_h, H, S, SPLITS: tl.constexpr, D: tl.constexpr, BYTES: tl.constexpr):
    """Ask for this program's first part of the cache of keys, or of values, whose rows of a head lie side by side."""
    unit, chunk = tl.program_id(0), tl.cdiv(tl.cdiv(S, SPLITS), _COLUMNS) * _COLUMNS
    h, first = unit // SPLITS, unit % SPLITS * chunk
    rows = tl.where(h < H, tl.minimum(chunk, S - first), 0)
    prefetch(ptr + tl.minimum(h, H - 1).to(tl.int64) * stride_h + first * D, rows * D, BYTES)


@triton.jit
def matrix_stage(
    x,  # [BK] the whole vector, float32
    w_ptr,
    stride_wk,
    stride_wn,
    bias_ptr,
    residual_ptr,  # or None
    out_ptr,
    N,
    K,
    GELU: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """This program's share of out[N] = act(x[K] @ w[K, N] + bias[N]) + residual[N]."""
    first, last = my_rows(N, BN)
    for n0 in tl.range(first, last, BN, num_stages=AHEAD):
        n = n0 + tl.arange(0, BN)
        out = row_dots(w_ptr, stride_wk, stride_wn, n, n < last, x, K, BK)
        out += tl.load(bias_ptr + n, mask=n < last, other=0.0).to(tl.float32)
        if GELU:
            out = gelu_tile(out)
        if residual_ptr is not None:
            out += tl.load(residual_ptr + n, mask=n < last, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out_ptr + n, out, mask=n < last)


@triton.jit
def qkv_stage(
    x,
    w_ptr,
    stride_wk,
    stride_wn,
    bias_ptr,
    q_ptr,
    k_ptr,  # row `position` of the caches
    v_ptr,
    stride_kh,
    stride_vh,
    C,
    D: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """This program's share of Q, K and V; keys and values go to the caches."""
    first, last = my_rows(3 * C, BN)
    for n0 in tl.range(first, last, BN, num_stages=AHEAD):
        n = n0 + tl.arange(0, BN)
        out = row_dots(w_ptr, stride_wk, stride_wn, n, n < last, x, C, BK)
        out += tl.load(bias_ptr + n, mask=n < last, other=0.0).to(tl.float32)
        part, c = n // C, n % C
        h, d = (c // D).to(tl.int64), c % D
        tl.store(q_ptr + c, out, mask=(n < last) & (part == 0))
        tl.store(k_ptr + h * stride_kh + d, out, mask=(n < last) & (part == 1))
        tl.store(v_ptr + h * stride_vh + d, out, mask=(n < last) & (part == 2))


@triton.jit
def attention_stage(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    acc_ptr,  # [H, SPLITS, D] float32, what the parts of a head leave for the last of them
    top_ptr,  # [H, SPLITS]
    total_ptr,
    ticket_ptr,  # [H], 0 before and after
    stride_kh,
    stride_ks,
    stride_vh,
    stride_vs,
    H,
    S,
    scale,
    SPLITS: tl.constexpr,
    D: tl.constexpr,
):
    """This program's share of the parts of the heads, as in attention_split_kv; the last part of a head combines."""
    r, d = tl.arange(0, _ROWS), tl.arange(0, D)
    chunk = tl.cdiv(tl.cdiv(S, SPLITS), _COLUMNS) * _COLUMNS
    sees = tl.zeros((_ROWS,), dtype=tl.int32) + S
    for unit in tl.range(tl.program_id(0), H * SPLITS, tl.num_programs(0)):
        h, part = unit // SPLITS, unit % SPLITS
        k_head = k_ptr + h.to(tl.int64) * stride_kh
        v_head = v_ptr + h.to(tl.int64) * stride_vh
        q = tl.load(q_ptr + h * D + d[None, :] + r[:, None] * 0, cache_modifier=".cg").to(k_ptr.dtype.element_ty)
        first, last = part * chunk, tl.minimum((part + 1) * chunk, S)
        acc, top, total = attend_to_part(
            q, k_head, v_head, stride_ks, stride_vs, sees, first, last, scale, _COLUMNS, D
        )  # 16 equal rows: tl.dot takes no fewer
        tl.store(acc_ptr + unit * D + d[None, :] + r[:, None] * 0, acc, mask=(r == 0)[:, None])
        tl.store(top_ptr + unit + r * 0, top, mask=r == 0)
        tl.store(total_ptr + unit + r * 0, total, mask=r == 0)
        tl.debug_barrier()
        ticket = tl.atomic_add(ticket_ptr + h, 1, sem="acq_rel")
        if ticket == SPLITS - 1:
            start = h * SPLITS
            out = combine_row(acc_ptr + start * D, top_ptr + start, total_ptr + start, 1, 0, SPLITS, D)
            tl.store(out_ptr + h * D + d, out)
            tl.store(ticket_ptr + h, 0)
