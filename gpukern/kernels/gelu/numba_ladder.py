"""gelu in Numba-CUDA."""

import math

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.op import require, require_whole

PER_THREAD = 4  # elements


@cuda.jit(device=True)
def tanh_gelu(x):
    """x * sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3), in float32; the activation of other kernels, too.

    exp of a number that is never positive cannot overflow, so any x will do.
    """
    u = float32(0.7978845608028654) * (x + float32(0.044715) * x * x * x)
    e = math.exp(float32(-2) * abs(u))
    sigmoid = (float32(1) if u > 0 else e) / (float32(1) + e)
    return x * float32(sigmoid)


@cuda.jit
def _gelu_kernel(x, out):
    """A grid-stride loop: thread i takes elements i, i + grid, i + 2 grid ... so neighbours read neighbours."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = tanh_gelu(float32(x[i]))


def gelu(x: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x: any shape (made contiguous first, if it is not). Returns its tanh-GELU, contiguous.

    Blocks of `threads`, as many of them as give each thread PER_THREAD elements.
    """
    require(x, "x", (None,) * getattr(x, "ndim", 0))
    require_whole(threads=threads)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    device.check_launch(1, threads)
    threads = min(threads, -(-out.numel() // PER_THREAD))
    grid = (-(-out.numel() // (threads * PER_THREAD)),)
    device.check_launch(grid, threads)
    _gelu_kernel[grid, threads, device.numba_stream()](*map(device.numba_array, (x.reshape(-1), out.view(-1))))
    return out
