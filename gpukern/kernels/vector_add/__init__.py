"""vector_add: out = x + y, element by element. The first kernel: one thread, one element.

Cost for N elements: N additions; 2N elements read, N written. At 1 FLOP for 12 bytes (float32) it is bound by memory
on every card.
"""

import torch

from gpukern.op import Op, Version, normal


def reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x, y: `[N]`. Returns `[N]` in float64."""
    return x.double() + y.double()


def add_torch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x, y: `[N]`. PyTorch's own kernel."""
    return x + y


def inputs(shape, dtype, device, generator) -> dict:
    kind = {"dtype": dtype, "device": device, "generator": generator}
    return {"x": normal(shape["N"], mean=1.0, **kind), "y": normal(shape["N"], **kind)}


vector_add = Op(
    name="vector_add",
    summary="out[N] = x[N] + y[N]",
    reference=reference,
    inputs=inputs,
    shapes=({"N": 1 << 10}, {"N": 1}, {"N": 127}, {"N": 1000}, {"N": 0}),
    flops=lambda s: s["N"],
    bytes=lambda s, dtype: 3 * s["N"] * dtype.itemsize,
    tolerance={torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    versions={
        "torch": Version("torch", "gpukern.kernels.vector_add:add_torch"),
        "numba": Version("numba", "gpukern.kernels.vector_add.numba_ladder:vector_add", {"threads": 256}),
        "triton": Version("triton", "gpukern.kernels.vector_add.triton_ladder:vector_add", {"BN": 1024, "warps": 4}),
        "cuda_cpp": Version("cuda", "gpukern.kernels.vector_add.cuda_ladder:vector_add", {"threads": 256}),
    },
)
