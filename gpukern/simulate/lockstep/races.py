"""Data races: two threads at one place, one of them writing, and nothing that orders the two.

Beside a space lies its shadow. For each place (granule) it remembers the last write: who, when, and on which line.
`When` is a clock that ticks at every barrier, so "since the last barrier" is one comparison. Two accesses by different
threads are

    of one warp       ordered if the warp met in syncwarp (or at a barrier) in between,
    of one block      ordered if the block met at a barrier in between,
    of two blocks     ordered only if the whole grid met (cooperative grid.sync),

and a race if they are not ordered, one of them writes, and not both are atomic. That a simulation runs them one after
the other does not matter: on a card, either may come first.

What a thread did before a threadfence counts as published (before a threadfence_block, to its block): whoever comes
later has waited for an atomic, which the machine does not check.

Reads are only noted. They are held against the writes when the next barrier comes, and only if there were any; reads of
an interval that goes on (no barrier yet, but too many notes) are folded into a table like that of the writes.
"""

import numpy as np

from gpukern.simulate.lockstep.memory import per_thread

# An entry of a table, in 64 bits: clock (24) | line (8) | atomic (1) | several (2) | thread (28). Zero: never.
_THREAD, _SEVERAL, _ATOMIC, _LINE, _CLOCK = 0, 28, 30, 31, 39
_WHO = (1 << _SEVERAL) - 1
SAME, WARP, BLOCK, GRID = range(4)  # what two threads have in common, at the least
MOST_THREADS, MOST_CLOCK = 1 << _SEVERAL, 1 << 24
_MOST_NOTES = 1 << 21
_ADVICE = {
    WARP: "Threads of a warp need not run in step: put cuda.syncwarp(), or cuda.syncthreads(), between the two.",
    BLOCK: "Nothing orders the two: put cuda.syncthreads() between them, or use cuda.atomic.",
    GRID: "Blocks run in any order: use cuda.atomic, give each block its own place, or launch twice.",
}


