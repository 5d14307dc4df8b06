"""Numba-CUDA kernels in lockstep, on a CPU."""

import os
import sys

from gpukern import device


def _use_the_compiler() -> None:
    """Import numba.cuda as on a machine with a card: we need its compiler, not its simulator. Nothing asks for a driver."""
    if "numba.cuda" in sys.modules:
        if sys.modules["numba"].config.ENABLE_CUDASIM:
            raise device.DeviceError(
                "numba.cuda was imported in its own simulator's mode. Restart the kernel (or the program) and put "
                "`import gpukern` first."
            )
        return
    os.environ["NUMBA_ENABLE_CUDASIM"] = "0"  # for good: Numba reads it again whenever it compiles
    import numba

    numba.config.ENABLE_CUDASIM = 0
    import numba.cuda  # noqa: F401


_use_the_compiler()

from gpukern.simulate.lockstep.faults import Fault, FaultError, Refused, Report  # noqa: E402
from gpukern.simulate.lockstep.host import install  # noqa: E402
from gpukern.simulate.lockstep.launch import run  # noqa: E402

__all__ = ["Fault", "FaultError", "Refused", "Report", "install", "run"]
