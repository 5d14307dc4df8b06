"""reduction in Numba-CUDA: from a tree whose warps are torn apart to one launch at the speed of memory."""

import torch
from numba import cuda, float32, int32

from gpukern import device
from gpukern.kernels.intrinsics import load4
from gpukern.kernels.quads import quad_elements
from gpukern.kernels.tickets import tickets
from gpukern.op import InputError, require, require_whole

EVERY_LANE = 0xFFFFFFFF


@cuda.jit
def _reduction_divergent_kernel(x, sums):
    """A block adds up blockDim.x elements, pairwise: first neighbours, then pairs, then fours, ..."""
    partial = cuda.shared.array(0, float32)  # dynamic: the launch says how much, one number a thread
    tx, threads = cuda.threadIdx.x, cuda.blockDim.x
    i = cuda.grid(1)
    partial[tx] = float32(x[i]) if i < x.size else float32(0)
    cuda.syncthreads()
    step = 1
    while step < threads:
        if tx % (2 * step) == 0 and tx + step < threads:
            partial[tx] += partial[tx + step]
        cuda.syncthreads()
        step *= 2
    if tx == 0:
        sums[cuda.blockIdx.x] = partial[0]


def reduction_divergent(x: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x: any shape. A block of `threads` adds up as many elements; its launches repeat on the sums until one is left.

    In each step every second, fourth, eighth, ... thread adds, so almost every warp has threads that add and threads
    that wait: in the first five steps all branches diverge, and the whole warp is there for the few that work.
    Returns the sum, `[]`, in the dtype of x.
    """
    return _levels(_reduction_divergent_kernel, x, threads)


@cuda.jit
def _reduction_sequential_kernel(x, sums):
    """A block adds up blockDim.x elements: the upper half of them to the lower half, until one is left."""
    partial = cuda.shared.array(0, float32)
    tx, left = cuda.threadIdx.x, cuda.blockDim.x
    i = cuda.grid(1)
    partial[tx] = float32(x[i]) if i < x.size else float32(0)
    cuda.syncthreads()
    while left > 1:
        half = (left + 1) >> 1
        if tx + half < left:
            partial[tx] += partial[tx + half]
        cuda.syncthreads()
        left = half
    if tx == 0:
        sums[cuda.blockIdx.x] = partial[0]


def reduction_sequential(x: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x: any shape. As `reduction_divergent`, in another order.

    Changes who adds: the first half of the threads, then the first quarter, ... so whole warps work or have nothing to
    do. divergent_branches falls to those of the last five steps, in one warp a block, and a warp's threads read
    neighbours in shared memory, in 32 banks: no conflict.
    """
    return _levels(_reduction_sequential_kernel, x, threads)


@cuda.jit(device=True)
def _warp_sum(value):
    """The sum of `value` over the 32 threads of a warp, each of which gets it and must call this.

    They read each other's registers: no shared memory, no barrier.
    """
    step = 16
    while step > 0:
        value += cuda.shfl_xor_sync(EVERY_LANE, value, step)
        step >>= 1
    return value


@cuda.jit(device=True)
def block_sum(value):
    """The sum of `value` over the threads of a block of whole warps, each of which gets it and must call this.

    Each warp adds up its own, then each adds up the sums of all warps, so none waits for the last step of another.
    """
    of_warp = cuda.shared.array(32, float32)
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    value = _warp_sum(value)
    if lane == 0:
        of_warp[warp] = value
    cuda.syncthreads()
    total = _warp_sum(of_warp[lane] if lane < cuda.blockDim.x // 32 else float32(0))
    cuda.syncthreads()  # all have read the sums before anyone writes them again
    return total


@cuda.jit
def _reduction_shuffle_kernel(x, sums):
    """A block adds up blockDim.x elements, each warp its 32 by shuffles, then the sums of the warps."""
    i = cuda.grid(1)
    total = block_sum(float32(x[i]) if i < x.size else float32(0))
    if cuda.threadIdx.x == 0:
        sums[cuda.blockIdx.x] = total


def reduction_shuffle(x: torch.Tensor, threads: int = 256) -> torch.Tensor:
    """x: any shape. As `reduction_sequential`, with `threads` a multiple of 32.

    Changes where the numbers meet: in registers. Of the nine barriers of a block of 256 two are left, and shared memory
    sees one number a warp: shared_store_requests and shared_load_requests fall to one a warp.
    """
    _require_warps(threads)
    return _levels(_reduction_shuffle_kernel, x, threads, shared=0)


@cuda.jit(device=True)
def _add4(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


@cuda.jit
def _reduction_last_block_kernel(x, x_quads, sums, ticket, out):
    """Each block adds up its share of x; the one that is done last adds up the sums of all.

    x_quads: the first elements of x, which are read 16 bytes at a time. sums: one number a block. ticket: `[1]`, 0
    before and after: a block that takes ticket 0, 1, ... last knows that the sums of all others are there.
    """
    tx = cuda.threadIdx.x
    i, stride = cuda.grid(1), cuda.gridsize(1)
    quads = x_quads.size // 4
    four = float32(0), float32(0), float32(0), float32(0)
    while i + stride < quads:  # two loads on their way at once
        first, second = load4(x_quads, 4 * i), load4(x_quads, 4 * (i + stride))
        four = _add4(four, _add4(first, second))
        i += 2 * stride
    if i < quads:
        four = _add4(four, load4(x_quads, 4 * i))
    total = (four[0] + four[1]) + (four[2] + four[3])
    for j in range(4 * quads + cuda.grid(1), x.size, stride):
        total += float32(x[j])

    total = block_sum(total)
    is_last = False
    if tx == 0:
        sums[cuda.blockIdx.x] = total
        cuda.threadfence()  # the sum is in memory before the ticket is taken
        is_last = cuda.atomic.add(ticket, 0, 1) == cuda.gridDim.x - 1
        cuda.threadfence()  # and what others wrote is read after it
    if cuda.syncthreads_or(int32(is_last)):
        total = float32(0)
        for j in range(tx, cuda.gridDim.x, cuda.blockDim.x):
            total += sums[j]
        total = block_sum(total)
        if tx == 0:
            out[0] = total
            ticket[0] = 0


def reduction_last_block(x: torch.Tensor, threads: int = 512, blocks: int = 4) -> torch.Tensor:
    """x: any shape. `blocks` of `threads`, a multiple of 32, for each SM of the card, or fewer if x is small.

    Changes the number of launches to one, and that of blocks to what the card holds: each thread adds up many elements
    on its own, 16 bytes at a time, before it talks to others. Requests fall to a quarter, barriers, shared memory and
    sums to what a few blocks need, and an atomic a block is new. Other dtypes than float32, strides, and starts that
    are no multiple of 16 bytes are read element by element. Returns the sum, `[]`, in the dtype of x.
    """
    require(x, "x", (None,) * getattr(x, "ndim", 0))
    _require_warps(threads)
    require_whole(blocks=blocks)
    device.check_launch(1, threads)
    if x.numel() == 0:
        return x.sum()
    x = x.reshape(-1)
    quads = x[: quad_elements(x) if x.dtype == torch.float32 else 0].view(torch.float32)
    grid = min(-(-x.numel() // (4 * threads)), blocks * device.card().sms)
    sums = torch.empty(grid, dtype=torch.float32, device=x.device)
    out = torch.empty(1, dtype=x.dtype, device=x.device)
    arrays = map(device.numba_array, (x, quads, sums, tickets(1), out))
    _reduction_last_block_kernel[grid, threads, device.numba_stream()](*arrays)
    return out.view(())


def _require_warps(threads: int) -> None:
    require_whole(threads=threads)
    if threads % 32:
        raise InputError(f"threads={threads} must be a multiple of 32: whole warps add up.")


def _levels(kernel, x: torch.Tensor, threads: int, shared: int = 4) -> torch.Tensor:
    """Launch `kernel(x, sums)`, which adds up `threads` elements a block, then on the sums, until one is left.

    shared  bytes of dynamic shared memory a thread
    """
    require(x, "x", (None,) * getattr(x, "ndim", 0))
    require_whole(threads=threads)
    if threads == 1:
        raise InputError("threads=1: a block that adds up one element comes to no end; use at least 2.")
    device.check_launch(1, threads)
    if x.numel() == 0:
        return x.sum()
    sums = x.reshape(-1)
    while True:
        left = -(-sums.numel() // threads)
        device.check_launch(left, threads)
        out = torch.empty(left, dtype=x.dtype if left == 1 else torch.float32, device=x.device)
        arrays = map(device.numba_array, (sums, out))
        kernel[left, threads, device.numba_stream(), shared * threads](*arrays)
        if left == 1:
            return out.view(())
        sums = out
