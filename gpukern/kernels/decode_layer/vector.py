"""What decode kernels share: a vector in registers, its norm, and its products with rows of weights.

With one new token every matrix product is a matrix times a vector: each weight is used once, so all that counts is how
fast the weights come. A program holds the whole vector and takes a few outputs; each output's weights are best side by
side in memory (`[N, K]`; a `[K, N]` view of it has strides 1, K), for then a warp reads them in whole sectors.
"""

import triton
import triton.language as tl

from gpukern import device
from gpukern.op import require_power_of_two


@triton.jit
def load_vector(x_ptr, stride, K, BK: tl.constexpr):
    """K elements in a tile of BK, float32, 0 past the end. Past the L1 (.cg): other SMs may just have written them."""
    k = tl.arange(0, BK)
    return tl.load(x_ptr + k * stride, mask=k < K, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def normalised(x, gamma_ptr, beta_ptr, K, eps, BK: tl.constexpr):
    """The LayerNorm of a vector in registers. Both passes of the variance are over registers: nothing is read again."""
    k = tl.arange(0, BK)
    gamma = tl.load(gamma_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / K
    centred = tl.where(k < K, x - mean, 0.0)  # a lane past the end is not a 0 - mean
    return centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / K + eps) * gamma + beta


@triton.jit
def row_dots(w_ptr, stride_wk, stride_wn, n, n_mask, x, K, BK: tl.constexpr):
    """x @ w for the columns n of w [K, N]: [BN] in float32. Weights are read once, so L2 need not keep them."""
    k = tl.arange(0, BK)
    w_ptrs = w_ptr + n.to(tl.int64)[:, None] * stride_wn + k.to(tl.int64)[None, :] * stride_wk  # [BN, BK]
    w = tl.load(w_ptrs, mask=n_mask[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    return tl.sum(w.to(tl.float32) * x[None, :], axis=1)


def require_vector_tile(K: int, BN: int, warps: int) -> None:
    """Refuse a tile that is no power of two, or BN rows of K that `warps` warps have no registers for."""
    require_power_of_two(BN=BN, warps=warps)
    device.check_launch(1, 32 * warps)
    a_thread = triton.next_power_of_2(K) * BN // (32 * warps)
    most = device.card().registers_per_thread
    if a_thread > most:
        raise device.LimitError(
            f"BN={BN} rows of {K} weights are {a_thread} for each thread of {warps} warps, and a thread has {most} "
            "registers. Use more warps, or fewer rows."
        )
