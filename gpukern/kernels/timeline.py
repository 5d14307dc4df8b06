"""Who ran where, and when: a kernel whose blocks write down their SM and the time at which they begin and end.

It shows what no counter does: how a grid is dealt out to the SMs, that a block begins when another one ends, and the
last wave, in which most SMs have nothing left to do.
"""

from typing import NamedTuple

import torch
from numba import cuda, float32

from gpukern import device
from gpukern.kernels.intrinsics import globaltimer, smid
from gpukern.op import InputError, require, require_whole


class Timeline(NamedTuple):
    """One number for each block, `[blocks]`, on the CPU.

    sm     number of the SM that ran the block
    start  nanoseconds from the start of the first block to that of this one; end: to its end
    """

    sm: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor


@cuda.jit
def _timeline_kernel(rounds, out, sm, start, end):
    """Each thread of block b does rounds[b] multiply-adds, one after the other; the first one notes where and when."""
    b = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        sm[b] = smid()
        start[b] = globaltimer()
    cuda.syncthreads()  # nobody works before the time is noted
    value = float32(cuda.threadIdx.x)
    for _ in range(rounds[b]):
        value = value * float32(0.5) + float32(1)
    out[cuda.grid(1)] = value  # or a compiler would see that nobody wants it
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        end[b] = globaltimer()


def timeline(rounds: torch.Tensor, threads: int = 256) -> Timeline:
    """Run a block of `threads` for each element of rounds, `[blocks]`, int32: so many multiply-adds it does a thread.

    The clock is %globaltimer, the same for all SMs; it ticks in steps (32 ns on a Hopper), so let a block take many.
    Returns a Timeline. Raises DeviceError on the simulated GPU, which has no SMs and no clock.
    """
    if device.simulated():
        raise device.DeviceError(
            "a timeline needs a CUDA card: the simulated GPU has no SMs and no clock. It counts, and never times."
        )
    require(rounds, "rounds", (None,), dtypes=(torch.int32,))
    require_whole(threads=threads)
    blocks = rounds.numel()
    if blocks == 0:
        raise InputError("rounds is empty: a grid has at least one block.")
    device.check_launch(blocks, threads)
    out = torch.empty(blocks * threads, dtype=torch.float32, device=rounds.device)
    sm = torch.empty(blocks, dtype=torch.int32, device=rounds.device)
    start, end = (torch.empty(blocks, dtype=torch.int64, device=rounds.device) for _ in range(2))
    arrays = map(device.numba_array, (rounds, out, sm, start, end))
    _timeline_kernel[blocks, threads, device.numba_stream()](*arrays)
    first = start.min()
    return Timeline(sm.cpu(), (start - first).cpu(), (end - first).cpu())
