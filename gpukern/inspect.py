"""Inside a compiled kernel: what the compiler gave it of the card's registers and shared memory."""

from contextlib import contextmanager
from dataclasses import dataclass

from gpukern import device


@dataclass
class Resources:
    """Registers a thread, shared memory a block in bytes, and spilled registers, of one compiled Triton kernel.

    All None until a kernel was compiled (or loaded from Triton's cache) while it was watched.
    """

    registers: int | None = None
    shared: int | None = None
    spills: int | None = None


@contextmanager
def watch_triton():
    """Collect the Resources of the last Triton kernel that is compiled and launched inside the `with`.

    A kernel that this process has launched before in the same form is not compiled again and so is not seen.
    """
    found = Resources()
    if device.simulated():
        yield found
        return
    from triton import knobs

    compiled = []

    def remember(*, key, fn, **_):
        compiled.append((fn.jit_function, key))

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = remember
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before
    for function, key in compiled:
        for cache, *_ in function.device_caches.values():
            kernel = cache.get(key)
            if kernel is not None and getattr(kernel, "n_regs", None) is not None:
                found.registers, found.spills = kernel.n_regs, kernel.n_spills
                found.shared = kernel.metadata.shared
