"""One basic block on its way to source: names, casts, statements, and how it ends."""

from numba.cuda import types
from numba.cuda.core import ir

from gpukern.simulate.lockstep.expressions import Expressions, tight
from gpukern.simulate.lockstep.operations import dtype_of, is_known, is_value
from gpukern.simulate.lockstep.program import Block, Move, Scope
from gpukern.simulate.report import Refused


class BlockLowering(Expressions):
    """One block on its way to source: statements in, lines out."""

    def __init__(self, code, pc: int, block: Block):
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
            if all(types.unliteral(a) == types.unliteral(b) for a, b in zip(old, new, strict=True)):
                return source
            parts = (self.cast(f"{source}[{n}]", a, b) for n, (a, b) in enumerate(zip(old, new, strict=True)))
            return f"({', '.join(parts)},)"
        if isinstance(new, types.Boolean):
            return f"({source} != 0)"
        wanted = self.dtype(new)
        if isinstance(new, types.Integer) and dtype_of(old).kind not in "iub":
            return f"to_int({source}, {wanted})"
        return f"{tight(source)}.astype({wanted})"

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
            said = (
                repr(statement.consts[n]) if n in statement.consts else self.read(v)
                for n, v in enumerate(statement.args)
            )
            self.lines.append(f"g.print({', '.join(said)})")
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
            return f"({', '.join(self._constant(v, t) for v, t in zip(value, type_, strict=True))},)"
        return self.code.constant(dtype_of(type_).type(value))

    def _store(self, statement) -> None:
        array = self.scope.type(statement.target.name)
        signature = self.scope.typed.calltypes[statement]
        if not isinstance(array, types.Array):
            self.refuse(f"an assignment to an element of {array}")
        index, whole = self._index(statement)
        if whole < array.ndim or isinstance(signature.args[2], types.Array):
            self.refuse("an assignment to a slice; assign element by element")
        value = self.operand(statement.value, array.dtype)
        self.lines.append(f'g.store({self.read(statement.target)}, {index}, {value}, "{self.line}")')

    def _index(self, expression) -> tuple:
        """Source of the index as a tuple, and how many of its parts are integers."""
        static = isinstance(expression, ir.StaticSetItem) or (
            isinstance(expression, ir.Expr) and expression.op == "static_getitem"
        )
        variable = expression.index_var if static else expression.index
        if variable is None:
            return f"({int(expression.index)},)", 1
        given = self.scope.type(variable.name)
        if not isinstance(given, types.BaseTuple):
            given, parts = [given], [self.read(variable)]
        else:
            parts = [f"{self.read(variable)}[{n}]" for n in range(len(given))]
        found, whole = [], 0
        for part, old in zip(parts, given, strict=True):
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
