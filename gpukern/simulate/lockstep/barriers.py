"""Barriers: a block's threads wait for each other; what they did before is ordered with what they do after."""

import numpy as np

from gpukern.simulate.lockstep.group import Group, join


class Barriers:
    """What a Machine does with threads that are parked at barriers."""

    def release_all(self) -> int:
        """All threads stand at one barrier: they go on; returns their program counter."""
        pc, kind, _, group, predicate, result = self.parked.pop()
        self._met(None, kind)
        self._deliver(group, kind, predicate, result)
        return pc

    def release(self, only_complete: bool) -> bool:
        """Let the parked threads go on whose block has arrived as a whole. Returns whether there were any.

        If there are none (and not only_complete), the barrier is divergent: a fault, after which all go on.
        """
        arrived = {}
        for pc, kind, _, group, _, _ in self.parked:
            here = np.bincount(self.block_of[group.lanes], minlength=self.blocks)
            arrived[pc, kind] = arrived.get((pc, kind), 0) + here
        ready = {}
        for (pc, kind), here in arrived.items():
            done = (here == self.alive) & (here > 0)
            ready[pc, kind] = done if kind != "grid" or (here == self.alive).all() else done & False
        complete = any(done.any() for done in ready.values())
        if not complete:
            if only_complete:
                return False
            self._divergent(arrived)
            ready = {key: here > 0 for key, here in arrived.items()}
        left_early = self.alive < self.block_size
        parked, self.parked, gone = self.parked, [], np.zeros(self.blocks, bool)
        merged = {}
        for pc, kind, line, group, predicate, result in parked:
            block = self.block_of[group.lanes]
            go = ready[pc, kind][block]
            alone = go & (left_early.any() if kind == "grid" else left_early[block])
            if complete and alone.any():
                self._left_early(group, np.flatnonzero(alone), line, "grid" if kind == "grid" else "block")
            if predicate is not None:
                group.r["$predicate"] = predicate
            if go.any():
                merged.setdefault((pc, kind, result), []).append(group.part(np.flatnonzero(go)))
                gone |= ready[pc, kind]
            if not go.all():
                stays = group.part(np.flatnonzero(~go))
                self.parked.append((pc, kind, line, stays, stays.r.pop("$predicate", None), result))
        kinds = {kind for (_, kind, _) in merged}
        self._met(gone, "grid" if kinds == {"grid"} else "sync")
        for (pc, kind, result), groups in merged.items():
            group = join(groups)
            self._deliver(group, kind, group.r.pop("$predicate", None), result)
            self.wait(pc, group)
        return True

    def _met(self, blocks, kind: str) -> None:
        """The blocks (None: all) met at a barrier: what they did before it is ordered with what they do now."""
        every = blocks is None or blocks.all()
        for shadow in self.shadows:
            shadow.settle(keep=not every or shadow.space.kind == "global")
        self.tick()
        if every:
            self.block_sync = self.clock
        else:
            if type(self.block_sync) is not np.ndarray:
                self.block_sync = np.full(self.blocks, self.block_sync)
            self.block_sync[blocks] = self.clock
        if kind == "grid":
            self.grid_sync = self.clock

    def _deliver(self, group: Group, kind: str, predicate, result) -> None:
        """syncthreads_count, _and, _or: every thread gets the answer of its block."""
        if predicate is None:
            return
        block = self.block_of[group.lanes]
        true = np.bincount(block, weights=np.broadcast_to(predicate != 0, group.n), minlength=self.blocks)
        here = np.bincount(block, minlength=self.blocks)
        answer = {"count": true, "and": (true == here) & (here > 0), "or": true > 0}[kind]
        group.r[result] = answer.astype(np.int32)[block]

    def _divergent(self, arrived: dict) -> None:
        where = {}
        for pc, kind, line, group, _, _ in self.parked:
            where.setdefault((pc, kind, line), []).append(self.who(int(group.global_threads[0])))
        places = [f"{names[0]} waits at {line}" for (_, _, line), names in where.items()]
        line = self.parked[0][2]
        threads = [names[0] for names in where.values()]
        if any(kind == "grid" for _, kind, _, _, _, _ in self.parked):
            advice = "Every thread of the grid must reach the same grid.sync()."
        else:
            advice = "Every thread of a block must reach the same syncthreads(): move it out of the branch or loop."
        self.report.add("divergent_barrier", f"{' while '.join(places)}. {advice}", line, threads)

    def _left_early(self, group: Group, which: np.ndarray, line: str, of: str) -> None:
        me = self.who(int(group.global_threads[which[0]]))
        self.report.add(
            "divergent_barrier",
            f"{me} waits at {line}, but other threads of its {of} have returned before it. Let every thread reach the "
            "barrier: guard the work, not the whole kernel, with the bounds check.",
            line,
            [me],
            count=len(which),
        )
