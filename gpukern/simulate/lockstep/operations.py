"""What a kernel may compute, as NumPy on registers: operators, mathematics, casts. One entry, one meaning.

Each entry is a template for the generated source; {0}, {1} ... are the operands, cast as Numba's signature says.
A product and a sum are rounded one after the other; a card fuses them (a * b + c with one rounding), so sums of
products agree with a card's to the last bits, not bit by bit. `cuda.fma` is fused here, too.
"""

import math
import operator

import ml_dtypes
import numpy as np
from numba import cuda
from numba.cuda import bf16, fp16, libdevice, types
from numba.cuda.np import numpy_support
from numba.cuda.types.ext_types import Bfloat16, Dim3, GridGroup

OPERATORS = {
    operator.add: "{0} + {1}",
    operator.sub: "{0} - {1}",
    operator.mul: "{0} * {1}",
    operator.truediv: "{0} / {1}",
    operator.floordiv: "{0} // {1}",
    operator.mod: "{0} % {1}",
    operator.pow: "{0} ** {1}",
    operator.and_: "{0} & {1}",
    operator.or_: "{0} | {1}",
    operator.xor: "{0} ^ {1}",
    operator.lshift: "{0} << {1}",
    operator.rshift: "{0} >> {1}",
    operator.eq: "{0} == {1}",
    operator.ne: "{0} != {1}",
    operator.lt: "{0} < {1}",
    operator.le: "{0} <= {1}",
    operator.gt: "{0} > {1}",
    operator.ge: "{0} >= {1}",
    operator.neg: "-{0}",
    operator.pos: "+{0}",
    operator.invert: "~{0}",
    operator.not_: "~{0}",
}
# a += b of numbers is a = a + b.
OPERATORS |= {
    getattr(operator, "i" + name): OPERATORS[getattr(operator, name)]
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "xor", "lshift", "rshift")
}
OPERATORS |= {operator.iand: "{0} & {1}", operator.ior: "{0} | {1}"}

_ONE_ARGUMENT = (
    "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh floor ceil trunc fabs isnan isinf isfinite "
    "degrees radians"
)
_TWO_ARGUMENTS = "hypot fmod copysign ldexp"
FUNCTIONS = {getattr(math, name): f"np.{name}({{0}})" for name in _ONE_ARGUMENT.split() if hasattr(math, name)}
FUNCTIONS |= {getattr(math, name): f"np.{name}({{0}}, {{1}})" for name in _TWO_ARGUMENTS.split()}
FUNCTIONS |= {
    math.pow: "np.power({0}, {1})",
    math.acos: "np.arccos({0})",
    math.asin: "np.arcsin({0})",
    math.atan: "np.arctan({0})",
    math.atan2: "np.arctan2({0}, {1})",
    math.acosh: "np.arccosh({0})",
    math.asinh: "np.arcsinh({0})",
    math.atanh: "np.arctanh({0})",
    math.erf: "each(math.erf, {0})",
    math.erfc: "each(math.erfc, {0})",
    math.gamma: "each(math.gamma, {0})",
    math.lgamma: "each(math.lgamma, {0})",
    abs: "abs({0})",
    max: "np.fmax({0}, {1})",
    min: "np.fmin({0}, {1})",
    round: "np.rint({0})",
    bool: "{0} != 0",
    pow: "{0} ** {1}",
    divmod: "({0} // {1}, {0} % {1})",
    cuda.popc: "popc({0})",
    cuda.clz: "clz({0})",
    cuda.ffs: "ffs({0})",
    cuda.brev: "brev({0})",
    cuda.fma: "fma({0}, {1}, {2})",
    cuda.cbrt: "np.cbrt({0})",
    cuda.selp: "np.where({0}, {1}, {2})[()]",
}
# libdevice, under its own names: `fast_expf` is `expf`, and both are exp of float32.
_SAME_NAME = "exp exp2 log log2 log10 sqrt sin cos tan sinh cosh tanh floor ceil"
_LIBDEVICE = {name: f"np.{name}({{0}})" for name in _SAME_NAME.split()} | {
    "fabs": "abs({0})",
    "rsqrt": "1 / np.sqrt({0})",
    "rcbrt": "1 / np.cbrt({0})",
    "erf": "each(math.erf, {0})",
    "pow": "{0} ** {1}",
    "fdivide": "{0} / {1}",
    "fmax": "np.fmax({0}, {1})",
    "fmin": "np.fmin({0}, {1})",
    "fma": "fma({0}, {1}, {2})",
}
FUNCTIONS |= {
    getattr(libdevice, name): template
    for base, template in _LIBDEVICE.items()
    for name in (base, base + "f", "fast_" + base, "fast_" + base + "f")
    if hasattr(libdevice, name)
}
# The functions that float16 and bfloat16 have of their own.
_HALF = {
    f"h{name}": f"np.{name}({{0}})"
    for name in ["sin", "cos", "log", "log2", "log10", "exp", "exp2", "sqrt", "floor", "ceil", "rint", "trunc"]
}
_HALF |= {"hadd": "{0} + {1}", "hsub": "{0} - {1}", "hmul": "{0} * {1}", "hdiv": "{0} / {1}", "hneg": "-{0}"}
_HALF |= {"habs": "abs({0})", "hfma": "fma({0}, {1}, {2})", "hmax": "np.fmax({0}, {1})", "hmin": "np.fmin({0}, {1})"}
_HALF |= {f"h{name}": OPERATORS[getattr(operator, name)] for name in ["eq", "ne", "gt", "ge", "lt", "le"]}
FUNCTIONS |= {
    getattr(module, name): template
    for module in (fp16, bf16)
    for name, template in _HALF.items()
    if hasattr(module, name)
}

