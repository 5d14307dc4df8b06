"""qkv: queries, keys and values of the new tokens in one matrix product; keys and values go straight into the cache.

The columns of w are Q's C, then K's C, then V's C; head h of each is its columns h*D .. (h+1)*D, with D = C / H. Keys
and values of token t go to row `position + t` of the caches. With `norm` = (gamma, beta, eps), x is normalised first,
as in `layernorm`, in the same kernel: a *prologue*, GPT-2's first norm.

Cost for x [B, T, C]: 6BTC^2 operations, and 8BTC for a norm; BTC + 3C^2 + 3C elements read and 3BTC written at the
least. In decode (T = 1) that is one multiply-add for each element of w: bound by the memory that w is read from.
Source: Vaswani et al., *Attention Is All You Need* (arXiv 1706.03762), section 3.2.2; one product as in GPT-2.
"""

import torch
import torch.nn.functional as F

from gpukern.kernels.layernorm import reference as layernorm_reference
from gpukern.op import InputError, Op, Version, normal


def split_heads(x: torch.Tensor, H: int) -> torch.Tensor:
    """`[B, T, H*D]` -> `[B, H, T, D]`, a view."""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def require_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, position: int, T: int) -> None:
    """Refuse a position at which T tokens do not fit, and caches whose elements share memory: rows would be lost."""
    S = k_cache.shape[2]
    if not isinstance(position, int) or isinstance(position, bool) or not 0 <= position <= S - T:
        raise InputError(f"{T} tokens at position {position!r} do not fit a cache of {S}; make a longer cache.")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if any(step == 0 and n > 1 for step, n in zip(cache.stride(), cache.shape, strict=True)):
            raise InputError(f"{name} is expanded: its elements share memory. Make it whole with .contiguous().")
    (k_first, k_last), (v_first, v_last) = map(_memory, (k_cache, v_cache))
    if k_first < v_last and v_first < k_last:
        raise InputError("k_cache and v_cache lie in the same memory; give each memory of its own.")


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory begins and ends."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def reference(x, w, bias, k_cache, v_cache, position: int, norm=None) -> tuple:
    """x: `[B, T, C]`, w: `[C, 3C]`, bias: `[3C]`, caches: `[B, H, S, D]`, norm: (`[C]`, `[C]`, eps) or None.

    Returns q `[B, H, T, D]` and copies of the two caches with the new rows, all in float64.
    """
    T, C = x.shape[1:]
    if norm is not None:
        x = layernorm_reference(x, *norm)
    q, k, v = (x.double() @ w.double() + bias.double()).split(C, dim=-1)
    caches = []
    for old, new in ((k_cache, k), (v_cache, v)):
        cache = old.double().clone()
        cache[:, :, position : position + T] = split_heads(new, old.shape[1])
        caches.append(cache)
    return split_heads(q, k_cache.shape[1]), *caches


def qkv_torch(x, w, bias, k_cache, v_cache, position: int, norm=None) -> tuple:
    """x: `[B, T, C]`, w: `[C, 3C]`, bias: `[3C]`, caches: `[B, H, S, D]`, norm: (`[C]`, `[C]`, eps) or None.

    Writes the new rows into the caches. PyTorch's own kernels: norm, product, two copies.
    Returns q `[B, H, T, D]` (a view) and the caches.
    """
    T, C = x.shape[1:]
    if norm is not None:
        gamma, beta, eps = norm
        x = F.layer_norm(x, (C,), gamma, beta, eps)
    q, k, v = F.linear(x, w.T, bias).split(C, dim=-1)
    H = k_cache.shape[1]
    k_cache[:, :, position : position + T] = split_heads(k, H)
    v_cache[:, :, position : position + T] = split_heads(v, H)
    return split_heads(q, H), k_cache, v_cache


def inputs(shape, dtype, device, generator) -> dict:
    """Flags of `shape`: position (of the first new token), norm, strided (caches kept token by token)."""
    kind = {"dtype": dtype, "device": device, "generator": generator}
    B, T, C, H, S = (shape[axis] for axis in "BTCHS")
    D = C // H
    scale = C**-0.5
    if shape.get("strided"):
        k_cache, v_cache = (normal(B, S, H, D, **kind).transpose(1, 2) for _ in "kv")
    else:
        k_cache, v_cache = (normal(B, H, S, D, **kind) for _ in "kv")
    norm = (normal(C, mean=1.0, scale=0.3, **kind), normal(C, scale=0.5, **kind), 1e-5) if shape.get("norm") else None
    return {
        "x": normal(B, T, C, mean=0.5, **kind),
        "w": normal(C, 3 * C, mean=scale / 4, scale=scale, **kind),
        "bias": normal(3 * C, mean=-0.5, **kind),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "position": shape.get("position", 0),
        "norm": norm,
    }


def flops(shape) -> int:
    B, T, C = (shape[axis] for axis in "BTC")
    return 6 * B * T * C * C + 8 * B * T * C * shape.get("norm", 0)


def least_bytes(shape, dtype) -> int:
    B, T, C = (shape[axis] for axis in "BTC")
    return (4 * B * T * C + 3 * C * C + 3 * C + 2 * C * shape.get("norm", 0)) * dtype.itemsize


qkv = Op(
    name="qkv",
    summary="q[B, H, T, D], and T new rows of k_cache, v_cache[B, H, S, D] = norm(x[B, T, C]) @ w[C, 3C] + bias[3C]",
    reference=reference,
    inputs=inputs,
    shapes=(
        {"B": 1, "T": 16, "C": 32, "H": 2, "S": 24},
        {"B": 1, "T": 1, "C": 1, "H": 1, "S": 1},
        {"B": 2, "T": 5, "C": 21, "H": 3, "S": 11, "position": 4, "norm": 1},
        {"B": 2, "T": 3, "C": 48, "H": 3, "S": 7, "position": 2, "strided": 1},
        {"B": 3, "T": 1, "C": 40, "H": 5, "S": 13, "position": 12, "norm": 1, "strided": 1},
        {"B": 1, "T": 0, "C": 8, "H": 2, "S": 4},
    ),
    flops=flops,
    bytes=least_bytes,
    tolerance={torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2},
    versions={
        "torch": Version("torch", "gpukern.kernels.qkv:qkv_torch"),
        "numba": Version(
            "numba",
            "gpukern.kernels.qkv.numba_ladder:qkv",
            {"BM": 16, "BN": 16, "BK": 16},
            shared="gpukern.kernels.qkv.numba_ladder:shared_bytes",
        ),
        "triton": Version(
            "triton",
            "gpukern.kernels.qkv.triton_ladder:qkv",
            {"BM": 128, "BN": 128, "BK": 32, "warps": 8, "stages": 3},
            shared="gpukern.kernels.matmul.triton_ladder:shared_bytes",
        ),
        "triton_decode": Version("triton", "gpukern.kernels.qkv.triton_decode:qkv_decode", {"BN": 2, "warps": 4}),
    },
)
