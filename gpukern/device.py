"""This machine: a real card or the simulated one, and the facts and limits of the cards the course knows.

Importing gpukern decides once which GPU every kernel of this process runs on:

`measured`  a CUDA card is there: Numba-CUDA and Triton compile for it, and times are taken on it.
`counted`   no card (or `GPUKERN_DEVICE=simulated`): kernels run on the simulated GPU, which counts and never times.

The choice must be made before `numba.cuda` and `triton` are first imported, because both read an environment
variable at that moment and then keep to it. `decide()` makes it; `gpukern/__init__.py` calls it first of all.
"""

import contextlib
import functools
import math
import os
import sys
from dataclasses import dataclass

import torch

MODES = ("measured", "counted")
_SWITCH = "GPUKERN_DEVICE"
# What NUMBA_ENABLE_CUDASIM and TRITON_INTERPRET accept as "on".
_ON = {"1", "true", "on", "yes"}
_mode = ""  # as `decide` chose it
_card = "H200"  # the simulated card; `using` changes it


class DeviceError(RuntimeError):
    """The machine cannot do what was asked: no card, a missing package, a mode that was decided too late."""


class LimitError(ValueError):
    """A launch breaks a limit of the card: too many threads, too large a grid, too much shared memory."""


@dataclass(frozen=True)
class Card:
    """Facts of one GPU. Bytes are bytes, rates are per second, `peak` is dense multiply-adds counted as two.

    Sources: NVIDIA's data sheets and architecture white papers for the rates; table "Technical Specifications per
    Compute Capability" of the CUDA C++ Programming Guide for the limits.
    """

    name: str
    compute_capability: tuple[int, int]
    sms: int
    warps_per_sm: int
    blocks_per_sm: int
    shared_per_sm: int  # bytes
    shared_per_block: int  # bytes, the opt-in maximum
    l2: int  # bytes
    memory: int  # bytes
    bandwidth: float | None  # bytes/s, None if nobody has told us
    peak: dict  # dtype name -> FLOP/s; a dtype the card has no fast path for is absent
    boost_mhz: int | None = None
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    shared_static: int = 48 * 1024  # bytes a block gets without opting in
    warp: int = 32
    threads_per_block: int = 1024
    max_block: tuple[int, int, int] = (1024, 1024, 64)
    max_grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)

    def bound(self, flops: float, n_bytes: float, dtype: torch.dtype) -> float | None:
        """Seconds that no kernel beats: the larger of arithmetic and memory time (the roofline). None if unknown."""
        rate = self.peak.get(str(dtype).removeprefix("torch."))
        if rate is None or self.bandwidth is None:
            return None
        return max(flops / rate, n_bytes / self.bandwidth)


_KB, _MB, _GB = 1024, 1024**2, 10**9

CARDS = {
    card.name: card
    for card in (
        Card(
            "H200",
            (9, 0),
            sms=132,
            warps_per_sm=64,
            blocks_per_sm=32,
            shared_per_sm=228 * _KB,
            shared_per_block=227 * _KB,
            l2=60 * _MB,
            memory=141 * _GB,
            bandwidth=4.8e12,
            peak={"float32": 67e12, "tfloat32": 494.7e12, "float16": 989.4e12, "bfloat16": 989.4e12},
            boost_mhz=1980,
        ),
        Card(
            "A100",
            (8, 0),
            sms=108,
            warps_per_sm=64,
            blocks_per_sm=32,
            shared_per_sm=164 * _KB,
            shared_per_block=163 * _KB,
            l2=40 * _MB,
            memory=80 * _GB,
            bandwidth=2.039e12,
            peak={"float32": 19.5e12, "tfloat32": 156e12, "float16": 312e12, "bfloat16": 312e12},
            boost_mhz=1410,
        ),
        Card(
            "T4",
            (7, 5),
            sms=40,
            warps_per_sm=32,
            blocks_per_sm=16,
            shared_per_sm=64 * _KB,
            shared_per_block=64 * _KB,
            l2=4 * _MB,
            memory=16 * _GB,
            bandwidth=320e9,
            peak={"float32": 8.1e12, "float16": 65e12},
            boost_mhz=1590,
        ),
        Card(
            "RTX 4090",
            (8, 9),
            sms=128,
            warps_per_sm=48,
            blocks_per_sm=24,
            shared_per_sm=100 * _KB,
            shared_per_block=99 * _KB,
            l2=72 * _MB,
            memory=24 * _GB,
            bandwidth=1.008e12,
            peak={"float32": 82.6e12, "tfloat32": 82.6e12, "float16": 165.2e12, "bfloat16": 165.2e12},
            boost_mhz=2520,
        ),
    )
}


