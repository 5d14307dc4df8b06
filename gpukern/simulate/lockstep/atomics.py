"""Atomics: what they make of memory, one thread after the other, and what each thread finds."""

import numpy as np

# What an atomic makes of the old value and its operand; NumPy's ufuncs, so that repeated places add up (`ufunc.at`).
UFUNCS = {
    "add": np.add,
    "sub": np.subtract,
    "max": np.fmax,
    "min": np.fmin,
    "nanmax": np.fmax,
    "nanmin": np.fmin,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor": np.bitwise_xor,
}
# Those that are no ufunc: what stands there afterwards, of single numbers.
_STEPWISE = {
    "exch": lambda old, value, _: value,
    "inc": lambda old, value, _: 0 if old >= value else old + 1,
    "dec": lambda old, value, _: value if old == 0 or old > value else old - 1,
    "cas": lambda old, value, expected: value if old == expected else old,
}


def atomic(name: str, flat: np.ndarray, element: np.ndarray, value: np.ndarray, expected=None) -> tuple:
    """Each thread's operation on flat[element], in the order of the threads. Returns the old values; any change?"""
    return (_stepwise if name in _STEPWISE else _accumulated)(name, flat, element, value, expected)


def _stepwise(name: str, flat: np.ndarray, element: np.ndarray, value: np.ndarray, expected) -> tuple:
    """Threads one after the other, in Python: the old values, and was anything changed?"""
    step, now, found, changed = _STEPWISE[name], {}, [], False
    start = flat[element].tolist()
    expected = element if expected is None else expected  # only a cas asks for it
    for place, first, new, wanted in zip(element.tolist(), start, value.tolist(), expected.tolist(), strict=True):
        old = now.get(place, first)
        now[place] = made = step(old, new, wanted)
        found.append(old)
        changed |= made != old
    flat[list(now)] = list(now.values())
    return np.array(found, flat.dtype), changed


def _accumulated(name: str, flat: np.ndarray, element: np.ndarray, value: np.ndarray, _) -> tuple:
    """As `_stepwise` for what is a ufunc: the threads of an element at once, or one of each element at once."""
    ufunc = UFUNCS[name]
    order = np.argsort(element, kind="stable")
    starts = np.flatnonzero(np.diff(element[order], prepend=-1))
    sizes = np.diff(np.append(starts, len(element)))
    old, changed = np.empty(len(element), flat.dtype), False
    if len(starts) < sizes.max():
        for these in np.split(order, starts[1:]):
            place = element[these[0]]
            steps = ufunc.accumulate(np.concatenate((flat[place : place + 1], value[these])), dtype=flat.dtype)
            old[these], flat[place] = steps[:-1], steps[-1]
            changed |= bool((steps[1:] != steps[:-1]).any())
        return old, changed
    for turn in range(sizes.max()):  # the first thread of each element, then the second of each that has one
        these = order[starts[sizes > turn] + turn]
        place = element[these]
        old[these] = found = flat[place]
        flat[place] = made = ufunc(found, value[these])
        changed |= bool((made != found).any())
    return old, changed
