"""gelu: the tanh form of the Gaussian error linear unit, GPT-2's activation, element by element.

    gelu(x) = x / 2 * (1 + tanh(u)) = x * sigmoid(2u),   u = sqrt(2 / pi) * (x + 0.044715 * x^3)

The sigmoid form is the one that the kernels use: exp(-2u) overflows to inf at worst, and x / inf is the right 0.
Not to be confused with the exact form, x * Phi(x) with the error function; the two differ by up to 5e-4.

Cost for N elements: N read, N written, about 8 operations each: bound by memory on every card.
Source: Hendrycks and Gimpel, *Gaussian Error Linear Units* (arXiv 1606.08415).
"""

import math

import torch
import torch.nn.functional as F

from gpukern.op import Op, Version, normal


def reference(x: torch.Tensor) -> torch.Tensor:
    """x: any shape. Returns the same shape in float64."""
    x = x.double()
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def gelu_torch(x: torch.Tensor) -> torch.Tensor:
    """x: any shape. PyTorch's own kernel."""
    return F.gelu(x, approximate="tanh")


def inputs(shape, dtype, device, generator) -> dict:
    """Normal with a width at which both tails are met: there the cube is large and the result 0 or x."""
    return {"x": normal(shape["N"], mean=0.5, scale=4.0, dtype=dtype, device=device, generator=generator)}


gelu = Op(
    name="gelu",
    summary="out = x * sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 * x^3), any shape",
    reference=reference,
    inputs=inputs,
    shapes=({"N": 1 << 10}, {"N": 1}, {"N": 127}, {"N": 1000}, {"N": 0}),
    flops=lambda s: 8 * s["N"],
    bytes=lambda s, dtype: 2 * s["N"] * dtype.itemsize,
    tolerance={torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    versions={
        "torch": Version("torch", "gpukern.kernels.gelu:gelu_torch"),
        "numba": Version("numba", "gpukern.kernels.gelu.numba_ladder:gelu", {"threads": 256}),
        "triton": Version("triton", "gpukern.kernels.gelu.triton_ladder:gelu", {"BN": 1024, "warps": 4}),
    },
)
