"""copy: out = x, and saxpy: out = alpha * x + y. Nothing to compute, so what is left is how a warp asks for memory.

Cost for N elements: copy reads N and writes N; saxpy reads 2N and writes N, for 2N operations (a multiply-add counted
as two). Both are bound by memory on every card, and a copy is the speed that every other memory-bound kernel is held
against.

Sources: M. Harris, *How to Access Global Memory Efficiently in CUDA C/C++ Kernels*, *CUDA Pro Tip: Write Flexible
Kernels with Grid-Stride Loops* and *CUDA Pro Tip: Increase Performance with Vectorized Memory Access* (NVIDIA blog).
"""

import torch

from gpukern.op import Op, Version, normal


def reference(x: torch.Tensor) -> torch.Tensor:
    """x: `[N]`. Returns `[N]` in float64."""
    return x.double()


def copy_torch(x: torch.Tensor) -> torch.Tensor:
    """x: `[N]`, any stride. PyTorch's own kernel."""
    return x.clone(memory_format=torch.contiguous_format)


def inputs(shape, dtype, device, generator) -> dict:
    return {"x": normal(shape["N"], mean=1.0, dtype=dtype, device=device, generator=generator)}


copy = Op(
    name="copy",
    summary="out[N] = x[N]",
    reference=reference,
    inputs=inputs,
    shapes=({"N": 1 << 10}, {"N": 1}, {"N": 127}, {"N": 1000}, {"N": 0}),
    flops=lambda s: 0,
    bytes=lambda s, dtype: 2 * s["N"] * dtype.itemsize,
    tolerance={torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0},
    versions={
        "torch": Version("torch", "gpukern.kernels.copy:copy_torch"),
        "numba_strided": Version("numba", "gpukern.kernels.copy.numba_ladder:copy_strided", {"threads": 256}),
        "numba_coalesced": Version("numba", "gpukern.kernels.copy.numba_ladder:copy_coalesced", {"threads": 256}),
        "numba_grid_stride": Version("numba", "gpukern.kernels.copy.numba_ladder:copy_grid_stride", {"threads": 256}),
        "numba_vectorised": Version(
            "numba", "gpukern.kernels.copy.numba_ladder:copy_vectorised", {"threads": 256, "quads": 1}
        ),
    },
)


def saxpy_reference(x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    """x, y: `[N]`. Returns `[N]` in float64."""
    return alpha * x.double() + y.double()


def saxpy_torch(x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    """x, y: `[N]`. PyTorch's own kernel, which does both operations at once."""
    return torch.add(y, x, alpha=alpha)


def saxpy_inputs(shape, dtype, device, generator) -> dict:
    kind = {"dtype": dtype, "device": device, "generator": generator}
    return {"x": normal(shape["N"], mean=1.0, **kind), "y": normal(shape["N"], **kind), "alpha": 1.5}


saxpy = Op(
    name="saxpy",
    summary="out[N] = alpha * x[N] + y[N]",
    reference=saxpy_reference,
    inputs=saxpy_inputs,
    shapes=copy.shapes,
    flops=lambda s: 2 * s["N"],
    bytes=lambda s, dtype: 3 * s["N"] * dtype.itemsize,
    tolerance={torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    versions={
        "torch": Version("torch", "gpukern.kernels.copy:saxpy_torch"),
        "numba_grid_stride": Version("numba", "gpukern.kernels.copy.saxpy_ladder:saxpy_grid_stride", {"threads": 256}),
        "numba_vectorised": Version(
            "numba", "gpukern.kernels.copy.saxpy_ladder:saxpy_vectorised", {"threads": 256, "quads": 1}
        ),
    },
)
