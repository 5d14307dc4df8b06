"""layernorm: (x - mean) / sqrt(variance + eps) * gamma + beta, along the last axis; and the same of x + residual.

The variance is the mean of (x - mean)^2, found in a second pass: E[x^2] - mean^2 in one pass loses all digits where the
mean is large beside the spread. Lanes past the end of a row must not enter it: (0 - mean)^2 is not 0.

Cost for x [..., C]: each element read and written once, plus gamma and beta; about 8 operations each: bound by memory.
With a residual two elements are read for each written; two are written if the sum is kept, which a transformer's next
block adds to again.
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
        "numba_shuffle": Version("numba", "gpukern.kernels.layernorm.numba_ladder:layernorm_shuffle", {"threads": 128}),
        "triton": Version("triton", "gpukern.kernels.layernorm.triton_ladder:layernorm", {"warps": 4}),
        "triton_two_pass": Version(
            "triton", "gpukern.kernels.layernorm.triton_ladder:layernorm_two_pass", {"BC": 16384, "warps": 32}
        ),
        "cuda_cpp": Version("cuda", "gpukern.kernels.layernorm.cuda_ladder:layernorm", {"warps": 4}),
    },
)


def residual_reference(x, residual, gamma, beta, eps: float = 1e-5, keep_sum: bool = False):
    """x, residual: `[..., C]`, gamma, beta: `[C]`. Returns the layernorm of their sum in float64; or it and the sum."""
    total = x.double() + residual.double()
    out = reference(total, gamma, beta, eps)
    return (out, total) if keep_sum else out


def residual_torch(x, residual, gamma, beta, eps: float = 1e-5, keep_sum: bool = False):
    """As `residual_reference`, by two of PyTorch's own kernels in the dtype of `x`."""
    total = x + residual
    out = F.layer_norm(total, x.shape[-1:], gamma, beta, eps)
    return (out, total) if keep_sum else out


def residual_inputs(shape, dtype, device, generator) -> dict:
    """Flag of `shape`: sum (it is kept and returned)."""
    drawn = inputs(shape, dtype, device, generator)
    residual = normal(*drawn["x"].shape, mean=-1.5, dtype=dtype, device=device, generator=generator)
    return {**drawn, "residual": residual, "keep_sum": bool(shape.get("sum"))}


def residual_bytes(shape, dtype) -> int:
    B, T, C = shape["B"], shape["T"], shape["C"]
    return ((3 + shape.get("sum", 0)) * B * T * C + 2 * C) * dtype.itemsize


residual_layernorm = Op(
    name="residual_layernorm",
    summary="out[..., C] = layernorm(x[..., C] + residual[..., C]) * gamma[C] + beta[C]; the sum, too, if it is kept",
    reference=residual_reference,
    inputs=residual_inputs,
    shapes=(
        {"B": 1, "T": 8, "C": 64},
        {"B": 1, "T": 1, "C": 1, "sum": 1},
        {"B": 2, "T": 3, "C": 17},
        {"B": 1, "T": 5, "C": 127, "sum": 1},
        {"B": 1, "T": 2, "C": 1000},
        {"B": 1, "T": 0, "C": 16, "sum": 1},
    ),
    flops=lambda s: 9 * s["B"] * s["T"] * s["C"],
    bytes=residual_bytes,
    tolerance={torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2},  # the sum is rounded, too
    versions={
        "torch": Version("torch", "gpukern.kernels.layernorm:residual_torch"),
        "triton_two_kernels": Version(
            "triton", "gpukern.kernels.layernorm.triton_ladder:residual_two_kernels", {"warps": 8}
        ),
        "triton": Version("triton", "gpukern.kernels.layernorm.triton_ladder:residual_layernorm", {"warps": 8}),
        "triton_two_pass": Version(
            "triton", "gpukern.kernels.layernorm.triton_ladder:residual_two_pass", {"BC": 16384, "warps": 32}
        ),
    },
)
