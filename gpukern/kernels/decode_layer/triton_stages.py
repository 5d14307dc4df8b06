"""The whole decode step of a layer as one kernel: all programs run at once and meet at a barrier between the stages.

`decode_layer` launches it once; `decode_layer_stages` launches the same kernel five times, one stage each, where the
end of a launch takes the place of the barrier. The difference between the two is what launches cost.
Source: the persistent kernel of Spector et al., *Look Ma, No Bubbles!* (Hazy Research, 2025), in its simplest form.
"""

import math

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.attention.tickets import tickets
from gpukern.kernels.attention.triton_split_kv import ROWS, attend_to_part, combine_row
from gpukern.kernels.decode_layer import require_decode
from gpukern.kernels.decode_layer.vector import load_vector, normalised, require_vector_tile, row_dots
from gpukern.kernels.gelu.triton_ladder import gelu_tile
from gpukern.kernels.matmul.triton_ladder import buffers
from gpukern.op import require_power_of_two, require_whole

STAGES = 5  # qkv; attention; output; norm and mlp_up; mlp_down
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
def _my_rows(N, BN: tl.constexpr):
    """(first, last) of the outputs of this program, a whole number of tiles, neighbours in memory."""
    share = tl.cdiv(tl.cdiv(N, tl.num_programs(0)), BN) * BN
    first = tl.program_id(0) * share
    return first, tl.minimum(first + share, N)