# Floating-point operations as a profiler counts them: a fused multiply-add is two, functions of mathematics none.
FLOPS = {getattr(operator, i + name): 1 for i in ("", "i") for name in ("add", "sub", "mul", "truediv")}
FLOPS |= {cuda.fma: 2}

# The Numba types of numbers; literals are meant, too, after types.unliteral.
NUMBERS = (types.Number, types.Boolean, Bfloat16)


def is_value(type_) -> bool:
    """Does a variable of this Numba type hold something at run time (and not a module, a function, a class)?"""
    if isinstance(type_, types.BaseTuple):
        return all(is_value(t) for t in type_)
    known = (
        types.Number,
        types.Boolean,
        types.Array,
        types.RangeType,
        types.RangeIteratorType,
        types.Pair,
        types.SliceType,
        types.UniTupleIter,
        Bfloat16,
    )
    return isinstance(type_, known)


def is_known(type_) -> bool:
    """Is a variable of this Numba type a thing of the source: a module, a function, a type, None, a string?"""
    if isinstance(type_, types.BaseTuple):
        return all(is_known(t) or is_value(t) for t in type_)
    known = (types.Dummy, types.Callable, types.UnicodeType, Dim3, GridGroup)
    return isinstance(type_, known)


def dtype_of(type_) -> np.dtype:
    """The NumPy type of a Numba number. Raises NotImplementedError for one that NumPy lacks."""
    if isinstance(type_, Bfloat16):
        return np.dtype(ml_dtypes.bfloat16)
    if isinstance(type_, types.Literal):
        type_ = types.unliteral(type_)
    return np.dtype(numpy_support.as_dtype(type_))


def to_int(value, dtype):
    """A float as an integer, as a card converts it: towards zero, held at the ends of the type, NaN becomes 0."""
    limits = np.iinfo(dtype)
    value = np.asarray(value).astype(np.float64)
    inside = (value > float(limits.min) - 1) & (value < float(limits.max))
    held = np.where(value > 0, limits.max, np.where(np.isnan(value), 0, limits.min))
    return np.where(inside, np.where(inside, value, 0).astype(dtype), held.astype(dtype))[()]


def trips(start, stop, step):
    """How many numbers range(start, stop, step) has, in the type of its arguments; none or fewer means none."""
    if start.dtype.kind == "u":
        return np.where(start < stop, (stop - start + step - step.dtype.type(1)) // step, stop * stop.dtype.type(0))[()]
    return -((start - stop) // step)


def each(function, x):
    """A function of Python's math, for every thread."""
    return np.asarray([function(v) for v in np.ravel(x)]).reshape(np.shape(x))[()]


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
NAMESPACE |= {function.__name__: function for function in (to_int, trips, each, popc, clz, ffs, brev, fma)}
NAMESPACE |= {name: getattr(np, name) for name in _TYPES.split()}
