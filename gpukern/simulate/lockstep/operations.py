"""What a kernel may compute, as NumPy on registers: operators and mathematics. One entry, one meaning.

Each entry is a template for the generated source; {0}, {1} ... are the operands, cast as Numba's signature says.
A product and a sum are rounded one after the other; a card fuses them (a * b + c with one rounding), so sums of
products agree with a card's to the last bits, not bit by bit. `cuda.fma` is fused here, too.
"""

import cmath
import math
import operator

import numpy as np
from numba import cuda
from numba.cuda import bf16, fp16, libdevice, types
from numba.cuda.np import numpy_support
from numba.cuda.ufuncs import ufunc_db

OPERATORS = {
    operator.add: "{0} + {1}",
    operator.sub: "{0} - {1}",
    operator.mul: "{0} * {1}",
    operator.truediv: "{0} / {1}",
    operator.floordiv: "{0} // {1}",
    operator.mod: "{0} % {1}",
    operator.pow: "power({0}, {1})",
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
    operator.not_: "{0} == 0",
    operator.truth: "{0} != 0",
}
# a += b of numbers is a = a + b.
OPERATORS |= {
    getattr(operator, "i" + name): OPERATORS[getattr(operator, name)]
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "xor", "lshift", "rshift")
}
OPERATORS |= {operator.iand: "{0} & {1}", operator.ior: "{0} | {1}"}
# Integers are brought to the type of the result first: uint64 + int64 is int64 in Numba, where NumPy has float64.
_TWO = ["add", "sub", "mul", "floordiv", "mod", "and", "xor", "or", "lshift", "rshift"]
IN_TYPE_OF_RESULT = {getattr(operator, name, None) or getattr(operator, name + "_") for name in _TWO}
IN_TYPE_OF_RESULT |= {getattr(operator, "i" + name) for name in _TWO}
IN_TYPE_OF_RESULT |= {divmod}

