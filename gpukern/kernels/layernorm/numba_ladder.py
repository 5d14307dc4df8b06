"""layernorm in Numba-CUDA, and what a block needs to reduce a row: `row_sum`, `row_stats`, `row_threads`."""

import math

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.kernels.reduction.numba_ladder import block_sum
from gpukern.op import require, require_whole


@cuda.jit(device=True)
def row_sum(value, partial):
    """The sum of `value` over the threads of one row of the block (threadIdx.x); each of them gets it.

    A tree in shared memory: the upper half is added to the lower half until one number is left. Every thread of the
    block must call it. partial: shared `[blockDim.x]` float32.
    """
    tx, left = cuda.threadIdx.x, cuda.blockDim.x
    partial[tx] = value
    cuda.syncthreads()
    while left > 1:
        half = (left + 1) >> 1
        if tx + half < left:
            partial[tx] += partial[tx + half]
        cuda.syncthreads()
        left = half
    total = partial[0]
    cuda.syncthreads()  # all have read it before anyone writes `partial` again
    return total


@cuda.jit(device=True)
def row_stats(x, eps, partial):
    """Mean and 1 / sqrt(variance + eps) of x `[C]`, by the threads of one row of the block.

    Two passes: the variance is the mean of (x - mean)^2. E[x^2] - mean^2 would need one, and cancels when the mean is
    large. partial: shared `[blockDim.x]` float32.
    """
    C = x.shape[0]
    total = float32(0)
    for c in range(cuda.threadIdx.x, C, cuda.blockDim.x):
        total += float32(x[c])
    mean = row_sum(total, partial) / float32(C)
    squares = float32(0)
    for c in range(cuda.threadIdx.x, C, cuda.blockDim.x):
        centred = float32(x[c]) - mean
        squares += centred * centred
    variance = row_sum(squares, partial) / float32(C)
    return mean, float32(1) / math.sqrt(variance + float32(eps))


@cuda.jit
def _layernorm_kernel(x, gamma, beta, eps, out):
    """One block normalises one row; thread i takes columns i, i + threads, ..."""
    partial = cuda.shared.array(0, float32)  # dynamic: the launch says how much, one number a thread
    row = cuda.blockIdx.x
    mean, rstd = row_stats(x[row], eps, partial)
    for c in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        normal = (float32(x[row, c]) - mean) * rstd
        out[row, c] = normal * float32(gamma[c]) + float32(beta[c])


def row_threads(threads: int, width: int) -> int:
    """Threads of a block that reduces a row: `threads`, or fewer if they would get less than four elements each."""
    require_whole(threads=threads)
    device.check_launch(1, threads)
    return max(1, min(threads, -(-width // 4)))


def layernorm(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-5, threads: int = 128
) -> torch.Tensor:
    """x: `[..., C]`, any strides (copied if its leading axes are not one in memory); gamma, beta: `[C]`.

    One block of up to `threads` (see `row_threads`) for each row. Returns the LayerNorm of x over C, contiguous.
    """
    return _launch(_layernorm_kernel, x, gamma, beta, eps, threads)


def _launch(kernel, x, gamma, beta, eps, threads, whole_warps=False) -> torch.Tensor:
    """Launch `kernel(x, gamma, beta, eps, out)` with a block for each row of x; return the output."""
    require(x, "x", (None,) * max(1, getattr(x, "ndim", 1)))
    C = x.shape[-1]
    require(gamma, "gamma", (C,), like=x)
    require(beta, "beta", (C,), like=x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    threads = row_threads(threads, C)
    if whole_warps:
        threads = -(-threads // 32) * 32
    if out.numel() == 0:
        return out
    rows = out.numel() // C
    shared = 0 if whole_warps else 4 * threads
    device.check_launch(rows, threads, shared)
    x, gamma, beta, flat = map(device.numba_array, (x.reshape(rows, C), gamma, beta, out.view(rows, C)))
    kernel[rows, threads, device.numba_stream(), shared](x, gamma, beta, eps, flat)
    return out


@cuda.jit
def _layernorm_shuffle_kernel(x, gamma, beta, eps, out):
    """As `_layernorm_kernel`, with sums that go through registers."""
    row, C = cuda.blockIdx.x, x.shape[1]
    tx, threads = cuda.threadIdx.x, cuda.blockDim.x
    total = float32(0)
    for c in range(tx, C, threads):
        total += float32(x[row, c])
    mean = block_sum(total) / float32(C)
    squares = float32(0)
    for c in range(tx, C, threads):
        centred = float32(x[row, c]) - mean
        squares += centred * centred
    variance = block_sum(squares) / float32(C)
    rstd = float32(1) / math.sqrt(variance + float32(eps))
    for c in range(tx, C, threads):
        out[row, c] = (float32(x[row, c]) - mean) * rstd * float32(gamma[c]) + float32(beta[c])


def layernorm_shuffle(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-5, threads: int = 128
) -> torch.Tensor:
    """As `layernorm`, in blocks of whole warps.

    Changes how the threads of a block find their sum: by shuffles in each warp, and one exchange between the warps. Of
    the nine barriers that a tree over 128 threads has, two are left, and shared memory sees one number a warp.
    """
    return _launch(_layernorm_shuffle_kernel, x, gamma, beta, eps, threads, whole_warps=True)
