"""Numba's types, sorted: what is a number, what has a value when the kernel runs, what is known when it is compiled."""

import ml_dtypes
import numpy as np
from numba.cuda import types
from numba.cuda.core.errors import NumbaNotImplementedError
from numba.cuda.np import numpy_support
from numba.cuda.types.ext_types import Bfloat16, Dim3, GridGroup
from numba.cuda.vector_types import VectorType

ITERATORS = (
    types.RangeIteratorType,
    types.UniTupleIter,
    types.ArrayIterator,
    types.EnumerateType,
    types.ZipType,
    types.NumpyFlatType,
    types.NumpyNdIterType,
    types.NumpyNdIndexType,
    types.NumpyNdEnumerateType,
)


def is_number(type_) -> bool:
    """Is it a type of numbers (literals, enumerations of numbers, too) that NumPy has?"""
    if isinstance(type_, types.EnumMember):
        return is_number(type_.dtype)
    return isinstance(types.unliteral(type_), types.Number | types.Boolean | Bfloat16)


def is_value(type_) -> bool:
    """Does a variable of this Numba type hold something at run time (and not a module, a function, a class)?"""
    if isinstance(type_, types.BaseTuple):  # in (None, slice), None is kept as None
        return all(is_value(t) or is_known(t) for t in type_) and (not len(type_) or any(map(is_value, type_)))
    if isinstance(type_, types.Optional):
        return is_number(type_.type)
    known = (
        types.Array,
        types.Record,
        types.RangeType,
        types.Pair,
        types.SliceType,
        VectorType,
        *ITERATORS,
    )
    return is_number(type_) or isinstance(type_, known)


def is_known(type_) -> bool:
    """Is a variable of this Numba type a thing of the source: a module, a function, a type, None, a string?"""
    if isinstance(type_, types.BaseTuple):
        return all(is_known(t) or is_value(t) for t in type_)
    known = (types.Dummy, types.Callable, types.UnicodeType, types.StringLiteral, types.Omitted, Dim3, GridGroup)
    return isinstance(type_, known)


def dtype_of(type_) -> np.dtype:
    """The NumPy type of a Numba number. Raises NotImplementedError for one that NumPy lacks."""
    if isinstance(type_, Bfloat16):
        return np.dtype(ml_dtypes.bfloat16)
    if isinstance(type_, types.EnumMember):
        type_ = type_.dtype
    try:
        return np.dtype(numpy_support.as_dtype(types.unliteral(type_)))
    except NumbaNotImplementedError as error:
        raise NotImplementedError(str(error)) from None
