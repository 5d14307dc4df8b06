"""Flash attention whose tiles are loaded by the card's copy engine.

A tensor descriptor tells the Tensor Memory Accelerator (TMA, compute capability 9.0) where a matrix lies and how large
it is; one thread then asks for a whole tile, and what lies past the end arrives as 0 (Shah et al., *FlashAttention-3*,
arXiv 2407.08608). Elsewhere Triton makes plain loads of the same source.

Triton can give the asking to warps of their own (`tl.range(..., warp_specialize=True)`). Triton 3.6 compiles this one
so, and what comes out is wrong on an H200: it is not done here.
"""

import math

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.attention.triton_ladder import require_heads
from gpukern.kernels.descriptors import launch_with_scratch
from gpukern.kernels.matmul.triton_ladder import buffers, require_dot_tile
from gpukern.op import InputError

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32; -inf - -inf would be NaN, this minus itself is 0


@triton.jit
def _attend_tiles(
    acc,  # [BM, D] sum of weights times values so far
    top,  # [BM] largest score so far, in units of log2(e)
    total,  # [BM] sum of weights so far
    q,  # [BM, D]
    k_tiles,  # descriptors of [S, D] in tiles of [BN, D]
    v_tiles,
    sees,  # [BM] how many columns each row sees
    first,
    last,
    scale,
    MASKED: tl.constexpr,
    BN: tl.constexpr,
):
    """Attend to columns first .. last, BN at a time, with the online softmax. Returns the new acc, top and total."""
    for n0 in tl.range(first, last, BN):
        k = k_tiles.load([n0, 0])
        s = tl.dot(q, k.T, input_precision="ieee")  # [BM, BN]
        if MASKED:
            s = tl.where((n0 + tl.arange(0, BN))[None, :] < sees[:, None], s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1) * scale)
        p = tl.exp2(s * scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(p, axis=1)
        v = v_tiles.load([n0, 0])
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _attention_descriptors_kernel(
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
    """BM rows of one head of one batch. Columns that every row sees are attended to without a mask."""
    pid, tiles = tl.program_id(0), tl.cdiv(T, BM)
    head = (pid // tiles).to(tl.int64)
    b, h = head // H, head % H
    first_row = (tiles - 1 - pid % tiles) * BM  # the last rows see the most, and start first
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h // GROUP * stride_kh
    v_ptr += b * stride_vb + h // GROUP * stride_vh
    out_ptr += (b * T * H + h) * D
    q_tiles = tl.make_tensor_descriptor(q_ptr, [T, D], [stride_qt, 1], [BM, D])
    k_tiles = tl.make_tensor_descriptor(k_ptr, [S, D], [stride_ks, 1], [BN, D])
    v_tiles = tl.make_tensor_descriptor(v_ptr, [S, D], [stride_vs, 1], [BN, D])
    out_tiles = tl.make_tensor_descriptor(out_ptr, [T, D], [H * D, 1], [BM, D])

    q = q_tiles.load([first_row, 0])
    sees = tl.zeros((BM,), dtype=tl.int32) + S
    whole, last = S // BN * BN, S
    if CAUSAL:  # row i sees i + S - T + 1 columns; tiles that not even the last row sees are skipped
        sees = tl.minimum(first_row + tl.arange(0, BM) + S - T + 1, S)
        whole = tl.maximum(first_row + S - T + 1, 0) // BN * BN
        last = tl.minimum(first_row + BM + S - T, S)
    acc = tl.zeros((BM, D), dtype=tl.float32)
    top = tl.full((BM,), _LOWEST, dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc, top, total = _attend_tiles(acc, top, total, q, k_tiles, v_tiles, sees, 0, whole, scale, False, BN)
    acc, top, total = _attend_tiles(acc, top, total, q, k_tiles, v_tiles, sees, whole, last, scale, True, BN)

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row that sees nothing stays 0
    out_tiles.store([first_row, 0], out.to(out_ptr.dtype.element_ty))


def attention_descriptors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    BM: int = 64,
    BN: int = 64,
    warps: int = 4,
    stages: int = 3,
) -> torch.Tensor:
    """As attention_flash, with descriptors in place of pointers: no thread computes or holds addresses of k and v.

    In the compiled kernel tma copies appear and asynchronous copies by threads vanish; the bytes stay the same.
    q: `[B, H, T, D]`, k, v: `[B, H_kv, S, D]`, H a multiple of H_kv; D is 16, 32, 64 or 128 and its elements lie side
    by side; rows begin at multiples of 16 bytes. Returns `[B, T, H*D]`. Errors as attention_flash.
    """
    B, H, T, D, H_kv, S = require_heads(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if any(n * tensor.itemsize % 16 for n in (*_strides(tensor), tensor.data_ptr() // tensor.itemsize)):
            raise InputError(f"{name}: descriptors want rows that begin at multiples of 16 bytes; call .contiguous().")
    require_dot_tile(warps, stages, BM=BM, BN=BN)
    out = torch.empty((B, T, H * D), dtype=q.dtype, device=q.device)
    if out.numel() == 0 or S == 0:
        return out.zero_()
    grid = (B * H * triton.cdiv(T, BM),)
    device.check_launch(grid, 32 * warps, descriptors_shared_bytes(BM, BN, D, warps, stages, q.dtype))

    def launch():
        _attention_descriptors_kernel[grid](
            q, k, v, out, H, H // H_kv, T, S, D**-0.5 * math.log2(math.e), *_strides(q), *_strides(k), *_strides(v),
            CAUSAL=causal, BM=BM, BN=BN, D=D, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    launch_with_scratch(launch)
    return out


def _strides(tensor: torch.Tensor) -> list[int]:
    """Of batch, head and token; of an axis of length 1 nothing depends on the stride, and it may be anything."""
    D = tensor.shape[3]
    return [D if n == 1 else step for n, step in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]


def descriptors_shared_bytes(
    BM: int, BN: int, D: int, warps: int, stages: int, dtype: torch.dtype, on: device.Card | None = None
) -> int:
    """Shared memory of one program, in bytes, but for barriers: the tile of q, the tiles of k and of v in flight."""
    return (BM + 2 * buffers(BM, warps, stages, dtype, on) * BN) * D * dtype.itemsize
