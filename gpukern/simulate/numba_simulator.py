"""A card's limits in Numba's CUDA simulator, which by itself runs a block of 2048 threads or 1 MB of shared memory."""

import sys
import threading

import numpy as np
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator import kernelapi

from gpukern import device

_launch = simulator.FakeCUDAKernel.__call__
_shared_array = kernelapi.FakeCUDAShared.array
_allocating = threading.Lock()


def install() -> None:
    """Check every launch and every shared array of this process from now on; and switch threads more often.

    Upstream runs one thread of this machine for each of a block's, and a barrier waits until every one had its turn.
    """
    sys.setswitchinterval(1e-4)
    simulator.FakeCUDAKernel.__call__ = _checked_launch
    kernelapi.FakeCUDAShared.array = _checked_shared_array


def _checked_launch(kernel, *args):
    """`kernel[grid, block, stream, shared](*args)`, or a LimitError. A call inside a kernel is not a launch."""
    called_from_host = simulator._get_kernel_context() is None and not kernel._device
    if called_from_host and kernel.grid_dim is not None:
        device.check_launch(kernel.grid_dim, kernel.block_dim)
        _check_shared(kernel.dynshared_size)
    return _launch(kernel, *args)


def _check_shared(n_bytes: int) -> None:
    card = device.card()
    if n_bytes > card.shared_static:  # the card may have more, but numba-cuda has no way to ask for it
        raise device.LimitError(
            f"a block wants {n_bytes:,} bytes of shared memory; Numba kernels have {card.shared_static:,}, static and "
            "dynamic together. Choose a smaller tile."
        )


def _checked_shared_array(shared, shape, dtype, alignment=None):
    """`cuda.shared.array`, or a LimitError: one array for each line of the source that asks, as upstream has it.

    Upstream takes no lock, so that two threads of a block may be given two arrays; and it refuses `alignment`.
    """
    if shape == 0:  # dynamic: its size was checked at the launch
        return _shared_array(shared, shape, dtype)
    if isinstance(dtype, kernelapi.types.Type):
        dtype = kernelapi.numpy_support.as_dtype(dtype)
    caller = sys._getframe(1)
    line = (caller.f_code.co_filename, caller.f_lineno)
    with _allocating:
        if line not in shared._allocations:
            shared._allocations[line] = np.empty(shape, dtype)
            _check_shared(shared._dynshared_size + sum(array.nbytes for array in shared._allocations.values()))
    return shared._allocations[line]
