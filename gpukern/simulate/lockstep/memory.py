"""Memory as the threads see it: spaces of bytes, and arrays (views) that lie in them.

A register holds one value for every thread of a group. If all threads have the same value it is kept once, as a NumPy
scalar (a *uniform* value: loop counters, shapes, addresses of tiles); if not, as a vector with one element a thread.
The arithmetic does not care which. An array is a View, whose offset, too, is uniform or one for each thread.
"""

import math
import weakref
from dataclasses import dataclass

import numpy as np

# What a thread finds where nothing was written: a NaN as float32, float16 and bfloat16, a large negative integer.
POISON = 0xFF


class Space:
    """A piece of memory in which arrays lie: `kind` is "global", "shared", "local" or "constant".

    address   of its first byte, as the card's allocator would align it; sectors are counted from it
    here      the same byte's address in this process
    granule   bytes of the smallest element that any array in it has; the unit in which races are looked for
    """

    def __init__(self, kind: str, data: np.ndarray, granule: int = 1, address: int = 0, here: int = 0):
        self.kind = kind
        self.data = data  # bytes
        self.granule = granule
        self.address, self.here = address, here
        self.granules = -(-len(data) // granule)
        self.shadow = None  # a races.Shadow where races are possible
        self.loaded = None  # [granules] was it ever loaded?
        self.ready = None  # [granules] was it ever written? None: all of it was, before the launch
        self.inputs = []  # (first byte, byte after the last, name) of arrays that must not be written
        self._flat = {}

    def flat(self, dtype: np.dtype) -> np.ndarray:
        """All of it as elements of `dtype`."""
        if dtype not in self._flat:
            usable = len(self.data) // dtype.itemsize * dtype.itemsize
            self._flat[dtype] = self.data[:usable].view(dtype)
        return self._flat[dtype]

    def places(self, element, itemsize: int) -> tuple:
        """The granules of an element: one, or several where arrays of smaller elements share the memory."""
        many = itemsize // self.granule
        return (element,) if many == 1 else tuple(element * many + n for n in range(many))

    def elements(self, table: np.ndarray, array: np.ndarray) -> np.ndarray:
        """The entries of a table of granules that belong to an array in this space: [*array.shape, granules each]."""
        first = (array.ctypes.data - self.here) // self.granule
        strides = (*(s // self.granule for s in array.strides), 1)
        shape = (*array.shape, array.itemsize // self.granule)
        return np.lib.stride_tricks.as_strided(table[first:], shape, tuple(s * table.itemsize for s in strides))


def granule(dtype: np.dtype) -> int:
    """Bytes of the smallest thing that an array of `dtype` is accessed by: a number, half a complex one, a field."""
    if dtype.fields is None and dtype.base.fields is None:
        return dtype.base.itemsize // (2 if dtype.base.kind == "c" else 1)
    if dtype.fields is None:
        return granule(dtype.base)
    sizes = [n for part, offset, *_ in dtype.fields.values() for n in (granule(part), offset)]
    return math.gcd(dtype.itemsize, *sizes)


# Arrays on the card that nobody has filled: address of the allocation -> for each byte, was it written?
_written = {}


def base(array: np.ndarray) -> np.ndarray:
    """The array that owns the memory of `array`."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def fresh(array: np.ndarray) -> np.ndarray:
    """Fill a new array with poison, and remember that nobody has written it."""
    data = base(array)
    data.reshape(-1, order="A").view(np.uint8)[:] = POISON
    if data.nbytes:
        _written[data.ctypes.data] = np.zeros(data.nbytes, bool)
        weakref.finalize(data, _written.pop, data.ctypes.data, None)
    return array


def ready(array: np.ndarray, space: Space):
    """Which granules of the space, in which `array` lies, were written. None: all, as far as we know."""
    known = _written.get(base(array).ctypes.data)
    if known is None or known.all():
        return None
    first = space.here - base(array).ctypes.data
    part = known[first : first + space.granules * space.granule]
    return part.reshape(space.granules, space.granule).all(1)


def mark_written(array: np.ndarray, index=...) -> None:
    """Remember that array[index] was written by the host."""
    known = _written.get(base(array).ctypes.data)
    if known is not None:
        first = array.ctypes.data - base(array).ctypes.data
        as_bytes = np.lib.stride_tricks.as_strided(known[first:], (*array.shape, array.itemsize), (*array.strides, 1))
        as_bytes[index] = True


def keep_ready(array: np.ndarray, space: Space) -> None:
    """Remember what a launch wrote in the space of `array`."""
    known = _written.get(base(array).ctypes.data)
    if known is not None:
        first = space.here - base(array).ctypes.data
        known[first : first + space.granules * space.granule] |= np.repeat(space.ready, space.granule)


@dataclass(slots=True)
class View:
    """An array in a space: element (i, j) is number offset + i * strides[0] + j * strides[1] of `flat`.

    offset, shape and strides count elements; each is uniform or has one value for each thread.
    """

    space: Space
    flat: np.ndarray
    offset: object
    shape: tuple
    strides: tuple
    name: str

    @property
    def size(self):
        return math.prod(self.shape, start=np.int64(1))

    @property
    def byte_strides(self) -> tuple:
        return tuple(s * np.int64(self.flat.itemsize) for s in self.strides)

    @property
    def T(self) -> "View":
        return View(self.space, self.flat, self.offset, self.shape[::-1], self.strides[::-1], self.name)

    def locate(self, index: tuple) -> tuple:
        """Where element `index` lies in `flat`, and which threads are out of bounds: None, or a mask."""
        where, wrong = self.offset, None
        for i, n, stride in zip(index, self.shape, self.strides, strict=True):
            if type(i) is int:  # a literal in the source: a[-1] means the last element, as in Python
                i = n + i if i < 0 else np.int64(i)
            outside = _outside(i, n)
            if outside is not None:
                wrong = outside if wrong is None else wrong | outside
            where = where + (i if type(stride) is not np.ndarray and stride == 1 else i * stride)
        return where, wrong

    def slice(self, index: tuple) -> "View":
        """The array that indexing with fewer integers than axes, or with slices (start, stop, step), gives."""
        offset, shape, strides = self.offset, [], []
        for axis, (n, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            i = index[axis] if axis < len(index) else (None, None, None)
            if isinstance(i, tuple):
                start, count, step = _bounds(*i, n)
                offset = offset + start * stride
                shape.append(count)
                strides.append(stride * step)
            else:
                offset = offset + (n + i if type(i) is int and i < 0 else i) * stride
        return View(self.space, self.flat, offset, tuple(shape), tuple(strides), self.name)


def _outside(i, n):
    """None if 0 <= i < n for all threads, else the mask (or True) of those for which it is not so."""
    if type(i) is np.ndarray:
        # As an unsigned number, a negative index is larger than any size: one comparison for both ends.
        wrong = i.view(np.uint64) >= (n.view(np.uint64) if type(n) is np.ndarray else max(int(n), 0))
    elif type(n) is np.ndarray:
        wrong = (n <= i) | (i < 0)
    else:
        return None if 0 <= i < n else np.True_
    return wrong if wrong.any() else None


def _bounds(start, stop, step, n) -> tuple:
    """First element, number of elements and step of a slice of an axis of `n`, clipped as Python clips."""
    step = np.int64(1) if step is None else step
    back = step < 0  # then from the last element down to one before the first
    first, last = np.where(back, -1, 0), np.where(back, n - 1, n)
    start = np.where(back, last, first) if start is None else np.where(start < 0, start + n, start)
    stop = np.where(back, first, last) if stop is None else np.where(stop < 0, stop + n, stop)
    start, stop = (np.minimum(np.maximum(x, first), last)[()] for x in (start, stop))
    return start, np.maximum(0, -((start - stop) // step)), step


def per_thread(value, n: int) -> np.ndarray:
    """A register's value with one element for each of `n` threads."""
    return value if type(value) is np.ndarray else np.broadcast_to(value, n)


def take(value, which):
    """A register's value for the threads at the places `which`."""
    if type(value) is np.ndarray:
        return value.take(which)
    if type(value) is tuple:
        return tuple(take(part, which) for part in value)
    if type(value) is View:
        parts = (take(part, which) for part in (value.offset, value.shape, value.strides))
        return View(value.space, value.flat, *parts, value.name)
    return value


def equal(a, b) -> bool:
    """Do two registers, or dicts of registers, hold the same?"""
    if a is b:
        return True
    if type(a) is dict:
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if type(a) is tuple:
        return len(a) == len(b) and all(map(equal, a, b))
    if type(a) is View:
        return a.space is b.space and equal((a.offset, a.shape, a.strides), (b.offset, b.shape, b.strides))
    return np.array_equal(a, b)


def merge(values: list, sizes: list, order: np.ndarray):
    """The values of several groups as one register: laid one after the other, then brought into thread order.

    Raises TypeError if the groups hold different arrays that cannot be one register.
    """
    first = values[0]
    if type(first) is tuple:
        return tuple(merge(list(parts), sizes, order) for parts in zip(*values, strict=True))
    if type(first) is View:
        if any(v.space is not first.space or v.flat is not first.flat for v in values):
            raise TypeError(f"a variable that is array {first.name} in some threads and another array in others")
        parts = ([getattr(v, part) for v in values] for part in ("offset", "shape", "strides"))
        return View(first.space, first.flat, *(merge(p, sizes, order) for p in parts), first.name)
    if all(type(v) is not np.ndarray and (v is first or v == first) for v in values):
        return first
    return np.concatenate([per_thread(v, n) for v, n in zip(values, sizes, strict=True)]).take(order)
