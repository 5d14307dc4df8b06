"""What a tile asks of the card, before it is tried: shared memory, threads, registers, waves."""

from dataclasses import dataclass

import torch

from gpukern import device
from gpukern.device import Card


@dataclass(frozen=True)
class Limit:
    """One limit of the card: what a tile uses of it and how much there is. `exact` is False for an estimate."""

    name: str
    used: int
    limit: int
    unit: str
    exact: bool = True

    @property
    def broken(self) -> bool:
        return self.used > self.limit

    def __str__(self) -> str:
        about = "" if self.exact else "about "
        return f"{self.name}: {about}{self.used:,} of {self.limit:,} {self.unit}"


def tile_limits(version, tile: dict, dtype: torch.dtype, card: Card | None = None, **sizes) -> list[Limit]:
    """What `version` (an op.Version) with `tile` takes of `card` (default: this machine's): one Limit each.

    sizes  what else the version's formula for shared memory wants: D, the head size, for attention

    Shared memory is the version's own formula. Registers are a lower estimate for kernels that keep a BM x BN
    accumulator in float32: the compiler needs more, for addresses and operands, and spills what does not fit.
    """
    card, tile = card or device.card(), {**version.tile, **tile}
    limits = []
    if "warps" in tile:
        threads = card.warp * tile["warps"]
    else:
        threads = tile.get("threads", tile.get("BM", 1) * tile.get("BN", 1))
    limits.append(Limit("threads a block", threads, card.threads_per_block, "threads"))
    if (shared := version.shared_bytes(tile, dtype=dtype, on=card, **sizes)) is not None:
        # Shared arrays of a size that stands in the source get no more than every block gets; Triton asks for more.
        most = card.shared_per_block if version.language == "triton" else card.shared_static
        limits.append(Limit("shared memory a block", shared, most, "bytes"))
    if version.language == "triton" and "BM" in tile and "BN" in tile:
        registers = tile["BM"] * tile["BN"] // threads
        limits.append(Limit("accumulator registers a thread", registers, card.registers_per_thread, "registers", False))
    return limits


def waves(M: int, N: int, batch: int, tile: dict, card: Card | None = None) -> float:
    """Blocks of a BM x BN tiling of `batch` M x N results, over the SMs of the card, one block an SM at a time."""
    card = card or device.card()
    return batch * -(-M // tile["BM"]) * -(-N // tile["BN"]) / card.sms
