"""The simulated card, its streams and events, as Numba-CUDA's host side describes them."""

import contextlib
import time

from gpukern import device


class Stream:
    """A queue of work. Here all work is done when it is queued."""

    handle = 0

    def synchronize(self) -> None:
        """All is done already."""

    def add_callback(self, callback, arg=None) -> None:
        """All before it is done already: call it now."""
        callback(self, 0, arg)

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
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = property(lambda self: device.card().shared_per_sm)
    MAX_THREADS_PER_MULTI_PROCESSOR = property(lambda self: device.card().warps_per_sm * device.card().warp)
    MAX_BLOCKS_PER_MULTIPROCESSOR = property(lambda self: device.card().blocks_per_sm)
    MAX_REGISTERS_PER_BLOCK = property(lambda self: device.card().registers_per_sm)
    COMPUTE_CAPABILITY_MAJOR = property(lambda self: device.card().compute_capability[0])
    COMPUTE_CAPABILITY_MINOR = property(lambda self: device.card().compute_capability[1])
    L2_CACHE_SIZE = property(lambda self: device.card().l2)
    COOPERATIVE_LAUNCH = 1
    MAX_REGISTERS_PER_MULTIPROCESSOR = property(lambda self: device.card().registers_per_sm)
    supports_float16 = supports_bfloat16 = True

    def reset(self) -> None:
        """There is nothing to reset."""

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *error) -> None:
        """It stays the current one: there is no other."""

    def __getattr__(self, name: str):
        raise AttributeError(f"the simulated card does not know {name}; gpukern.device.card() has what is known of it.")


class Devices(list):
    """`cuda.gpus`: the one simulated card."""

    lst = property(list)
    current = property(lambda self: self[0])


class Context:
    """`cuda.current_context()`."""

    def __init__(self, of: Device):
        self.device = of

    def get_memory_info(self) -> tuple:
        """Bytes of memory (free, total) of the card; nothing of it is in use."""
        return device.card().memory, device.card().memory

    def synchronize(self) -> None:
        """All is done already."""

    def reset(self) -> None:
        """There is nothing to reset."""
