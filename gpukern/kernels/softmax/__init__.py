"""softmax: exp(x - max) / sum(exp(x - max)) along the last axis, with the causal mask of attention if asked for.

Causal: T new tokens look at S tokens, of which they are the last T themselves; so row i sees column j if and only if
j <= i + S - T. Masked weights are exactly 0, and so is a row that sees nothing (or only -inf): never NaN.

Cost for x [..., T, S]: 2TS elements, x read and the weights written, whole as the layer's plan counts them (a kernel
may skip what the mask hides); 4 operations a visible element (subtract, exponential, sum, divide): bound by memory.
Three passes over a row (max, sum, quotient) become two if max and sum are found together: Milakov and Gimelshein,
*Online normalizer calculation for softmax* (arXiv 1805.02867).
"""

import math

import torch

from gpukern.op import Op, Version, normal


def visible(T: int, S: int, device=None) -> torch.Tensor:
    """The causal mask, `[T, S]` of bool: True where row i sees column j, that is j <= i + S - T."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def visible_pairs(T: int, S: int, causal: bool = True) -> int:
    """How many of the T x S pairs the mask lets through."""
    if not causal:
        return T * S
    rows = min(T, S)  # the rows above see nothing
    return rows * S - rows * (rows - 1) // 2


def reference(x: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """x: `[..., T, S]`. Returns the same shape in float64; a row that sees nothing is 0."""
    return _masked_softmax(x.double(), causal)


def softmax_torch(x: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """As `reference`, by PyTorch's own kernels in the dtype of `x`: mask, softmax, mask."""
    return _masked_softmax(x, causal)


def _masked_softmax(x: torch.Tensor, causal: bool) -> torch.Tensor:
    if causal:
        x = x.masked_fill(~visible(*x.shape[-2:], device=x.device), -math.inf)
    out = torch.softmax(x, dim=-1).masked_fill((x == -math.inf).all(-1, keepdim=True), 0.0)
    return out.masked_fill(~visible(*x.shape[-2:], device=x.device), 0.0) if causal else out


def inputs(shape, dtype, device, generator) -> dict:
    """Flags of `shape`: causal; masked (row 0 and the first third of row 1 are -inf, as a padding mask leaves them)."""
    kind = {"dtype": dtype, "device": device, "generator": generator}
    x = normal(*(shape[axis] for axis in "BHTS"), mean=3.0, scale=2.0, **kind)
    if shape.get("masked"):
        x[:, :, 0] = -math.inf
        x[:, :, 1, : shape["S"] // 3] = -math.inf
    return {"x": x, "causal": bool(shape.get("causal"))}


def flops(shape) -> int:
    return 4 * shape["B"] * shape["H"] * visible_pairs(shape["T"], shape["S"], bool(shape.get("causal")))


softmax = Op(
    name="softmax",
    summary="out[..., T, S] = softmax(x[..., T, S]) over S; causal: row i sees column j if j <= i + S - T",
    reference=reference,
    inputs=inputs,
    shapes=(
        {"B": 1, "H": 2, "T": 8, "S": 64, "causal": 1},
        {"B": 1, "H": 1, "T": 1, "S": 1},
        {"B": 1, "H": 2, "T": 5, "S": 37, "causal": 1},
        {"B": 2, "H": 3, "T": 2, "S": 17},
        {"B": 1, "H": 2, "T": 7, "S": 3, "causal": 1},
        {"B": 1, "H": 1, "T": 3, "S": 255, "masked": 1},
        {"B": 1, "H": 1, "T": 1, "S": 5001, "causal": 1},
        {"B": 1, "H": 2, "T": 3, "S": 0},
    ),
    flops=flops,
    bytes=lambda s, dtype: 2 * s["B"] * s["H"] * s["T"] * s["S"] * dtype.itemsize,
    tolerance={torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    versions={
        "torch": Version("torch", "gpukern.kernels.softmax:softmax_torch"),
        "numba_one_thread": Version(
            "numba", "gpukern.kernels.softmax.numba_ladder:softmax_one_thread", {"threads": 128}
        ),
        "numba": Version("numba", "gpukern.kernels.softmax.numba_ladder:softmax", {"threads": 128}),
        "triton_three_pass": Version(
            "triton", "gpukern.kernels.softmax.triton_ladder:softmax_three_pass", {"BN": 1024, "warps": 4}
        ),
        "triton": Version("triton", "gpukern.kernels.softmax.triton_ladder:softmax", {"BN": 4096, "warps": 8}),
        "triton_online": Version(
            "triton", "gpukern.kernels.softmax.triton_ladder:softmax_online", {"BN": 4096, "warps": 32}
        ),
    },
)
