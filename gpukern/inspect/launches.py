"""What the launches of a block of code were given on a card: watched, not compiled again."""

from contextlib import contextmanager
from dataclasses import dataclass

from gpukern import device


@dataclass
class Resources:
    """Registers a thread, shared memory a block in bytes, and spilled registers, of one compiled Triton kernel.

    All None until a kernel was launched on a card while it was watched.
    """

    registers: int | None = None
    shared: int | None = None
    spills: int | None = None


@contextmanager
def watch_triton():
    """Collect the Resources of the last Triton kernel that is launched inside the `with`."""
    found = Resources()
    if device.simulated():
        yield found
        return
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def run(self, *args, **kwargs):
        kernel = launch(self, *args, **kwargs)
        found.registers, found.spills, found.shared = kernel.n_regs, kernel.n_spills, kernel.metadata.shared
        return kernel

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = launch
