"""Triton's compiler, run in a process of its own: one that has Triton compile, whatever this process does with it.

A process either compiles `@triton.jit` functions or interprets them, decided once, when it imports Triton; and a fault
deep in the compiler ends the process that it is in. So there is a worker (`triton_worker`), started at the first kernel
and kept. It imports nothing of the kernel's own module: the kernel and the functions it calls are brought to it as
source, with the values that their other names have here, which makes a notebook's cell as good as a library.
"""

import ast
import atexit
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import numpy as np
import torch

from gpukern import device
from gpukern.inspect.result import Compiled, CompileError, read_log, static_shared

PATIENCE = 120  # seconds that the worker may take for one kernel
# Modules that the worker imports by name; of any other module it gets what the kernel uses.
_IMPORTED = {"triton", "torch", "numpy", "ml_dtypes", "builtins"} | sys.stdlib_module_names - {"__main__"}

_known = {}  # (the request, which has all of the kernel in it; the card) -> Compiled
_lock = threading.Lock()
_worker = None


def compiled(kernel, signature, on: device.Card, meta: dict) -> Compiled:
    """`inspect.compiled` for Triton."""
    function, arguments, meta = _settled(kernel, signature, meta)
    sources = _Sources()
    first = sources.encode(function)
    major, minor = on.compute_capability
    request = pickle.dumps(
        {
            "kernel": first,
            "arguments": {name: sources.encode(value) for name, value in arguments.items()},
            "typed": isinstance(signature, dict),
            "meta": {name: sources.encode(value) for name, value in meta.items()},
            "capability": 10 * major + minor,
            "functions": sources.functions,
        }
    )
    if (request, on.name) not in _known:
        _known[request, on.name] = _result(function.fn, _ask(request), on)
    return _known[request, on.name]


def _result(function: types.FunctionType, answer: dict, on: device.Card) -> Compiled:
    line = f"{Path(function.__code__.co_filename).name}:{function.__code__.co_firstlineno}"
    if "refused" in answer:
        raise CompileError(answer["refused"], answer["line"] or line)
    name, shared = function.__name__, answer["shared"]
    if shared > on.shared_per_block:
        raise CompileError(
            f"{name} wants {shared:,} bytes of shared memory a block; {on.name} has {on.shared_per_block:,}. Choose a "
            "smaller tile or fewer stages.",
            line,
        )
    threads = answer["warps"] * on.warp
    if threads > on.threads_per_block:
        raise CompileError(
            f"num_warps={answer['warps']} is a block of {threads} threads; {on.name} allows {on.threads_per_block}.",
            line,
        )
    return Compiled(
        name,
        "triton",
        on,
        threads,
        shared + static_shared(answer["ptx"]),
        **read_log(answer["log"]),
        ptx=answer["ptx"],
        cubin=answer["cubin"],
    )


def _settled(kernel, signature, meta: dict) -> tuple:
    """The jitted function itself, {parameter: value or type}, and meta with what autotuning and heuristics choose."""
    meta = dict(meta)
    if isinstance(signature, dict):
        arguments = {name: type_ for name, type_ in signature.items() if type_ != "constexpr"}
    elif isinstance(signature, tuple | list):
        names = kernel.arg_names
        if len(signature) > len(names):
            raise TypeError(f"{_name(kernel)} takes {len(names)} arguments; the signature has {len(signature)}.")
        arguments = dict(zip(names, signature, strict=False))
    else:
        raise TypeError(
            f"{signature!r} is no signature of a Triton kernel: give example arguments, or a dict such as "
            '{"x_ptr": "*fp32", "n": "i32"}.'
        )
    while type(kernel).__name__ not in ("JITFunction", "InterpretedFunction"):
        if hasattr(kernel, "configs"):  # @triton.autotune
            meta = {**kernel.configs[0].all_kwargs(), **meta}
        else:  # @triton.heuristics
            for name, choose in kernel.values.items():
                meta[name] = choose({**arguments, **meta})
        kernel = kernel.fn
    parameters = inspect.signature(kernel.fn).parameters
    arguments |= {name: meta.pop(name) for name in list(meta) if name in parameters}
    missing = [n for n, p in parameters.items() if n not in arguments and p.default is p.empty]
    unknown = [n for n in arguments if n not in parameters]
    if missing or unknown:
        what = f"no type or value for {', '.join(missing)}" if missing else f"no parameter {', '.join(unknown)}"
        raise TypeError(f"{_name(kernel)}: {what}; its parameters are {', '.join(parameters)}.")
    return kernel, arguments, meta


def _name(kernel) -> str:
    while not isinstance(kernel, types.FunctionType):
        kernel = kernel.fn
    return kernel.__name__


