"""Check: is a version right? Always asked before a time is taken."""

import math
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gpukern import device
from gpukern.op import Op, Shape, error


@dataclass(frozen=True)
class Verdict:
    """The largest error of any element (see op.error) and the largest that passes."""

    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        return f"{'right' if self.ok else 'WRONG'}: error {self.error:.1e}, tolerance {self.tolerance:.0e}"


def check(op: Op, version: str, shape: Shape, dtype: torch.dtype, tile: dict | None = None, seed: int = 0) -> Verdict:
    """Run one version on inputs drawn from `seed` and hold it against the float64 reference.

    shape  one of `op.shapes`, or any other with the same keys
    tile   keyword arguments that replace the version's default tile
    """
    drawn = op.draw(shape, dtype, device.torch_device(), seed)
    reference = op.reference(**drawn)
    with poisoned():
        out = op.versions[version](**drawn, **(tile or {}))
    return Verdict(error(out, reference), op.tolerance[dtype])


def found_error(out, reference) -> float:
    """op.error of a layer's result. A layer whose exact answer is not finite has nothing to be held against: inf."""
    tensors = reference if isinstance(reference, tuple) else (reference,)
    return error(out, reference) if all(bool(t.isfinite().all()) for t in tensors) else math.inf


@contextmanager
def poisoned():
    """Within it, torch.empty and torch.empty_like give memory full of NaN: an element that no thread writes shows."""
    empty, empty_like = torch.empty, torch.empty_like

    @torch.no_grad()  # a library (torch.compile, when it starts) may ask for memory that requires a gradient
    def fill(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    torch.empty = lambda *args, **kwargs: fill(empty(*args, **kwargs))
    torch.empty_like = lambda *args, **kwargs: fill(empty_like(*args, **kwargs))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like
