"""transpose: out[n, m] = x[m, n]. A copy in which reading and writing cannot both go along the rows of memory.

Cost for x [M, N]: MN elements read and MN written, no operation: bound by memory. A tile in shared memory takes the
turn, so that both sides of it are whole rows.

Source: G. Ruetsch and P. Micikevicius, *Optimizing Matrix Transpose in CUDA* (NVIDIA, 2009), and M. Harris, *An
Efficient Matrix Transpose in CUDA C/C++* (NVIDIA blog).
"""

import torch

from gpukern.op import Op, Version, normal


def reference(x: torch.Tensor) -> torch.Tensor:
    """x: `[M, N]`. Returns `[N, M]` in float64."""
    return x.double().T


def transpose_torch(x: torch.Tensor) -> torch.Tensor:
    """x: `[M, N]`, any strides. PyTorch's copy of the transposed view. Returns `[N, M]`, contiguous."""
    return x.T.clone(memory_format=torch.contiguous_format)


def inputs(shape, dtype, device, generator) -> dict:
    return {"x": normal(shape["M"], shape["N"], mean=1.0, dtype=dtype, device=device, generator=generator)}


_LADDER = "gpukern.kernels.transpose.numba_ladder"
transpose = Op(
    name="transpose",
    summary="out[N, M] = x[M, N], the axes swapped",
    reference=reference,
    inputs=inputs,
    shapes=(
        {"M": 64, "N": 96},
        {"M": 1, "N": 1},
        {"M": 33, "N": 65},
        {"M": 68, "N": 132},
        {"M": 1, "N": 100},
        {"M": 100, "N": 1},
        {"M": 0, "N": 5},
    ),
    flops=lambda s: 0,
    bytes=lambda s, dtype: 2 * s["M"] * s["N"] * dtype.itemsize,
    tolerance={torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0},
    versions={
        "torch": Version("torch", "gpukern.kernels.transpose:transpose_torch"),
        "numba_naive": Version("numba", f"{_LADDER}:transpose_naive", {"threads": 256}),
        "numba_tile": Version("numba", f"{_LADDER}:transpose_tile", {"threads": 256}),
        "numba_padded": Version("numba", f"{_LADDER}:transpose_padded", {"threads": 256}),
        "numba_vectorised": Version("numba", f"{_LADDER}:transpose_vectorised", {"threads": 256}),
    },
)
