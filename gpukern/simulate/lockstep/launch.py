"""Launching: arguments become arrays in global memory, the kernel is lowered for their types, the machine runs it."""

import ctypes
import math

import ml_dtypes
import numpy as np
import torch
from numba.cuda import types
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.errors import normalize_kernel_dimensions
from numba.cuda.typing.typeof import Purpose, typeof

from gpukern import device
from gpukern.simulate.lockstep import races
from gpukern.simulate.lockstep.faults import FaultError, Refused, Report
from gpukern.simulate.lockstep.frontend import typed_kernel
from gpukern.simulate.lockstep.lower import Code
from gpukern.simulate.lockstep.machine import Machine
from gpukern.simulate.lockstep.memory import Space, View
from gpukern.simulate.lockstep.operations import dtype_of

# The report of the last launch of this process, normal or by run().
last: Report | None = None


def run(kernel: CUDADispatcher, grid, block, *args, shared: int = 0, collect: bool = True) -> Report:
    """Run `kernel` on the simulated GPU and return what was counted and found.

    kernel   a function decorated with `@cuda.jit`
    grid     blocks in x, y, z, or their number in x; block: threads in x, y, z, or their number in x
    args     NumPy arrays, torch tensors on the CPU, arrays from `cuda.to_device`, numbers, tuples of these
    shared   bytes of dynamic shared memory a block
    collect  keep faults in the report; if False, raise FaultError when there are any

    Raises Numba's TypingError where the compiler would, LimitError for a launch that the card does not take, and
    Refused, with the line and what to do, for a construct that the simulated GPU does not know.
    """
    global last
    grid, block = normalize_kernel_dimensions(grid, block)
    args = [_as_argument(a) for a in args]
    code = lowered(kernel, tuple(typeof(a, Purpose.argument) for a in args))
    shared_bytes = code.dynamic + shared if shared else code.shared_static
    device.check_launch(grid, block, shared_bytes)
    most = device.card().shared_static
    if shared_bytes > most:  # the card may have more, but numba-cuda has no way to ask for it
        raise device.LimitError(
            f"{code.name} wants {shared_bytes:,} bytes of shared memory a block; Numba kernels have {most:,}, static "
            "and dynamic together. Choose a smaller tile."
        )
    if code.grid_sync:
        _check_cooperative(code, grid, block)
    report = last = Report()
    machine = Machine(code, grid, block, report, shared_bytes, code.grid_sync)
    machine.run(_registers(code, machine, args))
    report.finish()
    if report.errors and not collect:
        raise FaultError(report)
    return report


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
        run(self.dispatcher, self.griddim, self.blockdim, *args, shared=self.sharedmem, collect=False)


def lowered(kernel: CUDADispatcher, argument_types: tuple) -> Code:
    """The kernel's code for these types: made at the first launch, then kept, with the globals of that moment."""
    known = kernel.__dict__.setdefault("_lockstep", {})
    if not kernel._can_compile:  # compiled for given signatures only
        argument_types = _declared(kernel, argument_types)
    if argument_types not in known:
        known[argument_types] = Code(typed_kernel(kernel, argument_types))
    return known[argument_types]


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


def _as_argument(value):
    """What is typed and bound: tensors become NumPy arrays over the same memory."""
    if isinstance(value, torch.Tensor):
        return host_array(value)
    if isinstance(value, tuple):
        return tuple(_as_argument(v) for v in value)
    return value


def host_array(array) -> np.ndarray:
    """The NumPy array over the memory of a tensor on the CPU, or of an array of the simulated card."""
    if isinstance(array, torch.Tensor):
        if array.dtype == torch.bfloat16:  # NumPy has no bfloat16: pass the bits, name the type of ml_dtypes
            return array.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array.detach().numpy()
    return array if isinstance(array, np.ndarray) else array.host


def _registers(code: Code, machine: Machine, args: list) -> dict:
    """The registers that the kernel starts with: its arguments."""
    named = list(zip(code.arguments, code.argument_types, args, strict=True))
    spaces = _global_memory(code, machine, named)

    def value(type_, arg, name):
        if isinstance(type_, types.Array):
            array = host_array(arg)
            space = spaces[id(arg)]
            size = array.itemsize
            offset = array.ctypes.data - space.here
            if offset % size or any(s % size for s in array.strides):
                raise Refused(f"array {name}, whose elements do not lie at multiples of their size", code.name)
            shape = tuple(np.int64(n) for n in array.shape)
            strides = tuple(np.int64(s // size) for s in array.strides)
            return View(space, space.flat(array.dtype), np.int64(offset // size), shape, strides, name)
        if isinstance(type_, types.BaseTuple):
            return tuple(value(t, a, f"{name}[{n}]") for n, (t, a) in enumerate(zip(type_, arg, strict=True)))
        if isinstance(type_, types.NoneType | types.Omitted):
            return None
        try:
            return dtype_of(type_).type(arg)
        except NotImplementedError:
            raise Refused(f"an argument of type {type_} ({name})", code.name) from None

    return {code.register("arg." + name): value(type_, arg, name) for name, type_, arg in named}


def _global_memory(code: Code, machine: Machine, named: list) -> dict:
    """A Space for every array among the arguments, by id; arrays that overlap in memory share one."""
    spans = []

    def collect(name, arg):
        if isinstance(arg, tuple):
            for part in arg:
                collect(name, part)
        elif isinstance(arg, np.ndarray) or hasattr(arg, "host"):
            low, high = np.lib.array_utils.byte_bounds(host_array(arg))
            spans.append((low, high if host_array(arg).size else low, name, arg))

    for name, _, arg in named:
        collect(name, arg)
    spans.sort(key=lambda span: span[:2])
    regions, end = [], -1
    for span in spans:
        if span[0] >= end:
            regions.append([])
        regions[-1].append(span)
        end = max(end, span[1])
    spaces = {}
    machine.shadows = []
    for region in regions:
        low, high = region[0][0], max(span[1] for span in region)
        memory = (
            np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)
            if high > low
            else np.empty(0, np.uint8)
        )
        granule = min(host_array(span[3]).itemsize for span in region)
        space = Space("global", memory, granule, address=low - _owner(host_array(region[0][3])), here=low)
        if any(span[2] in code.stored for span in region):
            space.shadow = races.Shadow(machine, space)
            machine.shadows.append(space.shadow)
        for span in region:
            spaces[id(span[3])] = space
    return spaces


def _owner(array: np.ndarray) -> int:
    """The first byte of the allocation that an array lies in; a card aligns that, so sectors are counted from it."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    if isinstance(array.base, torch.Tensor):
        return array.base.untyped_storage().data_ptr()
    return array.ctypes.data if array.size else np.lib.array_utils.byte_bounds(array)[0]
