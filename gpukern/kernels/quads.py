"""Four neighbouring elements of a matrix at once, guarded at its edges: in 16 bytes where that can be, else one by one.

A kernel is written once, for `load` and `store`; which pair it is compiled with is the launcher's choice, `accesses`.
The 16-byte pair wants float32, contiguous rows that begin at multiples of 16 bytes, and a width that is a multiple of
4: so a quad lies inside a row or outside. The other takes any dtype, any strides and any width.
"""

import torch
from numba import cuda, float32, int32

from gpukern.kernels.intrinsics import load4, store4


@cuda.jit(device=True, forceinline=True)
def _load_quad(x, corner_m, corner_n, m, n):
    """x[corner_m + m, corner_n + n ... + 3] as four float32; zeros outside of x.

    corner_m, corner_n: where the block's tile begins, the same for all its threads, in 64 bits. m, n: the thread's
    place in the tile, whose distance from the corner must fit in 32 bits: 64 would take more registers of each thread.
    """
    M, N = x.shape
    if corner_m + m < M and corner_n + n < N:
        return load4(x, corner_m * N + corner_n + int32(m * int32(N) + n))
    return float32(0), float32(0), float32(0), float32(0)


@cuda.jit(device=True, forceinline=True)
def _store_quad(x, m, n, values):
    """x[m, n ... n + 3] = values, four float32; nothing outside of x."""
    M, N = x.shape
    if m < M and n < N:
        store4(x, m * N + n, values)


@cuda.jit(device=True, forceinline=True)
def _load_elements(x, corner_m, corner_n, m, n):
    """As `_load_quad`, for any dtype and strides."""
    m, n = corner_m + m, corner_n + n
    return _element(x, m, n), _element(x, m, n + 1), _element(x, m, n + 2), _element(x, m, n + 3)


@cuda.jit(device=True, forceinline=True)
def _element(x, m, n):
    return float32(x[m, n]) if m < x.shape[0] and n < x.shape[1] else float32(0)


@cuda.jit(device=True, forceinline=True)
def _store_elements(x, m, n, values):
    """As `_store_quad`, for any dtype and strides."""
    M, N = x.shape
    if m < M:
        if n < N:
            x[m, n] = values[0]
        if n + 1 < N:
            x[m, n + 1] = values[1]
        if n + 2 < N:
            x[m, n + 2] = values[2]
        if n + 3 < N:
            x[m, n + 3] = values[3]


def accesses(tile: int, *matrices: torch.Tensor) -> tuple:
    """(load, store): the 16-byte pair if all of `matrices` allow it, else the pair that goes element by element.

    tile  rows of the largest tile, whose size in memory decides whether 32 bits are enough
    """
    quads = all(
        x.dtype == torch.float32
        and x.is_contiguous()
        and x.shape[1] % 4 == 0
        and x.data_ptr() % 16 == 0
        and tile * x.shape[1] < 1 << 31
        for x in matrices
    )
    return (_load_quad, _store_quad) if quads else (_load_elements, _store_elements)


def quad_elements(*vectors: torch.Tensor) -> int:
    """How many elements of vectors `[N]`, from the first on, can be had 16 bytes at a time.

    That is N without the last few; 0 if a vector is not contiguous or does not begin at a multiple of 16 bytes.
    """
    if any(v.stride(0) != 1 or v.data_ptr() % 16 for v in vectors):
        return 0
    per_quad = 16 // vectors[0].itemsize
    return vectors[0].numel() // per_quad * per_quad
