"""What a call lays in: device functions, and the Python with which Numba itself implements what a kernel calls.

Numba writes many functions in Python (`np.argmin`, `a.fill(0)`, `sum` of a tuple): a compiler for a card compiles that
Python, and here it runs as any device function does. Where Numba emits machine code instead, and what it emits is a
loop over an array, a stand-in says the same loop in Python.
"""

import operator
from dataclasses import dataclass

import numpy as np
from numba.core.errors import NumbaError as CoreNumbaError
from numba.cuda import types, typing, utils
from numba.cuda.core import ir
from numba.cuda.core.errors import NumbaError
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.types.ext_types import GridGroup
from numba.cuda.typing.templates import _OverloadMethodTemplate

from gpukern.simulate.lockstep import calls
from gpukern.simulate.lockstep.frontend import Typed, typed
from gpukern.simulate.lockstep.kinds import is_number
from gpukern.simulate.report import Refused


@dataclass(frozen=True)
class Part:
    """Element `index` of the tuple `variable`, handed over as an argument."""

    variable: ir.Var
    index: int


@dataclass(frozen=True)
class Default:
    """A parameter that the call leaves out."""

    value: object


@dataclass(frozen=True)
class Callee:
    """A function to lay in. sources: for each of its parameters an ir.Var, a Part, a Default, or a tuple of these."""

    typed: Typed
    sources: tuple


def callee(scope, statement) -> Callee | None:
    """What is laid in for this statement; None if it is an operation of the machine's own."""
    try:
        return _callee(scope, statement)
    except (Refused, NumbaError, CoreNumbaError):
        raise
    except Exception as error:  # a construct that nobody thought of is refused, and is no traceback from in here
        raise Refused(f"this line ({type(error).__name__}: {error})", scope.line(statement.loc)) from error


def _callee(scope, statement) -> Callee | None:
    if isinstance(statement, ir.SetItem | ir.StaticSetItem):
        return _fills(scope, statement)
    value = getattr(statement, "value", None)
    if not (isinstance(statement, ir.Assign) and isinstance(value, ir.Expr) and value.op == "call"):
        return None
    function, signature = scope.type(value.func.name), scope.typed.calltypes[value]
    if isinstance(function, types.RecursiveCall):
        raise Refused("a function that calls itself", scope.line(statement.loc))
    positional, known = list(value.args), None
    if isinstance(function, types.Dispatcher):
        known = function.dispatcher.overloads[signature.args]
    elif isinstance(function, types.BoundFunction) and not isinstance(function.this, GridGroup):
        known = _method(function, signature)
        if known is not None:
            positional.insert(0, scope.typed.ir.get_definition(value.func).value)
    elif isinstance(function, types.Function) and not calls.is_native(function.typing_key, signature):
        known = _overload(function, signature.args) or _stand_in(function.typing_key, signature)
    if known is None:
        return None
    if value.vararg is not None:
        positional += [Part(value.vararg, n) for n in range(len(scope.type(value.vararg.name)))]
    return Callee(known, _in_order(known, positional, dict(value.kws)))


def sources(given) -> list:
    """The variables that a source of a Callee reads."""
    if isinstance(given, tuple):
        return [variable for part in given for variable in sources(part)]
    if isinstance(given, Default):
        return []
    return [given.variable if isinstance(given, Part) else given]


def _in_order(known: Typed, positional: list, by_name: dict) -> tuple:
    """The arguments of a call in the order of the parameters, defaults filled in, *arguments as one tuple."""
    return typing.fold_arguments(
        utils.pysignature(known.ir.func_id.func),
        positional,
        by_name,
        lambda index, parameter, given: given,
        lambda index, parameter, default: Default(default),
        lambda index, parameter, given: tuple(given),
    )


def _method(function: types.BoundFunction, signature) -> Typed | None:
    """The Python of an `@overload_method`, typed; for a method that Numba emits itself, its stand-in."""
    this, key = function.this, function.typing_key
    if key == "array.sum" and not signature.args:
        return _sum_of(this, signature.return_type)
    if not isinstance(key, tuple):
        return None
    context = cuda_target.typing_context
    with utils.numba_target_override():
        for template in context._get_attribute_templates(this):
            if isinstance(template, _OverloadMethodTemplate) and template._attr == key[1]:
                implementation = template._get_function_type(context, this)
                found = implementation.get_call_type(context, (this, *signature.args), {})
                return _overload(implementation, found.args)
    return None


