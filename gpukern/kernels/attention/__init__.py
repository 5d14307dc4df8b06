"""attention: softmax(q k^T / sqrt(D)) v, for every head: stages 2, 3 and 4 of the layer in one operation.

Causal: row i sees column j if and only if j <= i + S - T, as in `softmax`; a row that sees nothing is 0.

k and v may have fewer heads, H_kv, that divide H: H / H_kv neighbouring heads of q then share one (grouped heads).

`numba` and `triton` run the three kernels in a row and write the [B, H, T, S] scores and weights to memory between
them. `triton_flash` is one kernel that never does: Dao et al., *FlashAttention* (arXiv 2205.14135).
`triton_flash_descriptors` lets the card's copy engine load its tiles, and `triton_split_kv` is for decode: it splits
the cache over programs.

Cost for q [B, H, T, D], k and v [B, H, S, D]: 4D operations for each visible pair of tokens, in every batch and head;
BHD(T + 2S) elements read and BHTD written at the least.
"""

import torch
import torch.nn.functional as F

from gpukern.kernels.scores import reference as scores_reference
from gpukern.kernels.softmax import reference as softmax_reference
from gpukern.kernels.softmax import visible, visible_pairs
from gpukern.kernels.values import reference as values_reference
from gpukern.op import Op, Version, normal


def reference(q, k, v, causal: bool = True) -> torch.Tensor:
    """q: `[B, H, T, D]`, k, v: `[B, H_kv, S, D]`. Returns `[B, T, H*D]` in float64."""
    return values_reference(softmax_reference(scores_reference(q, k), causal), v)


def attention_torch(q, k, v, causal: bool = True) -> torch.Tensor:
    """As `reference`, by PyTorch's scaled_dot_product_attention in the dtype of `q`.

    Its `is_causal` aligns the mask to the top left; that is ours only if T == S. Otherwise the mask is handed over; and
    a row that sees nothing, which only then can be, is made 0: on a card some of its backends leave other values there.
    """
    T, S = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if causal and T != S and T != 1:
        mask = visible(T, S, q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal and T == S, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


def inputs(shape, dtype, device, generator) -> dict:
    """Of `shape`: H_kv, heads of k and v, where they are not H; flags causal; strided (k, v kept token by token)."""
    kind = {"dtype": dtype, "device": device, "generator": generator}
    B, H, T, S, D = (shape[axis] for axis in "BHTSD")
    q = normal(B, H, T, D, mean=0.3, **kind)
    H = shape.get("H_kv", H)
    if shape.get("strided"):
        k = normal(B, S, H, D, mean=0.3, **kind).transpose(1, 2)
        v = normal(B, S, H, D, mean=0.5, **kind).transpose(1, 2)
    else:
        k, v = normal(B, H, S, D, mean=0.3, **kind), normal(B, H, S, D, mean=0.5, **kind)
    return {"q": q, "k": k, "v": v, "causal": bool(shape.get("causal"))}


def flops(shape) -> int:
    pairs = visible_pairs(shape["T"], shape["S"], bool(shape.get("causal")))
    return 4 * shape["B"] * shape["H"] * shape["D"] * pairs


attention = Op(
    name="attention",
    summary="out[B, T, H*D] = softmax(q[B, H, T, D] k[B, H, S, D]^T / sqrt(D)) v[B, H, S, D], causal or not",
    reference=reference,
    inputs=inputs,
    shapes=(
        {"B": 1, "H": 2, "T": 8, "S": 8, "D": 32, "causal": 1},
        {"B": 1, "H": 1, "T": 1, "S": 1, "D": 16, "causal": 1},
        {"B": 2, "H": 3, "T": 2, "S": 37, "D": 16, "causal": 1, "strided": 1},
        {"B": 1, "H": 2, "T": 7, "S": 4, "D": 16, "causal": 1},
        {"B": 1, "H": 2, "T": 3, "S": 19, "D": 32},
        {"B": 2, "H": 1, "T": 1, "S": 67, "D": 64, "causal": 1},
        {"B": 1, "H": 2, "T": 0, "S": 5, "D": 16, "causal": 1},
    ),
    flops=flops,
    bytes=lambda s, dtype: 2 * s["B"] * s["D"] * (s["H"] * s["T"] + s.get("H_kv", s["H"]) * s["S"]) * dtype.itemsize,
    tolerance={torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2},
    versions={
        "torch": Version("torch", "gpukern.kernels.attention:attention_torch"),
        "numba": Version("numba", "gpukern.kernels.attention.numba_ladder:attention"),
        "triton": Version("triton", "gpukern.kernels.attention.triton_ladder:attention"),
        "triton_flash": Version(
            "triton",
            "gpukern.kernels.attention.triton_ladder:attention_flash",
            {"BM": 64, "BN": 64, "warps": 4, "stages": 3},
            shared="gpukern.kernels.attention.triton_ladder:shared_bytes",
        ),
        "triton_flash_descriptors": Version(
            "triton",
            "gpukern.kernels.attention.triton_descriptors:attention_descriptors",
            {"BM": 64, "BN": 64, "warps": 4, "stages": 3},
            shared="gpukern.kernels.attention.triton_descriptors:descriptors_shared_bytes",
        ),
        "triton_split_kv": Version(
            "triton",
            "gpukern.kernels.attention.triton_split_kv:attention_split_kv",
            {"BN": 64, "splits": 8, "warps": 4, "stages": 3},
            shared="gpukern.kernels.attention.triton_split_kv:split_kv_shared_bytes",
        ),
    },
)
