"""Tensors in memory: where they lie in this process, how far they reach, and which of them overlap."""

import ctypes
import math

import numpy as np
import torch

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
        self._within = None  # for each place from its first element to its last: does an element lie there?

    def look_for_gaps(self) -> None:
        """From now on what lies between the elements of a view does not belong to it."""
        like, places = self.like, self.size // self.like.element_size()
        distinct = math.prod(n for n, stride in zip(like.shape, like.stride(), strict=True) if stride)
        if places > distinct:
            self._within = np.zeros(places, bool)
            np.lib.stride_tricks.as_strided(self._within, tuple(like.shape), tuple(like.stride()))[...] = True

    def has(self, offset: np.ndarray, size: int) -> np.ndarray:
        """Which accesses of `size` bytes, `offset` (uint64) bytes from its first element, lie in its elements?"""
        inside = offset < np.uint64(max(self.size - size + 1, 0))
        if self._within is not None:
            first = offset[inside].view(np.int64)
            each = self.like.element_size()
            inside[inside] = self._within[first // each] & self._within[(first + size - 1) // each]
        return inside

    def has_all(self, offset: np.ndarray, size: int) -> bool:
        if self._within is None:
            return int(offset.max()) <= self.size - size
        return bool(self.has(offset, size).all())

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
