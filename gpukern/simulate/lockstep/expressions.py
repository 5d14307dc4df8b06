"""An expression of Numba's IR as source: operators, indexing, attributes, loops, calls."""

import math
import operator
import re

import numpy as np
from numba.cuda import types
from numba.cuda.core import ir
from numba.cuda.types.ext_types import Bfloat16
from numba.cuda.vector_types import VectorType

from gpukern.simulate.lockstep import calls
from gpukern.simulate.lockstep.arithmetic import NAMESPACE
from gpukern.simulate.lockstep.attributes import Attributes
from gpukern.simulate.lockstep.kinds import dtype_of, is_number, is_value
from gpukern.simulate.lockstep.methods import METHODS
from gpukern.simulate.lockstep.operations import FLOPS, FUNCTIONS, IN_TYPE_OF_RESULT, OPERATORS, ufunc_template

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class Expressions(Attributes):
    """The expressions of a BlockLowering."""

    def _expression(self, value: ir.Expr, target: str) -> tuple:
        """Source of an expression, and its type."""
        signature = self.scope.typed.calltypes.get(value)
        if value.op in ("binop", "inplace_binop"):
            if isinstance(self.scope.type(value.lhs.name), types.BaseTuple | types.Optional | types.NoneType) or (
                value.fn in (operator.is_, operator.is_not, operator.contains)
            ):
                return self._compare(value, signature)
            if value.fn in (operator.pow, operator.ipow) and isinstance(signature.args[1], types.IntegerLiteral):
                return self._power(value, signature)
            return self._apply(OPERATORS, value.fn, [value.lhs, value.rhs], signature)
        if value.op == "unary":
            return self._apply(OPERATORS, value.fn, [value.value], signature)
        if value.op in ("getitem", "static_getitem", "typed_getitem"):
            return self._getitem(value, signature, target)
        if value.op == "getattr":
            return self._getattr(value, target)
        if value.op == "build_tuple":
            return f"({''.join(self.read(v) + ', ' for v in value.items)})", self._tuple_type(value)
        if value.op == "exhaust_iter":
            return self.read(value.value), self.scope.type(value.value.name)
        if value.op == "null":  # a variable that nobody has set on this path
            return self._zero(self.scope.type(target)), self.scope.type(target)
        if value.op == "cast":
            return self.read(value.value), self.scope.type(value.value.name)
        if value.op == "getiter":
            return self._getiter(value)
        if value.op == "iternext":
            return self._iternext(value)
        if value.op in ("pair_first", "pair_second"):
            pair = self.scope.type(value.value.name)
            second = value.op == "pair_second"
            return f"{self.read(value.value)}[{int(second)}]", pair.second_type if second else pair.first_type
        self.refuse(f"`{value.op}`")

    def _tuple_type(self, value: ir.Expr):
        return types.Tuple([self.scope.type(v.name) for v in value.items])

    def _zero(self, type_) -> str:
        if not is_number(type_):
            self.refuse(f"a variable of type {type_} that may not be set")
        return self.code.constant(dtype_of(type_).type(0))

    def truth(self, variable: ir.Var) -> str:
        """A variable as a condition."""
        type_ = self.scope.type(variable.name)
        if isinstance(type_, types.Optional):
            return f"{self.read(variable)}[1] & {self.cast(f'{self.read(variable)}[0]', type_.type, types.boolean)}"
        return self.operand(variable, types.boolean)

    def _apply(self, table: dict, function, operands: list, signature, wanted=None) -> tuple:
        """An operator or function of numbers: operands cast as the signature says, the result brought to its type."""
        result = types.unliteral(signature.return_type)
        template = table.get(function)
        numbers = all(is_number(t) or isinstance(t, types.Optional) for t in signature.args)
        if template is None or not numbers or len(operands) != len(set(re.findall(r"{\d}", template))):
            name = getattr(function, "__name__", str(function))
            self.refuse(f"`{name}` of {', '.join(map(str, signature.args))}")
        wanted = list(wanted or signature.args)
        if function in IN_TYPE_OF_RESULT:
            whole = result.dtype if isinstance(result, types.UniTuple) else result
            wanted = [whole if isinstance(whole, types.Integer) else t for t in wanted]
        elif function in (operator.neg, operator.pos, operator.invert) and wanted[0] == types.boolean:
            wanted = [result]
        elif function is operator.not_:
            wanted = [types.boolean]
            template = "~{0}"
        operands = [self.operand(v, t) for v, t in zip(operands, wanted, strict=True)]
        source = template.format(*(tight(o) for o in operands))
        if isinstance(result, types.Float | Bfloat16) and function in FLOPS:
            self.code.flops[self.pc][self.line] += FLOPS[function]
        # Where NumPy's result has another type than Numba's (float32 ** int64), one more cast.
        names = {f"x{n}": np.ones(1, dtype_of(t)) for n, t in enumerate(wanted)}
        made = eval(template.format(*names), NAMESPACE | names)
        if not isinstance(result, types.BaseTuple):
            return self._as_result(source, made.dtype, result), result
        if all(m.dtype == dtype_of(t) for m, t in zip(made, result, strict=True)):
            return source, result
        self.lines.append(f"several = {source}")
        parts = (
            self._as_result(f"several[{n}]", m.dtype, t) for n, (m, t) in enumerate(zip(made, result, strict=True))
        )
        return f"({', '.join(parts)},)", result

    def _power(self, value: ir.Expr, signature) -> tuple:
        """x ** 3: multiplied out, if it is not too often."""
        result, n = signature.return_type, signature.args[1].literal_value
        if abs(n) > 0x10000 or not isinstance(result, types.Integer | types.Float):
            return self._apply(OPERATORS, value.fn, [value.lhs, value.rhs], signature)
        return f"multiplied_out({self.operand(value.lhs, result)}, {n})", result

    def _as_result(self, source: str, made: np.dtype, result) -> str:
        if made == dtype_of(result):
            return source
        if isinstance(result, types.Integer) and made.kind not in "iub":
            return f"to_int({source}, {self.dtype(result)})"
        return f"({source}).astype({self.dtype(result)})"

    def _compare(self, value: ir.Expr, signature) -> tuple:
        """`is`, `in` a tuple, and the comparison of tuples."""
        left, right = (self.scope.type(v.name) for v in (value.lhs, value.rhs))
        a, b = (self.read(v) if is_value(t) else "None" for v, t in ((value.lhs, left), (value.rhs, right)))
        if value.fn in (operator.is_, operator.is_not):
            return self._same(a, left, b, right, "~" if value.fn is operator.is_not else ""), types.boolean
        if value.fn is operator.contains and isinstance(left, types.BaseTuple):
            found = [self._one_by_one("==", f"{a}[{n}]", t, b, right) for n, t in enumerate(left)]
            return " | ".join(found) or "np.False_", types.boolean
        sign = _COMPARISONS.get(value.fn.__name__)
        if isinstance(left, types.BaseTuple) and isinstance(right, types.BaseTuple):
            if sign:
                return self._in_order(sign, a, left, b, right), types.boolean
            if value.fn is operator.add:
                return f"({a} + {b})", types.Tuple([*left, *right])
        if isinstance(left, types.Optional):
            return self._apply(OPERATORS, value.fn, [value.lhs, value.rhs], signature)
        self.refuse(f"`{value.fn.__name__}` of {left}, {right}")

    def _same(self, a: str, left, b: str, right, no: str) -> str:
        if isinstance(left, types.NoneType):
            a, left, b, right = b, right, a, left
        if isinstance(right, types.NoneType):
            if isinstance(left, types.Optional):
                return f"{no}(~np.bool_({a}[1]))"
            return f"{no}np.bool_({isinstance(left, types.NoneType)})"
        if isinstance(left, types.EnumMember | types.Boolean) and left == right:
            return f"{no}({a} == {b})"
        self.refuse(f"`is` of {left}, {right}")

    def _one_by_one(self, sign: str, a: str, left, b: str, right) -> str:
        if isinstance(left, types.BaseTuple) and isinstance(right, types.BaseTuple):
            return f"({self._in_order(sign, a, left, b, right)})"
        if not (is_number(left) and is_number(right)):
            self.refuse(f"a comparison of {left} with {right}")
        return f"({a} {sign} {b})"

    def _in_order(self, sign: str, a: str, left, b: str, right) -> str:
        """Tuples compare by the first of their elements that differ, then by their lengths."""
        both = min(len(left), len(right))
        if sign in ("==", "!="):
            if len(left) != len(right):
                return f"np.bool_({sign == '!='})"
            parts = [self._one_by_one(sign, f"{a}[{n}]", left[n], f"{b}[{n}]", right[n]) for n in range(both)]
            return (" & " if sign == "==" else " | ").join(parts) or f"np.bool_({sign == '=='})"
        source = f"np.bool_({len(left)} {sign} {len(right)})"
        for n in reversed(range(both)):
            x, y = (f"{a}[{n}]", left[n]), (f"{b}[{n}]", right[n])
            same, before = self._one_by_one("==", *x, *y), self._one_by_one(sign[0], *x, *y)
            source = f"({before} | ({same} & {source}))"
        return source

    def _getitem(self, value: ir.Expr, signature, target: str) -> tuple:
        source, container = self.read(value.value), self.scope.type(value.value.name)
        if isinstance(container, types.BaseTuple):
            if value.op == "static_getitem" and isinstance(value.index, int | slice):
                index = value.index if isinstance(value.index, int) else f"{value.index.start}:{value.index.stop}"
                if isinstance(value.index, slice):
                    index = ":".join("" if n is None else str(n) for n in (value.index.start, value.index.stop))
                    if value.index.step is not None:
                        index += f":{value.index.step}"
                return f"{source}[{index}]", self.scope.type(target)
            place, whole = self.operand(_index_variable(value), types.intp), types.unliteral(signature.args[0])
            source = self.cast(source, container, whole)
            return f'choose(g, {source}, {place}, "{self.line}")', signature.return_type
        if isinstance(container, types.EnumClass):
            return self._constant(container.instance_class[value.index], self.scope.type(target)), self.scope.type(
                target
            )
        if isinstance(container, types.Record):
            return self._field(source, container, self._field_name(value)), self.scope.type(target)
        if isinstance(container, types.NumpyFlatType):
            where = f"flat_index({source}[3], {self.operand(_index_variable(value), types.intp)})"
            return f'g.load({source}[3], {where}, "{self.line}")', container.dtype
        if not isinstance(container, types.Array):
            self.refuse(f"indexing of {container}")
        if value.op == "static_getitem" and isinstance(value.index, str):
            return self._field_view(source, container.dtype, value.index), self.scope.type(target)
        index, whole = self._index(value)
        if isinstance(signature.return_type, types.Array):
            return self._slice(source, index), signature.return_type
        if whole < container.ndim:
            source, index = f"{source}.slice({index})", "()"
        if isinstance(container.dtype, types.Record):
            return f'record(g, {source}, {index}, "{self.line}")', container.dtype
        return f'g.load({source}, {index}, "{self.line}")', container.dtype

    def _slice(self, source: str, index: str) -> str:
        """array[index]; None in the index adds an axis of length 1 to the result."""
        parts = [part for part in re.findall(r"\([^()]*\(?[^()]*\)?[^()]*\)|[^,]+", index[1:-1]) if part.strip()]
        return f"{source}.slice({index})" if "None" not in [p.strip() for p in parts] else f"sliced({source}, {index})"

    def _call(self, value: ir.Expr, target: ir.Var) -> tuple:
        signature = self.scope.typed.calltypes[value]
        function = self.scope.type(value.func.name)
        if value.vararg is not None or signature is None:
            self.refuse("a call with *arguments")
        key = getattr(function, "typing_key", None)
        if isinstance(signature.return_type, types.NumberClass):
            return "None", signature.return_type  # type(x), known when it is called
        if isinstance(function, types.ExceptionClass):
            return "None", signature.return_type  # the raise that follows ends the thread
        if isinstance(function, types.NumberClass) or (_hashable(key) and key in (int, float)):
            old = self.scope.type(value.args[0].name)
            if not (is_number(old) or isinstance(old, types.Optional)):
                self.refuse(f"a conversion of {old} to a number")
            return self.cast(self.read(value.args[0]), old, signature.return_type), signature.return_type
        if isinstance(function, types.NamedTupleClass):
            return self._named_tuple(value, function, signature), signature.return_type
        if isinstance(signature.return_type, VectorType):
            return self._vector(value, signature), signature.return_type
        if isinstance(function, types.BoundFunction) and _hashable(key) and key in METHODS:
            owner = self.scope.typed.ir.get_definition(value.func).value
            return METHODS[key](self, owner, value, signature), signature.return_type
        if isinstance(function, types.BoundFunction):
            self.refuse(f"`.{str(key).rpartition('.')[2]}()` of {function.this}")
        special = calls.special(key)
        if special is not None:
            return special(self, value, signature, target), signature.return_type
        if isinstance(key, np.ufunc):
            if any(isinstance(t, types.Array) for t in signature.args):
                self.refuse(f"np.{key.__name__} of these arrays; loop over their elements")
            found = ufunc_template(key, signature.args)
            if found is None:
                instead = f" (use math.{key.__name__})" if hasattr(math, key.__name__) else ""
                self.refuse(f"np.{key.__name__}, which Numba-CUDA does not compile{instead}")
            return self._apply({key: found[0]}, key, list(value.args), signature, found[1])
        if _hashable(key) and key in FUNCTIONS:
            if key in (max, min) and (len(value.args) > 2 or not all(map(is_number, signature.args))):
                return self._fold_extremum(key, value.args, signature)
            return self._apply(FUNCTIONS, key, list(value.args), signature)
        self.refuse(f"`{getattr(key, '__name__', function)}`")

    def _named_tuple(self, value: ir.Expr, function, signature) -> str:
        result = signature.return_type
        given = dict(zip(result.fields, value.args, strict=False)) | dict(value.kws)
        return (
            f"({''.join(self.operand(given[name], t) + ', ' for name, t in zip(result.fields, result, strict=True))})"
        )

    def _vector(self, value: ir.Expr, signature) -> str:
        """float32x4(...) from numbers and shorter vectors, laid one after the other; one number fills it."""
        parts, base = [], signature.return_type.base_type
        for variable, wanted in zip(value.args, signature.args, strict=True):
            if isinstance(wanted, VectorType):
                parts += [f"{self.read(variable)}[{n}]" for n in range(wanted.num_elements)]
            else:
                parts.append(self.operand(variable, base))
        if len(parts) == 1:
            parts *= signature.return_type.num_elements
        return f"({', '.join(parts)},)"

    def _fold_extremum(self, function, args, signature) -> tuple:
        """max or min of many numbers, or of a tuple of them."""
        result = signature.return_type
        if len(args) == 1 and isinstance(signature.args[0], types.BaseTuple):
            over = self.scope.type(args[0].name)
            parts = [self.cast(f"{self.read(args[0])}[{n}]", t, result) for n, t in enumerate(over)]
        else:
            parts = [self.operand(variable, result) for variable in args]
        source = parts[0]
        for part in parts[1:]:
            source = FUNCTIONS[function].format(source, part)
        return source, result


def _index_variable(expression: ir.Expr) -> ir.Var:
    return expression.index_var if expression.op == "static_getitem" else expression.index


def tight(source: str) -> str:
    """`source` in brackets, unless it is a name, a call or the like already."""
    return source if re.fullmatch(r"[\w.]+(\[\w+\])*|[\w.]+\([^()]*\)", source) else f"({source})"


def _hashable(key) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return key is not None
