"""layernorm: (x - mean) / sqrt(variance + eps) * gamma + beta, along the last axis.

The variance is the mean of (x - mean)^2, found in a second pass: E[x^2] - mean^2 in one pass loses all digits where the
mean is large beside the spread. Lanes past the end of a row must not enter it: (0 - mean)^2 is not 0.

Cost for x [..., C]: each element read and written once, plus gamma and beta; about 8 operations each: bound by memory.
Source: Ba, Kiros and Hinton, *Layer Normalization* (arXiv 1607.06450).
"""

import torch
import torch.nn.functional as F

from gpukern.op import Op, Version, normal


def reference(x, gamma, beta, eps: float = 1e-5) -> torch.Tensor:
    """x: `[..., C]`, gamma, beta: `[C]`. Returns the shape of x in float64."""
    x = x.double()
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / (variance + eps).sqrt() * gamma.double() + beta.double()


def layernorm_torch(x, gamma, beta, eps: float = 1e-5) -> torch.Tensor:
    """As `reference`, by PyTorch's own kernel in the dtype of `x`."""
    return F.layer_norm(x, x.shape[-1:], gamma, beta, eps)


def inputs(shape, dtype, device, generator) -> dict:
    """x has mean 5.5, so that padding lanes that enter the variance show."""
    kind = {"dtype": dtype, "device": device, "generator": generator}
    C = shape["C"]
    return {
        "x": normal(shape["B"], shape["T"], C, mean=5.5, scale=2.0, **kind),
        "gamma": normal(C, mean=1.0, scale=0.3, **kind),
        "beta": normal(C, scale=0.5, **kind),
    }


layernorm = Op(
    name="layernorm",
    summary="out[..., C] = (x[..., C] - mean) / sqrt(variance + eps) * gamma[C] + beta[C]",
    reference=reference,
    inputs=inputs,
    shapes=(
        {"B": 1, "T": 8, "C": 64},
        {"B": 1, "T": 1, "C": 1},
        {"B": 2, "T": 3, "C": 17},
        {"B": 1, "T": 5, "C": 127},
        {"B": 1, "T": 2, "C": 1000},
        {"B": 1, "T": 0, "C": 16},
    ),
    flops=lambda s: 8 * s["B"] * s["T"] * s["C"],
    bytes=lambda s, dtype: (2 * s["B"] * s["T"] * s["C"] + 2 * s["C"]) * dtype.itemsize,
    tolerance={torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    versions={
        "torch": Version("torch", "gpukern.kernels.layernorm:layernorm_torch"),
        "numba": Version("numba", "gpukern.kernels.layernorm.numba_ladder:layernorm", {"threads": 128}),
        "triton": Version("triton", "gpukern.kernels.layernorm.triton_ladder:layernorm", {"warps": 4}),
        "cuda_cpp": Version("cuda", "gpukern.kernels.layernorm.cuda_ladder:layernorm", {"warps": 4}),
    },
)
