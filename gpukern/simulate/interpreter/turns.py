"""Programs take turns: one after the other, and one that waits for another lets others run meanwhile.

A card runs as many programs at once as fit on its SMs, so a kernel may wait in one program for what another does: a
barrier over the grid, the tiles of stream-K. Here one program runs at a time. One that waits is left where it stands,
in its thread, and the next ones run in a new thread; so most launches need no thread but the caller's.
"""

import threading
from collections import deque


class Stop(Exception):
    """The launch cannot go on; its report says why."""


class Turns:
    """The programs 0 to count - 1, each run by `run(number)`.

    resident  how many the card can run at once: when so many wait, no new one begins
    """

    def __init__(self, run, count: int, resident: int):
        self._run, self._count, self._resident = run, count, resident
        self._next = 0
        self._parked = deque()  # a semaphore for each program that waits, the longest waiting first
        self._finished = threading.Semaphore(0)
        self._error = None

    @property
    def waiting(self) -> int:
        """How many programs have let others run, and did not get their turn again yet."""
        return len(self._parked)

    def run_all(self) -> None:
        """Run every program. Raises what the first one raised that failed."""
        self._work()
        self._finished.acquire()
        if self._error is not None:
            raise self._error

    def let_others_run(self) -> bool:
        """Called by the running program, which waits for something. False if there is nobody else who could run."""
        if self._error is not None:
            raise Stop
        may_begin = self._next < self._count and len(self._parked) + 1 < self._resident
        if not may_begin and not self._parked:
            return False
        mine = threading.Semaphore(0)
        self._parked.append(mine)
        try:
            if may_begin:
                threading.Thread(target=self._work, daemon=True).start()
            else:
                self._parked.popleft().release()
            mine.acquire()
        except BaseException:  # an interrupt: nobody shall hand the turn to a program that is gone
            if mine in self._parked:
                self._parked.remove(mine)
            raise
        if self._error is not None:
            raise Stop
        return True

    def _work(self) -> None:
        """Run programs until none is left, then hand the turn to one that waits."""
        try:
            while self._error is None and self._next < self._count:
                self._next += 1
                self._run(self._next - 1)
        except BaseException as error:
            self._error = self._error or error
        if self._parked:
            self._parked.popleft().release()
        else:
            self._finished.release()
