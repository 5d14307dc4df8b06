"""The simulated GPU: kernels run on any machine, under a card's rules. It counts and never times.

For now Numba kernels run in Numba's CUDA simulator and Triton kernels in Triton's interpreter; `install` makes both
refuse what a card refuses, and the interpreter right for bfloat16. Counters, races and lockstep warps come later.
"""

import importlib.util


def install() -> None:
    """Make the simulators of this process keep a card's rules. `import gpukern` calls it in the mode `counted`."""
    from gpukern.simulate import numba_simulator

    numba_simulator.install()
    if importlib.util.find_spec("triton"):  # Linux only
        from gpukern.simulate import triton_interpreter

        triton_interpreter.install()