@triton.jit
def _prefetch(ptr, n, BYTES: tl.constexpr):
    """Ask for the n elements from `ptr` on, or the first BYTES of them: they will be in L2 when the barrier opens."""
    size = n.to(tl.int64) * (ptr.dtype.element_ty.primitive_bitwidth // 8)
    if size > 0:
        line = ptr.to(tl.int64) + tl.arange(0, BYTES // 128) * 128 % size
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _prefetch_rows(w_ptr, N, K, BN: tl.constexpr, BYTES: tl.constexpr):
    """Ask for this program's weights of a matrix whose outputs' weights lie side by side."""
    first, last = _my_rows(N, BN)
    _prefetch(w_ptr + first.to(tl.int64) * K, (last - first) * K, BYTES)


@triton.jit
def _matrix_stage(
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
    first, last = _my_rows(N, BN)
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
def _qkv_stage(
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
    first, last = _my_rows(3 * C, BN)
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
def _attention_stage(
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


@triton.jit(do_not_specialize=["position"])
def _decode_layer_kernel(
    x_ptr,
    z_ptr,
    k_ptr,  # [H, S, D] of the one sequence
    v_ptr,
    first_gamma_ptr,  # or None
    first_beta_ptr,
    w_qkv_ptr,
    b_qkv_ptr,
    w_o_ptr,
    b_o_ptr,
    gamma_ptr,
    beta_ptr,
    w_1_ptr,
    b_1_ptr,
    w_2_ptr,
    b_2_ptr,
    q_ptr,  # [C], [C], [C] and [F] float32, what the stages hand on
    attn_ptr,
    y_ptr,
    h_ptr,
    acc_ptr,
    top_ptr,
    total_ptr,
    ticket_ptr,
    arrived_ptr,  # [2], 0 before and after: how many programs have come, and how many have left
    position,
    eps,
    scale,
    C,
    H,
    F,
    stride_kh,
    stride_ks,
    stride_vh,
    stride_vs,
    stride_qkv_k,
    stride_qkv_n,
    stride_o_k,
    stride_o_n,
    stride_1_k,
    stride_1_n,
    stride_2_k,
    stride_2_n,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PREFETCH: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    BN: tl.constexpr,
    BN_DOWN: tl.constexpr,
    BC: tl.constexpr,
    BF: tl.constexpr,
    D: tl.constexpr,
):
    """Stages FIRST to LAST of the five, with a barrier between any two. Before it waits, a program asks for weights."""
    WHOLE: tl.constexpr = FIRST < LAST
    S = position + 1
    if FIRST == 0:
        x = load_vector(x_ptr, 1, C, BC)
        if first_gamma_ptr is not None:
            x = normalised(x, first_gamma_ptr, first_beta_ptr, C, eps, BC)
        k_row = k_ptr + position.to(tl.int64) * stride_ks
        v_row = v_ptr + position.to(tl.int64) * stride_vs
        _qkv_stage(
            x, w_qkv_ptr, stride_qkv_k, stride_qkv_n, b_qkv_ptr, q_ptr, k_row, v_row, stride_kh, stride_vh,
            C, D, BN, BC, AHEAD,
        )  # fmt: skip
    if WHOLE:
        if PREFETCH:
            unit, chunk = tl.program_id(0), tl.cdiv(tl.cdiv(S, SPLITS), _COLUMNS) * _COLUMNS
            start = unit % SPLITS * chunk
            rows = tl.where(unit < H * SPLITS, tl.minimum(chunk, S - start), 0)
            at = (tl.minimum(unit // SPLITS, H - 1)).to(tl.int64)
            _prefetch(k_ptr + at * stride_kh + start * D, rows * D, PREFETCH)
            _prefetch(v_ptr + at * stride_vh + start * D, rows * D, PREFETCH)
        grid_barrier(arrived_ptr, 1)
    if FIRST <= 1 and LAST >= 1:
        _attention_stage(
            q_ptr, k_ptr, v_ptr, attn_ptr, acc_ptr, top_ptr, total_ptr, ticket_ptr,
            stride_kh, stride_ks, stride_vh, stride_vs, H, S, scale, SPLITS, D,
        )  # fmt: skip
    if WHOLE:
        if PREFETCH:
            _prefetch_rows(w_o_ptr, C, C, BN, PREFETCH)
        grid_barrier(arrived_ptr, 2)
    if FIRST <= 2 and LAST >= 2:
        attn = load_vector(attn_ptr, 1, C, BC)
        _matrix_stage(attn, w_o_ptr, stride_o_k, stride_o_n, b_o_ptr, x_ptr, y_ptr, C, C, False, BN, BC, AHEAD)
    if WHOLE:
        if PREFETCH:
            _prefetch_rows(w_1_ptr, F, C, BN, PREFETCH)
        grid_barrier(arrived_ptr, 3)
    if FIRST <= 3 and LAST >= 3:
        n = normalised(load_vector(y_ptr, 1, C, BC), gamma_ptr, beta_ptr, C, eps, BC)
        _matrix_stage(n, w_1_ptr, stride_1_k, stride_1_n, b_1_ptr, None, h_ptr, F, C, True, BN, BC, AHEAD)
    if WHOLE:
        if PREFETCH:
            _prefetch_rows(w_2_ptr, C, F, BN_DOWN, PREFETCH)
        grid_barrier(arrived_ptr, 4)
    if LAST == 4:
        h = load_vector(h_ptr, 1, F, BF)
        _matrix_stage(h, w_2_ptr, stride_2_k, stride_2_n, b_2_ptr, y_ptr, z_ptr, C, F, False, BN_DOWN, BF, AHEAD)
    if WHOLE:
        left = tl.atomic_add(arrived_ptr + 1, 1, sem="acq_rel")
        if left == tl.num_programs(0) - 1:  # all have passed the last barrier
            tl.store(arrived_ptr, 0)
            tl.store(arrived_ptr + 1, 0)


def decode_layer(
    x, weights, k_cache, v_cache, position, eps=1e-5,
    programs: int = 128, BN: int = 4, splits: int = 4, warps: int = 8, stages: int = 4,
):  # fmt: skip
    """One token through the whole layer, in one launch: nothing but scratch vectors goes to memory between stages.

    As decode_layer_stages, with four barriers in the place of four launches. All `programs` must run at once: the
    launch is cooperative, and the driver refuses a grid that the card cannot hold.
    Raises DeviceError on the simulated GPU, whose programs run one after the other: the first would wait for ever. A
    grid of one program, which waits for nobody, runs there.
    """
    if device.simulated() and programs != 1:
        raise device.DeviceError(
            "the one-kernel layer needs a CUDA card: its programs wait for each other at a barrier, and the simulated "
            "GPU runs them one after the other. Here run programs=1, or decode_layer_stages: the same kernel in stages."
        )
    whole = ((0, STAGES - 1),)
    return _launched(whole, x, weights, k_cache, v_cache, position, eps, programs, BN, splits, warps, stages)


def decode_layer_stages(
    x, weights, k_cache, v_cache, position, eps=1e-5,
    programs: int = 128, BN: int = 4, splits: int = 4, warps: int = 8, stages: int = 4,
):  # fmt: skip
    """One token through the whole layer, in five launches of one kernel.

    x                 `[1, 1, C]`, contiguous
    weights           the matrices and vectors of a layer by name, as decode_layer's Op names them; matrices `[K, N]` of
                      any strides, fast where an output's weights lie side by side (strides 1, K)
    k_cache, v_cache  `[1, H, S, D]`, elements of a head side by side; row `position` is written, rows up to it are read
    programs          of the grid; BN: outputs at a time; splits: of the cache of each head, a power of two
    stages            of the pipeline that loads weights ahead

    Returns (z `[1, 1, C]`, k_cache, v_cache). Raises InputError for arguments that do not fit, LimitError for a tile
    that the card cannot hold.
    """
    each = tuple((stage, stage) for stage in range(STAGES))
    return _launched(each, x, weights, k_cache, v_cache, position, eps, programs, BN, splits, warps, stages)


def _launched(launches, x, weights, k_cache, v_cache, position, eps, programs, BN, splits, warps, stages) -> tuple:
    C, H, D, F = require_decode(x, weights, k_cache, v_cache, position)
    require_whole(programs=programs, stages=stages)
    require_power_of_two(splits=splits)
    require_vector_tile(C, BN, warps)
    BC, BF = triton.next_power_of_2(C), triton.next_power_of_2(F)
    BN_DOWN = max(1, BN * BC // BF)  # as many weights a tile as the other products
    require_vector_tile(F, BN_DOWN, warps)
    device.check_launch(programs, 32 * warps, shared_bytes(BN, C, F, D, stages, x.dtype))

    w = weights
    matrices = [w[name] for name in ("w_qkv", "w_o", "w_1", "w_2")]
    together = launches[0][0] < launches[0][1]
    ahead = together and not device.simulated() and _side_by_side(matrices, k_cache, v_cache)
    vectors = torch.empty(3 * C + F, dtype=torch.float32, device=x.device)
    q, attn, y, h = vectors.split((C, C, C, F))
    parts = torch.empty(H * splits * (D + 2), dtype=torch.float32, device=x.device)
    acc, top, total = parts.split((H * splits * D, H * splits, H * splits))
    z = torch.empty_like(x)
    ticket, arrived = tickets(H), tickets(2)
    for first, last in launches:
        _decode_layer_kernel[(programs,)](
            x, z, k_cache, v_cache, w["first_gamma"], w["first_beta"], w["w_qkv"], w["b_qkv"], w["w_o"], w["b_o"],
            w["gamma"], w["beta"], w["w_1"], w["b_1"], w["w_2"], w["b_2"],
            q, attn, y, h, acc, top, total, ticket, arrived, position, eps, D**-0.5 * math.log2(math.e), C, H, F,
            *k_cache.stride()[1:3], *v_cache.stride()[1:3], *(n for m in matrices for n in m.stride()),
            FIRST=first, LAST=last, PREFETCH=_PREFETCH if ahead else 0, SPLITS=splits,
            AHEAD=stages, BN=BN, BN_DOWN=BN_DOWN, BC=BC, BF=BF, D=D, num_warps=warps, num_stages=stages,
            launch_cooperative_grid=together,
        )  # fmt: skip
    return z, k_cache, v_cache


def _side_by_side(matrices, k_cache, v_cache) -> bool:
    """Do what a program needs of each matrix, and of a head's cache, lie in one piece?"""
    return all(m.T.is_contiguous() for m in matrices) and k_cache.stride(2) == v_cache.stride(2) == k_cache.shape[3]


_PREFETCH = 1 << 16  # bytes of weights that a program asks for before it waits


def shared_bytes(BN: int, C: int, F: int, D: int, stages: int, dtype: torch.dtype) -> int:
    """Shared memory of a program, in bytes, but for what sums take: the weights, or keys and values, in flight."""
    widest = max(triton.next_power_of_2(C) * BN, triton.next_power_of_2(F))
    cache = 2 * buffers(ROWS, 4, stages, dtype) * COLUMNS * D
    return max((stages - 1) * widest, cache) * dtype.itemsize
