"""transpose in Numba-CUDA.

Every kernel has a grid of one axis, along which the tiles of x stand row after row: y and z allow 65,535 blocks only.
"""

import functools

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.kernels.quads import accesses
from gpukern.op import InputError, require, require_power_of_two, require_whole

TILE = 32  # elements along each axis: a row of it for a warp
WIDE = 64  # the same for `transpose_vectorised`: a row of it for 16 threads of four elements
PITCH = WIDE + 1  # of its rows in shared memory


@cuda.jit
def _transpose_naive_kernel(x, out):
    """Each thread copies some elements of a TILE x TILE tile, straight across."""
    M, N = x.shape
    across = (N + TILE - 1) // TILE
    n = cuda.blockIdx.x % across * TILE + cuda.threadIdx.x
    first_m = cuda.blockIdx.x // across * TILE
    for j in range(cuda.threadIdx.y, TILE, cuda.blockDim.y):
        if first_m + j < M and n < N:
            out[n, first_m + j] = x[first_m + j, n]


def transpose_naive(x: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x: `[M, N]`, any strides. Blocks of 32 x threads / 32. Returns `[N, M]`, contiguous.

    The threads of a warp read along a row: 4 sectors a request, of float32. They write down a column: each element lies
    in a sector of its own, so sectors_per_store_request is 32, and 8 times the bytes are moved.
    """
    return _turn(_transpose_naive_kernel, x, threads)


def _tile_kernel(width: int):
    """The kernel whose tile in shared memory has rows of `width` elements, of which TILE are used."""

    @cuda.jit
    def _transpose_tile_kernel(x, out):
        """A block reads a TILE x TILE tile row by row, and writes it row by row, after the turn in shared memory."""
        tile = cuda.shared.array((TILE, width), float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        M, N = x.shape
        across = (N + TILE - 1) // TILE
        first_n = cuda.blockIdx.x % across * TILE
        first_m = cuda.blockIdx.x // across * TILE
        for j in range(ty, TILE, cuda.blockDim.y):
            if first_m + j < M and first_n + tx < N:
                tile[j, tx] = x[first_m + j, first_n + tx]
        cuda.syncthreads()
        for j in range(ty, TILE, cuda.blockDim.y):
            if first_n + j < N and first_m + tx < M:
                out[first_n + j, first_m + tx] = tile[tx, j]

    return _transpose_tile_kernel


_transpose_tile_kernel = _tile_kernel(TILE)
_transpose_padded_kernel = _tile_kernel(TILE + 1)


def transpose_tile(x: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x: `[M, N]`, any strides. Blocks of 32 x threads / 32. Returns `[N, M]`, contiguous.

    Changes who turns the tile: shared memory. Global memory is now read and written along rows: both 4 sectors a
    request. But a warp reads a column of the tile, whose 32 elements lie in one bank: 31 conflicts a request.
    """
    return _turn(_transpose_tile_kernel, x, threads)


def transpose_padded(x: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x: `[M, N]`, any strides. Blocks of 32 x threads / 32. Returns `[N, M]`, contiguous.

    Changes the width of the tile from 32 to 33: element [i, j] lies in bank (i + j) % 32, so a column lies in 32 banks.
    shared_load_bank_conflicts falls to 0; nothing else changes.
    """
    return _turn(_transpose_padded_kernel, x, threads)


@functools.cache
def _transpose_vectorised_kernel(load, store, threads):
    """The kernel of a block size, with one of the pairs of `quads.accesses`."""
    rows = threads // 16  # a constant, so that the loops are unrolled and all loads are on their way at once

    @cuda.jit(launch_bounds=threads)
    def transpose_vectorised_kernel(x, out):
        """A block turns a WIDE x WIDE tile: 16 threads read four elements each of a row, then write four of a row."""
        tile = cuda.shared.array((WIDE, PITCH), float32)
        row, c = cuda.threadIdx.x // 16, cuda.threadIdx.x % 16 * 4
        across = (x.shape[1] + WIDE - 1) // WIDE
        first_n = cuda.blockIdx.x % across * WIDE
        first_m = cuda.blockIdx.x // across * WIDE
        for j in range(0, WIDE, rows):
            values = load(x, first_m, first_n, row + j, c)
            tile[row + j, c], tile[row + j, c + 1], tile[row + j, c + 2], tile[row + j, c + 3] = values
        cuda.syncthreads()
        for j in range(0, WIDE, rows):
            values = tile[c, row + j], tile[c + 1, row + j], tile[c + 2, row + j], tile[c + 3, row + j]
            store(out, first_n + row + j, first_m + c, values)

    return transpose_vectorised_kernel


def transpose_vectorised(x: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x: `[M, N]`, any strides. Blocks of `threads`, a power of two from 32. Returns `[N, M]`, contiguous.

    Changes how much a thread asks for at once: 16 bytes, of a tile of 64 x 64. The sectors stay as they were, in a
    quarter of the requests, and each thread has four loads on their way before the barrier. In shared memory an element
    still moves alone: threads that are 8 apart meet in a bank, so each request takes two wavefronts. Where 16 bytes
    cannot be had at once (`quads.accesses`), the same kernel goes element by element.
    """
    require(x, "x", (None, None))
    require_power_of_two(threads=threads)
    device.check_launch(1, (TILE, _rows(threads)))
    out = torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device)
    kernel = _transpose_vectorised_kernel(*accesses(WIDE, x, out), threads)
    return _launch(kernel, x, out, (threads,), WIDE)


def _turn(kernel, x: torch.Tensor, threads: int) -> torch.Tensor:
    """Launch `kernel(x, out)` in blocks of 32 x threads / 32, one for each TILE x TILE elements; return `out`."""
    require(x, "x", (None, None))
    block = TILE, _rows(threads)
    out = torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device)
    return _launch(kernel, x, out, block, TILE)


def _rows(threads: int) -> int:
    """Rows of a block that is 32 threads wide."""
    require_whole(threads=threads)
    if threads % 32:
        raise InputError(f"threads={threads} must be a multiple of 32: a warp takes a row.")
    return threads // 32


def _launch(kernel, x: torch.Tensor, out: torch.Tensor, block: tuple, tile: int) -> torch.Tensor:
    """Launch `kernel(x, out)` with a block for each tile x tile elements; return `out`."""
    device.check_launch(1, block)
    if out.numel() == 0:
        return out
    grid = -(-x.shape[0] // tile) * -(-x.shape[1] // tile)
    device.check_launch(grid, block)
    kernel[grid, block, device.numba_stream()](device.numba_array(x), device.numba_array(out))
    return out
