"""Values of a program: a block is a NumPy array, a scalar an array of one element. How one type becomes another."""

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from gpukern.simulate.interpreter import lines
from gpukern.simulate.report import Refused

# ml_dtypes' arithmetic rounds each result to nearest even, as a card does.
_OWN = {
    "bf16": ml_dtypes.bfloat16,
    "fp8e5": ml_dtypes.float8_e5m2,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e4b8": ml_dtypes.float8_e4m3fnuz,
    "fp8e5b16": ml_dtypes.float8_e5m2fnuz,
    "fp16": np.float16,
    "fp32": np.float32,
    "fp64": np.float64,
    "int1": np.bool_,
}
_DTYPES = {name: np.dtype(kind) for name, kind in _OWN.items()}
_DTYPES |= {f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}


def np_dtype(dtype: tl.dtype) -> np.dtype:
    """The NumPy type that holds a value of Triton's type; pointers are 64-bit addresses."""
    dtype = dtype.scalar
    if dtype.is_ptr():
        return np.dtype(np.uint64)
    if dtype.name not in _DTYPES:
        raise Refused(f"the type {dtype.name}", lines.where(), language="triton")
    return _DTYPES[dtype.name]


class Handle:
    """A block or a scalar: its values, and Triton's type of one of them."""

    __slots__ = ("data", "dtype")

    def __init__(self, data: np.ndarray, dtype: tl.dtype):
        self.data = data
        self.dtype = dtype

    def get_element_ty(self) -> tl.dtype:
        dtype = self.dtype
        while hasattr(dtype, "element_ty"):
            dtype = dtype.element_ty
        return dtype

    def clone(self) -> "Handle":
        return Handle(self.data.copy(), self.dtype)


interpreter.TensorHandle = Handle  # what upstream's block pointers and descriptors make


def converted(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`data` as `dtype`. What is too large for an integer or a float8 becomes the largest, as a card converts."""
    if data.dtype.kind in "fV" and dtype.kind in "iu":
        limits, wide = np.iinfo(dtype), data.astype(np.float64)
        out = np.where(wide >= float(limits.max), limits.max, np.nan_to_num(np.clip(wide, limits.min, 2.0**62)))
        return out.astype(dtype) if dtype.itemsize < 8 else _wide_integers(wide, dtype)
    if dtype.itemsize == 1 and dtype.kind == "V" or dtype.name.startswith("float8"):
        most = float(ml_dtypes.finfo(dtype).max)
        return np.clip(data.astype(np.float32), -most, most).astype(dtype)
    return data.astype(dtype, copy=False)


def _wide_integers(wide: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 as 64-bit integers: the limits are no float64, so they are put in after the conversion."""
    limits = np.iinfo(dtype)
    inside = (wide > limits.min) & (wide < float(limits.max))
    out = np.where(inside, wide, 0).astype(dtype)
    out[wide >= float(limits.max)] = limits.max
    out[wide <= limits.min] = limits.min
    return out


def as_tf32(x: np.ndarray) -> np.ndarray:
    """float32 as tensor cores read it for tf32: the low 13 bits of the mantissa are not there."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
