"""The host's side of Numba-CUDA without a card: device arrays, streams, events, the device, and `install()`."""

import contextlib
import time

import numpy as np
import torch
from numba import cuda
from numba.cuda.core import sigutils
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.typing.typeof import Purpose, typeof

from gpukern import device
from gpukern.simulate.lockstep.arguments import host_array
from gpukern.simulate.lockstep.frontend import compile_device, typed_kernel
from gpukern.simulate.lockstep.launch import Launch
from gpukern.simulate.lockstep.memory import fresh, mark_written


class DeviceArray:
    """An array on the simulated card, with the methods of Numba's. `host`: the NumPy array of its elements."""

    def __init__(self, host: np.ndarray):
        self.host = host

    shape = property(lambda self: self.host.shape)
    strides = property(lambda self: self.host.strides)
    dtype = property(lambda self: self.host.dtype)
    ndim = property(lambda self: self.host.ndim)
    size = property(lambda self: self.host.size)
    nbytes = property(lambda self: self.host.nbytes)
    T = property(lambda self: DeviceArray(self.host.T))
    _numba_type_ = property(lambda self: typeof(self.host, Purpose.argument))

    def copy_to_host(self, ary: np.ndarray | None = None, stream=0) -> np.ndarray:
        """The elements in `ary`, or in a new array."""
        if ary is None:
            return self.host.copy()
        if ary.shape != self.shape or ary.dtype != self.dtype:
            raise ValueError(f"cannot copy {self.shape} {self.dtype} into {ary.shape} {ary.dtype}")
        ary[...] = self.host
        return ary

    def copy_to_device(self, ary, stream=0) -> None:
        """Fill this array with the elements of `ary`."""
        source = ary.host if isinstance(ary, DeviceArray) else np.asarray(ary)
        if source.shape != self.shape:
            raise ValueError(f"cannot copy an array of shape {source.shape} into one of shape {self.shape}")
        self.host[...] = source
        mark_written(self.host)

    def reshape(self, *shape, order: str = "C") -> "DeviceArray":
        return DeviceArray(self.host.reshape(*shape, order=order))

    def ravel(self, order: str = "C", stream=0) -> "DeviceArray":
        return DeviceArray(self.host.ravel(order))

    def view(self, dtype) -> "DeviceArray":
        return DeviceArray(self.host.view(dtype))

    def transpose(self, axes=None) -> "DeviceArray":
        return DeviceArray(self.host.transpose(axes))

    def is_c_contiguous(self) -> bool:
        return self.host.flags.c_contiguous

    def is_f_contiguous(self) -> bool:
        return self.host.flags.f_contiguous

    def __getitem__(self, index):
        part = self.host[index]
        return DeviceArray(part) if isinstance(part, np.ndarray) else part

    def __setitem__(self, index, value) -> None:
        self.host[index] = value.host if isinstance(value, DeviceArray) else value
        mark_written(self.host, index)

    def __len__(self) -> int:
        return len(self.host)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.copy_to_host() if dtype is None else self.copy_to_host().astype(dtype)


class Stream:
    """A queue of work. Here all work is done when it is queued."""

    handle = 0

    def synchronize(self) -> None:
        """All is done already."""

    @contextlib.contextmanager
    def auto_synchronize(self):
        yield self


class Event:
    """A mark in a stream. The simulated card has no time of its own: `elapsed_time` refuses."""

    def __init__(self, timing: bool = True):
        self.at = None

    def record(self, stream=0) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """It has happened already."""

    def wait(self, stream=0) -> None:
        """It has happened already."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        raise device.DeviceError("the simulated GPU counts and does not time: time a kernel on a card.")


class Device:
    """The card whose limits the simulated GPU keeps, as `cuda.get_current_device()` describes one."""

    id = 0
    WARP_SIZE = 32
    name = property(lambda self: f"simulated {device.card().name}".encode())
    compute_capability = property(lambda self: device.card().compute_capability)
    MULTIPROCESSOR_COUNT = property(lambda self: device.card().sms)
    MAX_THREADS_PER_BLOCK = property(lambda self: device.card().threads_per_block)
    MAX_BLOCK_DIM_X = property(lambda self: device.card().max_block[0])
    MAX_BLOCK_DIM_Y = property(lambda self: device.card().max_block[1])
    MAX_BLOCK_DIM_Z = property(lambda self: device.card().max_block[2])
    MAX_GRID_DIM_X = property(lambda self: device.card().max_grid[0])
    MAX_GRID_DIM_Y = property(lambda self: device.card().max_grid[1])
    MAX_GRID_DIM_Z = property(lambda self: device.card().max_grid[2])
    MAX_SHARED_MEMORY_PER_BLOCK = property(lambda self: device.card().shared_static)
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = property(lambda self: device.card().shared_per_block)
    MAX_REGISTERS_PER_MULTIPROCESSOR = property(lambda self: device.card().registers_per_sm)
    supports_float16 = supports_bfloat16 = True

    def reset(self) -> None:
        """There is nothing to reset."""


def to_device(obj, stream=0, copy: bool = True, to: DeviceArray | None = None) -> DeviceArray:
    """A copy of `obj` on the card."""
    if to is not None:
        to.copy_to_device(obj)
        return to
    return DeviceArray(np.array(obj.host if isinstance(obj, DeviceArray) else obj))


def device_array(shape, dtype=np.float64, strides=None, order: str = "C", stream=0) -> DeviceArray:
    """An array whose elements nobody has written: NaN, or a negative number."""
    return DeviceArray(fresh(np.empty(shape, dtype, order)))


def device_array_like(ary, stream=0) -> DeviceArray:
    return device_array(ary.shape, ary.dtype)


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
    raise TypeError("*obj* doesn't implement the cuda array interface.")


@contextlib.contextmanager
def _nothing(*_, **__):
    yield


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


def install() -> None:
    """Let `kernel[grid, block, stream, shared](...)` and the host functions of numba.cuda use the simulated GPU."""
    CUDADispatcher.compile_device = compile_device
    CUDADispatcher.compile = _compile
    CUDADispatcher.configure = Launch
    CUDADispatcher.__getitem__ = lambda self, arguments: Launch(self, *arguments)
    CUDADispatcher.forall = _for_all
    CUDADispatcher.specialize = lambda self, *args: self
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
    cuda.gpus = [current]