def decide() -> str:
    """Choose the mode of this process and tell Numba and Triton, or explain why it is too late.

    Numba is set up the same in both: its compiler types every kernel, and where there is no card the simulated GPU
    runs what was typed. Numba's own simulator, which has no types and no warps, is never used.

    Raises DeviceError if `GPUKERN_DEVICE` asks for a card that is not there, if numba.cuda was imported earlier as
    Numba's own simulator, or Triton in the other mode.
    """
    global _mode
    mode = _wanted()
    late = _too_late(mode == "counted")
    if late:
        raise DeviceError(
            f"{' and '.join(late)} was imported before gpukern, in the wrong mode for this machine ({mode}). "
            "Restart the kernel (or the program) and put `import gpukern` first."
        )
    os.environ["NUMBA_ENABLE_CUDASIM"] = "0"  # for good: Numba reads it again when it compiles
    os.environ["TRITON_INTERPRET"] = "1" if mode == "counted" else "0"
    os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")  # a decode step fills no card, and need not say so
    if "numba" in sys.modules:  # numba has read the variable already; numba.cuda has not looked at it yet
        sys.modules["numba"].config.ENABLE_CUDASIM = 0
    _mode = mode
    return mode


def _wanted() -> str:
    switch = os.environ.get(_SWITCH, "").strip().lower()
    if switch not in ("", "auto", "cuda", "simulated"):
        raise DeviceError(f"{_SWITCH}={switch!r} is not known: use 'cuda', 'simulated' or leave it unset.")
    if switch == "cuda" and not has_cuda():
        raise DeviceError(f"{_SWITCH}=cuda, but {why_no_cuda()}. Unset {_SWITCH} to use the simulated GPU.")
    asked = any(os.environ.get(v, "0").lower() in _ON for v in ("NUMBA_ENABLE_CUDASIM", "TRITON_INTERPRET"))
    if switch == "simulated" or (switch != "cuda" and asked):
        return "counted"
    return "measured" if has_cuda() else "counted"


def _too_late(simulate: bool) -> list[str]:
    """The libraries that are loaded already, in another mode than the one that is wanted."""
    late = []
    if "numba.cuda" in sys.modules and sys.modules["numba"].config.ENABLE_CUDASIM:
        late.append("numba.cuda")
    if "triton.language" in sys.modules:
        # Triton decides for each function when it is decorated; its own tl.sum was decorated on import.
        interpreted = type(sys.modules["triton.language"].sum).__name__ == "InterpretedFunction"
        late += ["triton"] if interpreted != simulate else []
    return late


