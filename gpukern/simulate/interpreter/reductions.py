"""tl.reduce and tl.associative_scan: whole halves of a block combined at once, as threads do in a tree."""

import numpy as np
import triton.language as tl

from gpukern.simulate.interpreter.builder import builder
from gpukern.simulate.interpreter.values import Handle, np_dtype

_KNOWN_SUM = tl.standard._sum_combine


def _ignoring_nan(ufunc):
    return lambda x, axis: ufunc.reduce(x, axis)


_FAST = {
    tl.standard._elementwise_max: _ignoring_nan(np.fmax),
    tl.standard._elementwise_min: _ignoring_nan(np.fmin),
    tl.standard._xor_combine: lambda x, axis: np.bitwise_xor.reduce(x, axis),
}
_FAST_INDEX = {
    tl.standard._argmax_combine_tie_break_left: (np.max, np.argmax),
    tl.standard._argmax_combine_tie_break_fast: (np.max, np.argmax),
    tl.standard._argmin_combine_tie_break_left: (np.min, np.argmin),
    tl.standard._argmin_combine_tie_break_fast: (np.min, np.argmin),
}


def reduce(input, axis, combine_fn, keep_dims=False, **_):
    """tl.reduce of a tensor, or of several together."""
    several = isinstance(input, tuple | tl.tuple)
    tensors = tuple(input) if several else (input,)
    axis, keep_dims = _plain(axis), _plain(keep_dims)
    data = [t.handle.data for t in tensors]
    shape = data[0].shape
    if axis is None:
        data, along = [x.reshape(-1) for x in data], 0
    else:
        along = _axis(axis, len(shape))
    results = _reduced(data, tensors, along, combine_fn)
    if keep_dims:
        kept = (1,) * len(shape) if axis is None else (*shape[:along], 1, *shape[along + 1 :])
        results = [x.reshape(kept) for x in results]
    results = tuple(_tensor(x, t.dtype) for x, t in zip(results, tensors, strict=True))
    return results if several else results[0]


def _reduced(data: list, tensors: tuple, axis: int, combine_fn) -> list:
    first = data[0]
    if combine_fn is _KNOWN_SUM:
        _count_adds(tensors[0], first.size - first.size // first.shape[axis])
        return [_sum(first, axis)]
    if combine_fn in _FAST and len(data) == 1:
        return [_FAST[combine_fn](first, axis)]
    if combine_fn in _FAST_INDEX and _counts(data[1], axis):
        value, index = _FAST_INDEX[combine_fn]
        return [value(first, axis), index(first, axis)]
    while data[0].shape[axis] > 1:  # neighbours are combined, so that their order stays
        even, odd = ([np.take(x, range(n, x.shape[axis], 2), axis) for x in data] for n in (0, 1))
        data = _combined(combine_fn, even, odd, tensors)
    return [x.squeeze(axis) for x in data]


def _count_adds(tensor: tl.tensor, n: int) -> None:
    if tensor.dtype.is_floating():
        builder.count_flops(n)


def _sum(x: np.ndarray, axis: int) -> np.ndarray:
    """Threads add in a tree. NumPy does for float32; it would add bfloat16 one after the other, until the sum is too
    large to grow."""
    if x.dtype.kind in "fiu" and x.dtype.itemsize > 1:
        return x.sum(axis, dtype=x.dtype)
    while x.shape[axis] > 1:
        first, second = np.split(x, 2, axis)
        x = (first + second).astype(x.dtype)
    return x.squeeze(axis)


def _counts(index: np.ndarray, axis: int) -> bool:
    """Is it 0, 1, 2, ... along the axis? Then the place of the largest is what NumPy calls its index."""
    shape = [1] * index.ndim
    shape[axis] = -1
    return bool((index == np.arange(index.shape[axis]).reshape(shape)).all())


def scan(input, axis, combine_fn, reverse=False, **_):
    """tl.associative_scan of a tensor, or of several together."""
    several = isinstance(input, tuple | tl.tuple)
    tensors = tuple(input) if several else (input,)
    data = [t.handle.data for t in tensors]
    axis, reverse = _axis(_plain(axis), data[0].ndim), _plain(reverse)
    if reverse:
        data = [np.flip(x, axis) for x in data]
    if combine_fn is _KNOWN_SUM:
        _count_adds(tensors[0], data[0].size - data[0].size // data[0].shape[axis])
        data = [np.cumsum(data[0], axis, dtype=data[0].dtype)]
    else:
        data = _scanned(data, tensors, axis, combine_fn)
    if reverse:
        data = [np.flip(x, axis) for x in data]
    results = tuple(_tensor(x, t.dtype) for x, t in zip(data, tensors, strict=True))
    return results if several else results[0]


def _scanned(data: list, tensors: tuple, axis: int, combine_fn) -> list:
    """After step k every element holds the 2**k elements that end with it."""
    n, distance = data[0].shape[axis], 1
    shape = [1] * data[0].ndim
    shape[axis] = n
    place = np.arange(n).reshape(shape)
    while distance < n:
        before = [np.roll(x, distance, axis) for x in data]
        both = _combined(combine_fn, before, data, tensors)
        data = [np.where(place >= distance, new, old) for new, old in zip(both, data, strict=True)]
        distance *= 2
    return data


def _combined(combine_fn, left: list, right: list, tensors: tuple) -> list:
    """combine_fn, with blocks where a thread has scalars."""
    operands = [_tensor(x, t.dtype) for side in (left, right) for x, t in zip(side, tensors, strict=True)]
    out = combine_fn(*operands)
    out = out if isinstance(out, tuple | tl.tuple) else (out,)
    if len(out) != len(tensors):
        raise ValueError(f"combine_fn returns {len(out)} values for {len(tensors)} inputs.")
    return [
        np.broadcast_to(x.handle.data if isinstance(x, tl.tensor) else x, like.shape).astype(like.dtype)
        for x, like in zip(out, left, strict=True)
    ]


def _tensor(data: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    data = np.asarray(data).astype(np_dtype(dtype), copy=False)
    if data.ndim == 0:
        return tl.tensor(Handle(data.reshape(1), dtype), dtype)
    return tl.tensor(Handle(data, dtype), tl.block_type(dtype, list(data.shape)))


def _plain(value):
    return value.value if isinstance(value, tl.constexpr) else value


def _axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a block with {rank} axes.")
    return axis % rank
