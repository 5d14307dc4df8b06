"""Progress: a long piece of work done in steps, with a bar and a button that ends it."""

import asyncio
from collections.abc import Callable, Iterable, Iterator

import ipywidgets as widgets

# Seconds between steps in which the kernel hears of the Cancel button and of the other controls.
_PAUSE = 0.02


class Progress(widgets.HBox):
    """A bar and a Cancel button, shown while `run` works.

    In a notebook the steps run on the kernel's own event loop, between the messages of the front-end: no thread, so
    nothing is measured while a cell of the learner runs. In a plain program `run` returns when all is done.
    """

    def __init__(self, kind: str):
        self.bar = widgets.IntProgress(layout={"width": "300px"})
        self.label = widgets.Label()
        self.cancel = widgets.Button(description="Cancel", icon="stop", tooltip="Stop after the present measurement")
        self.cancel.on_click(self._stop)
        self.bar.add_class(f"{kind}-progress")
        self.cancel.add_class(f"{kind}-cancel")
        self.running = self._stopped = False
        self._task = None  # held here because the event loop does not keep it alive
        super().__init__([self.bar, self.label, self.cancel], layout={"display": "none"})

    def run(self, items: Iterable, total: int, take: Callable, end: Callable[[str, Exception | None], None]) -> None:
        """Hand each of `items` to `take` as it comes; call `end` with what happened in words and the error, if any.

        Does nothing if work is in progress.
        """
        if self.running:
            return
        self.running, self._stopped = True, False
        self.bar.max, self.bar.value, self.label.value = total, 0, f"0 of {total}"
        self.layout.display = "flex"
        steps = self._steps(items, total, take, end)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a plain program
            for _ in steps:
                pass
        else:
            self._task = loop.create_task(_paced(steps))

    def _steps(self, items, total, take, end) -> Iterator[None]:
        done, error = 0, None
        items = iter(items)
        try:
            yield  # shows the bar before the first item is worked on
            while not self._stopped and (item := next(items, None)) is not None:
                take(item)
                done += 1
                self.bar.value, self.label.value = done, f"{done} of {total}"
                yield
        except Exception as problem:
            error = problem
        finally:
            if hasattr(items, "close"):
                items.close()  # lets a generator give back what it holds on the card
            self.running = False
            self.layout.display = "none"
        ended = "stopped by an error" if error else "cancelled" if self._stopped else "done"
        end(f"{ended} after {done} of {total}", error)

    def _stop(self, _) -> None:
        self._stopped = True
        self.label.value += ", stopping"


async def _paced(steps: Iterator[None]) -> None:
    for _ in steps:
        await asyncio.sleep(_PAUSE)
