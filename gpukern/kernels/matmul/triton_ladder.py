"""matmul in Triton: one program computes one tile [BM, BN] of the output, BK columns of `a` at a time.

The rungs are one kernel: they differ in the order of the tiles and in how far ahead of the products it loads.
`dot_loop` is its main loop; qkv, scores and values are the same loop over other rows and columns.
"""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.gelu.triton_ladder import gelu_tile
from gpukern.op import InputError, require, require_power_of_two, require_whole


@triton.jit
def dot_loop(
    a_rows,  # [BM] pointers to the first element of each row of a
    stride_ak,
    m_mask,  # [BM] which rows exist
    w_cols,  # [BN] pointers to the first element of each column of w
    stride_wk,
    n_mask,  # [BN] which columns exist
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    mean=None,  # [BM] with these four, a is normalised as it is loaded: a LayerNorm as prologue
    rstd=None,  # [BM]
    gamma_ptr=None,  # [K]
    beta_ptr=None,  # [K]
):
    """a @ w for BM rows and BN columns: [BM, BN] in float32. Rows and columns that do not exist give 0.

    Triton overlaps the loads of the coming `num_stages - 1` rounds with the product of this one.
    """
    k = tl.arange(0, BK)
    a_ptrs = a_rows[:, None] + k[None, :] * stride_ak  # [BM, BK]
    w_ptrs = w_cols[None, :] + k[:, None] * stride_wk  # [BK, BN]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in tl.range(0, K, BK):
        k_mask = k < K - k0
        a = tl.load(a_ptrs, mask=m_mask[:, None] & k_mask[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=k_mask[:, None] & n_mask[None, :], other=0.0)
        if gamma_ptr is not None:
            gamma = tl.load(gamma_ptr + k0 + k, mask=k_mask, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + k0 + k, mask=k_mask, other=0.0).to(tl.float32)
            normed = (a.to(tl.float32) - mean[:, None]) * rstd[:, None] * gamma[None, :] + beta[None, :]
            a = normed.to(w.dtype)
        acc = tl.dot(a, w, acc, input_precision="ieee")  # float32 stays float32: no TF32
        a_ptrs += BK * stride_ak
        w_ptrs += BK * stride_wk
    return acc


@triton.jit
def _matmul_kernel(
    a_ptr,
    w_ptr,
    bias_ptr,  # or None
    residual_ptr,  # or None
    out_ptr,  # contiguous
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_wk,
    stride_wn,
    stride_rm,
    stride_rn,
    GELU: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr = 8,
):
    """One tile of the output, in the order of GROUP rows of tiles at a time; 1 is row after row."""
    pid, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
    tile_m, tile_n = tl.swizzle2d(pid // tiles_n, pid % tiles_n, tiles_m, tiles_n, GROUP)
    m = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    n = tile_n.to(tl.int64) * BN + tl.arange(0, BN)

    out = dot_loop(a_ptr + m * stride_am, stride_ak, m < M, w_ptr + n * stride_wn, stride_wk, n < N, K, BM, BN, BK)

    mask = (m < M)[:, None] & (n < N)[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GELU:
        out = gelu_tile(out)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + m[:, None] * stride_rm + n[None, :] * stride_rn, mask=mask, other=0.0)
        out += residual.to(tl.float32)
    tl.store(out_ptr + m[:, None] * N + n[None, :], out, mask=mask)


GROUP = 8  # rows of tiles


def matmul_naive(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    BM: int = 128,
    BN: int = 128,
    BK: int = 32,
    warps: int = 8,
    stages: int = 1,
) -> torch.Tensor:
    """act(a @ w + bias) + residual, `[M, N]`. Tiles row after row; each load is waited for before its product.

    a, w        `[M, K]`, `[K, N]`, any strides
    bias        `[N]`, contiguous, or None
    activation  None or "gelu"
    residual    `[M, N]`, any strides, or None
    BM, BN, BK  tile, powers of two from 16
    warps       of a program, a power of two
    stages      of the pipeline that loads tiles ahead of the products; 1: none

    Raises InputError for arguments that do not fit together, LimitError for a tile that the card cannot hold.
    """
    return _matmul(a, w, bias, activation, residual, BM, BN, BK, warps, stages, group=1)


def matmul_grouped(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    BM: int = 128,
    BN: int = 128,
    BK: int = 32,
    warps: int = 8,
    stages: int = 1,
) -> torch.Tensor:
    """As matmul_naive, with tiles in groups of 8 rows of tiles, column after column of the group.

    Each program loads what it loaded, so sectors stay; but the programs that run at one time share rows of a and
    columns of w: their distinct bytes fall, and with them what the L2 has to fetch.
    """
    return _matmul(a, w, bias, activation, residual, BM, BN, BK, warps, stages, group=GROUP)


def matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    BM: int = 128,
    BN: int = 128,
    BK: int = 32,
    warps: int = 8,
    stages: int = 3,
) -> torch.Tensor:
    """As matmul_grouped, with a pipeline: while one round of tiles is multiplied, the next ones are on their way.

    Loads become asynchronous copies into `stages` buffers of shared memory, which grows; sectors stay.
    """
    return _matmul(a, w, bias, activation, residual, BM, BN, BK, warps, stages, group=GROUP)


def _matmul(a, w, bias, activation, residual, BM, BN, BK, warps, stages, group) -> torch.Tensor:
    M, N, K = require_product(a, w, bias, activation, residual)
    require_dot_tile(warps, stages, BM=BM, BN=BN, BK=BK)
    out = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(M, BM) * triton.cdiv(N, BN),)
    device.check_launch(grid, 32 * warps, shared_bytes(BM, BN, BK, warps, stages, a.dtype))
    _matmul_kernel[grid](
        a, w, bias, residual, out, M, N, K, *a.stride(), *w.stride(),
        *(residual.stride() if residual is not None else (0, 0)),
        GELU=activation == "gelu", BM=BM, BN=BN, BK=BK, GROUP=group, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def require_product(a, w, bias, activation, residual) -> tuple[int, int, int]:
    """Refuse arguments of a matrix product with epilogue that do not fit together. Returns M, N, K."""
    require(a, "a", (None, None))
    M, K = a.shape
    require(w, "w", (K, None), like=a)
    N = w.shape[1]
    if bias is not None:
        require(bias, "bias", (N,), like=a)
        require_contiguous(bias=bias)
    if residual is not None:
        require(residual, "residual", (M, N), like=a)
    if activation not in (None, "gelu"):
        raise InputError(f"activation={activation!r} is not known; use None or 'gelu'.")
    return M, N, K


def shared_bytes(
    BM: int, BN: int, BK: int, warps: int, stages: int, dtype: torch.dtype, on: device.Card | None = None
) -> int:
    """Shared memory of one program on `on` (default: this machine's card), in bytes: the tiles of a and w in flight.

    It is what Triton reports for the compiled kernel, except for a small tile or a single stage whose output tile takes
    more room when it is rearranged for the store, and for qkv's norm, whose normalised tile of a may need room too.
    """
    return buffers(BM, warps, stages, dtype, on) * (BM + BN) * BK * dtype.itemsize


def buffers(BM: int, warps: int, stages: int, dtype: torch.dtype, on: device.Card | None = None) -> int:
    """How many rounds of tiles a pipelined `tl.dot` loop keeps in shared memory.

    Hopper's wgmma reads its operands there, so the round in work has a buffer besides the `stages - 1` on their way; it
    takes a warp group and 64 rows at a time, and 16-bit types. Otherwise the round in work is in registers. Before
    Ampere there are no asynchronous copies, so nothing is on its way.
    """
    major = (on or device.card()).compute_capability[0]
    if major < 8:
        return 1
    if uses_wgmma(BM, warps, dtype, on):
        return stages
    return max(1, stages - 1)


def uses_wgmma(BM: int, warps: int, dtype: torch.dtype, on: device.Card | None = None) -> bool:
    """Does `tl.dot` of BM rows become Hopper's warp-group product?"""
    hopper = (on or device.card()).compute_capability[0] == 9
    return hopper and dtype.itemsize == 2 and BM >= 64 and warps % 4 == 0


def require_contiguous(**tensors: torch.Tensor) -> None:
    """Refuse a tensor whose elements do not lie side by side, where a kernel takes no strides."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise InputError(f"{name} is not contiguous; call .contiguous() first.")


def require_dot_tile(warps: int, stages: int, **tile: int) -> None:
    """Refuse a tile that `tl.dot` cannot multiply: its sides are powers of two from 16."""
    require_whole(stages=stages)
    require_power_of_two(warps=warps, **tile)
    for name, n in tile.items():
        if n < 16:
            raise InputError(f"{name}={n} is too small for tl.dot, which needs 16; spare rows and columns are masked.")
