"""norm_mlp_up: gelu(norm(x) @ w + bias), the LayerNorm as a *prologue* of the product: stages 6 and 7 in one kernel.

The normalised rows never go to memory: 2MK elements less than in two kernels. The price is that every program finds
mean and spread of its rows by itself. In decode that is cheap, as a program holds its one row in registers. In prefill
a program reads its BM rows for them, and then works on several tiles of columns so that it does so once for all.

Cost for x [B, T, K], w [K, N]: 2MNK operations of M = B*T rows; MK + KN + 3K + N elements read and MN written at the
least.
"""

import torch
import torch.nn.functional as F

from gpukern.kernels.gelu import reference as gelu_reference
from gpukern.kernels.layernorm import reference as layernorm_reference
from gpukern.op import Op, Version, normal


def reference(x, gamma, beta, eps, w, bias) -> torch.Tensor:
    """x: `[..., K]`, gamma, beta: `[K]`, w: `[K, N]`, bias: `[N]`. Returns `[..., N]` in float64."""
    return gelu_reference(layernorm_reference(x, gamma, beta, eps) @ w.double() + bias.double())


def norm_mlp_up_torch(x, gamma, beta, eps, w, bias) -> torch.Tensor:
    """As `reference`, by PyTorch's own kernels in the dtype of `x`: norm, product with bias, GELU."""
    return F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, eps), w.T, bias), approximate="tanh")


def inputs(shape, dtype, device, generator) -> dict:
    """x has mean 5.5, so that padding lanes that enter the variance show.

    Flag of `shape`: columns (an output's weights side by side).
    """
    kind = {"dtype": dtype, "device": device, "generator": generator}
    B, T, K, N = (shape[axis] for axis in "BTKN")
    w = normal(K, N, mean=K**-0.5 / 4, scale=K**-0.5, **kind)
    return {
        "x": normal(B, T, K, mean=5.5, scale=2.0, **kind),
        "gamma": normal(K, mean=1.0, scale=0.3, **kind),
        "beta": normal(K, scale=0.5, **kind),
        "eps": 1e-5,
        "w": w.T.contiguous().T if shape.get("columns") else w,
        "bias": normal(N, mean=-0.5, **kind),
    }


def least_bytes(shape, dtype) -> int:
    B, T, K, N = (shape[axis] for axis in "BTKN")
    return (B * T * (K + N) + K * N + 2 * K + N) * dtype.itemsize


norm_mlp_up = Op(
    name="norm_mlp_up",
    summary="out[B, T, N] = gelu(norm(x[B, T, K]) @ w[K, N] + bias[N])",
    reference=reference,
    inputs=inputs,
    shapes=(
        {"B": 1, "T": 16, "K": 64, "N": 96},
        {"B": 1, "T": 1, "K": 1, "N": 1},
        {"B": 2, "T": 9, "K": 45, "N": 37},
        {"B": 1, "T": 1, "K": 127, "N": 67, "columns": 1},
        {"B": 3, "T": 1, "K": 40, "N": 131, "columns": 1},
        {"B": 1, "T": 0, "K": 8, "N": 24},
    ),
    flops=lambda s: s["B"] * s["T"] * (2 * s["N"] * s["K"] + 8 * s["K"] + 9 * s["N"]),
    bytes=least_bytes,
    tolerance={torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2},
    versions={
        "torch": Version("torch", "gpukern.kernels.mlp:norm_mlp_up_torch"),
        "triton": Version(
            "triton",
            "gpukern.kernels.mlp.triton_ladder:norm_mlp_up",
            {"BM": 128, "BN": 128, "BK": 64, "warps": 8, "stages": 3},
            shared="gpukern.kernels.matmul.triton_ladder:shared_bytes",
        ),
        "triton_decode": Version(
            "triton", "gpukern.kernels.mlp.triton_ladder:norm_mlp_up_decode", {"BN": 4, "warps": 4}
        ),
    },
)
