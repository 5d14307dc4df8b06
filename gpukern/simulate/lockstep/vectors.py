"""Accesses of 16 bytes a thread: four neighbouring float32 as one element of an array that has a quarter of them."""

import numpy as np

from gpukern.simulate.lockstep.memory import View, per_thread

_FOUR = np.dtype("V16")  # four float32 as one thing that is not computed with


class VectorAccess:
    """What a Group does with four elements at once."""

    def load4(self, view: View, element, line: str) -> tuple:
        """Elements element to element + 3, counted in memory order, as four registers."""
        if self._misaligned(view, element, line):
            return (np.float32(np.nan),) * 4
        four = self.load(_by_fours(view), (element // 4,), line)
        if type(four) is not np.ndarray:
            return tuple(np.frombuffer(four.tobytes(), np.float32))
        return tuple(np.ascontiguousarray(four.view(np.float32).reshape(-1, 4).T))

    def store4(self, view: View, element, values: tuple, line: str) -> None:
        """Four registers into elements element to element + 3."""
        if self._misaligned(view, element, line):
            return
        four = np.stack([per_thread(v, self.n) for v in values], 1).astype(np.float32).view(_FOUR).reshape(-1)
        self.store(_by_fours(view), (element // 4,), four, line)

    def _misaligned(self, view: View, element, line: str) -> bool:
        """A fault if an address is no multiple of 16 bytes: a card stops the kernel there."""
        byte = per_thread((view.offset + element) * 4 + view.space.address, self.n)
        wrong = np.flatnonzero(byte % 16)
        if len(wrong):
            me = self.machine.who(int(self.global_threads[wrong[0]]))
            at = int(per_thread(element, self.n)[wrong[0]])
            what = (
                f"{me} accesses 16 bytes of {view.name} at element {at} ({line}), which do not begin at a multiple of "
                "16 bytes. A card stops the kernel. Begin at a multiple of 4 elements, in an array that begins at one."
            )
            self.machine.report.add("misaligned", what, line, [me], view.name, (at,), len(wrong))
        return bool(len(wrong))


def _by_fours(view: View) -> View:
    size, one = view.size // 4, np.int64(1)
    return View(view.space, view.space.flat(_FOUR), view.offset // 4, (size,), (one,), f"{view.name} by fours")
