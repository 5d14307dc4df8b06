"""histogram in Numba-CUDA: counters in global memory, then a set of them for each block in shared memory."""

import torch
from numba import cuda, int32

from gpukern import device
from gpukern.kernels.histogram import BINS, DTYPES
from gpukern.op import require, require_whole


@cuda.jit
def _histogram_global_kernel(x, out):
    """A grid-stride loop over x; each element adds one to its counter in global memory."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        value = int32(x[i])
        if value >= 0 and value < BINS:
            cuda.atomic.add(out, value, 1)


def histogram_global(x: torch.Tensor, threads: int = 256, blocks: int = 8) -> torch.Tensor:
    """x: `[N]`, uint8 or int32, any stride. `blocks` of `threads` for each SM of the card, or fewer if x is small.

    One atomic for each warp of elements, all of them on the same 1 KB of global memory: an addition without an atomic
    loses counts, and a thousand warps that want one counter get it one after the other.
    Returns how often 0 ... 255 occur, `[256]`, int32; other values are not counted.
    """
    return _count(_histogram_global_kernel, x, threads, blocks)


@cuda.jit
def _histogram_privatised_kernel(x, out):
    """Each block counts in shared memory, then adds its 256 counts to those in global memory."""
    own = cuda.shared.array(BINS, int32)
    tx, threads = cuda.threadIdx.x, cuda.blockDim.x
    for value in range(tx, BINS, threads):
        own[value] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        value = int32(x[i])
        if value >= 0 and value < BINS:
            cuda.atomic.add(own, value, 1)
    cuda.syncthreads()
    for value in range(tx, BINS, threads):
        cuda.atomic.add(out, value, own[value])


def histogram_privatised(x: torch.Tensor, threads: int = 256, blocks: int = 8) -> torch.Tensor:
    """x: `[N]`, uint8 or int32, any stride. `blocks` of `threads` for each SM of the card, or fewer if x is small.

    Changes where the counters are: each block has 256 of its own in shared memory, wanted by its threads only. Atomics
    in global memory fall from one for each warp of elements to one for each warp of counters of a block; two barriers
    and the counters' way to global memory are new. Returns as `histogram_global`.
    """
    return _count(_histogram_privatised_kernel, x, threads, blocks)


def _count(kernel, x: torch.Tensor, threads: int, blocks: int) -> torch.Tensor:
    """Launch `kernel(x, out)` on counters that are 0; return them."""
    require(x, "x", (None,), dtypes=DTYPES)
    require_whole(threads=threads, blocks=blocks)
    device.check_launch(1, threads)
    out = torch.zeros(BINS, dtype=torch.int32, device=x.device)
    if x.numel() == 0:
        return out
    grid = min(-(-x.numel() // threads), blocks * device.card().sms)
    kernel[grid, threads, device.numba_stream()](device.numba_array(x), device.numba_array(out))
    return out
