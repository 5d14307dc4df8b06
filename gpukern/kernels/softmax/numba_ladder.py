"""softmax in Numba-CUDA."""

import math

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.kernels.layernorm.numba_ladder import row_sum, row_threads
from gpukern.op import require, require_whole


@cuda.jit(device=True)
def row_max(value, partial):
    """The largest `value` of the threads of one row of the block; as `row_sum`, with max in place of +."""
    tx, left = cuda.threadIdx.x, cuda.blockDim.x
    partial[tx] = value
    cuda.syncthreads()
    while left > 1:
        half = (left + 1) >> 1
        if tx + half < left:
            partial[tx] = max(partial[tx], partial[tx + half])
        cuda.syncthreads()
        left = half
    largest = partial[0]
    cuda.syncthreads()
    return largest


@cuda.jit
def _softmax_one_thread_kernel(x, T, causal, out):
    """One thread per row, three passes over it: the largest element, the sum of the exponentials, the weights."""
    row = cuda.grid(1)
    if row >= x.shape[0]:
        return
    S = x.shape[1]
    visible = max(0, row % T + S - T + 1) if causal else S
    largest = float32(-math.inf)
    for j in range(visible):
        largest = max(largest, float32(x[row, j]))
    if largest == float32(-math.inf):
        largest = float32(0)  # nothing to see: -inf - -inf would be NaN, -inf - 0 has the exponential 0
    total = float32(0)
    for j in range(visible):
        total += float32(math.exp(float32(x[row, j]) - largest))
    scale = float32(0) if total == 0 else float32(1) / total
    for j in range(S):
        weight = float32(0)
        if j < visible:
            weight = float32(math.exp(float32(x[row, j]) - largest)) * scale
        out[row, j] = weight


def softmax_one_thread(x: torch.Tensor, causal: bool = False, threads: int = 128) -> torch.Tensor:
    """As `softmax`, with a thread for each row, in blocks of `threads`.

    What one would write for a CPU. The threads of a warp are in 32 rows, so sectors_per_load_request is 32, and only
    as many threads work as there are rows.
    """
    require(x, "x", (None,) * max(2, getattr(x, "ndim", 2)))
    require_whole(threads=threads)
    device.check_launch(1, threads)
    T, S = x.shape[-2:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = out.numel() // S
    grid = -(-rows // threads)
    device.check_launch(grid, threads)
    x, flat = map(device.numba_array, (x.reshape(rows, S), out.view(rows, S)))
    _softmax_one_thread_kernel[grid, threads, device.numba_stream()](x, T, causal, flat)
    return out


@cuda.jit
def _softmax_kernel(x, T, causal, out):
    """One block per row, three passes over it: the largest element, the sum of the exponentials, the weights.

    The largest element is subtracted first, so no exponential overflows. Row i of T sees columns 0 ... i + S - T.
    """
    partial = cuda.shared.array(0, float32)  # dynamic: the launch says how much, one number a thread
    row, tx, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    S = x.shape[1]
    visible = max(0, row % T + S - T + 1) if causal else S

    largest = float32(-math.inf)
    for j in range(tx, visible, threads):
        largest = max(largest, float32(x[row, j]))
    largest = row_max(largest, partial)
    if largest == float32(-math.inf):
        largest = float32(0)  # nothing to see: -inf - -inf would be NaN, -inf - 0 has the exponential 0

    total = float32(0)
    for j in range(tx, visible, threads):
        total += float32(math.exp(float32(x[row, j]) - largest))
    total = row_sum(total, partial)
    scale = float32(0) if total == 0 else float32(1) / total

    for j in range(tx, S, threads):
        weight = float32(0)
        if j < visible:
            weight = float32(math.exp(float32(x[row, j]) - largest)) * scale
        out[row, j] = weight


def softmax(x: torch.Tensor, causal: bool = False, threads: int = 128) -> torch.Tensor:
    """x: `[..., T, S]`, any strides (copied if its leading axes are not one in memory).

    One block of up to `threads` (see `row_threads`) for each row. Changes who works on a row: neighbours are in
    neighbouring columns, 4 sectors a request (float32), and talk in shared memory, by trees with a barrier a step.
    Returns the softmax over S, contiguous. With `causal`, column j of row i has weight 0 unless j <= i + S - T; a row
    that sees nothing, or only -inf, is all 0.
    """
    require(x, "x", (None,) * max(2, getattr(x, "ndim", 2)))
    T, S = x.shape[-2:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    threads = row_threads(threads, S)
    if out.numel() == 0:
        return out
    rows = out.numel() // S
    device.check_launch(rows, threads, 4 * threads)
    x, flat = map(device.numba_array, (x.reshape(rows, S), out.view(rows, S)))
    _softmax_kernel[rows, threads, device.numba_stream(), 4 * threads](x, T, causal, flat)
    return out
