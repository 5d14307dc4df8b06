"""A kernel's Python, made ready to run: its source rewritten where Triton and Python mean different things.

Triton reads the source of a kernel; it does not run it. Where Python would do something else, the source is changed:

    total = 0.0           a variable holds a tensor, not a number: `total = _tensor(0.0)`
    a and b, not a        on blocks Triton works element by element, where Python would ask for one truth
    if a                  a block is refused: it has no one truth
    range(n)              the loop's variable is a tensor (int32, or int64 as its bounds): it wraps as on a card
    min(a, b), max(a, b)  element by element

Names are looked up in the kernel's globals and in the variables of the function around it, anew at each launch. A line
keeps its number, so that whatever happens can be told by the line on which the kernel's author wrote it.
"""

import ast
import inspect
import textwrap
from types import GeneratorType

import triton.language as tl
from triton.compiler.code_generator import CodeGenerator
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction

from gpukern.simulate.interpreter import language, lines


def _known(kernel) -> "Function":
    """The Function of what @triton.jit made; it is kept there."""
    if "_prepared" not in kernel.__dict__:
        kernel._prepared = Function(kernel.fn)
    return kernel._prepared


def prepared(kernel, launch: int):
    """The function to call for a kernel, or for one that it calls, its names as they are at launch number `launch`."""
    known = _known(kernel)
    if known.launch != launch:
        known.look_up(launch)
    return known.call


def line(kernel) -> str:
    """ "file.py:12", where the `def` of a kernel stands."""
    return _known(kernel).line


def uses(kernel, name: str, launch: int) -> bool:
    """Does a kernel, or a function that it calls, use `name`, such as the "dot" of tl.dot?"""
    seen, waiting = set(), [kernel]
    while waiting:
        function = waiting.pop()
        prepared(function, launch)
        known = _known(function)
        if known.upstream or known in seen:
            continue
        seen.add(known)
        if name in known.names:
            return True
        waiting += [value for value in known.namespace.values() if isinstance(value, InterpretedFunction)]
    return False


class Function:
    """A function that Triton decorated, rewritten. call: what runs; line: "file.py:12", where its `def` stands."""

    def __init__(self, function):
        self.original = function
        code = function.__code__
        path = code.co_filename
        file = path.rpartition("/")[2]
        try:
            source = textwrap.dedent(inspect.getsource(function))
            tree = ast.parse(source)
        except (OSError, SyntaxError) as error:
            message = f"{file}:{code.co_firstlineno}: the source of {function.__name__} cannot be read ({error}); "
            raise InterpreterError(message + "Triton needs it: define the kernel in a file or a cell.") from None
        definition = tree.body[0]
        ast.increment_lineno(tree, code.co_firstlineno - 1)
        self.line = f"{file}:{definition.lineno}"
        _strip(definition)
        tree.body[0] = _Rewriter(file).visit(definition)
        ast.fix_missing_locations(tree)
        self.namespace = {}
        made = compile(tree, path, "exec")
        exec(made, self.namespace)
        self.call = self.namespace.pop(function.__name__)
        self.call.__defaults__, self.call.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        self.names = _names(self.call.__code__)
        self.upstream = function.__module__.partition(".")[0] == "triton"
        self.launch = None
        if not self.upstream:
            lines.know(self.call.__code__, file, path)

    def look_up(self, launch: int) -> None:
        """Bring the names that the function uses up to date."""
        fn, space = self.original, self.namespace
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        for name in self.names:
            if name in cells:
                space[name] = language.replaced(cells[name].cell_contents)
            elif name in fn.__globals__:
                space[name] = language.replaced(fn.__globals__[name])
        space.update(_HELPERS)
        for name, value in _BUILTINS.items():
            if name not in cells and name not in fn.__globals__:
                space[name] = value
        self.launch = launch


def _strip(definition: ast.FunctionDef) -> None:
    """Take away what is evaluated when a function is defined: decorators, annotations, default values."""
    definition.decorator_list, definition.returns = [], None
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if default is None else ast.Constant(None) for default in arguments.kw_defaults]


