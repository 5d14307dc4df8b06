"""qkv for one token at a time: each product is a vector times the weights, by rows of them, without tl.dot."""

import torch
import triton
import triton.language as tl

from gpukern import device
from gpukern.kernels.decode_layer.vector import load_vector, normalised, require_vector_tile, row_dots
from gpukern.kernels.qkv.triton_ladder import require_qkv


@triton.jit(do_not_specialize=["position"])
def _qkv_decode_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    gamma_ptr,  # or None: no norm
    beta_ptr,
    q_ptr,  # [B, H, T, D] contiguous
    k_ptr,  # [B, H, S, D], the cache; elements of a head side by side, as in v
    v_ptr,
    position,
    eps,
    T,
    C,
    D,
    stride_xb,
    stride_xt,
    stride_xc,
    stride_wk,
    stride_wn,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """BN of the 3C outputs of one token. Neighbouring programs take the tokens in turn: they share weights in L2."""
    tokens = tl.num_programs(0) // tl.cdiv(3 * C, BN)
    token, n = tl.program_id(0) % tokens, tl.program_id(0) // tokens * BN + tl.arange(0, BN)
    b, t = (token // T).to(tl.int64), token % T
    x = load_vector(x_ptr + b * stride_xb + t * stride_xt, stride_xc, C, BC)
    if gamma_ptr is not None:
        x = normalised(x, gamma_ptr, beta_ptr, C, eps, BC)
    out = row_dots(w_ptr, stride_wk, stride_wn, n, n < 3 * C, x, C, BC)
    out += tl.load(bias_ptr + n, mask=n < 3 * C, other=0.0).to(tl.float32)

    part, c = n // C, n % C
    h, d = (c // D).to(tl.int64), c % D
    s = (position + t).to(tl.int64)
    tl.store(q_ptr + (b * C + h * D) * T + t * D + d, out, mask=part == 0)
    tl.store(k_ptr + b * stride_kb + h * stride_kh + s * stride_ks + d, out, mask=part == 1)
    tl.store(v_ptr + b * stride_vb + h * stride_vh + s * stride_vs + d, out, mask=part == 2)


def qkv_decode(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: int,
    norm: tuple | None = None,
    BN: int = 2,
    warps: int = 4,
) -> tuple:
    """As qkv, without tl.dot: no lane works for one of 15 rows that do not exist, and no tile waits in shared memory.

    FLOPs fall by the rows of a tile; shared memory is what a sum over warps takes; sectors stay. BN outputs a program,
    a power of two; fast where an output's weights lie side by side (w has strides 1, C). Weights are read once for
    every token, from L2 after the first: for one token, or a few. Arguments, result and errors otherwise as qkv.
    """
    B, T, C, H, D, gamma, beta, eps = require_qkv(x, w, bias, k_cache, v_cache, position, norm)
    require_vector_tile(C, BN, warps)
    q = torch.empty((B, H, T, D), dtype=x.dtype, device=x.device)
    if q.numel() == 0:
        return q, k_cache, v_cache
    grid = (B * T * triton.cdiv(3 * C, BN),)
    device.check_launch(grid, 32 * warps)
    _qkv_decode_kernel[grid](
        x, w, bias, gamma, beta, q, k_cache, v_cache, position, eps, T, C, D,
        *x.stride(), *w.stride(), *k_cache.stride()[:3], *v_cache.stride()[:3],
        BN=BN, BC=triton.next_power_of_2(C), num_warps=warps,
    )  # fmt: skip
    return q, k_cache, v_cache
