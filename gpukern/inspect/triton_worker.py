"""The process in which Triton compiles (see `triton_compiler`, which starts it and says what a request is).

It is run as a script, imports Triton and nothing of gpukern or of the kernel's modules, and serves one request after
the other until the other end of its pipe closes.
"""

import ast
import builtins
import contextlib
import importlib
import io
import linecache
import pickle
import re
import shutil
import sys
import textwrap
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction, create_function_from_signature


class Tensor:
    """What the launcher looks at in a tensor: its dtype, and whether its address is divisible by 16."""

    def __init__(self, dtype: str, address: int):
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


class Unknown:
    """Stands for a value that could not be brought here. Triton refuses it as it would have refused the value."""


class Values(pickle.Unpickler):
    """Reads values without importing modules that are not Triton's, NumPy's, PyTorch's or Python's own."""

    def find_class(self, module: str, name: str):
        root = module.partition(".")[0]
        if root not in {"triton", "torch", "numpy", "ml_dtypes"} | sys.stdlib_module_names or root == "__main__":
            raise pickle.UnpicklingError(module)
        return super().find_class(module, name)


class Functions:
    """The functions of one request, made from their sources."""

    def __init__(self, sources: list):
        for source in sources:
            linecache.cache.pop(source["file"], None)
        for source in sources:
            self._show(source)
        self.spaces = [{"__builtins__": builtins, "__name__": source["module"]} for source in sources]
        self.sources = sources
        self.made = [None] * len(sources)
        # From the last to the first: a function comes before those that it calls, and its defaults may want them.
        for number in reversed(range(len(sources))):
            self._make(number)
        for number, source in enumerate(sources):  # functions that call each other in a circle
            self.spaces[number].update({name: self.decode(value) for name, value in source["names"].items()})

    @staticmethod
    def _show(source: dict) -> None:
        """Let Python find the lines of the source where Triton will look for them; between functions stands `...`."""
        known = linecache.cache.get(source["file"], (0, None, []))[2]
        first, lines = source["first"] - 1, source["lines"]
        known = known[:first] + ["...\n"] * (first - len(known)) + lines + known[first + len(lines) :]
        linecache.cache[source["file"]] = (sum(map(len, known)), None, known, source["file"])

    def _make(self, number: int) -> None:
        source, space = self.sources[number], self.spaces[number]
        space.update({name: self.decode(value) for name, value in source["names"].items()})
        tree = ast.parse(textwrap.dedent("".join(source["lines"])))
        tree.body[0].decorator_list = []
        ast.increment_lineno(tree, source["first"] - 1)
        exec(compile(tree, source["file"], "exec"), space)
        function = space[source["name"]]
        function.__qualname__ = source["qualname"]
        if source["kind"] == "ConstexprFunction":
            function = triton.constexpr_function(function)
        elif source["kind"] != "plain":
            function = JITFunction(function, **source["options"])
        self.made[number] = space[source["name"]] = function

    def decode(self, value: tuple):
        kind, *rest = value
        if kind == "function":
            return self.made[rest[0]]
        if kind == "module":
            return importlib.import_module(rest[0])
        if kind == "member":
            member = importlib.import_module(rest[0])
            for name in rest[1].split("."):
                member = getattr(member, name)
            return member
        if kind == "namespace":
            module = types.ModuleType(rest[0])
            module.__dict__.update({name: self.decode(v) for name, v in rest[1].items()})
            return module
        if kind == "constexpr":
            return tl.constexpr(self.decode(rest[0]))
        if kind == "tuple":
            return tuple(self.decode(part) for part in rest[0])
        if kind == "tensor":
            return Tensor(*rest)
        if kind == "value":
            with contextlib.suppress(Exception):
                return Values(io.BytesIO(rest[0])).load()
        return Unknown()

    def place(self, error: CompilationError) -> tuple[str, str]:
        """("file.py:12", the text of that line) of the statement that Triton refuses."""
        line = getattr(error.node, "lineno", 1)
        for made, source in zip(self.made, self.sources, strict=True):
            if getattr(made, "src", None) == error.src:
                return f"{Path(source['file']).name}:{made.starting_line_number + line - 1}", error.src.splitlines()[
                    line - 1
                ]
        return "", (error.src or "").splitlines()[line - 1 : line][0]


def typed(parameter, value) -> tuple:
    """What the launcher would find for a parameter whose type is given: (type, what it is specialised on)."""
    if parameter.is_constexpr or not isinstance(value, str) or value == "constexpr":
        return "constexpr", value
    name, _, known = value.partition(":")
    if known == "1" and not name.startswith("*"):
        return "constexpr", 1
    divisible = known == "16" or (name.startswith("*") and not known)
    return name, "D" if divisible else ""


def compile_kernel(request: dict, functions: Functions) -> dict:
    kernel = functions.decode(request["kernel"])
    arguments = {name: functions.decode(value) for name, value in request["arguments"].items()}
    options = {name: functions.decode(value) for name, value in request["meta"].items()}
    options.setdefault("debug", kernel.debug)
    target = GPUTarget("cuda", request["capability"], 32)
    backend = make_backend(target)
    if request["typed"]:
        bound = kernel.signature.bind(**arguments)
        bound.apply_defaults()
        bound = bound.arguments
        special = [typed(parameter, bound[parameter.name]) for parameter in kernel.params]
        # The number 1 is compiled in, as the launcher does it.
        bound = {name: 1 if s == ("constexpr", 1) else v for (name, v), s in zip(bound.items(), special, strict=True)}
    else:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, special, options = bind(**arguments, **options)
    options, signature, constants, attributes = kernel._pack_args(backend, options, bound, special, options)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        source = ASTSource(kernel, signature, constants, attributes)
        made = triton.compile(source, target=target, options=options.__dict__)
    return {
        "ptx": made.asm["ptx"],
        "cubin": made.asm["cubin"],
        "shared": made.metadata.shared,
        "warps": made.metadata.num_warps,
        "log": log.getvalue(),
    }


def refusal(error: Exception, functions: Functions | None) -> dict:
    """Triton's words, and the line it was at: of the innermost function, where one calls another."""
    line, source, words = "", "", ""
    while error is not None:
        if isinstance(error, CompilationError):
            line, source = functions.place(error)
            words = error.error_message or ""
        else:
            words = str(error.args[0]) if error.args else _asserted(error)
            words = f"Triton knows no {words}" if isinstance(error, KeyError) else words
        error = error.__cause__
    said = re.fullmatch(r"""\w*Error\((["'])(.*)\1\)""", words.strip(), re.DOTALL)  # an error, as Python would write it
    words = said.group(2).replace("\\'", "'") if said else words.strip()
    if words == "PassManager::run failed":
        words = (
            "Triton's passes fail on this kernel, and do not say where. Does it return a value? A kernel returns none."
        )
    return {"line": line, "refused": words + (f"\n    {source.strip()}" if source else "")}


def _asserted(error: Exception) -> str:
    """The line of an assertion that has no words."""
    last = traceback.extract_tb(error.__traceback__)[-1:] if isinstance(error, AssertionError) else []
    return last[0].line if last and last[0].line else type(error).__name__


def main(pipe: Connection, folder: str) -> None:
    """Serve what comes through `pipe` until it closes; then nobody is left who would remove `folder`."""
    while True:
        try:
            request = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            return
        functions = None
        try:
            functions = Functions(request["functions"])
            answer = compile_kernel(request, functions)
        except Exception as error:  # of whatever kind: the compiler refuses the kernel
            answer = refusal(error, functions)
        pipe.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), sys.argv[2])
