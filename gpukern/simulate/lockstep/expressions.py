"""An expression of Numba's IR as source: operators, indexing, attributes, loops, calls."""

import operator
import re

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.core import ir
from numba.cuda.types.ext_types import Bfloat16

from gpukern.simulate.lockstep import calls
from gpukern.simulate.lockstep.operations import FLOPS, FUNCTIONS, NAMESPACE, NUMBERS, OPERATORS, dtype_of, is_value

_SPECIALS = {cuda.threadIdx: "t", cuda.blockIdx: "b", cuda.blockDim: "bd", cuda.gridDim: "gd"}


class Expressions:
    """The expressions of a BlockLowering."""

    def _expression(self, value: ir.Expr, target: str) -> tuple:
        """Source of an expression, and its type."""
        signature = self.scope.typed.calltypes.get(value)
        if value.op in ("binop", "inplace_binop"):
            return self._apply(OPERATORS, value.fn, [value.lhs, value.rhs], signature)
        if value.op == "unary":
            return self._apply(OPERATORS, value.fn, [value.value], signature)
        if value.op in ("getitem", "static_getitem", "typed_getitem"):
            return self._getitem(value, signature)
        if value.op == "getattr":
            return self._getattr(value, target)
        if value.op == "build_tuple":
            return f"({', '.join(self.read(v) for v in value.items)},)", self._tuple_type(value)
        if value.op == "exhaust_iter":
            return self.read(value.value), self.scope.type(value.value.name)
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

    def _apply(self, table: dict, function, operands: list, signature) -> tuple:
        """An operator or function of numbers: operands cast as the signature says, the result brought to its type."""
        numbers = all(isinstance(types.unliteral(t), NUMBERS) for t in signature.args)
        template = table.get(function)
        if template is None or not numbers or len(operands) != len(set(re.findall(r"{\d}", template))):
            name = getattr(function, "__name__", str(function))
            self.refuse(f"`{name}` of {', '.join(map(str, signature.args))}")
        if function is operator.not_:
            operands = [self.operand(operands[0], types.boolean)]
        else:
            operands = [self.operand(v, t) for v, t in zip(operands, signature.args, strict=True)]
        source = template.format(*(tight(o) for o in operands))
        if isinstance(signature.return_type, types.Float | Bfloat16) and function in FLOPS:
            self.code.flops[self.pc][self.line] += FLOPS[function]
        # Where NumPy's result has another type than Numba's (float32 ** int64), one more cast.
        samples = [np.ones(1, dtype_of(t)) for t in signature.args]
        names = {f"x{n}": s for n, s in enumerate(samples)}
        result = signature.return_type
        if isinstance(result, types.BaseTuple):
            return source, result
        made = eval(template.format(*names), NAMESPACE | names)
        if made.dtype != dtype_of(result):
            kind = made.dtype.kind
            to_int = isinstance(result, types.Integer) and kind not in "iub"
            source = f"to_int({source}, {self.dtype(result)})" if to_int else f"({source}).astype({self.dtype(result)})"
        return source, result

    def _getitem(self, value: ir.Expr, signature) -> tuple:
        source, container = self.read(value.value), self.scope.type(value.value.name)
        if isinstance(container, types.BaseTuple):
            if value.op == "static_getitem" and isinstance(value.index, int | slice):
                index = value.index if isinstance(value.index, int) else f"{value.index.start}:{value.index.stop}"
                picked = container[value.index] if isinstance(value.index, int) else types.Tuple(container[value.index])
                return f"{source}[{index}]", picked
            return f"g.choose({source}, {self.read(value.index)})", container.dtype
        if not isinstance(container, types.Array):
            self.refuse(f"indexing of {container}")
        index, whole = self._index(value)
        if isinstance(signature.return_type, types.Array):
            return f"{source}.slice({index})", signature.return_type
        return f'g.load({source}, {index}, "{self.line}")', container.dtype

    def _getattr(self, value: ir.Expr, target: str) -> tuple:
        owner, name = self.scope.type(value.value.name), value.attr
        type_ = self.scope.type(target)
        if isinstance(owner, types.Array):
            sources = {
                "shape": "{0}.shape",
                "size": "{0}.size",
                "strides": "{0}.byte_strides",
                "T": "{0}.T",
                "ndim": self.code.constant(np.int64(owner.ndim)),
                "itemsize": self.code.constant(np.int64(dtype_of(owner.dtype).itemsize)),
                "nbytes": "{0}.size * " + self.code.constant(np.int64(dtype_of(owner.dtype).itemsize)),
            }
            if name not in sources:
                self.refuse(f"`.{name}` of an array")
            return sources[name].format(self.read(value.value)), type_
        if isinstance(owner, types.Complex):
            return f"{self.read(value.value)}.{name}", type_
        module = self._known(value.value)
        if module in _SPECIALS:
            return f'g.special("{_SPECIALS[module]}{name}")', type_
        if module is cuda and name == "laneid":
            return 'g.special("lane")', type_
        if module is cuda and name == "warpsize":
            return self.code.constant(np.int32(32)), type_
        found = getattr(module, name, None)
        if isinstance(found, int | float | np.generic):
            return self._constant(found, type_), type_
        self.refuse(f"`.{name}` of {owner}")

    def _known(self, variable: ir.Var):
        """The Python object (module, function) that a variable stands for."""
        definition = self.scope.typed.ir.get_definition(variable)
        if isinstance(definition, ir.Global | ir.FreeVar | ir.Const):
            return definition.value
        if isinstance(definition, ir.Expr) and definition.op == "getattr":
            return getattr(self._known(definition.value), definition.attr, None)
        return None

    def _getiter(self, value: ir.Expr) -> tuple:
        signature = self.scope.typed.calltypes[value]
        over = signature.args[0]
        if isinstance(over, types.UniTuple):
            zero, one = (self.code.constant(np.int64(n)) for n in (0, 1))
            source = f"({zero}, {self.code.constant(np.int64(len(over)))}, {one}, {self.operand(value.value, over)})"
            return source, signature.return_type
        if not isinstance(over, types.RangeType):
            self.refuse(f"a loop over {over} (loop over range instead)")
        return self.read(value.value), signature.return_type

    def _iternext(self, value: ir.Expr) -> tuple:
        """A range under way is (next value, how many are left, step); taking the next one moves it on.

        A loop over a tuple is a range over its indices, with the tuple as a fourth part.
        """
        name = self.read(value.value)
        pair = self.scope.typed.calltypes[value].return_type
        over = self.scope.type(value.value.name)
        item, rest = f"{name}[0]", ""
        if isinstance(over, types.UniTupleIter):
            item, rest = f"g.choose({name}[3], {name}[0])", f", {name}[3]"
        self.lines.append(f"pair = ({item}, {name}[1] > 0)")
        self.write(value.value.name, f"({name}[0] + {name}[2], {name}[1] - 1, {name}[2]{rest})")
        return "pair", pair

    def _call(self, value: ir.Expr, target: ir.Var) -> tuple:
        signature = self.scope.typed.calltypes[value]
        function = self.scope.type(value.func.name)
        if value.vararg is not None:
            self.refuse("a call with *arguments")
        key = getattr(function, "typing_key", None)
        if isinstance(function, types.ExceptionClass):
            return "None", signature.return_type  # the raise that follows ends the thread
        if isinstance(function, types.NumberClass) or (_hashable(key) and key in (int, float)):
            old = self.scope.type(value.args[0].name)
            if not is_value(old):
                self.refuse(f"a conversion of {old} to a number")
            return self.cast(self.read(value.args[0]), old, signature.return_type), signature.return_type
        if isinstance(function, types.BoundFunction):
            self.refuse(f"`.{str(key).rpartition('.')[2]}()` of {function.this}")
        special = calls.SPECIAL.get(key) if _hashable(key) else None
        if special is not None:
            return special(self, value, signature, target), signature.return_type
        if isinstance(key, np.ufunc) and not any(isinstance(t, types.Array) for t in signature.args):
            places = ", ".join(f"{{{n}}}" for n in range(len(value.args)))
            return self._apply({key: f"np.{key.__name__}({places})"}, key, list(value.args), signature)
        if _hashable(key) and key in FUNCTIONS:
            if key in (max, min) and len(value.args) > 2:
                return self._fold_extremum(key, value.args, signature)
            return self._apply(FUNCTIONS, key, list(value.args), signature)
        self.refuse(f"`{getattr(key, '__name__', function)}`")

    def _fold_extremum(self, function, args, signature) -> tuple:
        source = self.operand(args[0], signature.return_type)
        for variable in args[1:]:
            source = FUNCTIONS[function].format(source, self.operand(variable, signature.return_type))
        return source, signature.return_type


def tight(source: str) -> str:
    """`source` in brackets, unless it is a name, a call or the like already."""
    return source if re.fullmatch(r"[\w.]+(\[\w+\])*|[\w.]+\([^()]*\)", source) else f"({source})"


def _hashable(key) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return key is not None
