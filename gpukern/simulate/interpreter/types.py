"""Triton's types and their checks, made cheap: what the compiler does once for a line, an interpreter does every time.

Nothing here changes a result. Types of blocks are made once and then shared, so that two operands of one type are known
to be so by identity; a scalar that meets a block is repeated by a stride of 0.
"""

import math

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic

from gpukern.simulate.interpreter import lines
from gpukern.simulate.interpreter.values import Handle
from gpukern.simulate.report import Refused

_MOST_TYPES = 4096
_known = {}  # (id of an element type, shape) -> (that type, what a block type has)
_new_block_type = tl.block_type.__init__
_unwrap = tl.core._unwrap_if_constexpr


def block_type(self, element_ty: tl.dtype, shape) -> None:
    """block_type.__init__"""
    plain = tuple([n.value if type(n) is tl.constexpr else n for n in shape])
    key = id(element_ty), plain
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST_TYPES:
            _known.clear()
        _new_block_type(self, element_ty, list(plain))
        self.constants = tl.tuple([tl.constexpr(n) for n in plain])
        self.elements = tl.constexpr(math.prod(plain))
        _known[key] = element_ty, self.__dict__
    else:
        self.__dict__ = found[1]  # shared: nobody changes a type


_NO_SHAPE, _ONE = tl.tuple([]), tl.constexpr(1)


def tensor(self, handle, type: tl.dtype) -> None:
    """tensor.__init__"""
    self.handle, self.type = handle, type
    if isinstance(type, tl.block_type):
        self.dtype, self.shape, self.numel = type.element_ty, type.constants, type.elements
    else:
        self.dtype, self.shape, self.numel = type.scalar, _NO_SHAPE, _ONE


def unwrap_if_constexpr(value):
    """core._unwrap_if_constexpr"""
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind is tl.tensor or kind is int or kind is float else _unwrap(value)


def _same(a: tl.dtype, b: tl.dtype) -> bool:
    """Are two types the same? Block types share what they have."""
    return a is b or getattr(a, "__dict__", None) is b.__dict__


class Semantic(TritonSemantic):
    def binary_op_type_checking_impl(self, lhs, rhs, *flags, **more):
        if type(lhs) is tl.tensor and type(rhs) is tl.tensor and _same(lhs.type, rhs.type):
            dtype = lhs.dtype
            if dtype.is_fp32() or dtype.is_int() or dtype.is_fp64():
                return lhs, rhs
        return super().binary_op_type_checking_impl(lhs, rhs, *flags, **more)

    def broadcast_impl_value(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a.is_block():
            if not b.is_block():
                return lhs, self._repeat(rhs, a)
            if a.__dict__ is b.__dict__ or lhs.handle.data.shape == rhs.handle.data.shape:
                return lhs, rhs
        elif b.is_block():
            return self._repeat(lhs, b), rhs
        else:
            return lhs, rhs
        return super().broadcast_impl_value(lhs, rhs)

    def dot_scaled(self, *_, **__):
        raise Refused("tl.dot_scaled", lines.where(), language="triton")

    @staticmethod
    def _repeat(scalar, like: tl.block_type):
        data = scalar.handle.data
        shape = tuple(like.shape)
        repeated = np.ndarray(shape, data.dtype, data, strides=(0,) * len(shape))
        return tl.tensor(Handle(repeated, scalar.dtype), tl.block_type(scalar.dtype, shape))


REPLACEMENTS = {
    (tl.block_type, "__init__"): block_type,
    (tl.tensor, "__init__"): tensor,
    (tl.core, "_unwrap_if_constexpr"): unwrap_if_constexpr,
}
