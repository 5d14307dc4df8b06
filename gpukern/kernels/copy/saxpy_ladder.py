"""saxpy in Numba-CUDA: what the last two rungs of copy do, with something to compute."""

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.kernels.copy.numba_ladder import quad_threads, resident_threads
from gpukern.kernels.intrinsics import load4, store4
from gpukern.kernels.quads import quad_elements
from gpukern.op import require, require_whole


@cuda.jit
def _saxpy_grid_stride_kernel(x, y, alpha, out):
    """Thread i takes elements i, i + grid, i + 2 grid, ..."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = alpha * float32(x[i]) + float32(y[i])


def saxpy_grid_stride(x: torch.Tensor, y: torch.Tensor, alpha: float, threads: int = 256) -> torch.Tensor:
    """x, y: `[N]`, any stride. `threads` a block, and no more blocks than the card holds at once.

    Two loads and a store for two operations: flops_per_byte is 1/6 in float32, where the card needs more than 10 to be
    busy with arithmetic. Returns alpha * x + y, contiguous.
    """
    _validate(x, y, threads=threads)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(_saxpy_grid_stride_kernel, min(x.numel(), resident_threads(threads)), threads, x, y, alpha, out)


@cuda.jit
def _saxpy_vectorised_kernel(x, y, alpha, out, whole):
    """A grid-stride loop over four elements at a time up to `whole`, then one over the elements that are left."""
    i, stride = cuda.grid(1), cuda.gridsize(1)
    for first in range(4 * i, whole, 4 * stride):
        u, v = load4(x, first), load4(y, first)
        total = alpha * u[0] + v[0], alpha * u[1] + v[1], alpha * u[2] + v[2], alpha * u[3] + v[3]
        store4(out, first, total)
    for j in range(whole + i, x.size, stride):
        out[j] = alpha * x[j] + y[j]


def saxpy_vectorised(
    x: torch.Tensor, y: torch.Tensor, alpha: float, threads: int = 256, quads: int = 1
) -> torch.Tensor:
    """x, y: `[N]`, float32, contiguous. Each of the `threads` of a block takes `quads` times four elements.

    Changes how much a thread asks for at once: the same sectors in a quarter of the requests. Where 16 bytes cannot be
    had at once (another dtype, a stride, a start that is no multiple of 16 bytes), `saxpy_grid_stride` runs.
    Returns alpha * x + y.
    """
    _validate(x, y, threads=threads, quads=quads)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    whole = quad_elements(x, y, out)
    if x.dtype != torch.float32 or whole == 0:
        return saxpy_grid_stride(x, y, alpha, threads)
    return _launch(_saxpy_vectorised_kernel, quad_threads(x, whole, quads), threads, x, y, alpha, out, whole)


def _validate(x, y, **sizes) -> None:
    require(x, "x", (None,))
    require(y, "y", tuple(x.shape), like=x)
    require_whole(**sizes)


def _launch(kernel, wanted: int, threads: int, x, y, alpha, out, *more) -> torch.Tensor:
    """Launch `kernel` with at least `wanted` threads, in blocks of `threads`; return `out`."""
    device.check_launch(1, threads)
    if out.numel() == 0:
        return out
    grid = -(-wanted // threads)
    device.check_launch(grid, threads)
    x, y, flat = map(device.numba_array, (x, y, out))
    kernel[grid, threads, device.numba_stream()](x, y, float32(alpha), flat, *more)
    return out
