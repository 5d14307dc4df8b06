"""A launch of a Triton kernel that is cheap enough for decode, where a kernel runs for a few microseconds.

On every launch Triton looks at each argument for what it specialises on, writes that down as a key, finds the compiled
kernel by it, and hands over tensors whose addresses the launcher asks the driver about. `Launcher` asks the same
questions in fewer words and passes addresses:

    _add = Launcher(_add_kernel)
    _add[grid](x, y, out, N, BN=1024, num_warps=4)        # as _add_kernel[grid](...)

The compiled kernel is Triton's own, from Triton's cache. On the simulated GPU, and while someone watches launches (a
profiler's hook, `gpukern.inspect.watch_triton`), the call goes to Triton itself.
"""

import functools

import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from gpukern import device

_RUN = JITFunction.run  # watch_triton puts another in its place


class Launcher:
    """Launches `kernel`, a @triton.jit function; `launcher[grid](*arguments, **meta)`, grid a tuple of one to three.

    What it does not look at, of what Triton does: global variables that the kernel uses must not change after its first
    launch, and pre-run hooks are not called. A host tensor descriptor among the arguments makes Triton do the launch.
    """

    def __init__(self, kernel):
        self.kernel = kernel
        self._known = {}  # (device, key) -> (compiled kernel, values of the parameters that `meta` and defaults give)

    def __getitem__(self, grid: tuple):
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple, *arguments, **meta):
        if device.simulated() or JITFunction.run is not _RUN or knobs.runtime.launch_enter_hook.calls:
            return self.kernel[grid](*arguments, **meta)
        key = launch_key(self._constexprs, arguments, meta)
        if key is None:
            return self.kernel[grid](*arguments, **meta)
        on = torch.cuda.current_device()
        known = self._known.get((on, key))
        if known is None:
            compiled = self.kernel[grid](*arguments, **meta)
            rest = tuple(meta.get(p.name, p.default) for p in self.kernel.params[len(arguments) :])
            self._known[on, key] = compiled, rest
            return compiled
        compiled, rest = known
        addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        compiled.run(
            *grid, *(1, 1, 1)[len(grid) :], triton.runtime.driver.active.get_current_stream(on), compiled.function,
            compiled.packed_metadata, None, None, None, *addresses, *rest,
        )  # fmt: skip
        return compiled

    @functools.cached_property
    def _constexprs(self) -> tuple[bool, ...]:
        return tuple(p.is_constexpr for p in self.kernel.params)


def launch_key(constexprs: tuple[bool, ...], arguments: tuple, meta: dict) -> tuple | None:
    """All that makes Triton compile another kernel. None for an argument that only Triton knows to handle.

    constexprs  for each parameter of the kernel, whether it is a constexpr
    arguments   those that are given by position; meta: those by name, and num_warps, num_stages, ...

    As in Triton (python/triton/runtime/jit.py): of a tensor its dtype and whether its address is a multiple of 16; of a
    whole number whether it is 1, a multiple of 16, and how many bits it takes; of a constexpr its value and type.
    """
    key = [len(arguments)]
    for value, is_constexpr in zip(arguments, constexprs, strict=False):
        if is_constexpr or value is None:
            key.append((type(value), value))
        elif isinstance(value, torch.Tensor):
            key.append((value.dtype, value.data_ptr() % 16 == 0))
        elif type(value) is int:
            bits = 32 if -(1 << 31) <= value < 1 << 31 else 64 if value < 1 << 63 else 65
            key.append((bits, 1 if value == 1 else 16 if value % 16 == 0 else 0))
        elif type(value) in (float, bool):
            key.append(type(value))
        else:
            return None
    for name, value in meta.items():
        if isinstance(value, torch.Tensor):  # by name: rare, and not worth a second way
            return None
        key.append((name, type(value), value))
    return tuple(key)