class _Sources:
    """Functions as source text, and values, in a form that another process can read without importing their modules.

    functions  a dict for each function met so far; in values they are called by their number in this list
    """

    def __init__(self):
        self.functions = []
        self._numbers = {}

    def encode(self, value, attributes=frozenset()) -> tuple:
        """`value` as (kind, ...). attributes: names that the code takes from it, should it be a module."""
        kind = type(value)
        root = kind.__module__.partition(".")[0]
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] in _IMPORTED:
                return "module", value.__name__
            used = sorted(name for name in attributes if hasattr(value, name))
            parts = {name: self.encode(getattr(value, name), attributes - {name}) for name in used}
            return "namespace", value.__name__, parts
        if root == "triton" and isinstance(getattr(value, "fn", None), types.FunctionType):
            if str(value.fn.__module__).partition(".")[0] == "triton":
                return "member", value.fn.__module__, value.fn.__qualname__
            return "function", self._number(value.fn, kind.__name__, value)
        if root == "triton" and kind.__name__ == "constexpr":
            return "constexpr", self.encode(value.value)
        if isinstance(value, types.FunctionType) and str(value.__module__).partition(".")[0] not in _IMPORTED:
            return "function", self._number(value, "plain", None)
        if isinstance(value, torch.Tensor):
            return "tensor", str(value.dtype), value.data_ptr() % 16
        if isinstance(value, np.ndarray):
            return "tensor", value.dtype.name, value.ctypes.data % 16
        if kind is tuple:
            return "tuple", [self.encode(part) for part in value]
        try:
            return "value", pickle.dumps(value)
        except Exception:  # whatever it is, Triton has no use for it, and says so
            return "unknown", kind.__name__

    def _number(self, function: types.FunctionType, kind: str, jitted) -> int:
        if function in self._numbers:
            return self._numbers[function]
        number = self._numbers[function] = len(self.functions)
        try:
            lines, first = inspect.getsourcelines(function)
        except OSError as error:
            raise CompileError(
                f"the source of {function.__name__} cannot be read: define it in a file or a cell."
            ) from error
        tree = ast.parse(textwrap.dedent("".join(lines)))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        attributes = frozenset(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        entry = {
            "name": function.__name__,
            "qualname": function.__qualname__,
            "module": function.__module__,
            "file": function.__code__.co_filename,
            "first": first,
            "lines": lines,
            "kind": kind,
            "options": _options(jitted),
        }
        self.functions.append(entry)
        scope = {**function.__globals__, **_enclosing(function)}
        entry["names"] = {name: self.encode(scope[name], attributes) for name in sorted(names) if name in scope}
        return number


def _enclosing(function: types.FunctionType) -> dict:
    """The variables of enclosing functions that `function` uses, as far as they have a value."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def _options(jitted) -> dict:
    """What the decorator was told that the compiler heeds."""
    told = getattr(jitted, "kwargs", None)  # of an interpreted function
    names = ("do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")
    return {name: told.get(name) if told is not None else getattr(jitted, name, None) for name in names}


class _Worker:
    """The process that compiles, and the pipe to it."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="gpukern-")
        self.pipe: Connection
        self.pipe, theirs = Pipe()
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "0",
            "TRITON_ALWAYS_COMPILE": "1",  # what comes from Triton's cache comes without the assembler's words
            "TRITON_CACHE_DIR": self.folder.name,
            "TRITON_DUMP_PTXAS_LOG": "1",
        }
        script = Path(__file__).with_name("triton_worker.py")
        self.said = Path(self.folder.name, "said")
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(theirs.fileno()), self.folder.name],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,  # an interrupt at the keyboard is for us
            )
        theirs.close()
        self.owner = os.getpid()

    def ask(self, request: bytes) -> dict:
        self.pipe.send_bytes(request)
        if not self.pipe.poll(PATIENCE):
            raise TimeoutError
        return pickle.loads(self.pipe.recv_bytes())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self.folder.cleanup()


def _ask(request: bytes) -> dict:
    """The worker's answer. A worker that is gone, or hangs, is a CompileError, and the next kernel gets a new one."""
    global _worker
    with _lock:
        if (
            _worker is None or _worker.owner != os.getpid()
        ):  # none yet, or it belongs to the process we were forked from
            _worker = _Worker()
        answered = False
        try:
            answer = _worker.ask(request)
            answered = True
        except TimeoutError:
            raise CompileError(f"Triton's compiler did not answer within {PATIENCE} s. Try a smaller tile.") from None
        except (EOFError, OSError):
            said = _worker.said.read_text(errors="replace").strip().splitlines()
            why = ": ".join(["Triton's compiler ended before it had an answer", *said[-1:]])
            raise CompileError(f"{why}. Nothing is known of this kernel; others can be compiled.") from None
        finally:
            if not answered:  # an interrupt, too, must not leave an answer that the next kernel would get
                _end_worker()
        return answer


@atexit.register
def _end_worker() -> None:
    global _worker
    if _worker is not None and _worker.owner == os.getpid():
        _worker.end()
    _worker = None
