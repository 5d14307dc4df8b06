"""The arithmetic that NumPy lacks, or has in another meaning than Numba gives it, on registers."""

import math

import ml_dtypes
import numpy as np


def to_int(value, dtype):
    """A float as an integer, as a card converts it: towards zero, held at the ends of the type.

    NaN becomes 0, or, where the float or the integer has 64 bits, the integer of which only the highest bit is set.
    """
    if np.dtype(dtype).itemsize == 1:  # the card has no such conversion: by way of 16 bits, of which the low ones stay
        return to_int(value, np.int16 if dtype is np.int8 else np.uint16).astype(dtype)
    limits = np.iinfo(dtype)
    wide = np.asarray(value).dtype.itemsize == 8 or limits.bits == 64
    not_a_number = (limits.min or 1 << limits.bits - 1) if wide else 0
    value = np.asarray(value).astype(np.float64)
    inside = (value > float(limits.min) - 1) & (value < float(limits.max))
    held = np.where(value > 0, limits.max, np.where(np.isnan(value), dtype(not_a_number), limits.min))
    return np.where(inside, np.where(inside, value, 0).astype(dtype), held.astype(dtype))[()]


def trips(start, stop, step):
    """How many numbers range(start, stop, step) has, in the type of its arguments; none or fewer means none."""
    if start.dtype.kind == "u":
        return np.where(start < stop, (stop - start + step - step.dtype.type(1)) // step, stop * stop.dtype.type(0))[()]
    return -((start - stop) // step)


def each(function, x):
    """A function of Python's math, for every thread."""
    return np.asarray([function(v) for v in np.ravel(x)]).reshape(np.shape(x))[()]


def gamma(x: float) -> float:
    """math.gamma without exceptions: 0 gives inf, a negative whole number NaN, a large number inf."""
    try:
        return math.gamma(x)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.copysign(math.inf, x) if x == 0 else math.nan


def lgamma(x: float) -> float:
    """math.lgamma without exceptions: inf where it has a pole."""
    try:
        return math.lgamma(x)
    except (OverflowError, ValueError):
        return math.inf


def round_to(x, digits):
    """round(x, digits), as CPython does it without a decimal library."""
    ten = np.float64(10)
    many = digits > 22
    first = ten ** np.where(many, digits - 22, abs(digits)).astype(np.float64)
    second = np.where(many, 1e22, 1.0)
    scaled = np.where(digits >= 0, x * first * second, x / first)
    near = np.rint(scaled)
    made = np.where(digits >= 0, near / second / first, near * first)
    return np.where(np.isfinite(x) & np.isfinite(scaled), made, x).astype(x.dtype)[()]


def remainder(x, y):
    """IEEE's remainder of floats: x less the multiple of y that is nearest, ties to the even multiple."""
    rest = np.fmod(abs(x), abs(y))
    half = abs(y) - rest
    odd = np.fmod(abs(x), 2 * abs(y)) >= abs(y)
    down = (rest > half) | ((rest == half) & odd)
    return np.where(np.isinf(y) & np.isfinite(x), x, np.copysign(1, x) * np.where(down, -half, rest)).astype(x.dtype)[
        ()
    ]


def power(a, b):
    """a ** b as Numba computes it for whole numbers: modulo 2^n; 0 for a fraction, and 0 ** -1 is the least number."""
    if a.dtype.kind == "c" or b.dtype.kind == "c":
        return _complex_power(a, b)
    if b.dtype.kind not in "iu" or a.dtype.kind not in "iu":
        return np.power(a, b)
    negative, huge = b < 0, b > 0x10000
    made = a ** np.where(negative | huge, 0, b).astype(a.dtype)
    made = np.where(huge, to_int(np.power(a.astype(np.float64), b.astype(np.float64)), a.dtype.type), made)
    sign = np.where((b & b.dtype.type(1)) != 0, a, 1)
    inverse = np.where(a == 0, _only_highest_bit(a.dtype), np.where(abs(a) == 1, sign, 0))
    return np.where(negative, inverse, made).astype(a.dtype)[()]


def _only_highest_bit(dtype: np.dtype):
    return np.array(1 << dtype.itemsize * 8 - 1, f"u{dtype.itemsize}").view(dtype)


def multiplied_out(a, n: int):
    """a ** n for an n that stands in the source: by squaring, in the type of the result, as Numba unrolls it."""
    made, square, left = a.dtype.type(1), a, abs(n)
    while left:
        if left & 1:
            made = made * square
        left >>= 1
        if left:
            square = square * square
    if n >= 0:
        return made
    if a.dtype.kind in "iu":
        least = _only_highest_bit(a.dtype)
        return np.where(made == 0, least, np.where(abs(made) == 1, made, 0)).astype(a.dtype)[()]
    return a.dtype.type(1) / made


def _complex_power(a, b):
    """As CPython has it: by the logarithm, so that a whole exponent is not exact."""
    size, angle = abs(a), np.angle(a)
    length = size**b.real / np.where(b.imag != 0, np.exp(angle * b.imag), 1)
    phase = angle * b.real + np.where(b.imag != 0, b.imag * np.log(size), 0)
    made = length * (np.cos(phase) + 1j * np.sin(phase))
    nothing = (b.real == 0) & (b.imag == 0)
    return np.where(nothing, 1, np.where((a.real == 0) & (b.real == 0), 0, made)).astype(np.result_type(a, b))[()]


def popc(x):
    return np.bitwise_count(_bits(x)).astype(x.dtype)


def clz(x):
    bits = _bits(x)
    width = x.dtype.itemsize * 8
    found = np.full(np.shape(bits), width)
    for n in range(width):
        found = np.where(bits >> bits.dtype.type(n) & bits.dtype.type(1), width - 1 - n, found)
    return found.astype(x.dtype)[()]


def ffs(x):
    """The place of the lowest bit that is set, counted from 1; 0 if none is."""
    bits = _bits(x)
    lowest = bits & (~bits + bits.dtype.type(1))
    return np.where(bits == 0, 0, np.bitwise_count(lowest - bits.dtype.type(1)) + 1).astype(np.uint32)[()]


def brev(x):
    bits, found = _bits(x), _bits(x) * 0
    one = bits.dtype.type(1)
    for n in range(x.dtype.itemsize * 8):
        found = found << one | (bits >> bits.dtype.type(n) & one)
    return found


def fma(a, b, c):
    """a * b + c, rounded once (float64: twice, for NumPy has nothing wider that is portable)."""
    wide = np.float64 if a.dtype.itemsize < 8 else np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype)


def _bits(x):
    return np.asarray(x).view(f"u{x.dtype.itemsize}")[()]


# The names that generated source may use.
_TYPES = "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
NAMESPACE = {"np": np, "math": math, "bfloat16": np.dtype(ml_dtypes.bfloat16).type}
_FUNCTIONS = (to_int, trips, each, gamma, lgamma, round_to, remainder, power, multiplied_out, popc, clz, ffs, brev, fma)
NAMESPACE |= {function.__name__: function for function in _FUNCTIONS}
NAMESPACE |= {name: getattr(np, name) for name in _TYPES.split()}
