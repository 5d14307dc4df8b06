"""Global memory as the programs of a kernel see it: every access is held against the tensor its pointer came from.

Each tensor argument gets its own stretch of the 64-bit address space, far from all others (its number stands in the
upper 16 bits). So whatever a kernel does with a pointer, an address still says whose it is, and one outside of its
tensor is found even where another tensor would follow. Low bits are those that a card's allocator would give, so that
sectors and alignment are as on a card. An address below all stretches is a real one, which the kernel loaded from
memory (`x.data_ptr()` in a tensor of pointers): it belongs to the live tensor that lies there.
"""

import gc
import math

import numpy as np
import torch

from gpukern.simulate.interpreter import lines
from gpukern.simulate.interpreter.races import Shadow
from gpukern.simulate.interpreter.regions import Region, Tensor, extent
from gpukern.simulate.interpreter.watch import ALLOCATION, Watch
from gpukern.simulate.report import Refused

POISON = 0xFF  # what a lane finds out of bounds: NaN as a float, -1 as an integer
_STRETCH, _MIDDLE = 48, ALLOCATION + 1


class Memory(Watch):
    """What the programs of one launch load and store.

    arguments  [(name, tensor)] in the kernel's order
    """

    def __init__(self, launch, arguments: list, inputs: tuple, outputs: tuple):
        self.launch = launch
        self.regions = []
        self.tensors = []  # place n has the tensor whose stretch is n + 1
        self.checks = launch.checks
        self._live = None
        ordered = sorted(arguments, key=lambda pair: extent(pair[1]))
        for _, tensor in ordered:
            low, high = extent(tensor)
            size = tensor.element_size()
            if self.regions and low < self.regions[-1].high:
                last = self.regions[-1]
                self.regions[-1] = Region(last.low, max(high, last.high), math.gcd(size, last.granule))
            else:
                self.regions.append(Region(low, high, size))
        for name, tensor in arguments:
            self._add(name, tensor, inputs)
        if not self.checks:
            return
        for region in self.regions:
            region.shadow = Shadow(launch, region.granules)
        for tensor in self.tensors:
            if tensor.name.partition("[")[0] in outputs:
                region = tensor.region
                region.ready = np.ones(region.granules, bool) if region.ready is None else region.ready
                tensor.elements(region.ready)[...] = False

    def _add(self, name: str, tensor: torch.Tensor, inputs: tuple) -> None:
        low, high = extent(tensor)
        region = next(r for r in self.regions if r.low <= low and high <= r.high)
        first = low - region.low
        base = (len(self.tensors) + 1 << _STRETCH) + _MIDDLE + low - tensor.untyped_storage().data_ptr()
        self.tensors.append(Tensor(name, region, first, high - low, base, tensor))
        self.tensors[-1].look_for_gaps()
        if name.partition("[")[0] in inputs:
            region.inputs.append((first, first + high - low, name))

    @property
    def addresses(self) -> list:
        """What the kernel gets for its tensor arguments."""
        return [tensor.base for tensor in self.tensors]

    # What programs do

    def load(self, pointers: np.ndarray, mask, other, dtype: np.dtype, volatile: bool) -> np.ndarray:
        """The values at `pointers`; `other` (default 0, as on a card) where the mask is off."""
        self.launch.look()
        address, lanes = _active(pointers, mask)
        n, shape = pointers.size, pointers.shape
        if lanes is None:
            out = None
        elif other is None:
            out = np.zeros(n, dtype)
        else:
            out = np.array(np.broadcast_to(other, shape), dtype).reshape(-1)
        if not len(address):
            return out.reshape(shape)
        for tensor, where, part in self._locate(address, lanes, dtype.itemsize, "load"):
            if tensor is not None and n == 1:
                place = tensor.region.low + where.start * dtype.itemsize
                if volatile:
                    self.launch.meet(place, True, False, False)
                else:
                    self.launch.poll(place)
            if tensor is None:
                values = np.full(len(part) * dtype.itemsize, POISON, np.uint8).view(dtype)
            else:
                values = tensor.region.flat(dtype)[where]
                if self.checks:
                    self._note_load(tensor, where, dtype, volatile)
            if part is None and lanes is None:
                return values.reshape(shape) if type(where) is not slice else values.reshape(shape).copy()
            if out is None:
                out = np.empty(n, dtype)
            out[lanes if part is None else part] = values
        return out.reshape(shape)

    def store(self, pointers: np.ndarray, mask, value: np.ndarray) -> None:
        """Write `value` at `pointers`, where the mask is on."""
        self.launch.look()
        address, lanes = _active(pointers, mask)
        if not len(address):
            return
        self.launch.poll(None)
        dtype = value.dtype
        value = np.broadcast_to(value, pointers.shape).reshape(-1)
        for tensor, where, part in self._locate(address, lanes, dtype.itemsize, "store"):
            if tensor is None:
                continue
            part = lanes if part is None else part
            new = value if part is None else value[part]
            flat = tensor.region.flat(dtype)
            bits = np.dtype(f"u{dtype.itemsize}")
            if self.checks:
                self._note_store(tensor, where, new, bits)
            flat[where] = new
            if type(where) is not slice and self.checks and _meet(where):
                lost = flat[where].view(bits) != np.ascontiguousarray(new).view(bits)
                tensor.region.shadow.report_own(tensor, where, lost, dtype.itemsize)

    def atomic(self, name: str, pointers: np.ndarray, mask, value: np.ndarray, sem: str, expected=None) -> np.ndarray:
        """One atomic operation for each lane whose mask is on, one after the other. Returns what was there before."""
        self.launch.look()
        address, lanes = _active(pointers, mask)
        out = np.zeros(pointers.size, value.dtype)
        if not len(address):
            return out.reshape(pointers.shape)
        value = np.broadcast_to(value, pointers.shape).reshape(-1)
        expected = None if expected is None else np.broadcast_to(expected, pointers.shape).reshape(-1)
        for tensor, where, part in self._locate(address, lanes, value.dtype.itemsize, "atomic"):
            part = (np.arange(pointers.size) if lanes is None else lanes) if part is None else part
            if tensor is None:
                out[part] = np.full(len(part) * value.dtype.itemsize, POISON, np.uint8).view(value.dtype)
                continue
            if self.checks:
                self._note_atomic(tensor, where, value.dtype, reads=name != "xchg")
            flat = tensor.region.flat(value.dtype)
            place = np.arange(where.start, where.stop) if type(where) is slice else where
            for turn in _turns(place):
                now, lane = place[turn], part[turn]
                out[lane] = old = flat[now]
                new = _ATOMICS[name](old, value[lane], None if expected is None else expected[lane])
                flat[now] = new
            if pointers.size == 1:
                address = tensor.region.low + where.start * value.dtype.itemsize
                self.launch.meet(address, sem.startswith("acq"), "release" in sem, bool(new[0] != old[0]))
        return out.reshape(pointers.shape)

    # Whose an address is

    def _locate(self, address: np.ndarray, lanes, size: int, doing: str) -> list:
        """[(tensor, where, lanes)]: pieces of an access that lie in one tensor. where: a slice or indices of elements
        of its region; lanes: which take part, None for all that are active. tensor None: those out of bounds."""
        tensor = self._tensor(int(address[0]))
        if tensor is not None:
            offset = address - np.uint64(tensor.base)
            if tensor.has_all(offset, size):
                return [(tensor, self._place(tensor, address, offset, lanes, size, doing), None)]
        lanes = np.arange(len(address)) if lanes is None else lanes
        pieces, left = [], np.ones(len(address), bool)
        while left.any():
            first = int(np.argmax(left))
            tensor = self._tensor(int(address[first]))
            if tensor is None:
                mine = left & (address >> np.uint64(_STRETCH) == address[first] >> np.uint64(_STRETCH))
                inside = np.zeros_like(mine)
                offset = address
            else:
                offset = address - np.uint64(tensor.base)
                inside = left & tensor.has(offset, size)
                same = address >> np.uint64(_STRETCH) == np.uint64(tensor.base >> _STRETCH)
                mine = left & same if tensor.base >> _STRETCH else inside.copy()
                mine[first] = True
            wrong = mine & ~inside
            if wrong.any():
                self._out_of_bounds(tensor, offset[wrong].view(np.int64), size, doing)
                pieces.append((None, None, lanes[wrong]))
            if inside.any():
                where = self._place(tensor, address[inside], offset[inside], lanes[inside], size, doing)
                pieces.append((tensor, where, lanes[inside]))
            left &= ~mine
        return pieces

    def _tensor(self, address: int):
        number = address >> _STRETCH
        if 0 < number <= len(self.tensors):
            return self.tensors[number - 1]
        return self._adopted(address) if number == 0 else None

    def _adopted(self, address: int):
        """The live tensor at a real address, as large as there is one; None if nothing lies there."""
        if self._live is None:
            # Not the other classes of tensors: those that a compiler traces with lie nowhere.
            found = (o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))
            found = [t for t in found if t.device.type == "cpu" and t.layout == torch.strided and t.numel()]
            self._live = [(*extent(t), t) for t in found]
        here = [(high - low, low, high, t) for low, high, t in self._live if low <= address < high]
        if not here:
            return None
        _, low, high, tensor = max(here, key=lambda found: found[0])
        region = next((r for r in self.regions if r.low <= low and high <= r.high), None)
        if region is None:
            region = Region(low, high, tensor.element_size())
            region.shadow = Shadow(self.launch, region.granules) if self.checks else None
            self.regions.append(region)
        return Tensor("a tensor that a loaded pointer leads to", region, low - region.low, high - low, low, tensor)

    def _place(self, tensor: Tensor, address, offset, lanes, size: int, doing: str):
        """Where elements lie in the region: a slice if they are neighbours, else indices. Counts and traces."""
        first = int(offset[0]) + tensor.first
        n = len(offset)
        step = (offset[1:] - offset[:-1]).view(np.int64) if n > 1 else None
        neighbours = n == 1 or (step[0] == size and bool((step == size).all()))
        if first % size or (not neighbours and (step & (size - 1)).any()):
            raise Refused(
                f"an access to {tensor.name} at an address that is no multiple of {size} bytes",
                lines.where(),
                language="triton",
            )
        if neighbours:
            where = slice(first // size, first // size + n)
        else:
            where = (offset.view(np.int64) + tensor.first) // size if size > 1 else offset.view(np.int64) + tensor.first
        if self.checks:
            self._count(tensor, address, step, neighbours, size, doing)
            if self.launch.tracing:
                self._trace(tensor, address, offset, lanes, size, doing)
        return where


def _active(pointers: np.ndarray, mask) -> tuple:
    """The addresses whose mask is on, in one row, and their lanes: None if all are."""
    address = pointers.reshape(-1)
    if mask is None:
        return address, None
    mask = np.broadcast_to(mask, pointers.shape).reshape(-1)
    if mask.all():
        return address, None
    lanes = np.flatnonzero(mask)
    return address[lanes], lanes


def _meet(place: np.ndarray) -> bool:
    """Do two lanes meet at one element?"""
    if (place[1:] > place[:-1]).all():
        return False
    place = np.sort(place)
    return bool((place[1:] == place[:-1]).any())


def _turns(place: np.ndarray) -> list:
    """Lanes that meet at an element take turns: lists of lanes, the k-th of each element in the k-th list."""
    order = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.diff(place[order], prepend=-1))
    if len(starts) == len(place):
        return [slice(None)]
    turn = np.empty(len(place), np.int64)
    turn[order] = np.arange(len(place)) - np.repeat(starts, np.diff(np.append(starts, len(place))))
    by_turn = np.argsort(turn, kind="stable")
    return np.split(by_turn, np.cumsum(np.bincount(turn))[:-1])


_ATOMICS = {
    "add": lambda old, value, _: old + value,
    "max": lambda old, value, _: np.maximum(old, value),
    "min": lambda old, value, _: np.minimum(old, value),
    "and": lambda old, value, _: old & value,
    "or": lambda old, value, _: old | value,
    "xor": lambda old, value, _: old ^ value,
    "xchg": lambda old, value, _: value,
    "cas": lambda old, value, expected: np.where(old == expected, value, old),
}
