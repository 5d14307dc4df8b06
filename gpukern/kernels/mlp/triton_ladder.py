"""norm_mlp_up in Triton: for many rows with tl.dot, and for one token as rows of weights times a vector."""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.decode_layer.vector import load_vector, normalised, require_vector_tile, row_dots
from gpukern.kernels.gelu.triton_ladder import gelu_tile
from gpukern.kernels.matmul.triton_ladder import dot_loop, require_contiguous, require_dot_tile, shared_bytes
from gpukern.kernels.qkv.triton_ladder import row_statistics
from gpukern.op import require


@triton.jit
def _norm_mlp_up_kernel(
    x_ptr,  # [M, K] contiguous
    gamma_ptr,
    beta_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,  # [M, N] contiguous
    M,
    N,
    K,
    TILES,  # of columns a program
    eps,
    stride_wk,
    stride_wn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """BM rows: their statistics once, then up to TILES tiles [BM, BN] of the output."""
    shares = tl.cdiv(tl.cdiv(N, BN), TILES)
    m = tl.program_id(0).to(tl.int64) // shares * BM + tl.arange(0, BM)
    first = tl.program_id(0) % shares * TILES
    m_mask = m < M
    x_rows = x_ptr + m * K
    mean, rstd = row_statistics(x_rows, 1, m_mask, K, eps, BM, BK)
    for tile in tl.range(first, tl.minimum(first + TILES, tl.cdiv(N, BN))):
        n = tile.to(tl.int64) * BN + tl.arange(0, BN)
        n_mask = n < N
        w_cols = w_ptr + n * stride_wn
        out = dot_loop(x_rows, 1, m_mask, w_cols, stride_wk, n_mask, K, BM, BN, BK, mean, rstd, gamma_ptr, beta_ptr)
        out += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + m[:, None] * N + n[None, :], gelu_tile(out), mask=m_mask[:, None] & n_mask[None, :])


def norm_mlp_up(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    eps: float,
    w: torch.Tensor,
    bias: torch.Tensor,
    BM: int = 128,
    BN: int = 128,
    BK: int = 64,
    warps: int = 8,
    stages: int = 3,
) -> torch.Tensor:
    """gelu(norm(x) @ w + bias), `[..., N]`, in one kernel.

    x            `[..., K]`, contiguous; gamma, beta, bias: `[K]`, `[K]`, `[N]`, contiguous; w: `[K, N]`, any strides
    BM, BN, BK, warps, stages  as for matmul

    A program takes as many tiles of columns as leave one program an SM, so that statistics are found few times.
    """
    M, K, N = _require(x, gamma, beta, w, bias)
    require_dot_tile(warps, stages, BM=BM, BN=BN, BK=BK)
    out = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows, columns = triton.cdiv(M, BM), triton.cdiv(N, BN)
    tiles = max(1, rows * columns // device.card().sms)
    grid = (rows * triton.cdiv(columns, tiles),)
    device.check_launch(grid, 32 * warps, shared_bytes(BM, BN, BK, warps, stages, x.dtype))
    _norm_mlp_up_kernel[grid](
        x, gamma, beta, w, bias, out, M, N, K, tiles, eps, *w.stride(),
        BM=BM, BN=BN, BK=BK, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit
def _norm_mlp_up_decode_kernel(
    x_ptr,
    gamma_ptr,
    beta_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    eps,
    stride_wk,
    stride_wn,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """BN outputs of one row. Neighbouring programs take the rows in turn: they share weights in L2."""
    rows = tl.num_programs(0) // tl.cdiv(N, BN)
    m, n = (tl.program_id(0) % rows).to(tl.int64), tl.program_id(0) // rows * BN + tl.arange(0, BN)
    x = normalised(load_vector(x_ptr + m * K, 1, K, BK), gamma_ptr, beta_ptr, K, eps, BK)
    out = row_dots(w_ptr, stride_wk, stride_wn, n, n < N, x, K, BK)
    out += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * N + n, gelu_tile(out), mask=n < N)


def norm_mlp_up_decode(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    eps: float,
    w: torch.Tensor,
    bias: torch.Tensor,
    BN: int = 4,
    warps: int = 4,
) -> torch.Tensor:
    """As norm_mlp_up, without tl.dot: a program holds one row in registers, finds its norm there, and reads it once.

    Loads fall by the passes that statistics take over the rows; FLOPs by the 15 rows of a tile that do not exist. BN
    outputs a program, a power of two; fast where an output's weights lie side by side (w has strides 1, K).
    """
    M, K, N = _require(x, gamma, beta, w, bias)
    require_vector_tile(K, BN, warps)
    out = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    grid = (M * triton.cdiv(N, BN),)
    device.check_launch(grid, 32 * warps)
    _norm_mlp_up_decode_kernel[grid](
        x, gamma, beta, w, bias, out, N, K, eps, *w.stride(), BN=BN, BK=triton.next_power_of_2(K), num_warps=warps
    )
    return out


def _require(x, gamma, beta, w, bias) -> tuple[int, int, int]:
    """(M, K, N) of arguments that fit together; refuses others."""
    require(x, "x", (None,) * max(1, getattr(x, "ndim", 1)))
    K = x.shape[-1]
    require(gamma, "gamma", (K,), like=x)
    require(beta, "beta", (K,), like=x)
    require(w, "w", (K, None), like=x)
    N = w.shape[1]
    require(bias, "bias", (N,), like=x)
    require_contiguous(x=x, gamma=gamma, beta=beta, bias=bias)
    return (x.numel() // K if K else 0), K, N
