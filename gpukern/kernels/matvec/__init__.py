"""matvec: matmul for at most 8 rows, which is what decode has: out = act(a @ w + bias) + residual.

Cost for [M, K] times w [K, N]: as for matmul, of which KN elements of w are nearly all that is read: 2M operations for
each of them, far from what a card could do in that time, so bound by memory. What counts is that enough loads are on
their way at any moment: by Little's law as many bytes as memory delivers in the time that one load takes.

w may lie in rows ([K, N]) or in columns (the transpose of a contiguous [N, K]): a program then reads a few whole
columns, and needs no other for its sums.
"""

import torch

from gpukern.kernels.matmul import inputs, least_bytes, reference
from gpukern.op import Op, Version

matvec = Op(
    name="matvec",
    summary="out[M, N] = act(a[M, K] @ w[K, N] + bias[N]) + residual[M, N], M up to 8",
    reference=reference,
    inputs=inputs,
    shapes=(
        {"M": 1, "N": 48, "K": 64},
        {"M": 1, "N": 1, "K": 1},
        {"M": 3, "N": 37, "K": 45, "bias": 1, "gelu": 1},
        {"M": 1, "N": 70, "K": 131, "bias": 1, "residual": 1, "strided": 1},
        {"M": 8, "N": 17, "K": 300, "gelu": 1, "residual": 1},
        {"M": 0, "N": 3, "K": 5},
    ),
    flops=lambda s: 2 * s["M"] * s["N"] * s["K"],
    bytes=least_bytes,
    tolerance={torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2},
    versions={
        "torch": Version("torch", "gpukern.kernels.matmul:matmul_torch"),
        "triton": Version(
            "triton",
            "gpukern.kernels.matvec.triton_ladder:matvec",
            {"BN": 64, "BK": 64, "warps": 4, "stages": 1},
            shared="gpukern.kernels.matvec.triton_ladder:shared_bytes",
        ),
        "triton_split_k": Version(
            "triton",
            "gpukern.kernels.matvec.triton_ladder:matvec_split_k",
            {"BN": 256, "BK": 32, "splits": 8, "warps": 8, "stages": 1},
            shared="gpukern.kernels.matvec.triton_ladder:shared_bytes",
        ),
    },
)
