"""Threads that spin, on a lock or a flag: others go first, and if none can change what they wait for, they hang."""

import numpy as np

from gpukern.simulate.lockstep.group import Group
from gpukern.simulate.lockstep.memory import equal

TURN = 200  # steps (a block, run by a group) before others get a look in
# Atomics that change nothing, before others get a look in, and after which nobody is taken to come to an end.
PATIENCE, _MOST_POLLS = 4, 50_000
_WAITED_FOR = (
    "Whoever holds the lock, or sets the flag, must get on: not wait at a barrier, nor for a lock that another holds, "
    "nor have returned."
)


class Stopped(Exception):
    """The kernel does not come to an end."""


class Spinning:
    """What a Machine does to find out who can go on."""

    def ready(self) -> list:
        """The program counters at which threads can go on, ascending."""
        free = self.waiting.keys() - self.spinning.keys()
        if not self.spinning:
            return sorted(free)
        late = {pc for pc in free & self.code.meets if all(self.behind(g).all() for g in self.waiting[pc])}
        if free - late:
            return sorted(free - late)
        again = sorted(pc for pc in self.waiting.keys() & self.spinning.keys() if self.spinning[pc] != self.changes)
        if again:
            self.patience = PATIENCE
        elif late and all(self.stuck.get(pc) == self.changes for pc in self.waiting.keys() & self.spinning.keys()):
            return sorted(late)
        return again

    def behind(self, group: Group) -> np.ndarray:
        """Which threads of a group would, in a shuffle or syncwarp, miss lanes of their warp that spin?"""
        at = self.waiting.keys() & self.spinning.keys()
        spinning = [self.warp_of[g.lanes] for pc in at for g in self.waiting[pc]]
        return np.isin(self.warp_of[group.lanes], np.concatenate(spinning)) if spinning else np.zeros(group.n, bool)

    def look_for_spinning(self, pc: int, group: Group, in_vain: bool) -> None:
        """Threads that come back to where they were, with registers and memory unchanged, will do so for ever.

        Those whose registers change (they count their tries), but whose atomics change nothing, may: others go first.
        """
        if self.polls > _MOST_POLLS:
            self.hang(pc, f"as {self.polls:,} atomics, one after the other, have changed nothing at", _WAITED_FOR)
        changes, n, registers = self.seen.get(pc, (None, 0, None))
        for_ever = changes == self.changes and n == group.n and equal(registers, group.r)
        if for_ever or in_vain:
            self.spinning[pc] = self.changes
        if for_ever:
            self.stuck[pc] = self.changes
        self.seen[pc] = self.changes, group.n, dict(group.r)

    def no_thread_can_go_on(self) -> None:
        """All wait: at barriers, or spinning. Barriers that are met come first; to spin for ever is a hang."""
        if self.release(only_complete=bool(self.waiting)) or not self.waiting:
            return
        if all(self.stuck.get(pc) == self.changes for pc in self.waiting):
            self.hang(min(self.waiting), "as nobody changes what its threads wait for at", _WAITED_FOR)
        self.spinning = dict(self.stuck)
        self.patience = min(2 * self.patience, TURN)

    def hang(self, pc: int, how: str, advice: str) -> None:
        line = self.code.line_of_block[pc]
        self.report.add("hang", f"{self.code.name} does not come to an end {how} {line}. {advice}", line)
        raise Stopped

    def tell(self, changed: bool, atomic: str = "") -> None:
        """An atomic or a store has changed memory, or has not."""
        if changed:
            self.changes, self.polls = self.changes + 1, 0
        else:
            self.tries += 1
            self.polls += atomic not in ("max", "min", "nanmax", "nanmin")  # one looks for a maximum for long in vain
