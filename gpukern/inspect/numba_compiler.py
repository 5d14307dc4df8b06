"""Numba-CUDA's compiler, run for a card that need not be there.

Numba compiles without a card, once two questions of its that go to the driver are answered here: which compute
capability there is, and what a device function was compiled to. The second because device functions are compiled when
the call of one is typed, and kept by their dispatcher: for this machine's card, or, on the simulated GPU, only typed.
So for the time of one compilation each dispatcher that is called gets an empty store, and its own back afterwards.
"""

import contextlib
import dataclasses
import linecache
import math
import re
import subprocess
import tempfile
import types as python_types
import weakref
from pathlib import Path

import torch
from numba.cuda import dispatcher as dispatchers
from numba.cuda import types
from numba.cuda.codegen import CUDACodeLibrary
from numba.cuda.compiler import compile_cuda
from numba.cuda.core import ir, sigutils
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.cudadrv import driver
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.typing.typeof import Purpose, typeof

from gpukern import device
from gpukern.inspect import tools
from gpukern.inspect.result import Compiled, CompileError, read_log, static_shared

_known = weakref.WeakKeyDictionary()  # dispatcher -> {(argument types, card): Compiled}


def compiled(kernel: CUDADispatcher, signature, on: device.Card) -> Compiled:
    """`inspect.compiled` for Numba."""
    known, key = _known.setdefault(kernel, {}), (_argument_types(signature), on.name)
    if key not in known:
        known[key] = _compile(kernel, key[0], on)
    return known[key]


def _argument_types(signature) -> tuple:
    """Numba's types of the arguments, from a signature or from example arguments."""
    if isinstance(signature, str) or not isinstance(signature, tuple | list):
        try:
            types_, result = sigutils.normalize_signature(signature)
        except Exception as error:
            raise TypeError(
                f"{signature!r} is no signature of Numba, such as 'void(float32[:], int64)': {error}"
            ) from error
        if result not in (None, types.none):
            raise TypeError(f"{signature!r}: a kernel returns nothing; write void(...).")
        return types_
    return tuple(value if isinstance(value, types.Type) else _type_of(value) for value in signature)


def _type_of(value):
    if isinstance(value, torch.Tensor) and value.is_cuda:
        value = device.numba_array(value)
    elif isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        import ml_dtypes  # NumPy has no bfloat16: ml_dtypes' type stands for it

        value = value.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    elif isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    try:
        return typeof(value, Purpose.argument)
    except ValueError as error:
        raise TypeError(f"{value!r} cannot be an argument of a kernel: {error}") from error


def _compile(kernel: CUDADispatcher, argument_types: tuple, on: device.Card) -> Compiled:
    code = kernel.py_func.__code__
    if len(argument_types) != code.co_argcount:
        raise TypeError(f"{code.co_name} takes {code.co_argcount} arguments; the signature has {len(argument_types)}.")
    try:
        with global_compiler_lock, _for_card(on):
            made = dispatchers._Kernel(kernel.py_func, argument_types, **kernel.targetoptions)
            # What is assembled. Where there is nvJitLink, Numba optimises once more while it links.
            ptx = made.library.get_lto_ptx() if made.library._lto else made.library.get_asm_str()
            ptx = ptx.strip("\0\n")
            shared = static_shared(ptx)
            cubin, log, why = _assemble(made.library, ptx)
    except Exception as error:  # of whatever kind: they are many, and some come from Python code in the compiler
        raise _refusal(error, code) from error
    if shared > on.shared_static:
        raise CompileError(
            f"{code.co_name} has {shared:,} bytes of shared arrays; a block has {on.shared_static:,}. Use less.",
            _place(code.co_filename, code.co_firstlineno),
        )
    bound = re.search(r"\.maxntid (\d+)(?:, (\d+), (\d+))?", ptx)
    threads = math.prod(int(n) for n in bound.groups() if n) if bound else None
    return Compiled(code.co_name, "numba", on, threads, shared, **read_log(log), ptx=ptx, cubin=cubin, why_no_cubin=why)


