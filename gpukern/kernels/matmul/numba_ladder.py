"""matmul in Numba-CUDA: one thread, one element of the output. `numba_register_tile` goes on from here."""

import functools
from collections.abc import Callable

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.kernels.gelu.numba_ladder import tanh_gelu
from gpukern.op import InputError, require, require_whole


@functools.cache
def epilogue(has_bias: bool, has_gelu: bool, has_residual: bool):
    """The device function (acc, m, n, bias, residual) -> what is stored as element [m, n], in float32."""

    @cuda.jit(device=True, forceinline=True)
    def finish(acc, m, n, bias, residual):
        if has_bias:
            acc += float32(bias[n])
        if has_gelu:
            acc = tanh_gelu(acc)
        if has_residual:
            acc += float32(residual[m, n])
        return acc

    return finish


@functools.cache
def _matmul_untiled_kernel(along_rows, *has):
    finish = epilogue(*has)

    @cuda.jit
    def matmul_untiled_kernel(a, w, bias, residual, out):
        """One thread computes one element, from a row of a and a column of w in global memory."""
        M, K = a.shape
        N = w.shape[1]
        i = cuda.grid(1)
        if along_rows:
            m, n = i // N, i % N
        else:
            m, n = i % M, i // M
        if m < M and n < N:
            acc = float32(0)
            for k in range(K):
                acc += float32(a[m, k]) * float32(w[k, n])
            out[m, n] = finish(acc, m, n, bias, residual)

    return matmul_untiled_kernel


@functools.cache
def _matmul_kernel(BM, BN, BK, *has):
    """The kernel of one tile and one epilogue: shared arrays want constant sizes, so each is compiled on its own."""
    finish = epilogue(*has)

    @cuda.jit(launch_bounds=BM * BN)  # so few registers a thread that a block of that size fits
    def matmul_kernel(a, w, bias, residual, out):
        """One block computes one BM x BN tile of the output, one thread an element of it."""
        a_tile = cuda.shared.array((BM, BK), float32)
        w_tile = cuda.shared.array((BK, BN), float32)
        M, K = a.shape
        N = w.shape[1]
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        m = cuda.blockIdx.x * BM + ty
        n = cuda.blockIdx.y * BN + tx
        acc = float32(0)
        for k0 in range(0, K, BK):
            # Together the threads load a tile of each; past the edge of a matrix a tile holds zeros.
            for k in range(tx, BK, BN):
                a_tile[ty, k] = float32(a[m, k0 + k]) if m < M and k0 + k < K else float32(0)
            for k in range(ty, BK, BM):
                w_tile[k, tx] = float32(w[k0 + k, n]) if n < N and k0 + k < K else float32(0)
            cuda.syncthreads()  # the tiles are full
            i = 0
            while i < BK:  # not `for i in range(BK)`, of which Numba unrolls less and checks each index for its sign
                acc += a_tile[ty, i] * w_tile[i, tx]
                i += 1
            cuda.syncthreads()  # the tiles are used up
        if m < M and n < N:
            out[m, n] = finish(acc, m, n, bias, residual)

    return matmul_kernel


def shared_bytes(BM: int, BN: int, BK: int, dtype: torch.dtype, on: device.Card | None = None) -> int:
    """Static shared memory of one block, in bytes: the tiles of a and w, in float32 whatever the dtype and the card."""
    return 4 * BK * (BM + BN)


def require_static(wanted: int, tile: tuple) -> None:
    """Refuse a tile that wants more shared memory than the card gives to arrays of constant size."""
    static = device.card().shared_static
    if wanted > static:
        raise device.LimitError(
            f"the tile {tile} wants {wanted:,} bytes of static shared memory; a block has {static:,}. "
            "Choose a smaller BK."
        )


def fit_tile(tile: tuple, shape: tuple, shared: Callable[..., int], dtype: torch.dtype, **more) -> tuple:
    """The tile (BM, BN, BK) for a product of `shape` (M, N, K): checked as it is given, then cut to what is needed.

    An axis shorter than its tile gets the next power of two, so that a single row (decode) runs in blocks of one row
    instead of blocks of idle threads, and few different kernels are compiled. `shared`: the kernel's `shared_bytes`,
    which gets the tile, dtype and `more`. Raises InputError for a size that is not a whole number of at least 1,
    LimitError for a tile that no launch can have.
    """
    BM, BN, BK = tile
    require_whole(BM=BM, BN=BN, BK=BK)
    device.check_launch(1, (BN, BM))
    require_static(shared(BM, BN, BK, dtype=dtype, **more), tile)
    return tuple(min(n, 1 << max(size - 1, 0).bit_length()) for n, size in zip(tile, shape, strict=True))


