"""The simulated GPU: kernels run on any machine, under a card's rules. It counts and never times.

    report = simulate.run(kernel, grid, block, x, out)          # a @cuda.jit kernel; collects what it finds
    report = simulate.run(kernel, grid, None, x, out, BLOCK=64) # a @triton.jit kernel
    report.counters["global_load_sectors"], report.faults, report.frame(), report.figure("banks")
    kernel[grid, block](x, out); simulate.last()                # the normal way: raises FaultError on a fault

Numba kernels run in lockstep (`gpukern.simulate.lockstep`), which counts what a card's profiler counts and finds races,
accesses out of bounds and barriers that are not met. Triton kernels run in Triton's interpreter
(`gpukern.simulate.interpreter`), made right for bfloat16, checked, counted and held to a card's limits.
"""

import importlib.util
import math

from gpukern import device
from gpukern.simulate.report import Access, Fault, FaultError, Refused, Report, keep, last

__all__ = ["Access", "Fault", "FaultError", "Refused", "Report", "install", "last", "run"]


def run(
    kernel,
    grid,
    block,
    *args,
    card: str | None = None,
    shared: int = 0,
    inputs: tuple = (),
    outputs: tuple = (),
    trace: int | None = 0,
    checks: bool = True,
    **meta,
) -> Report:
    """Run a kernel once on the simulated GPU and return what was counted and found, faults too.

    kernel   a function decorated with `@cuda.jit` or with `@triton.jit` (autotuned or with heuristics, too)
    grid     blocks (programs) in x, y, z, or their number in x; for Triton also a function of the meta-parameters
    block    threads in x, y, z, or their number in x; None for Triton
    args     NumPy arrays, torch tensors on the CPU, arrays from `cuda.to_device`, numbers, tuples of these
    card     whose limits to keep ("H200", "A100", "T4", "RTX 4090"); default: this machine's simulated card
    shared   bytes of dynamic shared memory a block (Numba)
    inputs   names of arguments that the kernel must not write
    outputs  names of arguments that hold nothing yet and that the kernel must write whole
    trace    the block (program) whose accesses are kept in `report.trace`, counted along x, then y, then z; None: none
    checks   False: compute only. Nothing is counted, and no race is looked for; out of bounds is still found
    meta     Triton's keyword arguments: constexprs, num_warps, num_stages

    A launch that the card does not take is a fault of kind "limit", and nothing is run; only that a block wants too
    many registers is found after the run, by compiling the kernel where that can be (from 257 threads a block). Raises
    what a compiler would: Numba's TypingError, Triton's errors; and Refused, with the line and what to do, for a
    construct that the simulated GPU does not know. Raises DeviceError where kernels run on a real card.
    """
    if not device.simulated():
        raise device.DeviceError("kernels of this process run on its card: set GPUKERN_DEVICE=simulated and restart.")
    _check_kernel(kernel, block)
    options = {"inputs": _names(inputs), "outputs": _names(outputs), "trace": trace, "checks": checks}
    with device.using(card):
        try:
            if block is None:
                from gpukern.simulate import interpreter

                return interpreter.run(kernel, grid, args, meta, **options)
            if meta:
                raise TypeError(f"{', '.join(meta)}: a Numba kernel takes its arguments by position.")
            from gpukern.simulate import lockstep

            report = lockstep.run(kernel, grid, block, args, shared=shared, **options)
            if checks and math.prod(report.block) * report.card.registers_per_thread > report.card.registers_per_sm:
                _check_registers(report)
            return report
        except device.LimitError as limit:
            return _refused(kernel, grid, block, limit)


def _check_kernel(kernel, block) -> None:
    """Refuse what is no kernel, and a block where there can be none."""
    library = type(kernel).__module__.partition(".")[0]
    if library not in ("numba", "triton"):
        raise TypeError(f"{kernel!r} is no kernel: decorate a function with @cuda.jit or @triton.jit.")
    if library == "numba" and block is None:
        raise TypeError(f"{kernel.py_func.__name__} is a Numba kernel: give it a block, the threads in x, y, z.")
    if library == "triton" and block is not None:
        name = _function(kernel).__name__
        raise TypeError(f"{name} is a Triton kernel, which has no block: simulate.run({name}, grid, None, ...).")


def _function(kernel):
    """The function that was decorated: Numba's and Triton's decorators keep it inside."""
    while not hasattr(kernel, "__code__"):
        kernel = kernel.py_func if hasattr(kernel, "py_func") else kernel.fn
    return kernel


def _check_registers(report: Report) -> None:
    """A block so large that its registers may not fit on an SM is compiled, to see how many it takes."""
    try:
        _ = report.occupancy
    except device.LimitError as limit:
        report.add("limit", str(limit), report.first_line)


def _refused(kernel, grid, block, limit: device.LimitError) -> Report:
    """The report of a launch that the card does not take."""
    function = _function(kernel)
    code = function.__code__
    language = "triton" if block is None else "numba"
    first_line = f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"
    report = Report(function.__name__, language, device.card(), _sizes(grid), _sizes(block or 1), first_line=first_line)
    report.add("limit", str(limit), first_line)
    keep(report)
    return report


def _sizes(size) -> tuple:
    size = tuple(size) if isinstance(size, tuple | list) else (size,)
    return (*size, 1, 1)[:3]


def _names(names) -> tuple:
    return (names,) if isinstance(names, str) else tuple(names)


def install() -> None:
    """Let this process's kernels run on the simulated GPU. `import gpukern` calls it in the mode `counted`."""
    from gpukern.simulate import lockstep

    lockstep.install()
    if importlib.util.find_spec("triton"):  # Linux only
        from gpukern.simulate import interpreter

        interpreter.install()
