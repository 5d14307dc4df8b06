"""The host's side of Numba-CUDA without a card: copies, streams, reductions, what is compiled, and `install()`."""

import contextlib

import numpy as np
import torch
from numba import cuda
from numba.cuda.core import sigutils
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.kernels.reduction import Reduce

from gpukern import device, inspect
from gpukern.simulate.lockstep.arguments import host_array
from gpukern.simulate.lockstep.card import Context, Device, Devices, Event, Stream
from gpukern.simulate.lockstep.device_array import DeviceArray
from gpukern.simulate.lockstep.frontend import compile_device, typed_kernel
from gpukern.simulate.lockstep.launch import Launch, run
from gpukern.simulate.lockstep.memory import fresh


def to_device(obj, stream=0, copy: bool = True, to: DeviceArray | None = None) -> DeviceArray:
    """A copy of `obj` on the card."""
    if to is not None:
        to.copy_to_device(obj)
        return to
    array = np.array(obj.host if isinstance(obj, DeviceArray) else obj)
    if array.dtype.hasobject:
        raise TypeError(f"{type(obj).__name__} holds Python objects, which a card has no memory for: pass numbers.")
    return DeviceArray(array)


def device_array(shape, dtype=np.float64, strides=None, order: str = "C", stream=0) -> DeviceArray:
    """An array whose elements nobody has written: NaN, or a negative number."""
    if strides is None:
        return DeviceArray(fresh(np.empty(shape, dtype, order)))
    shape, strides = np.empty(shape).shape, (strides,) if isinstance(strides, int) else strides
    size = sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    return DeviceArray(np.ndarray(shape, dtype, fresh(np.empty(size, np.uint8)), 0, strides))


def device_array_like(ary, stream=0) -> DeviceArray:
    """A new array of the shape, type and order of `ary`."""
    return DeviceArray(fresh(np.empty_like(host_array(ary), subok=False)))


def pinned_array(shape, dtype=np.float64, strides=None, order: str = "C") -> np.ndarray:
    return np.empty(shape, dtype, order)


def pinned_array_like(ary) -> np.ndarray:
    return np.empty_like(ary)


def as_cuda_array(obj, sync: bool = True) -> DeviceArray:
    """`obj`, a torch tensor on the CPU or an array of the card, without a copy."""
    if isinstance(obj, DeviceArray):
        return obj
    if isinstance(obj, torch.Tensor):
        return DeviceArray(host_array(obj))
    if hasattr(obj, "__cuda_array_interface__"):
        raise device.DeviceError(
            "this array lies on a real card; the simulated one takes NumPy's and torch's on the CPU."
        )
    raise TypeError("*obj* doesn't implement the cuda array interface.")


@contextlib.contextmanager
def _nothing(*_, **__):
    yield


@contextlib.contextmanager
def _mapped(*arrays, **_):
    """Arrays of the host that the card sees: the same memory."""
    made = [DeviceArray(a) for a in arrays]
    yield made[0] if len(made) == 1 else made


class _Trusted:
    """A kernel of Numba's own library. It leaves out barriers that a warp should have; its faults are nobody's here."""

    def __init__(self, kernel: CUDADispatcher):
        self.kernel = kernel

    def __getitem__(self, sizes):
        return lambda *args: run(self.kernel, sizes[0], sizes[1], args, checks=False)


class Reduction(Reduce):
    """cuda.reduce: Numba's own kernels, launched here."""

    def _compile(self, dtype) -> _Trusted:
        return _Trusted(super()._compile(dtype))


def _compiled(what: str):
    """A method of a kernel that tells of its machine code: compiled for the card by the real compiler, here."""

    def of_signatures(self, signature=None):
        if signature is not None:
            return getattr(inspect.compiled(self, signature, device.card().name), what)
        known = {types for types, _ in self.__dict__.get("_lockstep", {})}
        return {types: getattr(inspect.compiled(self, types, device.card().name), what) for types in known}

    return of_signatures


def _not_known(name: str):
    def refuse(self, *_, **__):
        raise device.DeviceError(
            f"the simulated GPU has no {name}(): gpukern.inspect.compiled(kernel, signature, card) shows PTX, SASS, "
            "registers, shared memory and spills."
        )

    return refuse


def _compile(self, signature):
    """CUDADispatcher.compile: type inference now, so that its errors come where the decorator stands."""
    argument_types, return_type = sigutils.normalize_signature(signature)
    if argument_types not in self.overloads:
        self.overloads[argument_types] = typed_kernel(self, argument_types)
    return self.overloads[argument_types]


def _for_all(self, ntasks: int, tpb: int = 0, stream=0, sharedmem: int = 0):
    """kernel.forall(n): enough blocks of `tpb` threads for n tasks."""
    if ntasks < 0:
        raise ValueError(f"Can't create ForAll with negative task count: {ntasks}")
    threads = tpb or 256
    launch = Launch(self, max(1, -(-ntasks // threads)), threads, stream, sharedmem)
    return launch if ntasks else (lambda *args: None)


def _configure(self, griddim, blockdim, stream=0, sharedmem: int = 0) -> Launch:
    """kernel[grid, block, stream, sharedmem]."""
    return Launch(self, griddim, blockdim, stream, sharedmem)


_COMPILED = {"inspect_asm": "ptx", "get_regs_per_thread": "registers", "get_shared_mem_per_block": "shared"}
_NOT_KNOWN = ("inspect_llvm", "inspect_types", "inspect_sass", "inspect_sass_cfg", "inspect_lto_ptx")
_NOT_KNOWN += ("get_local_mem_per_thread", "get_const_mem_size", "get_max_threads_per_block")


def install() -> None:
    """Let `kernel[grid, block, stream, shared](...)` and the host functions of numba.cuda use the simulated GPU."""
    CUDADispatcher.compile_device = compile_device
    CUDADispatcher.compile = _compile
    CUDADispatcher.configure = _configure
    CUDADispatcher.forall = _for_all
    CUDADispatcher.specialize = lambda self, *args: self
    for name, what in _COMPILED.items():
        setattr(CUDADispatcher, name, _compiled(what))
    for name in _NOT_KNOWN:
        setattr(CUDADispatcher, name, _not_known(name))
    current = Device()
    functions = {
        "to_device": to_device,
        "device_array": device_array,
        "device_array_like": device_array_like,
        "pinned_array": pinned_array,
        "pinned_array_like": pinned_array_like,
        "mapped_array": pinned_array,
        "managed_array": pinned_array,
        "pinned": _nothing,
        "mapped": _mapped,
        "mapped_array_like": pinned_array_like,
        "reduce": Reduction,
        "Reduce": Reduction,
        "profile_start": lambda: None,
        "profile_stop": lambda: None,
        "profiling": _nothing,
        "current_context": lambda devnum=None: Context(current),
        "cuda_error": lambda: None,
        "defer_cleanup": _nothing,
        "stream": Stream,
        "default_stream": Stream,
        "legacy_default_stream": Stream,
        "per_thread_default_stream": Stream,
        "external_stream": lambda pointer: Stream(),
        "event": Event,
        "event_elapsed_time": lambda start, end: start.elapsed_time(end),
        "synchronize": lambda: None,
        "get_current_device": lambda: current,
        "select_device": lambda number: current,
        "list_devices": lambda: [current],
        "is_available": lambda: True,
        "is_cuda_array": lambda obj: isinstance(obj, DeviceArray),
        "as_cuda_array": as_cuda_array,
        "close": lambda: None,
        "detect": lambda: True,
    }
    for name, function in functions.items():
        setattr(cuda, name, function)
    cuda.gpus = Devices([current])
