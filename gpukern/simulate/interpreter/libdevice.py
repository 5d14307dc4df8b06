"""The functions of libdevice, CUDA's library of mathematics, that have one meaning on NumPy arrays."""

import numpy as np
import torch


def _torch(function):
    """A function of PyTorch on NumPy arrays."""
    return lambda *xs: function(*(torch.from_numpy(np.ascontiguousarray(x)) for x in xs)).numpy()


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"uint{8 * x.itemsize}")


def _popc(x):
    return np.bitwise_count(_bits(x))


def _clz(x):
    """Leading zeros: the bits that are left when every bit below the highest is set."""
    bits, width = _bits(x).copy(), 8 * x.itemsize
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < width:
            bits |= bits >> bits.dtype.type(shift)
    return width - np.bitwise_count(bits)


def _ffs(x):
    """1 + the place of the lowest bit that is set; 0 if there is none."""
    bits = _bits(x)
    low = bits & (~bits + bits.dtype.type(1))
    return np.where(bits == 0, 0, np.bitwise_count(low - bits.dtype.type(1)) + 1)


def _round(x):
    """Halves away from zero."""
    return np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x)


def _fma(x, y, z):
    return x.astype(np.float64) * y + z


_FUNCTIONS = {
    "abs": np.abs,
    "fabs": np.abs,
    "llabs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "clz": _clz,
    "copysign": np.copysign,
    "cos": np.cos,
    "cosh": np.cosh,
    "cospi": lambda x: np.cos(np.pi * x.astype(np.float64)),
    "cyl_bessel_i0": _torch(torch.special.i0),
    "cyl_bessel_i1": _torch(torch.special.i1),
    "fdiv_rn": np.divide,
    "ddiv_rn": np.divide,
    "fadd_rn": np.add,
    "dadd_rn": np.add,
    "fsub_rn": np.subtract,
    "dsub_rn": np.subtract,
    "fmul_rn": np.multiply,
    "dmul_rn": np.multiply,
    "erf": _torch(torch.erf),
    "erfc": _torch(torch.erfc),
    "erfcx": _torch(torch.special.erfcx),
    "erfinv": _torch(torch.erfinv),
    "exp": np.exp,
    "exp10": lambda x: np.power(x.dtype.type(10), x),
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fast_cos": np.cos,
    "fast_fdivide": np.divide,
    "fast_exp": np.exp,
    "fast_exp10": lambda x: np.power(x.dtype.type(10), x),
    "fast_log": np.log,
    "fast_log10": np.log10,
    "fast_log2": np.log2,
    "fast_pow": np.power,
    "fast_sin": np.sin,
    "fast_tan": np.tan,
    "fdim": lambda x, y: np.where(x > y, x - y, 0),
    "ffs": _ffs,
    "float_as_int": lambda x: x.view(np.int32),
    "float_as_uint": lambda x: x.view(np.uint32),
    "floor": np.floor,
    "fma": _fma,
    "fma_rn": _fma,
    "fmaf_rn": _fma,
    "fmod": np.fmod,
    "hypot": np.hypot,
    "int_as_float": lambda x: x.view(np.float32),
    "uint_as_float": lambda x: x.view(np.float32),
    "isinf": np.isinf,
    "isnan": np.isnan,
    "finite": np.isfinite,
    "isfinited": np.isfinite,
    "j0": _torch(torch.special.bessel_j0),
    "j1": _torch(torch.special.bessel_j1),
    "ldexp": np.ldexp,
    "scalbn": np.ldexp,
    "lgamma": _torch(torch.lgamma),
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "mulhi": lambda x, y: x.astype(np.int64) * y >> 32,
    "nearbyint": np.rint,
    "nextafter": np.nextafter,
    "norm3d": lambda x, y, z: np.sqrt(x * x + y * y + z * z),
    "normcdf": _torch(torch.special.ndtr),
    "normcdfinv": _torch(torch.special.ndtri),
    "popc": _popc,
    "pow": np.power,
    "powi": np.power,
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "frcp_rn": lambda x: 1 / x,
    "drcp_rn": lambda x: 1 / x,
    "remainder": lambda x, y: x - y * np.rint(x / y),
    "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "rint": np.rint,
    "round": _round,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "frsqrt_rn": lambda x: 1 / np.sqrt(x),
    "saturate": lambda x: np.clip(np.nan_to_num(x), 0, 1),
    "signbit": np.signbit,
    "sin": np.sin,
    "sinh": np.sinh,
    "sinpi": lambda x: np.sin(np.pi * x.astype(np.float64)),
    "sqrt": np.sqrt,
    "fsqrt_rn": np.sqrt,
    "dsqrt_rn": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "trunc": np.trunc,
    "y0": _torch(torch.special.bessel_y0),
    "y1": _torch(torch.special.bessel_y1),
}


def function(symbol: str):
    """What "__nv_tanhf" computes, on NumPy arrays; None if it is not known here."""
    name = symbol.removeprefix("__nv_")
    for known in (name, name.removesuffix("f"), name.removesuffix("ll"), name.removesuffix("d")):
        if known in _FUNCTIONS:
            return _FUNCTIONS[known]
    return None
