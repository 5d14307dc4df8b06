"""copy in Numba-CUDA: four ways to ask for the same bytes."""

import torch
from numba import cuda

from gpukern import device
from gpukern.kernels.intrinsics import load4, store4
from gpukern.kernels.quads import quad_elements
from gpukern.op import require, require_whole

RUN = 8  # elements in a row that a thread of `copy_strided` copies: 32 bytes of float32, one sector


@cuda.jit
def _copy_strided_kernel(x, out):
    """One thread copies RUN neighbours, as a thread of a CPU would; the threads of a warp are RUN elements apart."""
    first = cuda.grid(1) * RUN
    for i in range(first, min(first + RUN, x.size)):
        out[i] = x[i]


def copy_strided(x: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x: `[N]`, any stride. `threads` a block. Returns a contiguous copy.

    Each thread works through a piece of its own. So in one request the 32 threads of a warp touch 32 sectors, and use
    4 bytes of each: sectors_per_load_request is 32 for float32, RUN times what the data take.
    """
    require(x, "x", (None,))
    return _launch(_copy_strided_kernel, x, threads, -(-x.numel() // RUN))


@cuda.jit
def _copy_coalesced_kernel(x, out):
    """One thread, one element: thread i takes element i, so neighbours in a warp ask for neighbours in memory."""
    i = cuda.grid(1)
    if i < x.size:
        out[i] = x[i]


def copy_coalesced(x: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x: `[N]`, any stride. `threads` a block. Returns a contiguous copy.

    Changes which thread takes which element: 32 neighbouring float32 lie in 4 sectors, so sectors_per_load_request
    falls from 32 to 4, and global_load_sectors by the same factor.
    """
    require(x, "x", (None,))
    return _launch(_copy_coalesced_kernel, x, threads, x.numel())


@cuda.jit
def _copy_grid_stride_kernel(x, out):
    """Thread i takes elements i, i + grid, i + 2 grid, ...: neighbours still read neighbours, whatever the grid is."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        out[i] = x[i]


def copy_grid_stride(x: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x: `[N]`, any stride. `threads` a block, and no more blocks than the card holds at once. Returns a copy.

    Changes the grid: it follows from the card instead of from N. The sectors stay as they were; what each thread does
    once (start, index, guard) it now does once for many elements, and no block waits for another to end.
    """
    require(x, "x", (None,))
    require_whole(threads=threads)
    return _launch(_copy_grid_stride_kernel, x, threads, min(x.numel(), resident_threads(threads)))


def resident_threads(threads: int) -> int:
    """How many threads the card runs at the same time, in blocks of `threads` that want few registers."""
    card = device.card()
    return card.sms * min(card.blocks_per_sm, max(1, 32 * card.warps_per_sm // threads)) * threads


@cuda.jit
def _copy_vectorised_kernel(x, out, x_words, out_words, first):
    """A grid-stride loop over 16 bytes at a time, then one over the elements from `first` on, which fill no 16 bytes.

    x_words, out_words: the first part of x and of out, its bytes taken as float32.
    """
    i, stride = cuda.grid(1), cuda.gridsize(1)
    for quad in range(i, x_words.size // 4, stride):
        store4(out_words, 4 * quad, load4(x_words, 4 * quad))
    for j in range(first + i, x.size, stride):
        out[j] = x[j]


def copy_vectorised(x: torch.Tensor, threads: int = 256, quads: int = 1) -> torch.Tensor:
    """x: `[N]`, any stride. Each of the `threads` of a block copies `quads` times 16 bytes. Returns a contiguous copy.

    Changes how much a thread asks for at once: 16 bytes instead of one element. The sectors stay as they were, in a
    quarter of the requests (float32), and so of the instructions. It wants an x that is contiguous and begins at a
    multiple of 16 bytes; any other is copied element by element.
    """
    require(x, "x", (None,))
    require_whole(threads=threads, quads=quads)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    whole = quad_elements(x, out)
    words = (t[:whole].view(torch.float32) if whole else t.new_empty(0, dtype=torch.float32) for t in (x, out))
    return _launch(_copy_vectorised_kernel, x, threads, quad_threads(x, whole, quads), out, *words, whole)


def quad_threads(x: torch.Tensor, whole: int, quads: int) -> int:
    """Threads that copy `quads` times 16 bytes each, and at least one for each element that fills no 16 bytes."""
    return max(-(-whole * x.itemsize // (16 * quads)), -(-(x.numel() - whole) // quads))


def _launch(kernel, x: torch.Tensor, threads: int, wanted: int, out: torch.Tensor | None = None, *more):
    """Launch `kernel(x, out, *more)` with at least `wanted` threads, in blocks of `threads`; return `out`."""
    require_whole(threads=threads)
    device.check_launch(1, threads)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if out.numel() == 0:
        return out
    grid = -(-wanted // threads)
    device.check_launch(grid, threads)
    arguments = (device.numba_array(t) if isinstance(t, torch.Tensor) else t for t in (x, out, *more))
    kernel[grid, threads, device.numba_stream()](*arguments)
    return out
