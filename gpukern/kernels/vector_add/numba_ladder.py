"""vector_add in Numba-CUDA."""

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.op import require, require_whole


@cuda.jit
def _vector_add_kernel(x, y, out):
    """One thread adds one element; the guard keeps the last block's spare threads off the end."""
    i = cuda.grid(1)
    if i < out.size:
        out[i] = float32(x[i]) + float32(y[i])


def vector_add(x: torch.Tensor, y: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x, y: `[N]`, any stride. `threads` a block, of which there are ceil(N / threads). Returns x + y, `[N]`."""
    require(x, "x", (None,))
    require(y, "y", tuple(x.shape), like=x)
    require_whole(threads=threads)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    grid = (-(-out.numel() // threads),)
    device.check_launch(grid, threads)
    _vector_add_kernel[grid, threads, device.numba_stream()](*map(device.numba_array, (x, y, out)))
    return out
