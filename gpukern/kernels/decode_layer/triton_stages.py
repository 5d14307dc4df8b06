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
from gpukern.kernels.attention.triton_split_kv import ROWS
from gpukern.kernels.decode_layer import require_decode
from gpukern.kernels.decode_layer.stages import (
    COLUMNS,
    attention_stage,
    grid_barrier,
    matrix_stage,
    prefetch_cache,
    prefetch_rows,
    qkv_stage,
)
from gpukern.kernels.decode_layer.vector import load_vector, normalised, require_vector_tile
from gpukern.kernels.matmul.triton_ladder import buffers
from gpukern.kernels.tickets import tickets
from gpukern.op import require_power_of_two, require_whole

STAGES = 5  # qkv; attention; output; norm and mlp_up; mlp_down


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
        qkv_stage(
            x, w_qkv_ptr, stride_qkv_k, stride_qkv_n, b_qkv_ptr, q_ptr, k_row, v_row, stride_kh, stride_vh,
            C, D, BN, BC, AHEAD,
        )  # fmt: skip
    if WHOLE:
        if PREFETCH:
            prefetch_cache(k_ptr, stride_kh, H, S, SPLITS, D, PREFETCH)
            prefetch_cache(v_ptr, stride_vh, H, S, SPLITS, D, PREFETCH)
        grid_barrier(arrived_ptr, 1)
    if FIRST <= 1 and LAST >= 1:
        attention_stage(
            q_ptr, k_ptr, v_ptr, attn_ptr, acc_ptr, top_ptr, total_ptr, ticket_ptr,
            stride_kh, stride_ks, stride_vh, stride_vs, H, S, scale, SPLITS, D,
        )  # fmt: skip
    if WHOLE:
        if PREFETCH:
            prefetch_rows(w_o_ptr, C, C, BN, PREFETCH)
        grid_barrier(arrived_ptr, 2)
    if FIRST <= 2 and LAST >= 2:
        attn = load_vector(attn_ptr, 1, C, BC)
        matrix_stage(attn, w_o_ptr, stride_o_k, stride_o_n, b_o_ptr, x_ptr, y_ptr, C, C, False, BN, BC, AHEAD)
    if WHOLE:
        if PREFETCH:
            prefetch_rows(w_1_ptr, F, C, BN, PREFETCH)
        grid_barrier(arrived_ptr, 3)
    if FIRST <= 3 and LAST >= 3:
        n = normalised(load_vector(y_ptr, 1, C, BC), gamma_ptr, beta_ptr, C, eps, BC)
        matrix_stage(n, w_1_ptr, stride_1_k, stride_1_n, b_1_ptr, None, h_ptr, F, C, True, BN, BC, AHEAD)
    if WHOLE:
        if PREFETCH:
            prefetch_rows(w_2_ptr, C, F, BN_DOWN, PREFETCH)
        grid_barrier(arrived_ptr, 4)
    if LAST == 4:
        h = load_vector(h_ptr, 1, F, BF)
        matrix_stage(h, w_2_ptr, stride_2_k, stride_2_n, b_2_ptr, y_ptr, z_ptr, C, F, False, BN_DOWN, BF, AHEAD)
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
