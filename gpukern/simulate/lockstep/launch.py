"""Launching: arguments become arrays in global memory, the kernel is lowered for their types, the machine runs it."""

import functools
import math

import numpy as np
from numba.cuda import types
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.errors import normalize_kernel_dimensions
from numba.cuda.typing.typeof import Purpose, typeof

from gpukern import device, inspect
from gpukern.simulate.lockstep.arguments import Arguments, as_argument
from gpukern.simulate.lockstep.frontend import typed_kernel
from gpukern.simulate.lockstep.lower import Code
from gpukern.simulate.lockstep.machine import Machine
from gpukern.simulate.report import FaultError, Report, keep


def run(
    kernel: CUDADispatcher,
    grid,
    block,
    args: tuple,
    shared: int = 0,
    inputs: tuple = (),
    outputs: tuple = (),
    trace: int | None = None,
    checks: bool = True,
) -> Report:
    """Run `kernel` and return what was counted and found: the Numba half of `simulate.run`, which says what is what."""
    try:
        grid, block = normalize_kernel_dimensions(grid, block)
    except ValueError as error:  # a zero or negative size
        raise device.LimitError(str(error)) from None
    if not isinstance(shared, int | np.integer) or shared < 0:
        raise device.LimitError(f"{shared!r} bytes of dynamic shared memory a block: give a whole number, 0 or more.")
    args = [as_argument(a) for a in args]
    argument_types = tuple(typeof(a, Purpose.argument) for a in args)
    code = lowered(kernel, argument_types)
    unknown = [name for name in (*inputs, *outputs) if name not in code.arguments]
    if unknown:
        raise ValueError(f"{code.name} has no argument {unknown[0]!r}; it has {', '.join(code.arguments)}.")
    shared_bytes = code.dynamic + shared if shared else code.shared_static
    card = device.card()
    report = Report(code.name, "numba", card, grid, block, shared_bytes, first_line=code.line_of_block[0])
    report.compile = functools.cache(lambda: inspect.compiled(kernel, code.argument_types, card.name))
    report.files = code.files
    keep(report)
    _check(code, grid, block, shared_bytes)
    machine = Machine(code, grid, block, report, shared_bytes, code.grid_sync, trace, checks)
    arguments = Arguments(code, machine, args, inputs, outputs)
    machine.run(arguments.registers)
    arguments.settle()
    return report.finish()


def _check(code: Code, grid: tuple, block: tuple, shared_bytes: int) -> None:
    """Raise LimitError for a launch that the card, or Numba on it, does not take."""
    device.check_launch(grid, block, shared_bytes)
    most = device.card().shared_static
    if shared_bytes > most:  # the card may have more, but numba-cuda has no way to ask for it
        raise device.LimitError(
            f"{code.name} wants {shared_bytes:,} bytes of shared memory a block; Numba kernels have {most:,}, static "
            "and dynamic together. Choose a smaller tile."
        )
    if code.grid_sync:
        _check_cooperative(code, grid, block)


def _check_cooperative(code: Code, grid: tuple, block: tuple) -> None:
    """Blocks that wait for each other must all be on the card at once."""
    card = device.card()
    warps = -(-math.prod(block) // card.warp)
    most = card.sms * min(card.blocks_per_sm, card.warps_per_sm // warps)
    if math.prod(grid) > most:
        raise device.LimitError(
            f"{code.name} synchronises its grid of {math.prod(grid):,} blocks; {card.name} holds {most:,} of "
            f"{math.prod(block)} threads at once. Launch fewer blocks, each with a loop over its work."
        )


class Launch:
    """kernel[grid, block, stream, shared]: what waits for its arguments. It keeps its own sizes, as on a card."""

    def __init__(self, dispatcher, griddim, blockdim, stream=0, sharedmem=0):
        self.dispatcher, self.stream, self.sharedmem = dispatcher, stream, sharedmem
        self.griddim, self.blockdim = normalize_kernel_dimensions(griddim, blockdim)

    def __call__(self, *args) -> None:
        report = run(self.dispatcher, self.griddim, self.blockdim, args, shared=self.sharedmem)
        if report.errors:
            raise FaultError(report)


def lowered(kernel: CUDADispatcher, argument_types: tuple) -> Code:
    """The kernel's code for these types: made at the first launch, then kept, with the globals of that moment."""
    known = kernel.__dict__.setdefault("_lockstep", {})
    if not kernel._can_compile:  # compiled for given signatures only
        argument_types = _declared(kernel, argument_types)
    key = argument_types, device.card().compute_capability
    if key not in known:
        known[key] = Code(typed_kernel(kernel, argument_types))
    return known[key]


def _declared(kernel, given: tuple) -> tuple:
    """The declared signature that takes arguments of the types `given`."""
    for declared in kernel.overloads:
        pairs = list(zip(declared, given, strict=True)) if len(declared) == len(given) else []
        if pairs and all(_accepts(want, got) for want, got in pairs):
            return declared
    signatures = "; ".join(f"({', '.join(map(str, d))})" for d in kernel.overloads)
    raise TypeError(
        f"No matching definition for ({', '.join(map(str, given))}); the kernel is declared for {signatures}."
    )


def _accepts(want, got) -> bool:
    if isinstance(want, types.Array):
        same = isinstance(got, types.Array) and (want.dtype, want.ndim) == (got.dtype, got.ndim)
        return same and want.layout in ("A", got.layout)
    return isinstance(want, types.Number | types.Boolean) and isinstance(got, types.Number | types.Boolean)
