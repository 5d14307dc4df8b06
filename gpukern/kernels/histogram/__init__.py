"""histogram: how often each of 256 values occurs. Threads that write where the data send them, many to one place.

Cost for N elements: N elements read, 256 counts of 4 bytes written, N additions that must be atomic. What bounds it is
neither bytes nor arithmetic but how many threads want the same counter at the same time.

Source: Kirk, Hwu and El Hajj, *Programming Massively Parallel Processors*, the chapter on histograms and privatisation.
"""

import torch

from gpukern.op import Op, Version

BINS = 256
DTYPES = (torch.uint8, torch.int32)


def reference(x: torch.Tensor) -> torch.Tensor:
    """x: `[N]` of whole numbers. Returns how often 0 ... 255 occur, `[256]` in float64; others are not counted."""
    return torch.stack([(x == value).sum() for value in range(BINS)]).double()


def histogram_torch(x: torch.Tensor) -> torch.Tensor:
    """x: `[N]` of whole numbers. By PyTorch's bincount. Returns `[256]`, int32."""
    if x.dtype != torch.uint8:
        x = x[(x >= 0) & (x < BINS)]
    return torch.bincount(x, minlength=BINS).int()


def inputs(shape, dtype, device, generator) -> dict:
    """A bell around 100, so that some counters are wanted by many; of int32, a few values lie outside of 0 ... 255."""
    x = (torch.randn(shape["N"], generator=generator) * 40 + 100).round()
    return {"x": x.clamp(0, 255).to(dtype).to(device) if dtype == torch.uint8 else x.to(dtype).to(device)}


_LADDER = "gpukern.kernels.histogram.numba_ladder"
histogram = Op(
    name="histogram",
    summary="out[256] = how often each value occurs in x[N]",
    reference=reference,
    inputs=inputs,
    shapes=({"N": 1 << 12}, {"N": 1}, {"N": 127}, {"N": 10007}, {"N": 0}),
    flops=lambda s: 0,
    bytes=lambda s, dtype: s["N"] * dtype.itemsize + 4 * BINS,
    tolerance=dict.fromkeys(DTYPES, 0.0),
    versions={
        "torch": Version("torch", "gpukern.kernels.histogram:histogram_torch"),
        "numba_global": Version("numba", f"{_LADDER}:histogram_global", {"threads": 256, "blocks": 8}),
        "numba_privatised": Version("numba", f"{_LADDER}:histogram_privatised", {"threads": 256, "blocks": 8}),
    },
)
