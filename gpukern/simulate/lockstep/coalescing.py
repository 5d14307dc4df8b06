"""What a warp's access costs: 32-byte sectors of global memory, wavefronts of shared memory.

The names and the rules are those of Nsight Compute: one *request* for each warp that executes the access, whatever
number of its threads takes part.
"""

import numpy as np

SECTOR = 32  # bytes
BANKS = 32  # of 4 bytes each
WARP = 32  # threads


class Warps:
    """How a group of threads falls into warps: its threads are in order, so those of a warp stand together."""

    def __init__(self, warp: np.ndarray, lane: np.ndarray):
        """warp, lane: for each thread of the group the number of its warp, and its place there."""
        self.lane = lane
        changes = np.flatnonzero(warp[1:] != warp[:-1]) + 1
        self.starts = np.concatenate(([0], changes))  # the place where each warp begins
        self.count = len(self.starts)
        self.sizes = np.diff(np.append(self.starts, len(warp)))
        self.of = np.repeat(np.arange(self.count), self.sizes)  # for each thread, which of the group's warps

    def sectors(self, element, itemsize: int, address: int) -> int:
        """Distinct sectors, warp by warp, that the threads access. address: of element 0."""
        if type(element) is not np.ndarray:
            return self.count
        sector = (element * itemsize + address) >> 5
        step = sector[1:] - sector[:-1]
        step[self.starts[1:] - 1] = 1  # a new warp is a new sector
        if step.min(initial=0) >= 0:  # neighbours ask for the same or for later sectors, as they mostly do
            return int(np.count_nonzero(step)) + 1
        order = np.lexsort((sector, self.of))
        sector, warp = sector[order], self.of[order]
        return int(np.count_nonzero((sector[1:] != sector[:-1]) | (warp[1:] != warp[:-1]))) + 1

    def wavefronts(self, element, itemsize: int, loads: bool) -> tuple:
        """Wavefronts and bank conflicts of an access to shared memory. element: the number of each thread's element.

        In one wavefront every bank delivers one word, to all threads that want it. Threads that want another word of
        a bank go again: a conflict. With elements of 8 bytes, over pairs of banks, half a warp goes at a time, with 16
        bytes a quarter; but twice as many load at once if neighbours (all lanes t and t ^ 1 of the warp, or all lanes t
        and t ^ 2) want the same or nothing.
        """
        if type(element) is not np.ndarray:
            return self.count, 0
        if itemsize > 4:
            word, banks, team = element, BANKS * 4 // itemsize, self._teams(element, itemsize, loads)
        else:
            word, banks, team = element if itemsize == 4 else element * itemsize >> 2, BANKS, self.of
        slot = team * banks + (word & (banks - 1))
        delivers = np.empty((team[-1] + 1) * banks, np.int64)
        waves, first = 0, None
        while True:
            delivers[slot] = word  # the last thread to ask decides which word the bank delivers
            served = delivers.take(slot) == word
            asking = self.count if waves == 0 and team is self.of else len(np.unique(team))
            first = asking if first is None else first
            waves += asking
            if served.all():
                return waves, waves - first
            again = np.flatnonzero(~served)
            slot, word, team = slot[again], word[again], team[again]

    def _teams(self, element: np.ndarray, itemsize: int, loads: bool) -> np.ndarray:
        """Who goes together, a number for each thread: those of a warp whose elements fill the banks once.

        Loads of twice as many threads go together if neighbours agree in the whole warp.
        """
        size = WARP * 4 // itemsize  # threads of a team
        pair = self.of * (WARP // size // 2) + self.lane // (2 * size)
        second = self.lane // size % 2
        if loads:
            second &= ~self._neighbours_agree(element)[self.of]
        return pair * 2 + second

    def _neighbours_agree(self, element: np.ndarray) -> np.ndarray:
        """For each warp: do all lanes t and t ^ 1, or all t and t ^ 2, want one element, or one of the two nothing?"""
        wanted = np.full((self.count, WARP), -1, np.int64)
        wanted[self.of, self.lane] = element
        agree = np.zeros(self.count, bool)
        for apart in (1, 2):
            other = wanted[:, np.arange(WARP) ^ apart]
            agree |= ((wanted == other) | (wanted < 0) | (other < 0)).all(1)
        return agree