def _overload(function: types.Function, argument_types: tuple) -> Typed | None:
    """The Python of an `@overload`, as type inference has typed it for these arguments."""
    for template in function.templates:
        for known in getattr(template, "_impl_cache", {}).values():
            dispatcher = known[0] if isinstance(known, tuple) else None
            if isinstance(dispatcher, CUDADispatcher) and argument_types in dispatcher.overloads:
                return dispatcher.overloads[argument_types]
    return None


def _stand_in(key, signature) -> Typed | None:
    if key is np.sum and len(signature.args) == 1 and isinstance(signature.args[0], types.Array):
        return _sum_of(signature.args[0], signature.return_type)
    if isinstance(key, np.ufunc) and any(isinstance(t, types.Array) for t in signature.args):
        return _elementwise(key, signature.args)
    return None


def _sum_of(array: types.Array, result) -> Typed:
    zero = np.dtype(str(result)).type(0)

    def array_sum(a):
        total = zero
        for v in a.flat:
            total += v
        return total

    return typed(array_sum, (array,))


def _elementwise(ufunc: np.ufunc, argument_types: tuple) -> Typed | None:
    """ufunc(x, y, out): every thread goes through all elements. An axis of size 1 is broadcast."""
    if len(argument_types) != ufunc.nin + 1 or ufunc.nout != 1:
        return None
    out = argument_types[-1]
    if any(isinstance(t, types.Array) and t.ndim != out.ndim for t in argument_types):
        return None
    names = [f"a{n}" for n in range(ufunc.nin)]
    loops = [f"{'    ' * (axis + 1)}for i{axis} in range(out.shape[{axis}]):" for axis in range(out.ndim)]
    elements = []
    for name, t in zip(names, argument_types, strict=False):
        index = ", ".join(f"i{axis} if {name}.shape[{axis}] > 1 else 0" for axis in range(out.ndim))
        elements.append(f"{name}[{index}]" if isinstance(t, types.Array) else name)
    index = ", ".join(f"i{axis}" for axis in range(out.ndim))
    body = f"{'    ' * (out.ndim + 1)}out[{index}] = ufunc({', '.join(elements)})"
    head = f"def {ufunc.__name__}({', '.join(names)}, out):"
    namespace = {"ufunc": ufunc}
    exec("\n".join([head, *loops, body, "    return out"]), namespace)
    return typed(namespace[ufunc.__name__], argument_types)


def _fill_1(a, index, value):
    part = a[index]
    for i in range(part.shape[0]):
        part[i] = value


def _fill_2(a, index, value):
    part = a[index]
    for i in range(part.shape[0]):
        for j in range(part.shape[1]):
            part[i, j] = value


def _fill_3(a, index, value):
    part = a[index]
    for i in range(part.shape[0]):
        for j in range(part.shape[1]):
            for k in range(part.shape[2]):
                part[i, j, k] = value


_FILLS = {1: _fill_1, 2: _fill_2, 3: _fill_3}


def _fills(scope, statement) -> Callee | None:
    """The loop of `a[1:3, :] = value`; None if an element is stored."""
    array, signature = scope.type(statement.target.name), scope.typed.calltypes[statement]
    index = statement.index_var if isinstance(statement, ir.StaticSetItem) else statement.index
    if not isinstance(array, types.Array) or index is None:
        return None
    part = _part_of(array, scope.type(index.name))
    if not isinstance(part, types.Array) or part.ndim == 0:
        return None
    value = scope.type(statement.value.name)
    if not is_number(value) or part.ndim not in _FILLS:
        what = "of an array or a tuple" if part.ndim in _FILLS else "of more than three axes"
        raise Refused(f"an assignment to a slice {what}; assign element by element", scope.line(statement.loc))
    known = typed(_FILLS[part.ndim], (array, scope.type(index.name), signature.args[2]))
    return Callee(known, (statement.target, index, statement.value))


def _part_of(array: types.Array, index):
    """The type of array[index]."""
    with utils.numba_target_override():
        context = cuda_target.typing_context
        return context.resolve_function_type(operator.getitem, (array, index), {}).return_type
