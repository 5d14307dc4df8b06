"""scores: q k^T / sqrt(D), for every head: how much each new token attends to each token. No mask, no softmax.

k may have fewer heads, H_kv, that divide H: heads g*H/H_kv .. (g+1)*H/H_kv of q then share head g (grouped heads).

Cost for q [B, H, T, D] and k [B, H, S, D]: 2BHTSD operations; BHD(T + S) elements read, BHTS written. All pairs of
tokens count here, where no mask is known; the layer's stage counts the visible ones. In prefill the written matrix is
the largest tensor of the layer, and that is why flash attention never writes it.
Source: Vaswani et al., *Attention Is All You Need* (arXiv 1706.03762), section 3.2.1.
"""

import torch

from gpukern.op import InputError, Op, Version, normal


def reference(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q: `[B, H, T, D]`, k: `[B, H_kv, S, D]`. Returns `[B, H, T, S]` in float64."""
    return q.double() @ for_heads(k, q.shape[1]).double().transpose(-1, -2) * q.shape[-1] ** -0.5


def scores_torch(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """As `reference`, by PyTorch's own kernels in the dtype of `q`."""
    require_head_size(q)
    return (q * q.shape[-1] ** -0.5) @ for_heads(k, q.shape[1]).transpose(-1, -2)


def for_heads(kv: torch.Tensor, H: int) -> torch.Tensor:
    """`[B, H_kv, S, D]` -> `[B, H, S, D]`: each head of keys or values once for every head of queries that shares it.

    Grouped heads: Ainslie et al., *GQA* (arXiv 2305.13245). A view where H == H_kv, otherwise a copy.
    """
    if kv.shape[1] == H:
        return kv
    require_groups(H, kv.shape[1])
    return kv.repeat_interleave(H // kv.shape[1], dim=1)


def require_groups(H: int, H_kv: int) -> None:
    """Refuse H heads of queries that cannot share H_kv heads of keys and values evenly."""
    if H_kv != H and (H_kv == 0 or H % H_kv):
        raise InputError(f"{H} heads of queries cannot share {H_kv} heads of keys; H must be a multiple of H_kv.")


def require_head_size(q: torch.Tensor) -> None:
    """Refuse heads of no elements: 1 / sqrt(D) is not a number there."""
    if q.shape[-1] == 0:
        raise InputError("q has heads of no elements; D must be at least 1.")


def inputs(shape, dtype, device, generator) -> dict:
    """Flag of `shape`: strided (heads and tokens swapped in memory, as in a cache kept token by token)."""
    kind = {"dtype": dtype, "device": device, "generator": generator}
    B, H, T, S, D = (shape[axis] for axis in "BHTSD")
    if shape.get("strided"):
        q = normal(B, T, H, D, mean=0.3, **kind).transpose(1, 2)
        k = normal(B, S, H, D, mean=0.3, **kind).transpose(1, 2)
    else:
        q, k = normal(B, H, T, D, mean=0.3, **kind), normal(B, H, S, D, mean=0.3, **kind)
    return {"q": q, "k": k}


scores = Op(
    name="scores",
    summary="out[B, H, T, S] = q[B, H, T, D] k[B, H, S, D]^T / sqrt(D)",
    reference=reference,
    inputs=inputs,
    shapes=(
        {"B": 1, "H": 2, "T": 12, "S": 40, "D": 32},
        {"B": 1, "H": 1, "T": 1, "S": 1, "D": 1},
        {"B": 2, "H": 3, "T": 5, "S": 19, "D": 7},
        {"B": 2, "H": 3, "T": 4, "S": 17, "D": 16, "strided": 1},
        {"B": 1, "H": 3, "T": 1, "S": 37, "D": 24},
        {"B": 1, "H": 2, "T": 0, "S": 5, "D": 16},
    ),
    flops=lambda s: 2 * s["B"] * s["H"] * s["T"] * s["S"] * s["D"],
    bytes=lambda s, dtype: s["B"] * s["H"] * (s["D"] * (s["T"] + s["S"]) + s["T"] * s["S"]) * dtype.itemsize,
    tolerance={torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2},
    versions={
        "torch": Version("torch", "gpukern.kernels.scores:scores_torch"),
        "numba": Version(
            "numba",
            "gpukern.kernels.scores.numba_ladder:scores",
            {"BM": 16, "BN": 16, "BK": 16},
            shared="gpukern.kernels.scores.numba_ladder:shared_bytes",
        ),
        "triton": Version(
            "triton",
            "gpukern.kernels.scores.triton_ladder:scores",
            {"BM": 64, "BN": 64, "BK": 32, "warps": 4, "stages": 2},
            shared="gpukern.kernels.matmul.triton_ladder:shared_bytes",
        ),
    },
)