def require_product(a, w, bias, activation, residual) -> tuple[int, int, int]:
    """Refuse what is no a `[M, K]` @ w `[K, N]` with its epilogue; return M, N, K."""
    require(a, "a", (None, None))
    M, K = a.shape
    require(w, "w", (K, None), like=a)
    N = w.shape[1]
    if bias is not None:
        require(bias, "bias", (N,), like=a)
    if activation not in (None, "gelu"):
        raise InputError(f'activation={activation!r} is not known; use None or "gelu".')
    if residual is not None:
        require(residual, "residual", (M, N), like=a)
    return M, N, K


def has(bias, activation, residual) -> tuple[bool, bool, bool]:
    """What the epilogue has, as the kernels are compiled for it."""
    return bias is not None, activation == "gelu", residual is not None


def launch(kernel, grid, block, a, w, bias, residual, out) -> torch.Tensor:
    """Launch `kernel(a, w, bias, residual, out)`, unless there is nothing to compute; return `out`."""
    if out.numel() == 0:
        return out
    device.check_launch(grid, block)
    # A kernel that has no use for an argument still wants an array in its place.
    arrays = (a, w, out if bias is None else bias, out if residual is None else residual, out)
    kernel[grid, block, device.numba_stream()](*map(device.numba_array, arrays))
    return out


def matmul_naive(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    threads: int = 256,
) -> torch.Tensor:
    """As `matmul`, in blocks of `threads`, each of which computes an element of one column of the output.

    The threads of a warp are in neighbouring rows of one column. They want one element of w, a broadcast, but 32
    elements of a that are a row apart: sectors_per_load_request comes near (32 + 1) / 2, and that of the stores to 32.
    """
    return _untiled(False, threads, a, w, bias, activation, residual)


def matmul_coalesced(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    threads: int = 256,
) -> torch.Tensor:
    """As `matmul_naive`, in which a block computes elements of one row of the output.

    Changes which thread takes which element: a warp's is now a piece of a row. All want one element of a, a broadcast,
    and 32 neighbours in w: sectors_per_load_request falls to (1 + 4) / 2 (float32), and that of the stores to 4. Each
    element of a and w still travels once for each product that it is in: flops_per_byte stays below 1.
    """
    return _untiled(True, threads, a, w, bias, activation, residual)


def _untiled(along_rows, threads, a, w, bias, activation, residual) -> torch.Tensor:
    M, N, _ = require_product(a, w, bias, activation, residual)
    require_whole(threads=threads)
    device.check_launch(1, threads)
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    kernel = _matmul_untiled_kernel(along_rows, *has(bias, activation, residual))
    return launch(kernel, (-(-M * N // threads),), threads, a, w, bias, residual, out)


def matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    BM: int = 16,
    BN: int = 16,
    BK: int = 16,
) -> torch.Tensor:
    """a: `[M, K]`, w: `[K, N]`, bias: `[N]`, residual: `[M, N]`, all of any strides; activation: None or "gelu".

    Blocks of (BN, BM) threads, cut where M or N is smaller (see `fit_tile`); K is walked in steps of BK.
    Changes where the threads read from: a block loads a tile of a and of w into shared memory, once for all its
    threads. So each element of a travels N / BN times instead of N, of w M / BM times instead of M: global_load_sectors
    falls, and two barriers for each step of K are new. Returns activation(a @ w + bias) + residual, `[M, N]`, added up
    in float32 and rounded once.
    """
    M, N, K = require_product(a, w, bias, activation, residual)
    BM, BN, BK = fit_tile((BM, BN, BK), (M, N, K), shared_bytes, a.dtype)
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = (-(-M // BM), -(-N // BN))  # the rows on x: y and z allow 65,535 blocks only
    kernel = _matmul_kernel(BM, BN, BK, *has(bias, activation, residual))
    return launch(kernel, grid, (BN, BM), a, w, bias, residual, out)
