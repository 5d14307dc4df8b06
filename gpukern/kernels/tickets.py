"""Tickets: counters that tell the last of several programs that it is the last, so that it can combine their results.

Each program of a group takes a ticket when its part is in memory (an atomic add, which releases what it wrote); the one
that gets the last ticket acquires what all others wrote. It sets the counter back to 0 for the launches to come.
"""

import functools

import torch

from gpukern import device

_ROOM = 1 << 18


def tickets(n: int) -> torch.Tensor:
    """`[n]` int32 counters, all 0; the kernel that takes them leaves them 0.

    Neighbouring launches get different counters, so that launches on several streams do not count each other.
    Raises LimitError for more than there are, DeviceError if the first call of all is inside a graph capture.
    """
    if n > _ROOM:
        raise device.LimitError(f"{n} groups of programs want a counter each; there are {_ROOM}. Use fewer splits.")
    pool = _pool(device.torch_device())
    first = pool.next if pool.next + n <= _ROOM else 0
    pool.next = first + n
    return pool.counters[first : first + n]


class _Pool:
    """The counters of one device, handed out in a ring."""

    def __init__(self, on: torch.device):
        if on.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise device.DeviceError("run this kernel once before it is captured: its counters must be 0 by then.")
        self.counters, self.next = torch.zeros(_ROOM, dtype=torch.int32, device=on), 0
        if on.type == "cuda":
            torch.cuda.synchronize()  # other streams may be the first to use them


@functools.cache
def _pool(on: torch.device) -> _Pool:
    return _Pool(on)
