"""What the threads of a warp do together: shuffles, votes, matches, syncwarp. A warp is 32 threads of one block."""

import numpy as np

from gpukern.simulate.lockstep.memory import per_thread

_LANES = np.arange(32)


class WarpFunctions:
    """What a Group does warp by warp."""

    def shuffle(self, kind: str, mask, value, by, line: str):
        """Each thread gets `value` of another lane: `by` itself, or by lanes up, down, xor. Off the warp: its own."""
        self._meet(mask, line, "a shuffle")
        lane, warp = self.warps.lane, self.warps.of
        by = np.asarray(by).astype(np.int64) & 31
        source = {"idx": by, "up": lane - by, "down": lane + by, "xor": lane ^ by}[kind]
        source = per_thread(source, self.n)
        source = np.where((source < 0) | (source > 31), lane, source)
        table, there = self._table(per_thread(value, self.n))
        silent = ~there[warp, source]
        if silent.any():
            first = int(np.flatnonzero(silent)[0])
            me = self.machine.who(int(self.global_threads[first]))
            self.machine.report.add(
                "divergent_warp",
                f"{me} reads lane {source[first]} in a shuffle ({line}), but that lane is not taking part. Let "
                "all lanes that are read execute the shuffle, outside of any branch.",
                line,
                [me],
                count=int(silent.sum()),
            )
        return table[warp, source]

    def vote(self, kind: str, mask, predicate, line: str):
        """all, any, eq: a truth for the whole warp; ballot: the bits of the lanes whose predicate holds."""
        self._meet(mask, line, "a vote")
        true = per_thread(np.asarray(predicate != 0)[()], self.n)
        asked = per_thread(np.asarray(mask).astype(np.int64)[()], self.n)
        bits = self._bits(true)[self.warps.of] & asked
        everyone = self._bits(np.ones(self.n, bool))[self.warps.of] & asked
        if kind == "ballot":
            return bits
        if kind == "any":
            return bits != 0
        return bits == everyone if kind == "all" else (bits == 0) | (bits == everyone)

    def match(self, kind: str, mask, value, line: str):
        """any: the lanes that have this thread's value; all: (the lanes, True) if all have it, else (0, False)."""
        self._meet(mask, line, "a match")
        value = np.ascontiguousarray(per_thread(value, self.n))
        value = value.view(f"u{value.itemsize}")  # a card compares the bits
        table, there = self._table(value)
        asked = per_thread(np.asarray(mask).astype(np.int64)[()], self.n)
        there = there[self.warps.of] & (asked[:, None] >> _LANES & 1).astype(bool)
        same = (table[self.warps.of] == value[:, None]) & there
        bits = (same << _LANES).sum(1)
        if kind == "any":
            return bits.astype(np.int32)
        whole = (same == there).all(1)
        return np.where(whole, bits, 0).astype(np.int32), whole

    def active_mask(self):
        """The lanes of the warp that are at this place together."""
        return self._bits(np.ones(self.n, bool))[self.warps.of].astype(np.uint32)

    def sync_warp(self, mask, line: str) -> None:
        """The lanes of each warp wait for each other; what they did in memory before is ordered with what follows."""
        self._meet(mask, line, "syncwarp")
        m = self.machine
        for shadow in m.shadows:
            shadow.settle(keep=True)
        m.tick()
        m.warp_sync[m.warp_of[self.lanes]] = m.clock

    def _table(self, value: np.ndarray) -> tuple:
        """`value` as [warp, lane], and which lanes are there."""
        table = np.zeros((self.warps.count, 32), value.dtype)
        there = np.zeros(table.shape, bool)
        table[self.warps.of, self.warps.lane] = value
        there[self.warps.of, self.warps.lane] = True
        return table, there

    def _bits(self, true: np.ndarray) -> np.ndarray:
        """One 32-bit mask a warp, as int64: the lanes for which `true` holds."""
        return np.bincount(self.warps.of, weights=true * 2.0**self.warps.lane, minlength=self.warps.count).astype(
            np.int64
        )

    def _meet(self, mask, line: str, what: str) -> None:
        """A fault if `mask` names lanes of the warp that are elsewhere, or leaves out a thread that is here."""
        here = self._bits(np.ones(self.n, bool))[self.warps.of]
        in_warp = self.machine.warp_size_of.take(self.lanes)
        mask = per_thread(np.asarray(mask).astype(np.int64)[()], self.n) & 0xFFFFFFFF & in_warp
        wrong = np.flatnonzero((mask & ~here != 0) | (mask >> self.warps.lane & 1 == 0))
        if len(wrong):
            me = self.machine.who(int(self.global_threads[wrong[0]]))
            self.machine.report.add(
                "divergent_warp",
                f"{me} is at {what} ({line}) with mask {int(mask[wrong[0]]):#x}, but the lanes here are "
                f"{int(here[wrong[0]]):#x}. The mask must name exactly the lanes that execute it together.",
                line,
                [me],
                count=len(wrong),
            )
