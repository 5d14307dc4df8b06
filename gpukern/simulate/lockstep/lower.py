"""Each basic block becomes, once, a Python function that runs it for all threads of a group with NumPy.

    def block_3(g):                               # matmul.py:36
        r = g.r
        acc, k = r["acc"], r["k"]
        a = g.load(a_tile, (ty.astype(int64), k), "matmul.py:37")
        r["acc"] = acc + a
        return 2

The source is kept (`Code.source`), for whoever wants to see what a warp executes.
"""

import keyword
import operator
import re

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.core import ir

from gpukern.simulate.lockstep import calls
from gpukern.simulate.lockstep.faults import Refused
from gpukern.simulate.lockstep.frontend import Typed
from gpukern.simulate.lockstep.operations import FUNCTIONS, NAMESPACE, OPERATORS, dtype_of, is_known, is_value
from gpukern.simulate.lockstep.program import Block, Move, Scope, flatten, live_registers

_SPECIALS = {cuda.threadIdx: "t", cuda.blockIdx: "b", cuda.blockDim: "bd", cuda.gridDim: "gd"}


class Code:
    """A kernel lowered for one signature.

    blocks          the functions, by program counter
    live            for each, the registers that have to be carried into it
    source          of them all
    shared_static   bytes of the static shared arrays; dynamic ones begin after them
    shared_granule  bytes of the smallest element in shared memory
    stored, loaded  names of the kernel's arguments through which it may write, and may read
    """

    def __init__(self, kernel: Typed):
        blocks = flatten(kernel)
        self.name = kernel.ir.func_id.func_name
        self.arguments, self.argument_types = list(kernel.ir.arg_names), kernel.signature.args
        self.shared_static, self.shared_granule, self.shared_dynamic = 0, 8, False
        self.grid_sync = any(b.end[0] == "barrier" and b.end[2] == "grid" for b in blocks)
        self.syncs_warps = False
        self.local_arrays = 0
        self.constants, self._registers, self._taken = {}, {}, {"g", "r", "pair"} | set(NAMESPACE)
        lowered = [BlockLowering(self, pc, block) for pc, block in enumerate(blocks)]
        self.live = live_registers(blocks, [b.uses for b in lowered], [b.defines for b in lowered])
        self.line_of_block = [b.scope.line(b.loc) for b in blocks]
        self.source = "\n\n".join(b.source(set().union(*(self.live[s] for s in b.block.successors))) for b in lowered)
        namespace = dict(NAMESPACE) | self.constants
        exec(compile(self.source, f"<{self.name} in lockstep>", "exec"), namespace)
        self.blocks = [namespace[f"block_{pc}"] for pc in range(len(blocks))]
        self.stored, self.loaded = _touched(blocks)
        self.dynamic = -(-self.shared_static // 16) * 16

    def constant(self, value) -> str:
        """A name for a value in the generated source."""
        for name, known in self.constants.items():
            if known is value or (np.ndim(value) == 0 and type(known) is type(value) and repr(known) == repr(value)):
                return name
        kind = value.dtype.name if isinstance(value, np.generic) else type(value).__name__
        name = self.name_for(f"{kind}_{value}" if np.ndim(value) == 0 else kind)
        self.constants[name] = value
        return name

    def name_for(self, wanted: str) -> str:
        """A Python name like `wanted` that the generated source does not use yet."""
        name = re.sub(r"\W", "_", wanted)
        if not name[0].isalpha():
            name = "t" + name
        while name in self._taken or keyword.iskeyword(name):
            name += "_"
        self._taken.add(name)
        return name

    def register(self, qualified: str) -> str:
        """The name in generated source of a variable of the flat program."""
        if qualified not in self._registers:
            self._registers[qualified] = self.name_for(qualified.replace("$", ""))
        return self._registers[qualified]


class BlockLowering:
    """One block on its way to source: statements in, lines out."""

    def __init__(self, code: Code, pc: int, block: Block):
        self.code, self.pc, self.block, self.scope = code, pc, block, block.scope
        self.lines, self.uses, self.defines = [], set(), set()
        self.line = block.scope.line(block.loc)
        for statement in block.statements:
            self._statement(statement)
        self.ending = self._end()

    def source(self, live_after: set) -> str:
        head = [f"def block_{self.pc}(g):  # {self.scope.line(self.block.loc)}", "    r = g.r"]
        head += [f'    {name} = r["{name}"]' for name in sorted(self.uses)]
        keep = [f'    r["{name}"] = {name}' for name in sorted(self.defines & live_after)]
        return "\n".join([*head, *("    " + line for line in self.lines), *keep, f"    return {self.ending}"])

    # --- names, constants, casts ---

    def refuse(self, construct: str):
        raise Refused(construct, self.line)

    def register(self, name: str, scope: Scope | None = None) -> str:
        return self.code.register((scope or self.scope).register(name))

    def read(self, variable: ir.Var, scope: Scope | None = None) -> str:
        """Source that gives a variable's value."""
        scope = scope or self.scope
        type_ = scope.type(variable.name)
        if isinstance(type_, types.Literal) and isinstance(type_.literal_value, int):
            return self.code.constant(dtype_of(type_).type(type_.literal_value))
        name = self.register(variable.name, scope)
        if name not in self.defines:
            self.uses.add(name)
        return name

    def write(self, name: str, source: str, scope: Scope | None = None) -> None:
        name = self.register(name, scope)
        self.lines.append(f"{name} = {source}")
        self.defines.add(name)

    def cast(self, source: str, old, new) -> str:
        """`source`, of Numba type `old`, as type `new`."""
        old, new = types.unliteral(old), types.unliteral(new)
        if old == new or not is_value(new) or isinstance(new, types.Array | types.RangeType | types.SliceType):
            return source
        if isinstance(new, types.BaseTuple):
            if all(types.unliteral(a) == types.unliteral(b) for a, b in zip(old, new)):
                return source
            parts = (self.cast(f"{source}[{n}]", a, b) for n, (a, b) in enumerate(zip(old, new)))
            return f"({', '.join(parts)},)"
        if isinstance(new, types.Boolean):
            return f"({source} != 0)"
        wanted = self.dtype(new)
        if isinstance(new, types.Integer) and dtype_of(old).kind not in "iub":
            return f"to_int({source}, {wanted})"
        return f"{_tight(source)}.astype({wanted})"

    def dtype(self, type_) -> str:
        """The name of a number's NumPy type in generated source."""
        try:
            name = dtype_of(type_).name
        except NotImplementedError:
            self.refuse(f"the type {type_}")
        return "bool_" if name == "bool" else name

    def operand(self, variable: ir.Var, wanted) -> str:
        return self.cast(self.read(variable), self.scope.type(variable.name), wanted)

    # --- statements ---

    def _statement(self, statement) -> None:
        if isinstance(statement, Move):
            self.line = self.block.scope.line(statement.loc)
            source = statement.source_scope.type(statement.source.name)
            final = statement.to.type(statement.target)
            if is_value(final):
                value = self.cast(self.read(statement.source, statement.source_scope), source, statement.passed_as)
                self.write(statement.target, self.cast(value, statement.passed_as, final), statement.to)
            return
        self.line = self.scope.line(statement.loc)
        if isinstance(statement, ir.Assign):
            self._assign(statement)
        elif isinstance(statement, ir.SetItem | ir.StaticSetItem):
            self._store(statement)
        elif isinstance(statement, ir.Print):
            self.lines.append(f"g.print({', '.join(self.read(v) for v in statement.args)})")
        elif not isinstance(statement, ir.Del):
            self.refuse(f"`{type(statement).__name__}`")

    def _assign(self, statement: ir.Assign) -> None:
        target, value = statement.target.name, statement.value
        type_ = self.scope.type(target)
        if isinstance(value, ir.Expr) and value.op == "call":
            source, given = self._call(value, statement.target)
            if source is None:
                return
        elif not is_value(type_) and not is_known(type_):
            self.refuse(f"a value of type {type_}")
        elif not is_value(type_) or (isinstance(type_, types.Literal) and isinstance(type_.literal_value, int)):
            return  # a module, a function, a constant: known when it is read
        elif isinstance(value, ir.Expr):
            source, given = self._expression(value, target)
        elif isinstance(value, ir.Arg):
            source, given = self._argument(value)
        elif isinstance(value, ir.Var):
            source, given = self.read(value), self.scope.type(value.name)
        else:  # Const, Global, FreeVar: frozen when the kernel was compiled
            source, given = self._constant(value.value, type_), type_
        self.write(target, self.cast(source, given, type_))

    def _argument(self, value: ir.Arg) -> tuple:
        name = self.register("arg." + value.name)
        self.uses.add(name)
        return name, self.scope.typed.signature.args[value.index]

    def _constant(self, value, type_) -> str:
        if isinstance(type_, types.Array):
            return f"g.constant_array({self.code.constant(value.copy())})"
        if isinstance(type_, types.BaseTuple):
            return f"({', '.join(self._constant(v, t) for v, t in zip(value, type_))},)"
        return self.code.constant(dtype_of(type_).type(value))

    def _store(self, statement) -> None:
        array = self.scope.type(statement.target.name)
        signature = self.scope.typed.calltypes[statement]
        if not isinstance(array, types.Array):
            self.refuse(f"an assignment to an element of {array}")
        index, whole = self._index(statement, signature.args[1])
        if whole < array.ndim or isinstance(signature.args[2], types.Array):
            self.refuse("an assignment to a slice; assign element by element")
        value = self.operand(statement.value, array.dtype)
        self.lines.append(f'g.store({self.read(statement.target)}, {index}, {value}, "{self.line}")')

    def _index(self, expression, wanted) -> tuple:
        """Source of the index as a tuple, and how many of its parts are integers."""
        static = isinstance(expression, ir.StaticSetItem) or (isinstance(expression, ir.Expr) and expression.op == "static_getitem")
        variable = expression.index_var if static else expression.index
        if variable is None:
            return f"({int(expression.index)},)", 1
        given = self.scope.type(variable.name)
        if not isinstance(given, types.BaseTuple):
            given, wanted, parts = [given], [wanted], [self.read(variable)]
        else:
            parts = [f"{self.read(variable)}[{n}]" for n in range(len(given))]
        found, whole = [], 0
        for part, old, new in zip(parts, given, wanted):
            if isinstance(old, types.SliceType):
                found.append(part)
            elif isinstance(old, types.IntegerLiteral):
                found.append(str(old.literal_value))  # a literal -1 is meant: a[-1] is the last element
                whole += 1
            elif isinstance(old, types.Integer):
                found.append(self.cast(part, old, types.intp))
                whole += 1
            else:
                self.refuse(f"an index of type {old}")
        return f"({', '.join(found)},)", whole

    # --- expressions ---

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
        if function not in table or not all(is_value(t) for t in signature.args):
            name = getattr(function, "__name__", str(function))
            self.refuse(f"`{name}` of {', '.join(map(str, signature.args))}")
        if any(not isinstance(types.unliteral(t), types.Number | types.Boolean | type(types.bfloat16)) for t in signature.args):
            name = getattr(function, "__name__", str(function))
            self.refuse(f"`{name}` of {', '.join(map(str, signature.args))}")
        template = table[function]
        if function is operator.not_:
            operands = [self.operand(operands[0], types.boolean)]
        else:
            operands = [self.operand(v, t) for v, t in zip(operands, signature.args)]
        source = template.format(*(_tight(o) for o in operands))
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
        index, whole = self._index(value, signature.args[1])
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
        if isinstance(function, types.NumberClass):
            old = self.scope.type(value.args[0].name)
            if not is_value(old):
                self.refuse(f"a conversion of {old} to a number")
            return self.cast(self.read(value.args[0]), old, signature.return_type), signature.return_type
        key = getattr(function, "typing_key", None)
        if isinstance(function, types.BoundFunction):
            self.refuse(f"`.{key[1] if isinstance(key, tuple) else key}()`")
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

    # --- the end of the block ---

    def _end(self) -> str:
        kind = self.block.end[0]
        if kind == "jump":
            return str(self.block.end[1])
        if kind == "branch":
            _, condition, yes, no, loc = self.block.end
            return f'g.branch({self.read(condition)}, {yes}, {no}, "{self.scope.line(loc)}")'
        if kind == "barrier":
            _, after, how, predicate, target, loc = self.block.end
            line = self.scope.line(loc)
            if predicate is None:
                return f'g.barrier({after}, "{how}", "{line}")'
            return f'g.barrier({after}, "{how}", "{line}", {self.read(predicate)}, "{self.register(target.name)}")'
        return "g.exit()"


def _tight(source: str) -> str:
    """`source` in brackets, unless it is a name, a call or the like already."""
    return source if re.fullmatch(r"[\w.]+(\[\w+\])*|[\w.]+\([^()]*\)", source) else f"({source})"


def _hashable(key) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return key is not None


def _touched(blocks: list[Block]) -> tuple:
    """The kernel's arguments that are written, and that are read, followed through assignments, slices and calls."""
    comes_from = {}  # register -> registers whose array it may be

    def name(scope, variable):
        return scope.register(variable if isinstance(variable, str) else variable.name)

    stored, loaded = set(), set()
    for block in blocks:
        scope = block.scope
        for statement in block.statements:
            if isinstance(statement, Move):
                to = comes_from.setdefault(name(statement.to, statement.target), set())
                to.add(name(statement.source_scope, statement.source))
                continue
            if isinstance(statement, ir.SetItem | ir.StaticSetItem):
                stored.add(name(scope, statement.target))
            if not isinstance(statement, ir.Assign):
                continue
            to, value = comes_from.setdefault(name(scope, statement.target), set()), statement.value
            if isinstance(value, ir.Arg):
                to.add(scope.register("arg." + value.name))
            elif isinstance(value, ir.Var):
                to.add(name(scope, value))
            elif isinstance(value, ir.Expr):
                to |= {name(scope, v) for v in value.list_vars()}
                if value.op in ("getitem", "static_getitem"):
                    loaded.add(name(scope, value.value))
                if value.op == "call":  # an atomic writes its first argument
                    stored |= {name(scope, v) for v in value.args if isinstance(scope.type(v.name), types.Array)}

    def roots(names):
        seen, todo = set(), list(names)
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += comes_from.get(at, ())
        return {n.removeprefix("arg.") for n in seen if n.startswith("arg.")}

    return roots(stored), roots(loaded)
