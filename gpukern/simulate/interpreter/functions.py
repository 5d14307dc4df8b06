"""A kernel's Python, made ready to run: its source rewritten where Triton and Python mean different things.

Triton reads the source of a kernel; it does not run it. Where Python would do something else, the source is changed:

    total = 0.0           a variable holds a tensor, not a number: `total = _tensor(0.0)`
    a and b, not a        on blocks Triton works element by element, where Python would ask for one truth
    if a                  a block is refused: it has no one truth
    range(n)              the loop's variable is a tensor (int32, or int64 as its bounds): it wraps as on a card
    min(a, b), max(a, b)  element by element
    print("x", x)         tl.device_print

What the compiler refuses is refused here: of Python's builtins and of a module's values a kernel sees those that Triton
knows. Names are looked up in the kernel's globals and in the variables of the function around it, anew at each launch.
A line keeps its number, so that whatever happens can be told by the line on which the kernel's author wrote it.
"""

import ast
import builtins
import inspect
import sys
import textwrap
from types import BuiltinFunctionType, FunctionType, GeneratorType, ModuleType

import numpy as np
import triton.language as tl
from triton import knobs
from triton.compiler.code_generator import CodeGenerator
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITCallable

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
        self._members = _members(definition)
        tree.body[0] = _Rewriter(file).visit(definition)
        ast.fix_missing_locations(tree)
        self.namespace = {"__builtins__": _PYTHON}
        made = compile(tree, path, "exec")
        exec(made, self.namespace)
        self.call = self.namespace.pop(function.__name__)
        self.call.__defaults__, self.call.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        self.names = _names(self.call.__code__)
        self.upstream = str(function.__module__).partition(".")[0] == "triton"
        self.launch = None
        if not self.upstream:
            lines.know(self.call.__code__, file, path)

    def look_up(self, launch: int) -> None:
        """Bring the names that the function uses up to date."""
        fn, space = self.original, self.namespace
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        refused = space[_REFUSED] = {}
        for name in self.names:
            if name in cells:
                value = cells[name].cell_contents
            elif name in fn.__globals__:
                value = fn.__globals__[name]
            else:
                continue
            if self.upstream or _compiles(value):
                space[name] = language.replaced(value)
            else:
                space.pop(name, None)
                refused[name] = value
        for node, root, path in self._members:
            if not self.upstream and isinstance(space.get(root), ModuleType):
                self._check_member(node, space[root], path)
        space.update(_HELPERS)
        for name, value in _BUILTINS.items():
            if name not in cells and name not in fn.__globals__:
                space[name] = value
        self.launch = launch

    def _check_member(self, node, module: ModuleType, path: list) -> None:
        """Refuse `np.exp(x)`: a function of a module that is none of Triton's."""
        value = module
        for name in path:
            if isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "triton":
                return
            value = getattr(value, name, None)
        if isinstance(value, FunctionType | BuiltinFunctionType | np.ufunc):
            what = f"{module.__name__}.{'.'.join(path)}"
            file = self.line.rpartition(":")[0]
            why = (
                "Triton does not compile it. Use a function of triton.language, or decorate your own with @triton.jit."
            )
            raise InterpreterError(f"{file}:{node.lineno}: a kernel cannot call {what}: {why}")


def unknown(error: NameError) -> str:
    """What to do about a name that a kernel does not see; "" if it does not exist at all."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    refused = trace.tb_frame.f_globals.get(_REFUSED, {})
    if error.name not in refused:
        return ""
    value = refused[error.name]
    if isinstance(value, FunctionType):
        return f"{error.name} is a function of Python: decorate it with @triton.jit"
    return (
        f"{error.name} is a {type(value).__name__} outside of the kernel, which Triton does not compile: make it "
        f"{error.name} = tl.constexpr(...), or an argument"
    )


def _compiles(value) -> bool:
    """May a kernel use this value of its module, or of the function around it? As the compiler decides it."""
    if isinstance(value, ModuleType | InterpretedFunction | JITCallable | tl.dtype | tl.constexpr):
        return True
    if isinstance(value, tuple):
        return all(map(_compiles, value))
    named_tuple = isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")
    upstream = str(getattr(value, "__module__", "")).partition(".")[0] == "triton"
    own = getattr(value, "__triton_builtin__", False) or getattr(value, "__triton_aggregate__", False)
    return named_tuple or upstream or own or knobs.compilation.allow_non_constexpr_globals


def _members(definition: ast.FunctionDef) -> list:
    """[(node, "np", ["exp"])] for each call such as `np.exp(x)`."""
    found = []
    for node in ast.walk(definition):
        path, root = [], node.func if isinstance(node, ast.Call) else None
        while isinstance(root, ast.Attribute):
            path, root = [root.attr, *path], root.value
        if path and isinstance(root, ast.Name):
            found.append((node, root.id, path))
    return found


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
        node.iter = self._call("_loop", node.iter, ast.Constant(ast.unparse(node.target)))
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


def _loop(over, variable: str):
    """What a `for` goes over. A range is unrolled; any other loop is compiled once, for the types it begins with."""
    if not isinstance(over, range | GeneratorType):
        raise TypeError("a `for` in a kernel goes over range, tl.range or tl.static_range, and nothing else.")
    return over if isinstance(over, range) else _trips(over, variable, sys._getframe(1))


def _trips(over: GeneratorType, variable: str, kernel):
    """`over`, and after the first trip a look at the types: in a later one they are what they are."""
    before = {name: value.type for name, value in kernel.f_locals.items() if type(value) is tl.tensor}
    before.pop(variable, None)
    for first in over:
        yield first
        break
    for name, value in kernel.f_locals.items():
        if type(value) is tl.tensor and value.type != before.get(name, value.type):
            raise TypeError(
                f"{name} is {before[name]} before the loop and {value.type} after its first trip. Triton compiles a "
                f"loop only if each variable keeps its type: give {name} the right one before the loop, or convert it "
                "in the loop with .to(...)."
            )
    yield from over


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


def _print(prefix, *values):
    tl.device_print(prefix, *values)


_REFUSED = "_refused"  # in the namespace of a function: {name: value} of what the compiler would not let it use
_PYTHON = {name: getattr(builtins, name) for name in CodeGenerator.builtin_namespace}
_HELPERS = {"_truth": language.truth, "_loop": _loop, "_tensor": _tensor, "_and": _and, "_or": _or, "_not": _not}
_BUILTINS = {"range": language.tensor_range, "min": _least, "max": _most, "print": _print}
