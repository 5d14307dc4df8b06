"""One basic block on its way to source: names, casts, statements, and how it ends."""

import contextlib

from numba.cuda import types
from numba.cuda.core import ir
from numba.cuda.types.ext_types import Bfloat16
from numba.cuda.typing.typeof import typeof

from gpukern.simulate.lockstep.callees import Default, Part
from gpukern.simulate.lockstep.expressions import Expressions, tight
from gpukern.simulate.lockstep.iteration import Iteration
from gpukern.simulate.lockstep.kinds import dtype_of, is_known, is_number, is_value
from gpukern.simulate.lockstep.program import Block, Move, Scope
from gpukern.simulate.report import Refused


def _indexed(expression) -> ir.Var:
    """The array that an expression or an assignment indexes."""
    return expression.target if isinstance(expression, ir.SetItem | ir.StaticSetItem) else expression.value


class BlockLowering(Expressions, Iteration):
    """One block on its way to source: statements in, lines out."""

    def __init__(self, code, pc: int, block: Block):
        self.code, self.pc, self.block, self.scope = code, pc, block, block.scope
        self.lines, self.uses, self.defines = [], set(), set()
        self.line = block.scope.line(block.loc)
        for statement in block.statements:
            with self._clearly():
                self._statement(statement)
        with self._clearly():
            self.ending = self._end()

    def source(self, live_after: set) -> str:
        head = [f"def block_{self.pc}(g):  # {self.scope.line(self.block.loc)}", "    r = g.r"]
        head += [f'    {name} = r["{name}"]' for name in sorted(self.uses)]
        keep = [f'    r["{name}"] = {name}' for name in sorted(self.defines & live_after)]
        return "\n".join([*head, *("    " + line for line in self.lines), *keep, f"    return {self.ending}"])

    # --- names, constants, casts ---

    def refuse(self, construct: str):
        raise Refused(construct, self.line)

    @contextlib.contextmanager
    def _clearly(self):
        """A construct that nobody thought of is refused with its line, and is no traceback from in here."""
        try:
            yield
        except (Refused, MemoryError, RecursionError):
            raise
        except Exception as error:
            raise Refused(f"this line ({type(error).__name__}: {error})", self.line) from error

    def register(self, name: str, scope: Scope | None = None) -> str:
        return self.code.register((scope or self.scope).register(name))

    def read(self, variable: ir.Var, scope: Scope | None = None) -> str:
        """Source that gives a variable's value."""
        scope = scope or self.scope
        type_ = scope.type(variable.name)
        if isinstance(type_, types.Literal) and isinstance(type_.literal_value, int):
            return self.code.constant(dtype_of(type_).type(type_.literal_value))
        if not is_value(type_):
            return "None"
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
        if old == new or not is_value(new):
            return source
        if isinstance(new, types.Optional):  # (value, is there one?)
            if isinstance(old, types.NoneType):
                return f"({self.code.constant(dtype_of(new.type).type(0))}, np.False_)"
            if isinstance(old, types.Optional):
                return f"({self.cast(f'{source}[0]', old.type, new.type)}, {source}[1])"
            return f"({self.cast(source, old, new.type)}, np.True_)"
        if isinstance(old, types.Optional):
            return self.cast(f"{source}[0]", old.type, new)
        if isinstance(new, types.BaseTuple):
            if all(types.unliteral(a) == types.unliteral(b) for a, b in zip(old, new, strict=True)):
                return source
            parts = (self.cast(f"{source}[{n}]", a, b) for n, (a, b) in enumerate(zip(old, new, strict=True)))
            return f"({', '.join(parts)},)"
        if not is_number(new):
            return source
        if not is_number(old):
            self.refuse(f"a conversion of {old} to {new}")
        if isinstance(new, types.Boolean):
            return f"({source} != 0)"
        wanted = self.dtype(new)
        if dtype_of(new).kind in "iu" and dtype_of(old).kind not in "iub":
            return f"to_int({source}, {wanted})"
        return f"{tight(source)}.astype({wanted})"

    def dtype(self, type_) -> str:
        """The name of a type's NumPy type in generated source."""
        if isinstance(type_, types.Record):
            return self.code.constant(dtype_of(type_))
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
            self._move(statement)
            return
        self.line = self.scope.line(statement.loc)
        if isinstance(statement, ir.Assign):
            self._assign(statement)
        elif isinstance(statement, ir.SetItem | ir.StaticSetItem):
            self._store(statement)
        elif isinstance(statement, ir.SetAttr):
            self._store_field(statement.target, statement.attr, statement.value)
        elif isinstance(statement, ir.Print):
            said = [self._said(v, self.scope.type(v.name)) for v in statement.args]
            form = " ".join(f for f, _ in said)
            self.lines.append(f"say(g, {form!r}{''.join(', ' + part for _, parts in said for part in parts)})")
        elif not isinstance(statement, ir.Del):
            self.refuse(f"`{type(statement).__name__}`")

    def _move(self, move: Move) -> None:
        """Hand a value over between scopes, as the type at the border."""
        self.line = self.block.scope.line(move.loc)
        final = move.to.type(move.target)
        if not is_value(final) or (isinstance(final, types.Literal) and isinstance(final.literal_value, int)):
            return
        source, given = self._handed(move.source, move.source_scope)
        self.write(move.target, self.cast(self.cast(source, given, move.passed_as), move.passed_as, final), move.to)

    def _handed(self, given, scope: Scope) -> tuple:
        """Source and type of what is handed over: a Callee's source."""
        if isinstance(given, tuple):
            parts = [self._handed(part, scope) for part in given]
            return f"({''.join(source + ', ' for source, _ in parts)})", types.Tuple([t for _, t in parts])
        if isinstance(given, Part):
            return f"{self.read(given.variable, scope)}[{given.index}]", scope.type(given.variable.name)[given.index]
        if isinstance(given, Default):
            type_ = typeof(given.value)
            return (self._constant(given.value, type_) if is_value(type_) else "None"), type_
        return self.read(given, scope), scope.type(given.name)

    def _said(self, variable: ir.Var, type_) -> tuple:
        """How print() formats a variable, as C's printf does on the card, and the values that go in."""
        if isinstance(type_, types.StringLiteral):
            return type_.literal_value.replace("%", "%%"), []
        if isinstance(type_, types.BaseTuple):
            parts = [self._form(t) for t in type_]
            source = self.read(variable)
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})", [f"{source}[{n}]" for n in range(len(parts))]
        return self._form(type_), [self.read(variable)]

    def _form(self, type_) -> str:
        plain = types.unliteral(type_)
        if isinstance(plain, types.Boolean):
            return "%s"
        if isinstance(plain, types.Integer):
            return "%d"
        if isinstance(plain, types.Float | Bfloat16):
            return "%f"
        self.refuse(f"print of {type_}")

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
        type_ = self.scope.typed.signature.args[value.index]
        if isinstance(type_, types.Omitted):
            given = typeof(type_.value)
            return (self._constant(type_.value, given) if is_value(given) else "None"), given
        name = self.register("arg." + value.name)
        self.uses.add(name)
        return name, type_

    def _constant(self, value, type_) -> str:
        if isinstance(type_, types.Array):
            return f"g.constant_array({self.code.constant(value.copy())})"
        if isinstance(type_, types.BaseTuple):
            return f"({''.join(self._constant(v, t) + ', ' for v, t in zip(value, type_, strict=True))})"
        if isinstance(type_, types.EnumMember):
            value = value.value
        if not is_value(type_):
            return "None"
        if not is_number(type_):
            self.refuse(f"a constant of type {type_}")
        return self.code.constant(dtype_of(type_).type(value))

    def _store(self, statement) -> None:
        target = self.scope.type(statement.target.name)
        self.scope.typed.calltypes[statement]
        if isinstance(target, types.Record):
            self._store_field(statement.target, self._field_name(statement), statement.value)
            return
        if isinstance(target, types.NumpyFlatType):
            where = f"flat_index({self.read(statement.target)}[3], {self.operand(statement.index, types.intp)})"
            value = self.operand(statement.value, target.dtype)
            self.lines.append(f'g.store({self.read(statement.target)}[3], {where}, {value}, "{self.line}")')
            return
        if not isinstance(target, types.Array):
            self.refuse(f"an assignment to an element of {target}")
        index, whole = self._index(statement)
        view = self.read(statement.target)
        if whole < target.ndim:  # all axes that are left have no length: a[...] of an array without axes
            view, index = f"{view}.slice({index})", "()"
        if isinstance(target.dtype, types.Record):
            record = self.read(statement.value)
            self.lines.append(f'copy_record(g, record(g, {view}, {index}, "{self.line}"), {record}, "{self.line}")')
            return
        value = self.operand(statement.value, target.dtype)
        self.lines.append(f'g.store({view}, {index}, {value}, "{self.line}")')

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
            elif isinstance(old, types.EllipsisType):
                axes = self.scope.type(_indexed(expression).name).ndim
                given_axes = sum(not isinstance(t, types.EllipsisType | types.NoneType) for t in given)
                found += ["(None, None, None)"] * (axes - given_axes)
            elif isinstance(old, types.NoneType):
                found.append("None")
            elif isinstance(old, types.IntegerLiteral):
                found.append(str(old.literal_value))  # a literal -1 is meant: a[-1] is the last element
                whole += 1
            elif is_number(old) and dtype_of(old).kind in "iub":
                found.append(self.cast(part, old, types.intp))
                whole += 1
            else:
                self.refuse(f"an index of type {old}")
        return f"({''.join(part + ', ' for part in found)})", whole

    # --- the end of the block ---

    def _end(self) -> str:
        kind = self.block.end[0]
        if kind == "jump":
            return str(self.block.end[1])
        if kind == "branch":
            _, condition, yes, no, loc = self.block.end
            truth = self.truth(condition)
            return f'g.branch({truth}, {yes}, {no}, "{self.scope.line(loc)}")'
        if kind == "barrier":
            _, after, how, predicate, target, loc = self.block.end
            line = self.scope.line(loc)
            if predicate is None:
                return f'g.barrier({after}, "{how}", "{line}")'
            return f'g.barrier({after}, "{how}", "{line}", {self.read(predicate)}, "{self.register(target.name)}")'
        return "g.exit()"
