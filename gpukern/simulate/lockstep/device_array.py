"""Arrays on the simulated card."""

import numpy as np
from numba.cuda.typing.typeof import Purpose, typeof

from gpukern.simulate.lockstep.memory import mark_written


class DeviceArray:
    """An array on the simulated card, with the methods of Numba's. `host`: the NumPy array of its elements."""

    def __init__(self, host: np.ndarray):
        self.host = host

    shape = property(lambda self: self.host.shape)
    strides = property(lambda self: self.host.strides)
    dtype = property(lambda self: self.host.dtype)
    ndim = property(lambda self: self.host.ndim)
    size = property(lambda self: self.host.size)
    nbytes = property(lambda self: self.host.nbytes)
    T = property(lambda self: self.transpose())
    alloc_size = property(lambda self: self.host.nbytes)
    flags = property(lambda self: self.host.flags)
    stream = 0
    _numba_type_ = property(lambda self: typeof(self.host, Purpose.argument))

    def copy_to_host(self, ary: np.ndarray | None = None, stream=0) -> np.ndarray:
        """The elements in `ary`, or in a new array."""
        if ary is None:
            return self.host.copy()
        if ary.shape != self.shape or ary.dtype != self.dtype:
            raise ValueError(f"cannot copy {self.shape} {self.dtype} into {ary.shape} {ary.dtype}")
        ary[...] = self.host
        return ary

    def copy_to_device(self, ary, stream=0) -> None:
        """Fill this array with the elements of `ary`."""
        source = ary.host if isinstance(ary, DeviceArray) else np.asarray(ary)
        if source.shape != self.shape:
            raise ValueError(f"cannot copy an array of shape {source.shape} into one of shape {self.shape}")
        self.host[...] = source
        mark_written(self.host)

    def reshape(self, *shape, order: str = "C") -> "DeviceArray":
        return DeviceArray(self.host.reshape(*shape, order=order))

    def ravel(self, order: str = "C", stream=0) -> "DeviceArray":
        return DeviceArray(self.host.ravel(order))

    def view(self, dtype) -> "DeviceArray":
        return DeviceArray(self.host.view(dtype))

    def transpose(self, axes=None) -> "DeviceArray":
        """A matrix's transpose, in memory of its own: Numba launches a kernel that copies it."""
        if axes and tuple(axes) == tuple(range(self.ndim)):
            return self
        if self.ndim != 2:
            raise NotImplementedError("transposing a non-2D DeviceNDArray isn't supported")
        if axes is not None and set(axes) != {0, 1}:
            raise ValueError(f"invalid axes list {axes!r}")
        return DeviceArray(np.ascontiguousarray(self.host.T))

    def squeeze(self, axis=None, stream=0) -> "DeviceArray":
        return DeviceArray(self.host.squeeze(axis))

    def split(self, section: int, stream=0):
        """The array in pieces of `section` elements."""
        if self.ndim != 1:
            raise ValueError("only support 1d array")
        for start in range(0, self.size, section):
            yield self[start : start + section]

    def bind(self, stream=0) -> "DeviceArray":
        return self

    def is_c_contiguous(self) -> bool:
        return self.host.flags.c_contiguous

    def is_f_contiguous(self) -> bool:
        return self.host.flags.f_contiguous

    def __getitem__(self, index):
        part = self.host[index]
        return DeviceArray(part) if isinstance(part, np.ndarray) else part

    def __setitem__(self, index, value) -> None:
        self.host[index] = value.host if isinstance(value, DeviceArray) else value
        mark_written(self.host, index)

    def __len__(self) -> int:
        return len(self.host)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.copy_to_host() if dtype is None else self.copy_to_host().astype(dtype)
