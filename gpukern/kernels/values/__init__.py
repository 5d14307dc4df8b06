"""values: the weighted sum of the values, p v, for every head, with the heads merged as they are stored.

v may have fewer heads, H_kv, that divide H, as k in `scores`.

Cost for p [B, H, T, S] and v [B, H, S, D]: 2BHTSD operations; BHS(T + D) elements read, BHTD written. All pairs
of tokens count here, where no mask is known; the layer's stage counts the visible ones.
Source: Vaswani et al., *Attention Is All You Need* (arXiv 1706.03762), sections 3.2.1 and 3.2.2.
"""

import torch

from gpukern.kernels.scores import for_heads
from gpukern.op import Op, Version, normal


def reference(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """p: `[B, H, T, S]`, v: `[B, H_kv, S, D]`. Returns `[B, T, H*D]` in float64."""
    return (p.double() @ for_heads(v, p.shape[1]).double()).transpose(1, 2).flatten(2)


def values_torch(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As `reference`, by PyTorch's own kernels in the dtype of `p`; merging the heads is a copy of its own."""
    return (p @ for_heads(v, p.shape[1])).transpose(1, 2).flatten(2)


def inputs(shape, dtype, device, generator) -> dict:
    """p has rows that sum to 1, as softmax leaves them. Flag of `shape`: strided (v is kept token by token)."""
    kind = {"dtype": dtype, "device": device, "generator": generator}
    B, H, T, S, D = (shape[axis] for axis in "BHTSD")
    p = normal(B, H, T, S, dtype=torch.float32, device=device, generator=generator).softmax(-1).to(dtype)
    if shape.get("strided"):
        v = normal(B, S, H, D, mean=0.5, **kind).transpose(1, 2)
    else:
        v = normal(B, H, S, D, mean=0.5, **kind)
    return {"p": p, "v": v}


values = Op(
    name="values",
    summary="out[B, T, H*D] = p[B, H, T, S] v[B, H, S, D], heads merged",
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
    bytes=lambda s, dtype: s["B"] * s["H"] * (s["S"] * (s["T"] + s["D"]) + s["T"] * s["D"]) * dtype.itemsize,
    tolerance={torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2},
    versions={
        "torch": Version("torch", "gpukern.kernels.values:values_torch"),
        "numba": Version(
            "numba",
            "gpukern.kernels.values.numba_ladder:values",
            {"BM": 16, "BN": 16, "BK": 16},
            shared="gpukern.kernels.matmul.numba_ladder:shared_bytes",
        ),
        "triton": Version(
            "triton",
            "gpukern.kernels.values.triton_ladder:values",
            {"BM": 64, "BN": 64, "BK": 32, "warps": 4, "stages": 3},
            shared="gpukern.kernels.matmul.triton_ladder:shared_bytes",
        ),
    },
)