_ONE_ARGUMENT = (
    "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh floor ceil trunc fabs isnan isinf isfinite "
    "degrees radians frexp"
)
_TWO_ARGUMENTS = "hypot fmod copysign ldexp nextafter"
_OTHER_NAMES = {"acos": "arccos", "asin": "arcsin", "atan": "arctan"}
_OTHER_NAMES |= {name + "h": numpys + "h" for name, numpys in _OTHER_NAMES.items()}
FUNCTIONS = {getattr(math, name): f"np.{name}({{0}})" for name in _ONE_ARGUMENT.split() if hasattr(math, name)}
FUNCTIONS |= {getattr(math, name): f"np.{name}({{0}}, {{1}})" for name in _TWO_ARGUMENTS.split()}
FUNCTIONS |= {getattr(math, name): f"np.{numpys}({{0}})" for name, numpys in _OTHER_NAMES.items()}
_OF_COMPLEX = ["exp", "log", "log10", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "isnan", "isinf", "isfinite"]
FUNCTIONS |= {getattr(cmath, name): f"np.{name}({{0}})" for name in _OF_COMPLEX}
FUNCTIONS |= {getattr(cmath, name): f"np.{numpys}({{0}})" for name, numpys in _OTHER_NAMES.items()}
FUNCTIONS |= {
    cmath.phase: "np.angle({0})",
    math.pow: "np.power({0}, {1})",
    math.atan2: "np.arctan2({0}, {1})",
    math.remainder: "remainder({0}, {1})",
    math.modf: "np.modf({0})",
    math.erf: "each(math.erf, {0})",
    math.erfc: "each(math.erfc, {0})",
    math.gamma: "each(gamma, {0})",
    math.lgamma: "each(lgamma, {0})",
    abs: "abs({0})",
    operator.abs: "abs({0})",
    max: "np.fmax({0}, {1})",
    min: "np.fmin({0}, {1})",
    round: "np.rint({0})",
    bool: "{0} != 0",
    pow: "power({0}, {1})",
    divmod: "({0} // {1}, {0} % {1})",
    cuda.popc: "popc({0})",
    cuda.clz: "clz({0})",
    cuda.ffs: "ffs({0})",
    cuda.brev: "brev({0})",
    cuda.fma: "fma({0}, {1}, {2})",
    cuda.cbrt: "np.cbrt({0})",
    cuda.selp: "np.where({0}, {1}, {2})[()]",
}
# libdevice, under its own names: `fast_expf` is `expf`, and both are exp of float32. Functions of whole numbers have
# the suffix ll for 64 bits.
_SAME_NAME = "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh floor ceil trunc cbrt rint"
_LIBDEVICE = {name: f"np.{name}({{0}})" for name in _SAME_NAME.split()}
_LIBDEVICE |= {name: f"np.{numpys}({{0}})" for name, numpys in _OTHER_NAMES.items()}
_LIBDEVICE |= {
    "fabs": "abs({0})",
    "nearbyint": "np.rint({0})",
    "round": "np.copysign(np.floor(abs({0}) + 0.5), {0})",
    "rsqrt": "1 / np.sqrt({0})",
    "rcbrt": "1 / np.cbrt({0})",
    "exp10": "10 ** {0}",
    "sinpi": "np.sin(np.pi * {0})",
    "cospi": "np.cos(np.pi * {0})",
    "sincos": "(np.sin({0}), np.cos({0}))",
    "erf": "each(math.erf, {0})",
    "erfc": "each(math.erfc, {0})",
    "tgamma": "each(gamma, {0})",
    "lgamma": "each(lgamma, {0})",
    "pow": "np.power({0}, {1})",
    "powi": "np.power({0}, {1})",
    "fmod": "np.fmod({0}, {1})",
    "remainder": "remainder({0}, {1})",
    "atan2": "np.arctan2({0}, {1})",
    "hypot": "np.hypot({0}, {1})",
    "copysign": "np.copysign({0}, {1})",
    "nextafter": "np.nextafter({0}, {1})",
    "ldexp": "np.ldexp({0}, {1})",
    "scalbn": "np.ldexp({0}, {1})",
    "frexp": "np.frexp({0})",
    "modf": "np.modf({0})[::-1]",
    "fdim": "np.maximum({0} - {1}, 0)",
    "fdivide": "{0} / {1}",
    "fmax": "np.fmax({0}, {1})",
    "fmin": "np.fmin({0}, {1})",
    "fma": "fma({0}, {1}, {2})",
    "isnan": "np.isnan({0})",
    "isinf": "np.isinf({0})",
    "isfinite": "np.isfinite({0})",
    "signbit": "np.signbit({0})",
}
FUNCTIONS |= {
    getattr(libdevice, name): template
    for base, template in _LIBDEVICE.items()
    for name in (base, base + "f", base + "d", "fast_" + base, "fast_" + base + "f")
    if hasattr(libdevice, name)
}
_WHOLE = {
    "abs": "abs({0})",
    "llabs": "abs({0})",
    "min": "np.minimum({0}, {1})",
    "max": "np.maximum({0}, {1})",
    "umin": "np.minimum({0}, {1})",
    "umax": "np.maximum({0}, {1})",
    "llmin": "np.minimum({0}, {1})",
    "llmax": "np.maximum({0}, {1})",
    "clz": "clz({0})",
    "clzll": "clz({0})",
    "popc": "popc({0})",
    "popcll": "popc({0})",
    "brev": "brev({0})",
    "brevll": "brev({0})",
    "ffs": "ffs({0})",
    "ffsll": "ffs({0})",
    "finitef": "np.isfinite({0})",
    "saturatef": "np.fmin(np.fmax({0}, 0), 1)",
    "float_as_int": "{0}.view(int32)",
    "int_as_float": "{0}.view(float32)",
    "double_as_longlong": "{0}.view(int64)",
    "longlong_as_double": "{0}.view(float64)",
}
FUNCTIONS |= {getattr(libdevice, name): template for name, template in _WHOLE.items() if hasattr(libdevice, name)}
# The functions that float16 and bfloat16 have of their own.
_HALF = {
    f"h{name}": f"np.{name}({{0}})"
    for name in ["sin", "cos", "log", "log2", "log10", "exp", "exp2", "sqrt", "floor", "ceil", "rint", "trunc"]
}
_HALF |= {"hrsqrt": "1 / np.sqrt({0})", "hrcp": "1 / {0}", "htanh": "np.tanh({0})", "hexp10": "10 ** {0}"}
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

# What NumPy's function of another meaning, or of none, must not stand in for.
_UFUNCS = {
    np.floor_divide: "np.floor({0} / {1})",
    np.conjugate: "np.conjugate({0})",
    np.logical_not: "{0} == 0",
}


def ufunc_template(ufunc: np.ufunc, argument_types) -> tuple | None:
    """How ufunc(numbers) is written, and the types its arguments are cast to; None if Numba-CUDA does not have it."""
    if ufunc not in ufunc_db():
        return None
    loop = numpy_support.ufunc_find_matching_loop(ufunc, [types.unliteral(t) for t in argument_types])
    if loop is None or loop.ufunc_sig not in ufunc_db()[ufunc]:
        return None
    places = ", ".join(f"{{{n}}}" for n in range(ufunc.nin))
    return _UFUNCS.get(ufunc, f"np.{ufunc.__name__}({places})"), loop.inputs
