"""gpukern: what a GPU kernel is, taught by running the eight kernels of one transformer layer.

Import it before `numba.cuda` and `triton`: it decides once whether this machine measures (a CUDA card) or counts
(the simulated GPU), and both libraries are then set up for that.
"""

import sys
from pathlib import Path

from gpukern import device
from gpukern.lesson import compare, show_source

__all__ = ["compare", "device", "show_source"]

try:
    device.decide()
except device.DeviceError as refusal:
    if Path(sys.argv[0]).stem != "gpukern":
        raise
    print(f"error: {refusal}", file=sys.stderr)  # the command: one line, as cli.main has it for what is refused later
    sys.exit(2)

if device.simulated():
    from gpukern import simulate

    simulate.install()