@functools.cache
def has_cuda() -> bool:
    """Is there a CUDA card that PyTorch can use? Asked through NVML, so no CUDA context is made."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.is_available()


def why_no_cuda() -> str:
    """One sentence on why `has_cuda()` is False."""
    if torch.version.cuda is None:
        return "the installed PyTorch is a build without CUDA"
    return "PyTorch finds no CUDA card (is the NVIDIA driver installed, and is CUDA_VISIBLE_DEVICES empty?)"


def torch_device() -> torch.device:
    """Where tensors live in this mode: `cuda` when measured, `cpu` when counted."""
    return torch.device("cpu" if simulated() else "cuda")


def simulated() -> bool:
    """True when kernels run on the simulated GPU."""
    return _mode == "counted"


def mode() -> str:
    """`measured` or `counted`, as decided when gpukern was imported."""
    return _mode


def card(name: str | None = None) -> Card:
    """The card called `name`, or the present one; on a machine without a card, the simulated one: an H200."""
    if name is not None:
        if name not in CARDS:
            raise DeviceError(f"no facts about a card called {name!r}; known are {', '.join(CARDS)}.")
        return CARDS[name]
    return CARDS[_card] if simulated() else _present_card()


@contextlib.contextmanager
def using(name: str | None):
    """Simulate the card called `name` inside the `with`; None leaves it as it is. Raises DeviceError if unknown."""
    global _card
    before = _card
    _card = card(name).name if name is not None else before
    try:
        yield
    finally:
        _card = before


@functools.cache
def _present_card() -> Card:
    props = torch.cuda.get_device_properties(0)
    for known in CARDS.values():
        # One name may be sold with less memory, which then has another rate.
        same_memory = abs(props.total_memory - known.memory) < 0.1 * known.memory
        if known.name in props.name and known.sms == props.multi_processor_count and same_memory:
            return known
    # A card we have no data sheet for: the driver's limits, and its memory rate; peak rates stay unknown.
    clock, bus = getattr(props, "memory_clock_rate", 0), getattr(props, "memory_bus_width", 0)  # kHz, bits
    return Card(
        props.name,
        (props.major, props.minor),
        sms=props.multi_processor_count,
        warps_per_sm=props.max_threads_per_multi_processor // 32,
        blocks_per_sm=32 if props.major in (8, 9) and props.minor == 0 else 16,
        shared_per_sm=props.shared_memory_per_multiprocessor,
        shared_per_block=props.shared_memory_per_block_optin,
        l2=props.L2_cache_size,
        memory=props.total_memory,
        bandwidth=2 * clock * 1e3 * bus / 8 if clock and bus else None,
        peak={},
    )


def check_launch(grid: tuple, block: tuple | int, shared: int = 0, on: Card | None = None) -> None:
    """Refuse a launch that `on` (default: this machine's card) cannot run, before it is tried.

    grid    blocks in x, y, z (fewer may be given)
    block   threads in x, y, z, or their number
    shared  bytes of shared memory a block
    """
    on = on or card()
    block = (block,) if isinstance(block, int) else tuple(block)
    grid = (grid,) if isinstance(grid, int) else tuple(grid)
    threads = math.prod(block)
    if threads > on.threads_per_block:
        raise LimitError(
            f"a block of {' x '.join(map(str, block))} has {threads} threads; {on.name} allows "
            f"{on.threads_per_block}. Choose a smaller tile."
        )
    for what, size, limits in (("block", block, on.max_block), ("grid", grid, on.max_grid)):
        if len(size) > 3:
            raise LimitError(f"{what} has {len(size)} axes; there are x, y and z.")
        for axis, n, most in zip("xyz", size, limits, strict=False):
            if n < 1:
                raise LimitError(f"{what}.{axis} is {n}; it must be at least 1.")
            if n > most:
                raise LimitError(f"{what}.{axis} is {n}; {on.name} allows {most}. Put the long axis on x.")
    if shared > on.shared_per_block:
        raise LimitError(
            f"a block wants {shared:,} bytes of shared memory; {on.name} has {on.shared_per_block:,}. "
            "Choose a smaller tile or fewer stages."
        )


def numba_array(tensor: torch.Tensor):
    """`tensor` as Numba-CUDA takes it, without a copy: shape, strides and dtype kept, bfloat16 included.

    A device array over the tensor's memory; when counted, the simulated card's stand-in for one.
    """
    from numba import cuda

    if not simulated() and not tensor.is_cuda:
        raise DeviceError(f"a tensor is on {tensor.device}; kernels of this machine run on its card: .to('cuda').")
    if tensor.dtype != torch.bfloat16:
        return cuda.as_cuda_array(tensor.detach())
    import ml_dtypes

    # NumPy has no bfloat16: pass the bits, name the type of ml_dtypes.
    return cuda.as_cuda_array(tensor.detach().view(torch.int16)).view(ml_dtypes.bfloat16)


def numba_stream():
    """PyTorch's current stream as Numba-CUDA takes it, so that both queue in one order (and in one graph capture)."""
    if simulated():
        return 0
    from numba import cuda

    return cuda.external_stream(torch.cuda.current_stream().cuda_stream)
