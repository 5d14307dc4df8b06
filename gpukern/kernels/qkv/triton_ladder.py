"""qkv in Triton: matmul's main loop, with a LayerNorm in front and a store that goes to q and the two caches."""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.matmul.triton_ladder import dot_loop, require_contiguous, require_dot_tile, shared_bytes
from gpukern.kernels.qkv import require_caches
from gpukern.op import InputError, require


@triton.jit
def row_statistics(rows, stride, m_mask, C, eps, BM: tl.constexpr, BK: tl.constexpr):
    """Mean and 1 / sqrt(variance + eps) of BM rows of C elements, [BM] each, in two passes over them."""
    k = tl.arange(0, BK)
    ptrs = rows[:, None] + k[None, :] * stride  # [BM, BK]
    total = tl.zeros((BM, BK), dtype=tl.float32)
    for k0 in tl.range(0, C, BK):
        mask = m_mask[:, None] & (k < C - k0)[None, :]
        total += tl.load(ptrs + k0 * stride, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=1) / C
    squares = tl.zeros((BM, BK), dtype=tl.float32)
    for k0 in tl.range(0, C, BK):
        mask = m_mask[:, None] & (k < C - k0)[None, :]
        x = tl.load(ptrs + k0 * stride, mask=mask, other=0.0).to(tl.float32)
        centred = tl.where(mask, x - mean[:, None], 0.0)  # a lane past the end is not a 0 - mean
        squares += centred * centred
    return mean, tl.rsqrt(tl.sum(squares, axis=1) / C + eps)


@triton.jit
def _pick(part, of_q, of_k, of_v):
    """The scalar that belongs to part 0 (Q), 1 (K) or 2 (V)."""
    return tl.where(part == 0, of_q, tl.where(part == 1, of_k, of_v))


@triton.jit(do_not_specialize=["position"])
def _qkv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    gamma_ptr,  # or None: no norm
    beta_ptr,
    q_ptr,  # [B, H, T, D]; of all three, the elements of a head lie side by side
    k_ptr,  # [B, H, S, D], the cache
    v_ptr,
    position,  # row of the cache that token 0 goes to
    eps,
    B,
    T,
    C,
    D,
    stride_xb,
    stride_xt,
    stride_xc,
    stride_wk,
    stride_wn,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr = 8,
):
    """One tile of Q, of K or of V. Row m is token m % T of batch m // T, column n is element n % D of head n // D."""
    pid, tiles_m, tiles_c = tl.program_id(0), tl.cdiv(B * T, BM), tl.cdiv(C, BN)
    tile_m, tile_n = tl.swizzle2d(pid // (3 * tiles_c), pid % (3 * tiles_c), tiles_m, 3 * tiles_c, GROUP)
    part = tile_n // tiles_c
    m, n = tile_m * BM + tl.arange(0, BM), tile_n % tiles_c * BN + tl.arange(0, BN)
    m_mask, n_mask = m < B * T, n < C
    b, t = (m // T).to(tl.int64), (m % T).to(tl.int64)  # [BM]
    h, d = (n // D).to(tl.int64), n % D  # [BN]

    x_rows = x_ptr + b * stride_xb + t * stride_xt
    w_cols = w_ptr + (part * C + n).to(tl.int64) * stride_wn
    if gamma_ptr is not None:
        mean, rstd = row_statistics(x_rows, stride_xc, m_mask, C, eps, BM, BK)
        out = dot_loop(
            x_rows, stride_xc, m_mask, w_cols, stride_wk, n_mask, C, BM, BN, BK, mean, rstd, gamma_ptr, beta_ptr
        )
    else:
        out = dot_loop(x_rows, stride_xc, m_mask, w_cols, stride_wk, n_mask, C, BM, BN, BK)
    out += tl.load(bias_ptr + part * C + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]

    s = t + _pick(part, 0, position, position)
    out_rows = b * _pick(part, stride_qb, stride_kb, stride_vb) + s * _pick(part, stride_qt, stride_ks, stride_vs)
    out_cols = h * _pick(part, stride_qh, stride_kh, stride_vh) + d
    out_ptrs = (_pick(part, q_ptr, k_ptr, v_ptr) + out_rows)[:, None] + out_cols[None, :]
    tl.store(out_ptrs, out, mask=m_mask[:, None] & n_mask[None, :])


def qkv(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: int,
    norm: tuple | None = None,
    BM: int = 128,
    BN: int = 128,
    BK: int = 32,
    warps: int = 8,
    stages: int = 3,
) -> tuple:
    """Queries of the new tokens; their keys and values are written into the caches.

    x, w, bias        `[B, T, C]`, `[C, 3C]` (any strides), `[3C]` (contiguous)
    k_cache, v_cache  `[B, H, S, D]`, elements of a head side by side; rows `position` to `position + T` are written
    norm              (gamma `[C]`, beta `[C]`, eps) to normalise x first, or None
    BM, BN, BK, warps, stages  as for matmul

    Returns (q `[B, H, T, D]`, k_cache, v_cache). Raises InputError if the new tokens do not fit in the cache.
    """
    B, T, C, H, D, gamma, beta, eps = require_qkv(x, w, bias, k_cache, v_cache, position, norm)
    require_dot_tile(warps, stages, BM=BM, BN=BN, BK=BK)
    q = torch.empty((B, H, T, D), dtype=x.dtype, device=x.device)
    if q.numel() == 0:
        return q, k_cache, v_cache
    grid = (3 * triton.cdiv(B * T, BM) * triton.cdiv(C, BN),)
    device.check_launch(grid, 32 * warps, shared_bytes(BM, BN, BK, warps, stages, x.dtype))
    _qkv_kernel[grid](
        x, w, bias, gamma, beta, q, k_cache, v_cache, position, eps, B, T, C, D,
        *x.stride(), *w.stride(), *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
        BM=BM, BN=BN, BK=BK, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return q, k_cache, v_cache


def require_qkv(x, w, bias, k_cache, v_cache, position, norm) -> tuple:
    """(B, T, C, H, D, gamma, beta, eps) of arguments that fit together; refuses others. No norm: None, None, 0."""
    require(x, "x", (None, None, None))
    B, T, C = x.shape
    require(k_cache, "k_cache", (B, None, None, None), like=x)
    _, H, S, D = k_cache.shape
    require(v_cache, "v_cache", (B, H, S, D), like=x)
    require(w, "w", (C, 3 * C), like=x)
    require(bias, "bias", (3 * C,), like=x)
    require_contiguous(bias=bias)
    gamma, beta, eps = norm or (None, None, 0.0)
    if norm is not None:
        require(gamma, "gamma", (C,), like=x)
        require(beta, "beta", (C,), like=x)
        require_contiguous(gamma=gamma, beta=beta)
    if C != H * D:
        raise InputError(f"the cache has {H} heads of {D}, but x has a width of {C}; C must be H * D.")
    require_caches(k_cache, v_cache, position, T)
    if D > 1 and not k_cache.stride(3) == v_cache.stride(3) == 1:
        raise InputError("the caches must have the elements of a head side by side; make them [B, H, S, D] in memory.")
    return B, T, C, H, D, gamma, beta, eps
