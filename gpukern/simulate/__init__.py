"""The simulated GPU: kernels run on any machine, under a card's rules. It counts and never times.

Numba kernels run in lockstep (`gpukern.simulate.lockstep`), which counts what a card's profiler counts and finds races,
accesses out of bounds and barriers that are not met. Triton kernels run in Triton's interpreter; `install` makes it
refuse what a card refuses, and right for bfloat16.
"""

import importlib.util
import os
import sys

from gpukern import device


def install() -> None:
    """Let this process's kernels run on the simulated GPU. `import gpukern` calls it in the mode `counted`."""
    _use_numbas_compiler()
    from gpukern.simulate import lockstep

    lockstep.install()
    if importlib.util.find_spec("triton"):  # Linux only
        from gpukern.simulate import triton_interpreter

        triton_interpreter.install()


# What follows is device.py's part. It goes when `device` keeps the mode in a variable of its own, sets
# NUMBA_ENABLE_CUDASIM=0 in both modes, and makes Numba's arrays by cuda.as_cuda_array in both.


def _use_numbas_compiler() -> None:
    """Numba's compiler instead of its simulator: the lockstep machine runs what the compiler has typed."""
    if "numba.cuda" in sys.modules and sys.modules["numba"].config.ENABLE_CUDASIM:
        raise device.DeviceError(
            "numba.cuda was imported before gpukern, as Numba's own simulator. Restart the kernel (or the program) and "
            "put `import gpukern` first."
        )
    os.environ["NUMBA_ENABLE_CUDASIM"] = "0"  # for good: Numba reads it again when it compiles
    if "numba" in sys.modules:
        sys.modules["numba"].config.ENABLE_CUDASIM = 0
    device.simulated = lambda: True
    device.numba_array = _numba_array


def _numba_array(tensor):
    import ml_dtypes
    import torch
    from numba import cuda

    half = tensor.dtype == torch.bfloat16
    array = cuda.as_cuda_array(tensor.detach().view(torch.int16) if half else tensor.detach())
    return array.view(ml_dtypes.bfloat16) if half else array
