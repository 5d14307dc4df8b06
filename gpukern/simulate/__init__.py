"""The simulated GPU: kernels run on any machine, under a card's rules. It counts and never times.

Numba kernels run in lockstep (`gpukern.simulate.lockstep`), which counts what a card's profiler counts and finds races,
accesses out of bounds and barriers that are not met. Triton kernels run in Triton's interpreter; `install` makes it
refuse what a card refuses, and right for bfloat16.
"""

import importlib.util


def install() -> None:
    """Let this process's kernels run on the simulated GPU. `import gpukern` calls it in the mode `counted`."""
    from gpukern.simulate import lockstep

    lockstep.install()
    if importlib.util.find_spec("triton"):  # Linux only
        from gpukern.simulate import triton_interpreter

        triton_interpreter.install()
