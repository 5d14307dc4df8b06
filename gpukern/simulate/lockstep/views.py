"""Views of arrays as generated source makes them: fields of records, parts of complex numbers, other shapes, types."""

import numpy as np

from gpukern.simulate.lockstep.memory import View, per_thread, take
from gpukern.simulate.report import Refused


def field(view: View, name: str) -> View:
    """The array of one field of an array of records; of one record, an array without axes."""
    dtype, offset = view.flat.dtype.fields[name][:2]
    base, inner = dtype.base, dtype.shape
    inner_strides = [int(np.prod(inner[axis + 1 :])) for axis in range(len(inner))]
    return _as_part(view, base, offset, inner, inner_strides, f"{view.name}.{name}")


def part(view: View, which: str) -> View:
    """The real or the imaginary parts of an array of complex numbers."""
    half = np.dtype(f"f{view.flat.itemsize // 2}")
    return _as_part(view, half, half.itemsize * (which == "imag"), (), (), f"{view.name}.{which}")


def _as_part(view: View, dtype: np.dtype, offset: int, inner, inner_strides, name: str) -> View:
    many = np.int64(view.flat.itemsize // dtype.itemsize)
    where = view.offset * many + np.int64(offset // dtype.itemsize)
    shape = (*view.shape, *(np.int64(n) for n in inner))
    strides = (*(s * many for s in view.strides), *(np.int64(s) for s in inner_strides))
    return View(view.space, view.space.flat(dtype), where, shape, strides, name)


def retyped(view: View, dtype, line: str) -> View:
    """a.view(dtype): the same bytes as numbers of another type; the last axis gets longer or shorter."""
    old, new = view.flat.itemsize, np.dtype(dtype).itemsize
    flat = view.space.flat(np.dtype(dtype))
    if old == new:
        return View(view.space, flat, view.offset, view.shape, view.strides, view.name)

    if old < new and np.any(view.offset % (new // old)):
        raise Refused(f"a view of {view.name} as elements that do not lie at multiples of their size", line)

    def scaled(n):
        return n * np.int64(old // new) if old > new else n // np.int64(new // old)

    shape = (*view.shape[:-1], scaled(view.shape[-1]))
    strides = (*(scaled(s) for s in view.strides[:-1]), view.strides[-1])
    return View(view.space, flat, scaled(view.offset), shape, strides, view.name)


def reshaped(view: View, shape: tuple) -> View:
    """a.reshape(shape) of a contiguous array. One length may be -1."""
    known = np.int64(1)
    for n in shape:
        known = known * np.where(n < 0, 1, n)[()]
    shape = tuple(np.where(n < 0, view.size // np.maximum(known, 1), n)[()] for n in shape)
    strides, step = [], np.int64(1)
    for n in reversed(shape):
        strides.append(step)
        step = step * n
    return View(view.space, view.flat, view.offset, shape, tuple(strides[::-1]), view.name)


def unravel(shape: tuple, place) -> tuple:
    """The index of element number `place`, counted along the last axis first."""
    index = []
    for n in reversed(shape):
        size = np.maximum(n, 1)
        index.append(place % size)
        place = place // size
    return tuple(index[::-1])


def flat_index(view: View, place) -> tuple:
    """As `unravel`, for an array; a place past its end stays past the end of the first axis."""
    index, rest = [], place
    for n in reversed(view.shape[1:]):
        size = np.maximum(n, 1)
        index.append(rest % size)
        rest = rest // size
    return (rest, *index[::-1]) if view.shape else ()


def inside(place, n):
    """`place`, but not past the end of an axis of n."""
    return np.minimum(place, np.maximum(n - 1, 0))


def element(g, view: View, index: tuple, there, line: str):
    """view[index] for the threads for which it is `there`. The others, whose loop ends here, get 0 and load nothing."""
    if np.all(there):
        return g.load(view, index, line)
    found = np.zeros(g.n, view.flat.dtype)
    some = np.flatnonzero(per_thread(there, g.n))
    if len(some):
        found[some] = g.part(some, ()).load(take(view, some), take(index, some), line)
    return found


def record(g, view: View, index: tuple, line: str) -> View:
    """A record of an array: an array without axes, through which its fields are loaded and stored."""
    where, wrong = view.locate(index)
    if wrong is not None:
        outside = per_thread(wrong, g.n)
        g._out_of_bounds(view, index, np.flatnonzero(outside), line, "accesses")
        where = np.where(outside, 0, per_thread(where, g.n))
    return View(view.space, view.flat, where, (), (), view.name)


def copy_record(g, to: View, source: View, line: str) -> None:
    """Assign a record: field by field."""
    for name, (dtype, *_) in to.flat.dtype.fields.items():
        into, out_of = field(to, name), field(source, name)
        for index in np.ndindex(dtype.shape):
            at = tuple(np.int64(i) for i in index)
            if dtype.base.fields:
                copy_record(g, record(g, into, at, line), record(g, out_of, at, line), line)
            else:
                g.store(into, at, g.load(out_of, at, line), line)


def sliced(view: View, index: tuple) -> View:
    """view[index], where None in the index is a new axis of length 1."""
    made = view.slice(tuple(i for i in index if i is not None))
    shape, strides = list(made.shape), list(made.strides)
    axis = 0
    for i in index:
        if i is None:
            shape.insert(axis, np.int64(1))
            strides.insert(axis, np.int64(0))
        axis += i is None or isinstance(i, tuple)
    return View(made.space, made.flat, made.offset, tuple(shape), tuple(strides), made.name)


def choose(g, parts: tuple, place, line: str):
    """parts[place] of a tuple of numbers or of arrays. Past its end, where a loop over it ends, the last one."""
    place = np.minimum(np.where(place < 0, place + len(parts), place), len(parts) - 1)[()]
    if np.ndim(place) and (place == place[0]).all():
        place = place[0]
    if np.ndim(place) == 0:
        return parts[int(place)]
    first = parts[0]
    if not isinstance(first, View):
        return np.stack([per_thread(part, g.n) for part in parts])[place, np.arange(g.n)]
    if any(v.flat is not first.flat for v in parts):
        raise Refused("a tuple of arrays that threads of one warp index differently", line)

    def chosen(values):
        return np.stack([per_thread(v, g.n) for v in values])[place, np.arange(g.n)]

    shape, strides = (
        tuple(chosen(axis) for axis in zip(*(getattr(v, what) for v in parts), strict=True))
        for what in ("shape", "strides")
    )
    return View(first.space, first.flat, chosen([v.offset for v in parts]), shape, strides, first.name)


def say(g, form: str, *values) -> None:
    """print() in a kernel: a line for each thread."""
    values = [per_thread(value, g.n) for value in values]
    for n in range(g.n):
        print(form % tuple(value[n] for value in values))


VIEWS = (field, part, retyped, reshaped, unravel, flat_index, inside, element, record, copy_record, sliced, choose, say)
