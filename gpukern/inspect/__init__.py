"""Inside a compiled kernel: registers, shared memory, spills, PTX and SASS, for any card, on any machine.

    made = inspect.compiled(kernel, "void(float32[::1], float32[::1])", "T4")        # a @cuda.jit kernel
    made = inspect.compiled(kernel, {"x_ptr": "*fp32", "n": "i32"}, "A100", BLOCK=64) # a @triton.jit kernel
    made = inspect.compiled(kernel, (x, out, 1000), BLOCK=64)                        # typed by example arguments
    made = inspect.compiled(kernel, (torch.float32, 16), "H200")                     # a CUDA C++ kernel, of a .cu file
    made.registers, made.shared, made.spills, made.features["wgmma"], made.ptx, made.sass
    inspect.occupancy(256, made.registers, made.shared, "T4")

No GPU is needed, and what a compiler would refuse on the card is refused here: CompileError, in the compiler's words.
Numba's kernels are compiled in this process (`numba_compiler`), Triton's in one beside it (`triton_compiler`), CUDA C++
by NVRTC, which is a library of this process (`cpp_compiler`).
"""

from gpukern import device
from gpukern.inspect.launches import Resources, watch_triton
from gpukern.inspect.multiprocessor import Occupancy, occupancy
from gpukern.inspect.result import Compiled, CompileError

__all__ = ["CompileError", "Compiled", "Occupancy", "Resources", "compiled", "occupancy", "watch_triton"]


def compiled(kernel, signature, card: str | None = None, **meta) -> Compiled:
    """Compile `kernel` for arguments of the types in `signature`, for the card called `card`. Needs no GPU.

    kernel     decorated with `@cuda.jit`, or with `@triton.jit` (autotuned or with heuristics, too), or a CppKernel
    signature  either example arguments in a tuple or list, as a launch would pass them: arrays, tensors, numbers;
               or, for Numba, a signature as Numba writes them: "void(float32[:], int64)", or a tuple of Numba's types;
               or, for Triton, a dict with the type of every parameter that is no constexpr: "*fp32", "*bf16", "i32", …;
               for a CppKernel, the parameters of its template in a tuple: dtypes, numbers, bools
    card       "H200", "A100", "T4" or "RTX 4090"; default: this machine's card, or the simulated one
    meta       Triton's keyword arguments: constexprs, num_warps, num_stages, maxnreg, …

    Triton specialises a kernel: the launcher compiles it anew for a pointer or a number that is divisible by 16, and
    for a number that is 1. Example arguments are looked at in the same way. In a dict, a pointer is taken as divisible
    by 16, which every tensor's is as it is allocated, and of a number nothing is known; a suffix says otherwise:
    "*fp32:1" is a pointer of which nothing is known, "i32:16" a number divisible by 16, "i32:1" the number 1. Of an
    autotuned kernel the first configuration is compiled, with what `meta` says in its place.

    The result is kept: the same kernel, types, card and `meta` are compiled once. Raises CompileError for what the
    compiler refuses, DeviceError for an unknown card, TypeError for a kernel or a signature that is none.
    """
    on = device.card(card)
    library = type(kernel).__module__.partition(".")[0]
    if library == "numba":
        if meta:
            raise TypeError(
                f"{', '.join(meta)}: a Numba kernel is compiled as its decorator says; only Triton has meta."
            )
        from gpukern.inspect import numba_compiler

        return numba_compiler.compiled(kernel, signature, on)
    if library == "triton":
        from gpukern.inspect import triton_compiler

        return triton_compiler.compiled(kernel, signature, on, meta)
    if type(kernel).__name__ == "CppKernel":
        if meta:
            raise TypeError(f"{', '.join(meta)}: a CUDA C++ kernel is compiled as its template's parameters say.")
        from gpukern.inspect import cpp_compiler

        return cpp_compiler.compiled(kernel, signature, on)
    raise TypeError(f"{kernel!r} is no kernel: decorate a function with @cuda.jit or @triton.jit.")
