"""Theoretical occupancy: how many blocks of a kernel fit on one SM of a card at once, and what keeps out the next one.

The rules are those of NVIDIA's occupancy calculator (`cuda_occupancy.h` of the CUDA toolkit). An SM has four
partitions. A warp's registers lie in one of them, in portions of 256. A block's shared memory is given out in portions
as well, and from compute capability 8.0 on the system keeps 1 KB of it in each block.
"""

from dataclasses import dataclass

from gpukern import device

PARTITIONS = 4  # of an SM
REGISTERS_AT_ONCE = 256  # of a warp


@dataclass(frozen=True)
class Occupancy:
    """How full one SM can be.

    blocks      of the kernel on an SM at once; warps: of all of them
    fraction    warps / the warps that an SM can hold
    limited_by  what there is too little of for one more block: "threads", "blocks" (an SM holds only so many),
                "registers" or "shared memory". At a tie, the first of them
    """

    blocks: int
    warps: int
    fraction: float
    limited_by: str


def occupancy(threads: int, registers: int | None, shared: int = 0, card: str | None = None) -> Occupancy:
    """The theoretical occupancy of blocks of `threads` threads on the card called `card` (default: this machine's).

    registers  a thread; None if nobody knows them: then they limit nothing
    shared     bytes a block, static and dynamic. The SM is taken to give all it can of its memory to shared memory

    Raises LimitError for a block that the card cannot launch, DeviceError for an unknown card, TypeError for a number
    that is not whole.
    """
    on = device.card(card)
    for name, n in (("threads", threads), ("registers", registers), ("shared", shared)):
        if not isinstance(n, int) and not (name == "registers" and n is None):
            raise TypeError(f"{name}={n!r}: it is a whole number.")
    if shared < 0:
        raise device.LimitError(f"a block wants {shared} bytes of shared memory; it cannot be less than 0.")
    device.check_launch(1, threads, shared, on)
    warps = -(-threads // on.warp)
    fits = {
        "threads": on.warps_per_sm // warps,
        "blocks": on.blocks_per_sm,
        "registers": _by_registers(warps, registers, on) if registers else on.blocks_per_sm,
        "shared memory": _by_shared(shared, on),
    }
    limited_by = min(fits, key=fits.get)
    blocks = fits[limited_by]
    return Occupancy(blocks, blocks * warps, blocks * warps / on.warps_per_sm, limited_by)


def most_threads(registers: int, on: device.Card) -> int:
    """The largest block, in threads, that can be launched when each thread takes `registers`."""
    return min(on.threads_per_block, _most_warps(registers, on) * on.warp)


def _by_registers(warps: int, registers: int, on: device.Card) -> int:
    if not 0 < registers <= on.registers_per_thread:
        raise device.LimitError(f"{registers} registers a thread: {on.name} has 1 to {on.registers_per_thread}.")
    most = most_threads(registers, on)
    if warps * on.warp > most:
        raise device.LimitError(
            f"{warps * on.warp} threads with {registers} registers each want more than the {on.registers_per_sm:,} "
            f"registers of an SM of {on.name}: no such block can be launched. Use at most {most} threads a block, or "
            "tell the compiler the size of the block (launch_bounds in Numba, num_warps in Triton)."
        )
    return _most_warps(registers, on) // warps


def _most_warps(registers: int, on: device.Card) -> int:
    """Warps whose registers fit on one SM: those of one partition, times the partitions."""
    each = _round_up(registers * on.warp, REGISTERS_AT_ONCE)
    return PARTITIONS * (on.registers_per_sm // PARTITIONS // each)


def _by_shared(shared: int, on: device.Card) -> int:
    modern = on.compute_capability >= (8, 0)
    block = _round_up(shared + (1024 if modern else 0), 128 if modern else 256)
    return on.shared_per_sm // block if block else on.blocks_per_sm


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
