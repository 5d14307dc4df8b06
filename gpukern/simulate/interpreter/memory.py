"""Global memory as the programs of a kernel see it: every access is held against the tensor its pointer came from.

Each tensor argument gets its own stretch of the 64-bit address space, far from all others (its number stands in the
upper 16 bits). So whatever a kernel does with a pointer, an address still says whose it is, and one outside of its
tensor is found even where another tensor would follow. Low bits are those that a card's allocator would give, so that
sectors and alignment are as on a card. An address below all stretches is a real one, which the kernel loaded from
memory (`x.data_ptr()` in a tensor of pointers): it belongs to the live tensor that lies there.
"""

import ctypes
import gc
import math

import numpy as np
import torch

from gpukern.simulate.interpreter.races import Shadow
from gpukern.simulate.report import SECTOR, Access, Refused

POISON = 0xFF  # what a lane finds out of bounds: NaN as a float, -1 as an integer
_STRETCH, _MIDDLE = 48, 1 << 46
_ALIGNED = 16  # bytes; regions begin at multiples of it


class Region:
    """Memory in which tensors overlap, or one tensor alone.

    low      address of the first byte, in this process
    granule  bytes of the smallest element; the unit of the shadow
    """

    def __init__(self, low: int, high: int, granule: int):
        self.low = low // _ALIGNED * _ALIGNED
        self.high = high
        self.data = np.empty(0, np.uint8)
        if high > self.low:
            self.data = np.frombuffer((ctypes.c_uint8 * (high - self.low)).from_address(self.low), np.uint8)
        self.granule = granule
        self.shadow = None  # races.Shadow, if races are looked for
        self.ready = None  # for each granule: was it written? None: all was, before the launch
        self.inputs = []  # (first byte, byte after the last, name) of tensors that must not be written
        self._flat = {}

    @property
    def granules(self) -> int:
        return -(-len(self.data) // self.granule)

    def flat(self, dtype: np.dtype) -> np.ndarray:
        """All of it as elements of `dtype`."""
        if dtype not in self._flat:
            self._flat[dtype] = self.data[: len(self.data) // dtype.itemsize * dtype.itemsize].view(dtype)
        return self._flat[dtype]

    def refine(self, granule: int) -> None:
        """Split granules: a pointer was cast to a smaller type."""
        times, self.granule = self.granule // granule, granule
        if self.shadow is not None:
            self.shadow.refine(times)
        if self.ready is not None:
            self.ready = np.repeat(self.ready, times)

    def granules_of(self, where, size: int):
        """The granules of elements `where` (a slice or indices) of `size` bytes."""
        if size < self.granule:
            self.refine(size)
        many = size // self.granule
        if many == 1:
            return where
        if type(where) is slice:
            return slice(where.start * many, where.stop * many)
        return (where[:, None] * many + np.arange(many)).reshape(-1)


class Tensor:
    """A tensor that the kernel has a pointer to.

    name      of the parameter; shape and strides in elements, or None for memory that no argument names
    first     byte of the region where it begins; size: bytes from its first element to the end of its last
    base      the address of its first byte, as the kernel sees it
    """

    def __init__(self, name: str, region: Region, first: int, size: int, base: int, like=None):
        self.name, self.region, self.first, self.size, self.base = name, region, first, size, base
        self.like = like

    def elements(self, table: np.ndarray) -> np.ndarray:
        """The entries of a table of granules that belong to it: [*shape, granules of an element]."""
        size, granule = self.like.element_size(), self.region.granule
        strides = (*(s * size // granule for s in self.like.stride()), 1)
        shape = (*self.like.shape, size // granule)
        return np.lib.stride_tricks.as_strided(
            table[self.first // granule :], shape, tuple(s * table.itemsize for s in strides)
        )


def extent(tensor: torch.Tensor) -> tuple:
    """First byte of a tensor's elements, and the byte after the last."""
    low = tensor.data_ptr()
    if tensor.numel() == 0:
        return low, low
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (last + 1) * tensor.element_size()


class Memory:
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
            if tensor.name in outputs:
                region = tensor.region
                region.ready = np.ones(region.granules, bool) if region.ready is None else region.ready
                tensor.elements(region.ready)[...] = False

    def _add(self, name: str, tensor: torch.Tensor, inputs: tuple) -> None:
        low, high = extent(tensor)
        region = next(r for r in self.regions if r.low <= low and high <= r.high)
        first = low - region.low
        base = (len(self.tensors) + 1 << _STRETCH) + _MIDDLE + low - tensor.untyped_storage().data_ptr()
        self.tensors.append(Tensor(name, region, first, high - low, base, tensor))
        if name.partition(".")[0] in inputs:
            region.inputs.append((first, first + high - low, name))

    def address(self, number: int) -> int:
        """What the kernel gets for the tensor argument at place `number`."""
        return self.tensors[number].base

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
            if tensor is not None and volatile and n == 1:
                self.launch.meet(tensor.region.low + where.start * dtype.itemsize, True, False, False)
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
            if type(where) is not slice and self.checks:
                lost = flat[where].view(bits) != np.ascontiguousarray(new).view(bits)
                if lost.any():
                    tensor.region.shadow.report_own(
                        tensor, int(where[np.argmax(lost)]), dtype.itemsize, int(lost.sum())
                    )

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
                self._note_atomic(tensor, where, value.dtype)
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
            if int(offset.max()) <= tensor.size - size:
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
                inside = left & (offset < np.uint64(max(tensor.size - size + 1, 0)))
                same = address >> np.uint64(_STRETCH) == np.uint64(tensor.base >> _STRETCH)
                mine = left & same if tensor.base >> _STRETCH else inside
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
            found = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
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
                self.launch.where(),
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

    # What is counted and found

    def _count(self, tensor, address, step, neighbours: bool, size: int, doing: str) -> None:
        launch = self.launch
        if doing == "atomic":
            launch.count("atomics", 1)
            return
        if neighbours:
            sectors = (int(address[-1]) + size - 1) // SECTOR - int(address[0]) // SECTOR + 1
        else:
            sector = address >> np.uint64(5)
            if step.min() < 0:
                sector = np.sort(sector)
            sectors = int(np.count_nonzero(sector[1:] != sector[:-1])) + 1
        launch.count(f"global_{doing}_requests", 1)
        launch.count(f"global_{doing}_sectors", sectors)

    def _note_load(self, tensor, where, dtype, volatile: bool) -> None:
        region = tensor.region
        places = region.granules_of(where, dtype.itemsize)
        region.shadow.read(places, tensor, volatile)
        if region.ready is not None and not region.ready[places].all():
            self._uninitialised(tensor, places)

    def _note_store(self, tensor, where, new, bits) -> None:
        region = tensor.region
        places = region.granules_of(where, bits.itemsize)

        def same(granules):
            """Do the elements of these granules get the value that they have?"""
            now = region.flat(bits)[where] == np.ascontiguousarray(new).view(bits)
            return bool(np.repeat(now, len(granules) // len(now))[granules].all())

        region.shadow.write(places, tensor, same)
        self._note_written(tensor, places)

    def _note_atomic(self, tensor, where, dtype) -> None:
        places = tensor.region.granules_of(where, dtype.itemsize)
        tensor.region.shadow.atomic(places, tensor)
        self._note_written(tensor, places)

    def _note_written(self, tensor, places) -> None:
        region = tensor.region
        if region.ready is not None:
            region.ready[places] = True
        for first, last, name in region.inputs:
            places = np.arange(places.start, places.stop) if type(places) is slice else places
            byte = places * region.granule
            wrong = (byte >= first) & (byte < last)
            if wrong.any():
                index = self.index_of(tensor, int(byte[np.argmax(wrong)]))
                me = self.launch.who()
                what = f"{me} writes {tensor.name}[{index}] ({self.launch.where()}), which lies in the input {name}. "
                advice = "Whoever launched the kernel still needs it: write to an output."
                self.launch.fault("input_written", what + advice, [me], tensor.name, (index,), int(wrong.sum()))

    @staticmethod
    def index_of(tensor: Tensor, byte: int) -> int:
        """Elements between the tensor's first and a byte of its region."""
        size = tensor.like.element_size() if tensor.like is not None else 1
        return (byte - tensor.first) // size

    def _uninitialised(self, tensor, places) -> None:
        region = tensor.region
        missing = ~region.ready[places]
        place = int(np.argmax(missing)) + places.start if type(places) is slice else int(places[np.argmax(missing)])
        index = self.index_of(tensor, place * region.granule)
        me = self.launch.who()
        what = f"{me} loads {tensor.name}[{index}] ({self.launch.where()}), which nobody has written. "
        advice = "An output starts with anything in it: store it first."
        self.launch.fault("uninitialised", what + advice, [me], tensor.name, (index,), int(missing.sum()))

    def _out_of_bounds(self, tensor, offset: np.ndarray, size: int, doing: str) -> None:
        me, line = self.launch.who(), self.launch.where()
        does = {"load": "loads", "store": "stores to", "atomic": "changes"}[doing]
        if tensor is None:
            what = f"{me} {does} the address {int(offset[0]):#x} ({line}), where no tensor lies. "
            self.launch.fault(
                "out_of_bounds", what + "Compute addresses from a pointer argument.", [me], None, None, len(offset)
            )
            return
        index = int(offset[0]) // size
        has = f"{tensor.name} has {tensor.size // size} elements from its pointer on"
        if tensor.like is not None and not tensor.like.is_contiguous():
            has += f" (shape {tuple(tensor.like.shape)}, strides {tensor.like.stride()})"
        if index < 0:
            why = "That is before its first element: a pointer went below the start."
        else:
            why = "A card reads or destroys what lies there."
        advice = "Give the access a mask, as in mask=offsets < n (for a block pointer: boundary_check)."
        what = f"{me} {does} {tensor.name}[{index}] ({line}), but {has}. {why} {advice}"
        self.launch.fault("out_of_bounds", what, [me], tensor.name, (index,), len(offset))

    def _trace(self, tensor, address, offset, lanes, size: int, doing: str) -> None:
        lanes = np.arange(len(offset)) if lanes is None else lanes
        where = (address & np.uint64(_MIDDLE - 1)).view(np.int64)  # from the start of the allocation
        step = len(self.launch.report.trace)
        index = (offset.view(np.int64) // size,)
        elements = tensor.size // size
        self.launch.report.trace.append(
            Access(step, self.launch.where(), "global", doing, tensor.name, (elements,), size, lanes, index, where)
        )

    def settle(self, outputs: tuple, line: str) -> None:
        """After the run: unique bytes, and outputs that were not written."""
        for region in self.regions if self.checks else ():
            region.shadow.count_unique(region.granule)
        for tensor in self.tensors:
            if self.checks and tensor.name in outputs:
                missing = np.argwhere(~tensor.elements(tensor.region.ready).all(-1))
                if len(missing):
                    self._not_written(tensor.name, tuple(map(int, missing[0])), len(missing), line)

    def _not_written(self, name: str, index: tuple, count: int, line: str) -> None:
        at = f"{name}[{', '.join(map(str, index))}]"
        what = f"no program writes {at}" + (f" nor {count - 1:,} more elements" if count > 1 else "")
        what += f" of the output {name}. They keep what lay in memory: launch enough programs, and let each element "
        self.launch.report.add("uninitialised", what + "have its lane.", line, (), name, index, count)


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
