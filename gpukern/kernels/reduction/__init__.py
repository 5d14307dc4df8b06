"""reduction: the sum of all elements of x. Threads that know one number each must find out what they know together.

Cost for N elements: N - 1 additions; N elements read, one written: bound by memory. Floating-point addition is not
associative, so the order decides the last digits: each version adds in an order that its tile and N fix, whatever block
is done first, and gives the same result each time.

Source: M. Harris, *Optimizing Parallel Reduction in CUDA* (NVIDIA, 2007); the last block that finishes the sum is that
of NVIDIA's sample threadFenceReduction.
"""

import torch

from gpukern.op import Op, Version, normal


def reference(x: torch.Tensor) -> torch.Tensor:
    """x: any shape. Returns its sum, `[]` in float64."""
    return x.double().sum()


def reduction_torch(x: torch.Tensor) -> torch.Tensor:
    """x: any shape. PyTorch's own kernel, which adds in float32 what is smaller. Returns `[]`."""
    return x.sum()


def inputs(shape, dtype, device, generator) -> dict:
    return {"x": normal(shape["N"], mean=0.25, dtype=dtype, device=device, generator=generator)}


_LADDER = "gpukern.kernels.reduction.numba_ladder"
reduction = Op(
    name="reduction",
    summary="out[] = sum of x[N]",
    reference=reference,
    inputs=inputs,
    shapes=({"N": 1 << 12}, {"N": 1}, {"N": 127}, {"N": 10007}, {"N": 0}),
    flops=lambda s: max(s["N"] - 1, 0),
    bytes=lambda s, dtype: (s["N"] + 1) * dtype.itemsize,
    tolerance={torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    versions={
        "torch": Version("torch", "gpukern.kernels.reduction:reduction_torch"),
        "numba_divergent": Version("numba", f"{_LADDER}:reduction_divergent", {"threads": 256}),
        "numba_sequential": Version("numba", f"{_LADDER}:reduction_sequential", {"threads": 256}),
        "numba_shuffle": Version("numba", f"{_LADDER}:reduction_shuffle", {"threads": 256}),
        "numba_last_block": Version("numba", f"{_LADDER}:reduction_last_block", {"threads": 512, "blocks": 4}),
    },
)