class Shadow:
    """Who last wrote, and who read, each granule of one space."""

    def __init__(self, machine, space):
        self.machine = machine
        self.space = space
        self.writes = np.zeros(space.granules, np.int64)
        self.reads = None
        self.notes, self.noted = [], 0
        self.dirty = False  # written since the first note?

    def restart(self) -> None:
        """Forget everything: other blocks use the memory now."""
        self.writes[:] = 0
        self.reads, self.notes, self.noted, self.dirty = None, [], 0, False

    def read(self, group, element, view, line: str) -> None:
        """Threads of `group` read `element` of `view.flat`. Reports reads of what was never written, and races."""
        for place in self.space.places(element, view.flat.itemsize):
            entry = self.writes.take(place)
            if self.space.kind == "shared" and not entry.all():
                self._never_written(group, entry, element, view, line)
            self._check(group, entry, place, view, line, "reads", "wrote")
            self.notes.append((group, place, view, line, self.machine.clock))
            self.noted += group.n
        if self.noted > _MOST_NOTES:
            self.settle(keep=True)

    def write(self, group, element, view, line: str, value=None, atomic: bool = False, reads: bool = False) -> None:
        """Threads of `group` write `element`. Call it before the memory changes. value: what they write.

        reads: they read it, too, as most atomics do
        """
        for place in self.space.places(per_thread(element, group.n), view.flat.itemsize):
            entry = self.writes.take(place)
            if reads and self.space.kind == "shared" and not entry.all():
                self._never_written(group, entry, element, view, line)
            there = None if value is None else view.flat.take(element)
            self._check(group, entry, place, view, line, "writes", "wrote", (value, there), atomic)
            if self.reads is not None:
                self._check(group, self.reads.take(place), place, view, line, "writes", "read")
            mine = self.machine.stamp(group, line, self.machine.clock) | (int(atomic) << _ATOMIC)
            self.writes[place] = mine
            if group.n > 1 and not atomic:
                entry = self.writes.take(place)  # of the threads that write one place, the last has it now
                if (entry != mine).any():
                    last = np.searchsorted(group.global_threads, entry & _WHO)
                    values = value, per_thread(value, group.n)[last]
                    self._check(group, entry, place, view, line, "writes", "writes", values)
            self.dirty |= bool(self.notes)

    def settle(self, keep: bool) -> None:
        """Hold the notes against the writes made since. keep: the interval goes on, so they must not be lost."""
        for group, place, view, line, clock in self.notes if self.dirty else ():
            self._check(group, self.writes.take(place), place, view, line, "reads", "writes", clock=clock)
        if keep:
            for group, place, _, line, clock in self.notes:
                self._fold(group, per_thread(place, group.n), line, clock)
        self.notes, self.noted, self.dirty = [], 0, False

    def _check(self, group, entry, place, view, line, doing, other, values=(None, None), atomic=False, clock=None):
        """Report the threads of `group` that are not ordered with the accesses in `entry` at their places.

        values: what they write, and what the other access has written there
        clock   when they did it, if not now
        """
        floor = group.since_block << _CLOCK if self.space.kind == "shared" else 1
        if not (entry >= floor).any():
            return
        me = group.global_threads
        entry = per_thread(entry, group.n)
        hit = np.flatnonzero((entry != 0) & ((entry & _WHO != me) | (entry >> _SEVERAL & 3 != 0)))
        if not len(hit):
            return
        entry, me = entry[hit], me[hit]
        common = np.maximum(self.machine.common(entry & _WHO, me), entry >> _SEVERAL & 3)
        race = (common > SAME) & (entry >> _CLOCK >= group.since(common, hit))
        if self.machine.fenced is not None:
            within = (common != GRID).astype(np.int64)
            race &= self.machine.fenced[within, entry & _WHO] < entry >> _CLOCK
            if clock is not None:
                race &= self.machine.fenced[within, me] < clock
        if atomic:
            race &= entry >> _ATOMIC & 1 == 0
        hit, entry = hit[race], entry[race]
        if not len(hit):
            return
        new, old = values
        same = new is not None and (per_thread(new, group.n)[hit] == per_thread(old, group.n)[hit]).all()
        self._report(group, hit, entry, per_thread(place, group.n)[hit], view, line, doing, other, same)

    def _report(self, group, hit, entry, place, view, line, doing, other, same):
        machine = self.machine
        first, who = int(hit[0]), int(entry[0]) & _WHO
        array, index = machine.name_of(self.space, int(place[0]) * self.space.granule, view, first)
        there = machine.line_of(int(entry[0]) >> _LINE & 0xFF)
        several = " and others" if int(entry[0]) >> _SEVERAL & 3 else ""
        me = machine.who(int(group.global_threads[first]))
        you = machine.who(who)
        what = f"{me} {doing} {array}[{', '.join(map(str, index))}] ({line}), which {you}{several} {other} ({there})"
        if same:
            kind, advice = (
                "same_value_race",
                "Both write the same value, so the result stands; let one thread write it.",
            )
        else:
            kind = "race"
            apart = machine.common(entry & _WHO, group.global_threads[hit]).max()  # the fix must serve all of them
            advice = _ADVICE[apart]
            if apart == GRID and machine.code.asks_atomics and other == "wrote":
                advice += " If an atomic tells that it is there: cuda.threadfence() between the write and that atomic."
        machine.report.add(kind, f"{what}. {advice}", line, [me, you], array, index, len(hit))

    def _never_written(self, group, entry, element, view, line) -> None:
        entry = per_thread(entry, group.n)
        first = int(np.flatnonzero(entry == 0)[0])
        byte = int(per_thread(element, group.n)[first]) * view.flat.itemsize
        array, index = self.machine.name_of(self.space, byte, view, first)
        me = self.machine.who(int(group.global_threads[first]))
        self.machine.report.add(
            "uninitialised",
            f"{me} reads {array}[{', '.join(map(str, index))}] ({line}), which no thread of its block has written. "
            "Shared memory starts with anything in it: write it first, then cuda.syncthreads().",
            line,
            [me],
            array,
            index,
            int((entry == 0).sum()),
        )

    def _fold(self, group, place, line, clock) -> None:
        """Enter reads into their table: the last reader of a place, whether there are several, how far apart."""
        if self.reads is None:
            self.reads = np.zeros(self.space.granules, np.int64)
        me = group.global_threads
        mine = np.broadcast_to(self.machine.stamp(group, line, clock), group.n)
        old = self.reads[place]
        if not old.any():
            self.reads[place] = mine
            if (self.reads[place] == mine).all():  # nobody else reads here, as is mostly so
                return
        common = np.maximum(self.machine.common(old & _WHO, me), old >> _SEVERAL & 3)
        valid = (old != 0) & (old >> _CLOCK >= group.since(common, np.arange(group.n)))
        self.reads[place] = mine | np.where(valid, common, SAME) << _SEVERAL
        for level in (WARP, BLOCK, GRID):  # threads of this one read at the same place
            now = self.reads[place]
            apart = np.maximum(self.machine.common(now & _WHO, me), now >> _SEVERAL & 3)
            more = np.flatnonzero((apart == level) & (now >> _SEVERAL & 3 < level))
            if len(more):
                self.reads[place[more]] |= level << _SEVERAL