@contextlib.contextmanager
def _for_card(on: device.Card):
    """Inside the `with`, Numba compiles for `on`, device functions too."""
    capability = on.compute_capability
    stores = {}  # dispatcher of a device function -> what it had compiled before
    template = CUDADispatcher.get_call_template

    def get_call_template(self, args, kws):
        if self not in stores:
            stores[self], self.overloads = self.overloads, type(self.overloads)()
            if not self._can_compile:  # declared for given types only
                for declared, before in stores[self].items():
                    compile_device(self, declared, before.signature.return_type)
        return template(self, args, kws)

    def compile_device(self, args, return_type=None):
        if args not in self.overloads:
            options = self.targetoptions
            chosen = {name: options.get(name) for name in ("debug", "lineinfo", "forceinline", "fastmath")}
            nvvm_options = {"opt": 3 if options.get("opt") else 0, "fastmath": options.get("fastmath")}
            nvvm_options |= {"g": None} if options.get("debug") else {}
            with self._compiling_counter:
                made = compile_cuda(
                    self.py_func, return_type, args, inline=options.get("inline", "never"), cc=capability,
                    nvvm_options=nvvm_options, **chosen,
                )  # fmt: skip
            self.overloads[args] = made
            made.target_context.insert_user_function(made.entry_point, made.fndesc, [made.library])
        return self.overloads[args]

    # From 9.0 on Numba compiles for the very card ("sm_90a"), as it does with one in front of it.
    replaced = [
        (CUDADispatcher, "compile_device", compile_device),
        (CUDADispatcher, "get_call_template", get_call_template),
        (CUDACodeLibrary, "_ensure_cc", lambda self, cc: (*capability, "a" if capability >= (9, 0) else "")),
        (dispatchers, "get_current_device", lambda: python_types.SimpleNamespace(compute_capability=capability)),
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, mine in replaced:
        setattr(owner, name, mine)
    try:
        yield
    finally:
        for (owner, name, _), theirs in zip(replaced, before, strict=True):
            setattr(owner, name, theirs)
        for function, store in stores.items():
            for made in function.overloads.values():
                made.target_context.remove_user_function(made.entry_point)
            function.overloads = store


def _assemble(library: CUDACodeLibrary, ptx: str) -> tuple[bytes | None, str, str]:
    """The cubin, what the assembler said, and why there is no cubin."""
    if driver._have_nvjitlink():  # what Numba itself uses on a card
        link = driver._Linker(library._max_registers, cc=library._ensure_cc(None), lto=library._lto)
        library._link_all(link, link.cc)
        options = dataclasses.replace(link._get_linker_options(ptx=False), ptxas_options=["-v"])
        linker = driver.Linker(*link._object_codes, options=options)
        cubin = linker.link("cubin").code
        return cubin, linker.get_info_log(), ""
    if library._linking_files or library.needs_cudadevrt:
        return None, "", "the kernel needs a library, and only nvJitLink links one: pip install 'numba-cuda[cu13]'."
    return _assemble_with_ptxas(library, ptx)


def _assemble_with_ptxas(library: CUDACodeLibrary, ptx: str) -> tuple[bytes | None, str, str]:
    architecture = re.search(r"\.target (\w+)", ptx).group(1)
    most = [f"--maxrregcount={library._max_registers}"] if library._max_registers else []
    reasons = []
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        for ptxas in tools.find("ptxas"):
            command = [ptxas, "-v", f"--gpu-name={architecture}", *most, str(source), "-o", str(cubin)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return cubin.read_bytes(), done.stderr, ""
            reasons.append(done.stderr.strip())
            if "Unsupported .version" not in done.stderr:  # it is the code that it refuses, and not the PTX's edition
                raise driver.LinkerError(done.stderr)
    none = "there is no assembler: pip install 'numba-cuda[cu13]' brings one (nvJitLink)."
    return None, "", "; ".join(reasons) or none


# Words of Numba that do not say what to do.
_HINTS = {
    r"array\(int\d+, |array\(UniTuple\(int": "The shape of a shared or local array must be a constant of the source: a "
    "number, a global or a variable of the enclosing function.",
    r"to none for '\$\d+return": "A kernel returns nothing: write into an array.",
}


def _refusal(error: Exception, code: python_types.CodeType) -> CompileError:
    """Numba's words, without its trace of what it was doing, and the line at which it stopped."""
    text = re.sub(r"\x1b\[[0-9;]*m|^Failed in .*\n| at 0x\w+", "", str(error), flags=re.MULTILINE)
    words = re.split(r"\n\s*\nFile |\nDuring: |\n *There are |\.? Raised from |, defined at ", text)[0]
    hints = [hint for words_, hint in _HINTS.items() if re.search(words_, words)]
    file, line = _stopped_at(error, text) or (code.co_filename, code.co_firstlineno)
    message = "\n".join([" ".join(words.split()) or type(error).__name__, *hints])
    source = linecache.getline(file, line).strip()
    return CompileError(message + (f"\n    {source}" if source else ""), _place(file, line))


def _stopped_at(error: Exception, text: str) -> tuple[str, int] | None:
    """File and line of the statement that Numba was at: it says so itself, or the frames of its functions have it."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        for name in ("loc", "self", "inst", "expr", "constraint"):
            value = trace.tb_frame.f_locals.get(name)
            at = value if isinstance(value, ir.Loc) else getattr(value, "loc", None)
            if isinstance(at, ir.Loc) and at.line:
                found = at.filename, at.line
        trace = trace.tb_next
    said = re.search(r'\nFile "([^"]+)", line (\d+):', text) or re.search(r"Raised from (\S+) \((\d+)\)", text)
    if said is None:
        return found
    file, line = said.group(1), int(said.group(2))  # it says the name of the file, and leaves out the folders
    return (found[0] if found and found[0].endswith(file) else file), line


def _place(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"