def _names(code) -> set:
    """The global names that a code object uses, with the functions in it."""
    inner = (constant for constant in code.co_consts if inspect.iscode(constant))
    return set(code.co_names).union(*map(_names, inner))


class _Rewriter(ast.NodeTransformer):
    def __init__(self, file: str):
        self.file = file

    def visit(self, node):
        """Refuse what Triton's compiler refuses, then rewrite."""
        name = type(node).__name__
        part = isinstance(node, ast.stmt | ast.expr) and not isinstance(node, ast.Starred | ast.FormattedValue)
        if part and not hasattr(CodeGenerator, "visit_" + name):
            self.refuse(node, f"a kernel cannot have `{name.lower()}`: Triton does not compile it")
        return super().visit(node)

    def refuse(self, node, why: str):
        raise InterpreterError(f"{self.file}:{node.lineno}: {why}.")

    def visit_AnnAssign(self, node):
        """`n: tl.constexpr = ...` stays what it is."""
        if node.value is not None:
            node.value = self.visit(node.value)
            if "constexpr" not in ast.unparse(node.annotation):
                node.value = self._call("_tensor", node.value)
        return node

    def visit_Assign(self, node):
        if len(node.targets) > 1:
            self.refuse(node, "`a = b = ...` assigns twice in one line: Triton does not compile it; write two lines")
        self.generic_visit(node)
        node.value = self._call("_tensor", node.value)
        return node

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        result = node.values[0]
        for value in node.values[1:]:
            nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
            later = ast.Lambda(args=nothing, body=value)
            result = self._call("_and" if isinstance(node.op, ast.And) else "_or", result, later)
        return ast.copy_location(result, node)

    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        return self._call("_not", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_If(self, node):
        """Also `while` and `a if condition else b`."""
        self.generic_visit(node)
        node.test = self._call("_truth", node.test)
        return node

    visit_While = visit_IfExp = visit_If

    def visit_For(self, node):
        self.generic_visit(node)
        node.iter = self._call("_loop", node.iter)
        return node

    def visit_Compare(self, node):
        if len(node.ops) > 1:
            self.refuse(node, "Triton does not compile a chain of comparisons; write `(a <= b) & (b < c)`")
        return self.generic_visit(node)

    @staticmethod
    def _call(name: str, first, *rest):
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [first, *rest], []), first)


def _tensor(value):
    """What a variable holds after `name = value`."""
    kind = type(value)
    if kind is tl.tensor:
        return value
    if kind in (int, float, bool, tl.constexpr):
        return language.semantic.to_tensor(value, False)
    if kind is tuple:
        return tuple(map(_tensor, value))
    return value


def _loop(over):
    """What a `for` goes over."""
    if not isinstance(over, range | GeneratorType):
        raise TypeError("a `for` in a kernel goes over range, tl.range or tl.static_range, and nothing else.")
    return over


def _is_block(value) -> bool:
    return isinstance(value, tl.tensor) and value.type.is_block()


def _and(a, b):
    if isinstance(a, tl.tensor):
        b = b()
        return a.logical_and(b) if _is_block(a) or isinstance(b, tl.tensor) else a and b
    return a and b()


def _or(a, b):
    if isinstance(a, tl.tensor):
        b = b()
        return a.logical_or(b) if _is_block(a) or isinstance(b, tl.tensor) else a or b
    return a or b()


def _not(a):
    return language.semantic.not_(a) if isinstance(a, tl.tensor) else not a


def _least(a, b, *more):
    result = tl.minimum(a, b) if isinstance(a, tl.tensor) or isinstance(b, tl.tensor) else min(a, b)
    return _least(result, *more) if more else result


def _most(a, b, *more):
    result = tl.maximum(a, b) if isinstance(a, tl.tensor) or isinstance(b, tl.tensor) else max(a, b)
    return _most(result, *more) if more else result


_HELPERS = {"_truth": language.truth, "_loop": _loop, "_tensor": _tensor, "_and": _and, "_or": _or, "_not": _not}
_BUILTINS = {"range": language.tensor_range, "min": _least, "max": _most}
