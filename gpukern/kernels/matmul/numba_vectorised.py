"""matmul in Numba-CUDA at the speed of the multiply-adds: 16 bytes at a time, and one tile ahead."""

import functools

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.kernels.intrinsics import load4, store4
from gpukern.kernels.matmul.numba_ladder import epilogue, has, launch, require_product, require_static
from gpukern.kernels.matmul.numba_register_tile import add_outer, zeros
from gpukern.kernels.quads import accesses
from gpukern.op import InputError, require_power_of_two

# A warp computes 64 x 32 of the tile, a thread 8 x 8 of it: quads of rows 32 apart, quads of columns 16 apart. So the
# warp's threads ask for 8 neighbouring quads of a column of a, and for 4 of a row of w.
WARP_M, WARP_N = 64, 32
PER_THREAD = 64
PADDING = 4  # elements between the columns of a in shared memory: quads stay aligned, and stores meet in fewer banks
REGISTERS = 128  # a thread: 64 sums, 16 operands, 16 elements on their way, and addresses


def _steps(step, count: int, a_pitch: int, w_pitch: int):
    """The device function that does `step` for `count` (a power of two) neighbouring k: a loop, written out."""
    if count == 1:
        return step
    half = _steps(step, count // 2, a_pitch, w_pitch)
    a_ahead, w_ahead = count // 2 * a_pitch, count // 2 * w_pitch

    @cuda.jit(device=True, forceinline=True)
    def both_halves(acc, a_tile, w_tile, a_at, w_at):
        acc = half(acc, a_tile, w_tile, a_at, w_at)
        return half(acc, a_tile, w_tile, a_at + a_ahead, w_at + w_ahead)

    return both_halves


@cuda.jit(device=True, forceinline=True)
def _step(acc, a_tile, w_tile, a_at, w_at):
    """One k: 8 elements of a and 8 of w, in four loads, make 64 multiply-adds. acc: four times 4 x 4 sums."""
    above, below = load4(a_tile, a_at), load4(a_tile, a_at + WARP_M // 2)
    left, right = load4(w_tile, w_at), load4(w_tile, w_at + WARP_N // 2)
    return (
        add_outer(acc[0], above, left),
        add_outer(acc[1], above, right),
        add_outer(acc[2], below, left),
        add_outer(acc[3], below, right),
    )


@functools.cache
def _matmul_vectorised_kernel(BM, BN, BK, load, store, *has):
    """The kernel of one tile, one pair of `quads.accesses` and one epilogue."""
    finish = epilogue(*has)
    threads = BM * BN // PER_THREAD
    a_rows, w_rows = threads * 4 // BK, threads * 4 // BN  # rows of a tile that all threads load at once, a quad each
    a_loads, w_loads = BM // a_rows, BK // w_rows
    pitch = BM + PADDING
    a_shape, w_shape = (2, BK, pitch), (2, BK, BN)
    a_buffer, w_buffer = BK * pitch, BK * BN  # elements
    steps = _steps(_step, BK, pitch, BN)
    a_fetched_shape, w_fetched_shape = (a_loads, 4), (w_loads, 4)

    @cuda.jit(device=True, forceinline=True)
    def store_row(values, m, n, bias, residual, out):
        if m < out.shape[0]:
            finished = cuda.local.array(4, float32)
            finished[0], finished[1], finished[2], finished[3] = values
            for i in range(4):
                if n + i < out.shape[1]:
                    finished[i] = finish(finished[i], m, n + i, bias, residual)
            store(out, m, n, (finished[0], finished[1], finished[2], finished[3]))

    @cuda.jit(device=True, forceinline=True)
    def store_rows(acc, m, n, bias, residual, out):
        store_row(acc[0], m, n, bias, residual, out)
        store_row(acc[1], m + 1, n, bias, residual, out)
        store_row(acc[2], m + 2, n, bias, residual, out)
        store_row(acc[3], m + 3, n, bias, residual, out)

    # So many blocks on an SM that a thread gets REGISTERS and no more.
    @cuda.jit(launch_bounds=(threads, max(1, 65536 // (REGISTERS * threads))))
    def matmul_vectorised_kernel(a, w, bias, residual, out):
        """One block computes a BM x BN tile. In each step of K it fetches the next tiles of a and w into registers,
        multiplies those in one buffer of shared memory, and puts the next into the other."""
        a_tile = cuda.shared.array(a_shape, float32)  # of each k the column of a
        w_tile = cuda.shared.array(w_shape, float32)
        # Their indices are known once the short loops are written out, so these are registers.
        a_fetched = cuda.local.array(a_fetched_shape, float32)
        w_fetched = cuda.local.array(w_fetched_shape, float32)
        K = a.shape[1]
        t = cuda.threadIdx.x
        m0, n0 = cuda.blockIdx.x * BM, cuda.blockIdx.y * BN
        a_m, a_k = t // (BK // 4), t % (BK // 4) * 4  # what the thread fetches of the tiles
        w_k, w_n = t // (BN // 4), t % (BN // 4) * 4
        warp, lane = t // 32, t % 32
        m = warp // (BN // WARP_N) * WARP_M + lane // 4 * 4  # what it computes
        n = warp % (BN // WARP_N) * WARP_N + lane % 4 * 4
        acc = zeros(), zeros(), zeros(), zeros()
        buffer = 0
        for k0 in range(-BK, K, BK):
            ahead = k0 + BK
            if ahead < K:
                for i in range(a_loads):
                    quad = load(a, m0, ahead, a_m + i * a_rows, a_k)
                    a_fetched[i, 0], a_fetched[i, 1], a_fetched[i, 2], a_fetched[i, 3] = quad
                for i in range(w_loads):
                    quad = load(w, ahead, n0, w_k + i * w_rows, w_n)
                    w_fetched[i, 0], w_fetched[i, 1], w_fetched[i, 2], w_fetched[i, 3] = quad
            if k0 >= 0:
                acc = steps(acc, a_tile, w_tile, buffer * a_buffer + m, buffer * w_buffer + n)
            if ahead < K:
                buffer = 1 - buffer
                for i in range(a_loads):
                    for j in range(4):
                        a_tile[buffer, a_k + j, a_m + i * a_rows] = a_fetched[i, j]
                for i in range(w_loads):
                    quad = w_fetched[i, 0], w_fetched[i, 1], w_fetched[i, 2], w_fetched[i, 3]
                    store4(w_tile, buffer * w_buffer + (w_k + i * w_rows) * BN + w_n, quad)
                cuda.syncthreads()  # the next tiles are there, and nobody reads from their buffer's last ones any more
        m, n = m0 + m, n0 + n
        store_rows(acc[0], m, n, bias, residual, out)
        store_rows(acc[1], m, n + WARP_N // 2, bias, residual, out)
        store_rows(acc[2], m + WARP_M // 2, n, bias, residual, out)
        store_rows(acc[3], m + WARP_M // 2, n + WARP_N // 2, bias, residual, out)

    return matmul_vectorised_kernel


def shared_bytes(BM: int, BN: int, BK: int, dtype: torch.dtype, on: device.Card | None = None) -> int:
    """Static shared memory of one block, in bytes: two buffers for the tiles of a and w, in float32."""
    return 4 * 2 * BK * (BM + PADDING + BN)


def matmul_vectorised(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    BM: int = 128,
    BN: int = 128,
    BK: int = 16,
) -> torch.Tensor:
    """a: `[M, K]`, w: `[K, N]`, bias: `[N]`, residual: `[M, N]`, all of any strides; activation: None or "gelu".

    Changes how numbers travel: in quads of 16 bytes, from global memory and from shared memory, where a lies turned so
    that four rows of it are neighbours; a thread's 8 x 8 elements take four loads for 64 multiply-adds. So
    global_load_requests and shared_load_requests fall to a quarter of what the same bytes took. And the next tiles are
    fetched while these are multiplied, into a second buffer: one barrier is left for each step of K instead of two.
    Where 16 bytes cannot be had at once (`quads.accesses`), the same kernel reads and writes element by element.

    BM, BN and BK are powers of two: BM from 64, BN from 32, both at most 16 BK. Returns activation(a @ w + bias) +
    residual, `[M, N]`, added up in float32 and rounded once.
    """
    M, N, _ = require_product(a, w, bias, activation, residual)
    require_power_of_two(BM=BM, BN=BN, BK=BK)
    if BM < WARP_M or BN < WARP_N:
        raise InputError(f"BM={BM}, BN={BN}: a warp computes {WARP_M} x {WARP_N}; choose no less.")
    threads = BM * BN // PER_THREAD
    device.check_launch(1, threads)
    if max(BM, BN) > 16 * BK:
        raise InputError(f"BK={BK}: tiles of {BM} x {BN} have not a quad for each thread; use {max(BM, BN) // 16}.")
    require_static(shared_bytes(BM, BN, BK, a.dtype), (BM, BN, BK))
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    pair = accesses(max(BM, BK), a, w, out)
    kernel = _matmul_vectorised_kernel(BM, BN, BK, *pair, *has(bias, activation, residual))
    return launch(kernel, (-(-M // BM), -(-N // BN)), threads, a, w, bias, residual, out)
