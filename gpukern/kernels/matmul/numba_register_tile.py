"""matmul in Numba-CUDA, several elements of the output a thread: they and their operands stay in registers.

What is to be a register must not be an array that is indexed at run time: such an array lies in local memory, which
is memory. Tuples are values, as numbers are. So a thread's 4 x 4 sums are a tuple of four tuples of four, and the
functions below, which the compiler puts in place, take one and return the next.
"""

import functools

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.kernels.matmul.numba_ladder import epilogue, has, launch, require_product, require_static, shared_bytes
from gpukern.op import InputError, require_whole

FOUR = 4  # rows and columns that a thread computes of a block's tile


@cuda.jit(device=True, forceinline=True)
def zeros():
    """4 x 4 sums of nothing."""
    row = float32(0), float32(0), float32(0), float32(0)
    return row, row, row, row


@cuda.jit(device=True, forceinline=True)
def _row(acc, a, w):
    return acc[0] + a * w[0], acc[1] + a * w[1], acc[2] + a * w[2], acc[3] + a * w[3]


@cuda.jit(device=True, forceinline=True)
def add_outer(acc, a, w):
    """acc + the outer product of a and w: 4 x 4 sums, from four elements of a column of a and four of a row of w."""
    return _row(acc[0], a[0], w), _row(acc[1], a[1], w), _row(acc[2], a[2], w), _row(acc[3], a[3], w)


@functools.cache
def _matmul_register_tile_kernel(BM, BN, BK, *has):
    finish = epilogue(*has)
    rows, columns = BM // FOUR, BN // FOUR  # threads of a block along each axis of the tile
    threads = rows * columns

    @cuda.jit(device=True, forceinline=True)
    def store(value, m, n, bias, residual, out):
        if m < out.shape[0] and n < out.shape[1]:
            out[m, n] = finish(value, m, n, bias, residual)

    @cuda.jit(device=True, forceinline=True)
    def store_row(values, m, n, bias, residual, out):
        store(values[0], m, n, bias, residual, out)
        store(values[1], m, n + columns, bias, residual, out)
        store(values[2], m, n + 2 * columns, bias, residual, out)
        store(values[3], m, n + 3 * columns, bias, residual, out)

    @cuda.jit(launch_bounds=threads)
    def matmul_register_tile_kernel(a, w, bias, residual, out):
        """One block computes a BM x BN tile; thread (tx, ty) columns tx, tx + columns, ... of rows ty, ty + rows, ...

        So neighbours are next to each other wherever they read or write: their elements lie in different banks, and in
        the same sectors.
        """
        a_tile = cuda.shared.array((BM, BK), float32)
        w_tile = cuda.shared.array((BK, BN), float32)
        M, K = a.shape
        N = w.shape[1]
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        t = ty * columns + tx
        m0 = cuda.blockIdx.x * BM
        n0 = cuda.blockIdx.y * BN
        acc = zeros()
        for k0 in range(0, K, BK):
            for i in range(t, BM * BK, threads):
                m, k = i // BK, i % BK
                a_tile[m, k] = float32(a[m0 + m, k0 + k]) if m0 + m < M and k0 + k < K else float32(0)
            for i in range(t, BK * BN, threads):
                k, n = i // BN, i % BN
                w_tile[k, n] = float32(w[k0 + k, n0 + n]) if k0 + k < K and n0 + n < N else float32(0)
            cuda.syncthreads()
            k = 0
            while k < BK:
                column = a_tile[ty, k], a_tile[ty + rows, k], a_tile[ty + 2 * rows, k], a_tile[ty + 3 * rows, k]
                row = w_tile[k, tx], w_tile[k, tx + columns], w_tile[k, tx + 2 * columns], w_tile[k, tx + 3 * columns]
                acc = add_outer(acc, column, row)
                k += 1
            cuda.syncthreads()
        m, n = m0 + ty, n0 + tx
        store_row(acc[0], m, n, bias, residual, out)
        store_row(acc[1], m + rows, n, bias, residual, out)
        store_row(acc[2], m + 2 * rows, n, bias, residual, out)
        store_row(acc[3], m + 3 * rows, n, bias, residual, out)

    return matmul_register_tile_kernel


def matmul_register_tile(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    BM: int = 64,
    BN: int = 64,
    BK: int = 16,
) -> torch.Tensor:
    """a: `[M, K]`, w: `[K, N]`, bias: `[N]`, residual: `[M, N]`, all of any strides; activation: None or "gelu".

    Changes how much a thread computes: 4 x 4 elements instead of one, so that eight numbers from shared memory serve 16
    multiply-adds instead of one. shared_load_requests falls to a quarter for the same product, and the tile can be 64 x
    64 with the same 256 threads: global_load_sectors falls with BM and BN, as before.

    BM and BN are multiples of 4. Returns activation(a @ w + bias) + residual, `[M, N]`, added up in float32 and rounded
    once.
    """
    M, N, _ = require_product(a, w, bias, activation, residual)
    require_whole(BM=BM, BN=BN, BK=BK)
    if BM % FOUR or BN % FOUR:
        raise InputError(f"BM={BM} and BN={BN} must be multiples of {FOUR}: a thread computes {FOUR} x {FOUR}.")
    block = BN // FOUR, BM // FOUR
    device.check_launch(1, block)
    require_static(shared_bytes(BM, BN, BK, a.dtype), (BM, BN, BK))
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    kernel = _matmul_register_tile_kernel(BM, BN, BK, *has(bias, activation, residual))
    return launch(kernel, (-(-M // BM), -(-N // BN)), block, a, w, bias, residual, out)
