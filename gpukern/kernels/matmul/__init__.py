"""matmul: out = act(a @ w + bias) + residual. It runs three of the layer's eight stages; its main loop runs six.

Cost for a [M, K] times w [K, N]: 2MNK operations (a multiply-add counted as two); MK + KN elements read and MN
written at the least, plus N for a bias and MN for a residual. Bias, activation and residual are an *epilogue*: they are
applied to the float32 sum while it is still in registers, before the one rounding to the output's dtype, so they cost
no trip to memory of their own.

Algorithm: blocking for reuse, as in chapter 5 of Kirk, Hwu and El Hajj, *Programming Massively Parallel Processors*,
and Triton's tutorial 03.
"""

import torch
import torch.nn.functional as F

from gpukern.kernels.gelu import reference as gelu_reference
from gpukern.op import InputError, Op, Version, normal


def reference(a, w, bias=None, activation=None, residual=None) -> torch.Tensor:
    """a: `[M, K]`, w: `[K, N]`, bias: `[N]`, residual: `[M, N]`. Returns `[M, N]` in float64."""
    out = a.double() @ w.double()
    if bias is not None:
        out = out + bias.double()
    if activation == "gelu":
        out = gelu_reference(out)
    if residual is not None:
        out = out + residual.double()
    return out


def matmul_torch(a, w, bias=None, activation=None, residual=None) -> torch.Tensor:
    """As `reference`, by PyTorch's own kernels in the dtype of `a`: cuBLAS, then one kernel for each epilogue."""
    if activation not in (None, "gelu"):
        raise InputError(f"activation={activation!r} is not known; use None or 'gelu'.")
    out = a @ w if bias is None else torch.addmm(bias, a, w)
    if activation == "gelu":
        out = F.gelu(out, approximate="tanh")
    return out if residual is None else out + residual


def inputs(shape, dtype, device, generator) -> dict:
    """Flags of `shape`: strided (both matrices transposed in memory), bias, gelu, residual."""
    kind = {"dtype": dtype, "device": device, "generator": generator}
    M, N, K = shape["M"], shape["N"], shape["K"]
    scale = max(K, 1) ** -0.5  # keeps the products near 1, whatever K is
    if shape.get("strided"):
        a = normal(K, M, mean=0.5, **kind).T
        w = normal(N, K, mean=scale / 4, scale=scale, **kind).T
    else:
        a = normal(M, K, mean=0.5, **kind)
        w = normal(K, N, mean=scale / 4, scale=scale, **kind)
    return {
        "a": a,
        "w": w,
        "bias": normal(N, mean=-0.5, **kind) if shape.get("bias") else None,
        "activation": "gelu" if shape.get("gelu") else None,
        "residual": normal(M, N, mean=1.0, **kind) if shape.get("residual") else None,
    }


def least_bytes(shape, dtype) -> int:
    M, N, K = shape["M"], shape["N"], shape["K"]
    epilogue = N * shape.get("bias", 0) + M * N * shape.get("residual", 0)
    return (M * K + K * N + M * N + epilogue) * dtype.itemsize


matmul = Op(
    name="matmul",
    summary="out[M, N] = act(a[M, K] @ w[K, N] + bias[N]) + residual[M, N]",
    reference=reference,
    inputs=inputs,
    shapes=(
        {"M": 32, "N": 48, "K": 64},
        {"M": 1, "N": 1, "K": 1},
        {"M": 33, "N": 17, "K": 45, "bias": 1, "gelu": 1},
        {"M": 17, "N": 37, "K": 19, "bias": 1, "residual": 1, "strided": 1},
        {"M": 1, "N": 40, "K": 23, "gelu": 1, "residual": 1},
        {"M": 0, "N": 3, "K": 5},
    ),
    flops=lambda s: 2 * s["M"] * s["N"] * s["K"],
    bytes=least_bytes,
    tolerance={torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2},
    versions={
        "torch": Version("torch", "gpukern.kernels.matmul:matmul_torch"),
        "numba_naive": Version("numba", "gpukern.kernels.matmul.numba_ladder:matmul_naive", {"threads": 256}),
        "numba_coalesced": Version("numba", "gpukern.kernels.matmul.numba_ladder:matmul_coalesced", {"threads": 256}),
        "numba": Version(
            "numba",
            "gpukern.kernels.matmul.numba_ladder:matmul",
            {"BM": 16, "BN": 16, "BK": 16},
            shared="gpukern.kernels.matmul.numba_ladder:shared_bytes",
        ),
        "numba_register_tile": Version(
            "numba",
            "gpukern.kernels.matmul.numba_register_tile:matmul_register_tile",
            {"BM": 64, "BN": 64, "BK": 16},
            shared="gpukern.kernels.matmul.numba_ladder:shared_bytes",
        ),
        "numba_vectorised": Version(
            "numba",
            "gpukern.kernels.matmul.numba_vectorised:matmul_vectorised",
            {"BM": 128, "BN": 128, "BK": 16},
            shared="gpukern.kernels.matmul.numba_vectorised:shared_bytes",
        ),
        "triton_naive": Version(
            "triton",
            "gpukern.kernels.matmul.triton_ladder:matmul_naive",
            {"BM": 128, "BN": 128, "BK": 32, "warps": 8, "stages": 1},
            shared="gpukern.kernels.matmul.triton_ladder:shared_bytes",
        ),
        "triton_grouped": Version(
            "triton",
            "gpukern.kernels.matmul.triton_ladder:matmul_grouped",
            {"BM": 128, "BN": 128, "BK": 32, "warps": 8, "stages": 1},
            shared="gpukern.kernels.matmul.triton_ladder:shared_bytes",
        ),
        "triton": Version(
            "triton",
            "gpukern.kernels.matmul.triton_ladder:matmul",
            {"BM": 128, "BN": 128, "BK": 32, "warps": 8, "stages": 3},
            shared="gpukern.kernels.matmul.triton_ladder:shared_bytes",
        ),
        "triton_persistent": Version(
            "triton",
            "gpukern.kernels.matmul.triton_persistent:matmul_persistent",
            {"BM": 128, "BN": 256, "BK": 64, "warps": 8, "stages": 4},
            shared="gpukern.kernels.matmul.triton_persistent:shared_bytes",
        ),
        "cuda_cpp": Version(
            "cuda",
            "gpukern.kernels.matmul.cuda_ladder:matmul",
            {"BM": 16, "BN": 16, "BK": 16},
            shared="gpukern.kernels.matmul.cuda_ladder:shared_bytes",
        ),
        "cutlass": Version(
            "cutlass",
            "gpukern.kernels.matmul.cutlass_ladder:matmul",
            {"BM": 128, "BN": 256, "BK": 64, "stages": 4},
            shared="gpukern.kernels.matmul.cutlass_ladder:shared_bytes",
        ),
    },
)
