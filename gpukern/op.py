"""Op: an operation declared once. Tests, benchmarks, drop-downs and the layer all read this one record.

An operation says what it computes (a reference in plain PyTorch), what it costs (bytes, FLOPs), on which inputs it is
tried (shapes, dtypes, tolerances), and which versions of it exist: a ladder of kernels per language.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Shape = Mapping[str, int]


class InputError(ValueError):
    """An argument that a kernel or the layer refuses; the message says what to do."""


# A package that a version needs and a machine may lack -> what to do then.
_REMEDIES = {
    "triton": "this version needs Triton, which installs on Linux only. Use a Numba version here, "
    "or run the course on Linux, WSL 2, Binder or Colab.",
    "cutlass": "this version needs NVIDIA's CUTLASS for Python: pip install nvidia-cutlass-dsl (Linux only), "
    'or install the course with its extra: pip install -e ".[cutlass]".',
}


@dataclass(frozen=True)
class Version:
    """One rung of a ladder: a launcher, its language and its default tile.

    language  "torch", "numba", "triton", "cuda" (CUDA C++) or "cutlass" (CUTLASS's Python language, CuTe)
    launcher  "module:function"; imported at the first call, so that a machine without Triton has the Numba half
    tile      keyword arguments of the launcher that a learner may change, with their defaults
    shared    "module:function" of (**tile, dtype, on) -> bytes of shared memory a block on a card; None if the tile
              does not decide them
    """

    language: str
    launcher: str
    tile: Mapping[str, int] = field(default_factory=dict)
    shared: str | None = None

    @property
    def needs_card(self) -> bool:
        """True if the simulated GPU, which runs Numba and Triton, cannot run it: a call there is a DeviceError."""
        return self.language in ("cuda", "cutlass")

    @property
    def function(self) -> Callable:
        """The launcher itself. Raises ImportError with the remedy if its language is not installed."""
        return self._load(self.launcher)

    def shared_bytes(self, tile: Mapping[str, int], **more) -> int | None:
        """Bytes of shared memory that a block takes with `tile`, or None if it is not the tile's to say.

        more  dtype, `on` (a Card; default: this machine's), and for attention the head size D
        """
        return self._load(self.shared)(**{**self.tile, **tile}, **more) if self.shared else None

    @staticmethod
    def _load(name: str) -> Callable:
        module, _, name = name.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing in _REMEDIES:
                raise ImportError(_REMEDIES[missing]) from error
            raise

    def __call__(self, *args, **kwargs) -> torch.Tensor:
        return self.function(*args, **{**self.tile, **kwargs})


@dataclass(frozen=True)
class Op:
    """An operation, declared once.

    name       its name in rows, drop-downs and on the command line
    summary    one line: what it computes, with shapes
    reference  (**inputs) -> Tensor in float64; plain PyTorch
    inputs     (shape, dtype, device, generator) -> dict of the keyword arguments of reference and launchers
    shapes     the shapes that every version is tested on; the first is the smallest of interest to a benchmark
    flops      (shape) -> floating-point operations of the mathematics, a multiply-add counted as two
    bytes      (shape, dtype) -> least bytes: each input read once, each output written once
    tolerance  dtype -> largest `error` that a correct version shows; its dtypes are those that the versions take
    versions   name -> Version, in the order of the ladder
    """

    name: str
    summary: str
    reference: Callable[..., torch.Tensor]
    inputs: Callable[..., dict]
    shapes: tuple[Shape, ...]
    flops: Callable[[Shape], int]
    bytes: Callable[[Shape, torch.dtype], int]
    tolerance: Mapping[torch.dtype, float]
    versions: Mapping[str, Version]

    def __post_init__(self):
        if "torch" not in self.versions:
            raise ValueError(f"Op {self.name}: needs a 'torch' version, the library's way, to be compared with")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of inputs that every version takes."""
        return tuple(self.tolerance)

    def draw(self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict:
        """Inputs of `shape`: the same for the same seed on every device (drawn on the CPU, then moved)."""
        return self.inputs(shape, dtype, device, torch.Generator().manual_seed(seed))


def error(out, reference) -> float:
    """The largest error of any element: |out - ref| / (|ref| + rms of ref). A NaN or inf where ref has none: inf.

    Relative to the element and to the size of the whole, so that neither an element near zero nor a small tensor
    hides a mistake. Zero for empty tensors; for tuples of tensors the largest of theirs.
    """
    if isinstance(reference, tuple):
        if not isinstance(out, tuple) or len(out) != len(reference):
            raise InputError(f"the result must be {len(reference)} tensors, as the reference is.")
        return max(error(o, r) for o, r in zip(out, reference, strict=True))
    if out.shape != reference.shape:
        raise InputError(f"the result has shape {tuple(out.shape)}, the reference {tuple(reference.shape)}")
    ref = reference.detach().double()
    out = out.detach().to(ref.device).double()
    if ref.numel() == 0:
        return 0.0
    gap = (out - ref).abs_().div_(ref.abs() + _rms(ref))
    gap[(out == ref) | (out.isnan() & ref.isnan())] = 0.0  # equal infinities, and 0 / 0, are no error
    return gap.nan_to_num_(nan=math.inf, posinf=math.inf).max().item()


def _rms(ref: torch.Tensor) -> float:
    """Root mean square of the finite elements."""
    finite = ref[ref.isfinite()]
    return finite.square().mean().sqrt().item() if finite.numel() else 0.0


def normal(*size: int, dtype: torch.dtype, device, generator, mean: float = 0.0, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed inputs, drawn in float32 on the CPU so that every device sees the same values."""
    return (torch.randn(*size, generator=generator) * scale + mean).to(dtype).to(device)


def require(tensor: torch.Tensor, name: str, shape: tuple, like: torch.Tensor | None = None, dtypes=FLOATS) -> None:
    """Refuse `tensor` unless it has `shape` (None = any size), one of `dtypes`, and device and dtype of `like`.

    Raises InputError naming the argument, what it is and what it should be.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}.")
    fits = tensor.dim() == len(shape) and all(n in (None, got) for n, got in zip(shape, tensor.shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise InputError(f"{name} has shape {tuple(tensor.shape)}; expected ({wanted}).")
    if tensor.dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise InputError(f"{name} is {tensor.dtype}; supported are {names}. Convert it with .to(dtype).")
    if like is not None and tensor.dtype != like.dtype:
        raise InputError(f"{name} is {tensor.dtype}, but the first argument is {like.dtype}; convert one of them.")
    if like is not None and tensor.device != like.device:
        raise InputError(f"{name} is on {tensor.device}, but the first argument is on {like.device}; move one of them.")


def require_whole(**sizes: int) -> None:
    """Refuse a size that is not a whole number of at least 1."""
    for name, n in sizes.items():
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InputError(f"{name}={n!r} must be a whole number from 1.")


def require_power_of_two(**sizes: int) -> None:
    """Refuse a size that is not a power of two, as Triton's tiles and numbers of warps must be."""
    require_whole(**sizes)
    for name, n in sizes.items():
        if n & (n - 1):
            below = 1 << (n.bit_length() - 1)
            raise InputError(f"{name}={n} is not a power of two; the nearest are {below} and {2 * below}.")
        if n > 1 << 20:
            raise InputError(f"{name}={n} is too large; a tile of Triton has at most {1 << 20} elements.")
