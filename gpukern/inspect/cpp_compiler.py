"""CUDA C++ for a card that need not be there: the kernel's own compiler, NVRTC, needs none."""

import math
import re

from gpukern import device
from gpukern.inspect.result import Compiled, CompileError, read_log, static_shared


def compiled(kernel, signature, on: device.Card) -> Compiled:
    """`inspect.compiled` for a CppKernel of gpukern.kernels.cpp; signature: the parameters of its template."""
    if not isinstance(signature, tuple | list):
        raise TypeError(f"{signature!r}: a CUDA C++ kernel is named by its template's parameters: (torch.float32, 16).")
    try:
        made = kernel.compile(tuple(signature), on.compute_capability)
    except RuntimeError as error:
        if not hasattr(error, "words"):  # a CppError has them; its class stands in a room that this one does not import
            raise
        raise CompileError(error.words, error.line) from error
    shared = static_shared(made.ptx)
    bound = re.search(r"\.maxntid (\d+)(?:, (\d+), (\d+))?", made.ptx)
    threads = math.prod(int(n) for n in bound.groups() if n) if bound else None
    return Compiled(made.name, "cuda", on, threads, shared, **read_log(made.log), ptx=made.ptx, cubin=made.cubin)
