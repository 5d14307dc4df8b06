"""gpukern: what a GPU kernel is, taught by running the eight kernels of one transformer layer.

Import it before `numba.cuda` and `triton`: it decides once whether this machine measures (a CUDA card) or counts
(the simulated GPU), and both libraries are then set up for that.
"""

from gpukern import device
from gpukern.lesson import compare, show_source

__all__ = ["compare", "device", "show_source"]

if device.decide() == "counted":
    from gpukern import simulate

    simulate.install()
