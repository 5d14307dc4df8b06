"""matvec in Triton: every weight is read once and used for a few rows only, so all depends on how it is read.

There is no tl.dot: it would multiply 16 rows, of which one is there. Each thread keeps sums of its own for its elements
of a tile [BK, BN] of w and adds the next tile to them; only at the end are they added over the tile's K.
"""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.gelu.triton_ladder import gelu_tile
from gpukern.kernels.matmul.triton_ladder import require_product
from gpukern.kernels.tickets import tickets
from gpukern.op import InputError, require_power_of_two, require_whole

MOST_ROWS = 8


@triton.jit
def multiply_strip(
    a_ptr,
    w_ptr,
    m,  # [BM] rows
    n,  # [BN] columns
    first,
    last,
    M,
    N,
    stride_am,
    stride_ak,
    stride_wk,
    stride_wn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """a[m, first:last] @ w[first:last, n], [BM, BN] in float32. Rows and columns that do not exist give 0.

    With more than one stage the tiles to come are copied to shared memory ahead of the sums, in a ring. With one they
    are loaded straight to registers and marked as the first to leave the L2, as nobody reads them again.
    """
    m_mask, n_mask = (m < M)[:, None], (n < N)[None, None, :]
    a_ptr += m.to(tl.int64)[:, None] * stride_am  # [BM, 1]
    w_ptr += n.to(tl.int64)[None, None, :] * stride_wn  # [1, 1, BN]
    acc = tl.zeros((BM, BK, BN), dtype=tl.float32)
    for k0 in tl.range(first, last, BK, num_stages=STAGES):
        k = (k0 + tl.arange(0, BK))[None, :]
        a = tl.load(a_ptr + k.to(tl.int64) * stride_ak, mask=m_mask & (k < last), other=0.0)  # [BM, BK]
        k = k[:, :, None]
        w_ptrs = w_ptr + k.to(tl.int64) * stride_wk  # [1, BK, BN]
        w = tl.load(w_ptrs, mask=(k < last) & n_mask, other=0.0, eviction_policy="evict_first")
        acc += a.to(tl.float32)[:, :, None] * w.to(tl.float32)
    return tl.sum(acc, axis=1)


@triton.jit
def _finish(out, out_ptr, bias_ptr, residual_ptr, m, n, M, N, stride_rm, stride_rn, GELU: tl.constexpr):
    """The epilogue of a tile [BM, BN], and its store."""
    mask = (m < M)[:, None] & (n < N)[None, :]
    m, n = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if GELU:
        out = gelu_tile(out)
    if residual_ptr is not None:
        out += tl.load(residual_ptr + m * stride_rm + n * stride_rn, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * N + n, out, mask=mask)


@triton.jit
def _matvec_kernel(
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
    STAGES: tl.constexpr,
):
    """BN columns of the output, for all rows: the whole of K."""
    m, n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    out = multiply_strip(a_ptr, w_ptr, m, n, 0, K, M, N, stride_am, stride_ak, stride_wk, stride_wn, BM, BN, BK, STAGES)
    _finish(out, out_ptr, bias_ptr, residual_ptr, m, n, M, N, stride_rm, stride_rn, GELU)


def matvec(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    BN: int = 64,
    BK: int = 64,
    warps: int = 4,
    stages: int = 1,
) -> torch.Tensor:
    """act(a @ w + bias) + residual, `[M, N]`, for M of at most 8. One program a block of columns.

    a, w        `[M, K]`, `[K, N]`, any strides; fastest where rows or columns of w lie side by side
    bias        `[N]`, contiguous, or None
    activation  None or "gelu"
    residual    `[M, N]`, any strides, or None
    BN, BK      tile of w, powers of two; several rows share the registers, so that BK becomes BK / M
    warps       of a program, a power of two
    stages      1: load to registers; more: so many tiles of w are in shared memory or on their way there

    Global loads are those of w and, for each program, of a. Raises InputError for arguments that do not fit together,
    LimitError for a tile that the registers do not hold.
    """
    M, N, K, BM, BK = _checked(a, w, bias, activation, residual, BN, BK, warps, stages)
    out = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    _matvec_kernel[(triton.cdiv(N, BN),)](
        a, w, bias, residual, out, M, N, K, *a.stride(), *w.stride(),
        *(residual.stride() if residual is not None else (0, 0)),
        GELU=activation == "gelu", BM=BM, BN=BN, BK=BK, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _matvec_split_k_kernel(
    a_ptr,
    w_ptr,
    bias_ptr,  # or None
    residual_ptr,  # or None
    out_ptr,  # contiguous
    part_ptr,  # [tiles, SPLITS, BM, BN] float32, what the programs of a tile leave for the last of them
    ticket_ptr,  # [tiles], 0 before and after
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
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One part of K for BN columns of the output. The last program of a tile adds up the parts, in their order."""
    tile, part = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    m, n = tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    chunk = tl.cdiv(tl.cdiv(K, SPLITS), BK) * BK
    first, last = part * chunk, tl.minimum((part + 1) * chunk, K)
    out = multiply_strip(
        a_ptr, w_ptr, m, n, first, last, M, N, stride_am, stride_ak, stride_wk, stride_wn, BM, BN, BK, STAGES
    )

    at = m[:, None] * BN + tl.arange(0, BN)[None, :]
    part_ptr += tile.to(tl.int64) * SPLITS * BM * BN
    tl.store(part_ptr + part * BM * BN + at, out)
    tl.debug_barrier()  # all threads have stored before one of them takes the ticket
    ticket = tl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel")
    if ticket == SPLITS - 1:
        whole = tl.zeros((BM, BN), dtype=tl.float32)
        for i in tl.static_range(SPLITS):  # .cg: other SMs wrote them; the L1 may be stale
            whole += tl.load(part_ptr + i * BM * BN + at, cache_modifier=".cg")
        _finish(whole, out_ptr, bias_ptr, residual_ptr, m, n, M, N, stride_rm, stride_rn, GELU)
        tl.store(ticket_ptr + tile, 0)  # for the next launch


def matvec_split_k(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    BN: int = 256,
    BK: int = 32,
    splits: int = 8,
    warps: int = 8,
    stages: int = 1,
) -> torch.Tensor:
    """As matvec, with the K of a block of columns split over `splits` programs (a power of two).

    Wide tiles read long pieces of w's rows, but make few blocks of columns: split, there are programs enough to keep
    the memory busy. Each stores its sums in float32 and takes a ticket; the one with the last adds them up. One atomic
    a program is new, and splits x M x N floats are stored and loaded. The order of the sum is that of the parts,
    whoever comes last: the same inputs give the same bits.
    """
    require_power_of_two(splits=splits)
    M, N, K, BM, BK = _checked(a, w, bias, activation, residual, BN, BK, warps, stages)
    out = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    tiles = triton.cdiv(N, BN)
    device.check_launch((tiles * splits,), 32 * warps)
    parts = torch.empty((tiles, splits, BM, BN), dtype=torch.float32, device=a.device)
    _matvec_split_k_kernel[(tiles * splits,)](
        a, w, bias, residual, out, parts, tickets(tiles), M, N, K, *a.stride(), *w.stride(),
        *(residual.stride() if residual is not None else (0, 0)),
        GELU=activation == "gelu", SPLITS=splits, BM=BM, BN=BN, BK=BK, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out


def _checked(a, w, bias, activation, residual, BN, BK, warps, stages) -> tuple[int, int, int, int, int]:
    """Refuse what the kernels do not take. Returns M, N, K, M as a tile, and the BK of a tile for so many rows."""
    M, N, K = require_product(a, w, bias, activation, residual)
    if M > MOST_ROWS:
        raise InputError(f"a has {M} rows; matvec takes up to {MOST_ROWS}. Use matmul.")
    require_power_of_two(BN=BN, BK=BK, warps=warps)
    require_whole(stages=stages)
    BM = triton.next_power_of_2(max(M, 1))
    sums, most = BN * BK // (32 * warps), device.card().registers_per_thread
    if sums > most:
        raise device.LimitError(
            f"a tile {BK} x {BN} is {sums} sums for each thread of {warps} warps, and a thread has {most} registers. "
            "Choose a smaller tile or more warps."
        )
    BK = max(1, BK // BM)
    device.check_launch(max(triton.cdiv(N, BN), 1), 32 * warps, shared_bytes(BN, BK, warps, stages, a.dtype))
    return M, N, K, BM, BK


def shared_bytes(
    BN: int, BK: int, warps: int, stages: int, dtype: torch.dtype, on: device.Card | None = None, splits: int = 1
) -> int:
    """Shared memory of one program, in bytes, at the least: the tiles of w in the ring."""
    return (stages - 1) * BN * BK * dtype.itemsize
