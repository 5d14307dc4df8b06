"""A kernel's arguments: arrays become views of global memory, numbers become registers of the compiler's types."""

import ctypes

import ml_dtypes
import numpy as np
import torch
from numba.cuda import types

from gpukern.simulate.lockstep import memory, races
from gpukern.simulate.lockstep.kinds import dtype_of
from gpukern.simulate.lockstep.memory import Space, View
from gpukern.simulate.report import Refused


class Arguments:
    """The arguments of one launch. registers: what the kernel starts with.

    inputs   names of arguments that must not be written
    outputs  names of arguments that hold nothing at the start, and must be written whole
    """

    def __init__(self, code, machine, args: list, inputs: tuple, outputs: tuple):
        self.code, self.machine, self.outputs = code, machine, outputs
        self.named = list(zip(code.arguments, code.argument_types, args, strict=True))
        self.arrays = []  # (name, NumPy array)
        for name, _, arg in self.named:
            self._collect(name, arg)
        self.spaces = {}  # id of an array -> its Space
        machine.shadows, machine.spaces = [], []
        for region in _regions(self.arrays):
            self._make_space(region, inputs)
        self.registers = {code.register("arg." + name): self._value(t, arg, name) for name, t, arg in self.named}

    def settle(self) -> None:
        """After the run: outputs that were not written are faults; what was written stays known as written."""
        for name, array in self.arrays:
            space = self.spaces[id(array)]
            if space.ready is None:
                continue
            if name in self.outputs:
                missing = np.argwhere(~space.elements(space.ready, array).all(-1))
                if len(missing):
                    self._not_written(name, tuple(map(int, missing[0])), len(missing))
            memory.keep_ready(array, space)

    def _not_written(self, name: str, index: tuple, count: int) -> None:
        at = f"{name}[{', '.join(map(str, index))}]"
        line = self.code.line_of_block[0]
        self.machine.report.add(
            "uninitialised",
            f"no thread writes {at}" + (f" nor {count - 1:,} more elements" if count > 1 else "") + f" of the output "
            f"{name}. They keep what lay in memory: launch enough blocks, and let every element have its thread.",
            line,
            (),
            name,
            index,
            count,
        )

    def _collect(self, name: str, arg) -> None:
        if isinstance(arg, tuple):
            for n, part in enumerate(arg):
                self._collect(f"{name}[{n}]", part)
        elif isinstance(arg, np.ndarray) or hasattr(arg, "_numba_type_"):
            self.arrays.append((name, host_array(arg)))

    def _make_space(self, region: list, inputs: tuple) -> None:
        """One Space for arrays that overlap in memory."""
        bounds = [_bounds(array) for _, array in region]
        low, high = min(b[0] for b in bounds), max(b[1] for b in bounds)
        data = np.empty(0, np.uint8)
        if high > low:
            data = np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)
        granule = self.code.granule(min(memory.granule(array.dtype) for _, array in region))
        space = Space("global", data, granule, address=low - _owner(region[0][1]), here=low)
        self.machine.spaces.append(space)
        for (name, array), (first, last) in zip(region, bounds, strict=True):
            self.spaces[id(array)] = space
            root = name.partition("[")[0]
            if root in inputs:
                space.inputs.append((first - low, last - low, name))
            if self.machine.checks and root in self.code.stored and space.shadow is None:
                space.shadow = races.Shadow(self.machine, space)
                self.machine.shadows.append(space.shadow)
        if not self.machine.checks:
            return
        space.loaded = np.zeros(space.granules, bool)
        space.ready = memory.ready(region[0][1], space)
        for name, array in region:
            if name in self.outputs:
                if space.ready is None:
                    space.ready = np.ones(space.granules, bool)
                space.elements(space.ready, array)[...] = False

    def _value(self, type_, arg, name: str):
        if isinstance(type_, types.Array):
            array = host_array(arg)
            space = next(self.spaces[id(a)] for n, a in self.arrays if n == name)
            size = array.itemsize
            offset = array.ctypes.data - space.here
            if offset % size or any(s % size for s in array.strides):
                raise Refused(f"array {name}, whose elements do not lie at multiples of their size", self.code.name)
            shape = tuple(np.int64(n) for n in array.shape)
            strides = tuple(np.int64(s // size) for s in array.strides)
            return View(space, space.flat(array.dtype), np.int64(offset // size), shape, strides, name)
        if isinstance(type_, types.BaseTuple):
            return tuple(self._value(t, a, f"{name}[{n}]") for n, (t, a) in enumerate(zip(type_, arg, strict=True)))
        if isinstance(type_, types.NoneType | types.Omitted):
            return None
        if isinstance(type_, types.Record):
            raise Refused(f"a record as an argument ({name}); pass an array of one record", self.code.name)
        try:
            return dtype_of(type_).type(arg)
        except NotImplementedError:
            raise Refused(f"an argument of type {type_} ({name})", self.code.name) from None


def as_argument(value):
    """What is typed and bound: tensors become NumPy arrays over the same memory."""
    if isinstance(value, torch.Tensor):
        return host_array(value)
    if isinstance(value, tuple):
        parts = [as_argument(v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def host_array(array) -> np.ndarray:
    """The NumPy array over the memory of a tensor on the CPU, or of an array of the simulated card."""
    if isinstance(array, torch.Tensor):
        if array.dtype == torch.bfloat16:  # NumPy has no bfloat16: pass the bits, name the type of ml_dtypes
            return array.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array.detach().numpy()
    return array if isinstance(array, np.ndarray) else array.host


def _bounds(array: np.ndarray) -> tuple:
    """First byte, and the byte after the last."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high if array.size else low


def _regions(arrays: list) -> list:
    """The arrays (name, array) in lists of those that overlap in memory."""
    regions, end = [], -1
    for name, array in sorted(arrays, key=lambda pair: _bounds(pair[1])):
        low, high = _bounds(array)
        if low >= end:
            regions.append([])
        regions[-1].append((name, array))
        end = max(end, high)
    return regions


def _owner(array: np.ndarray) -> int:
    """The first byte of the allocation that an array lies in; a card aligns that, so sectors are counted from it."""
    base = memory.base(array)
    if isinstance(base.base, torch.Tensor):
        return base.base.untyped_storage().data_ptr()
    return base.ctypes.data if base.size else _bounds(base)[0]
