"""The simulated GPU: kernels run on any machine, under a card's rules. It counts and never times.

Numba kernels run in lockstep (`gpukern.simulate.lockstep`), which counts what a card's profiler counts and finds races,
accesses out of bounds and barriers that are not met. Triton kernels run in Triton's interpreter; `install` makes it
refuse what a card refuses, and right for bfloat16.
"""

import importlib.util

from gpukern import device


def install() -> None:
    """Let this process's kernels run on the simulated GPU. `import gpukern` calls it in the mode `counted`."""
    # These two until device.py keeps the mode in a variable of its own and knows arrays by cuda.as_cuda_array alone.
    device.simulated = lambda: True
    device.numba_array = _numba_array
    from gpukern.simulate import lockstep

    lockstep.install()
    if importlib.util.find_spec("triton"):  # Linux only
        from gpukern.simulate import triton_interpreter

        triton_interpreter.install()


def _numba_array(tensor):
    import ml_dtypes
    import torch
    from numba import cuda

    half = tensor.dtype == torch.bfloat16
    array = cuda.as_cuda_array(tensor.detach().view(torch.int16) if half else tensor.detach())
    return array.view(ml_dtypes.bfloat16) if half else array
