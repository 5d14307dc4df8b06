"""Explorer: what every explorer is made of. Controls, a status line, a picture that follows the controls, its words.

A picture is a matplotlib Figure sent as PNG to an Image widget: it works in JupyterLab, Notebook, VS Code, Colab and
Binder with nothing installed but ipywidgets. Without a front-end (plain Python, nbconvert, a web page of the notebook)
an explorer still shows its last picture, and setting a control from code draws anew.
"""

import asyncio
import base64
import functools
import html
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager

import ipywidgets as widgets
import torch
from IPython import get_ipython

from gpukern.figures import png
from gpukern.layer import Layer, text

# Seconds after a drawing in which changes that queued up meanwhile arrive; of them, only the last is drawn.
_SETTLE = 0.02


class Explorer(widgets.VBox):
    """Controls above a picture. A subclass makes both and writes `show`, and `adjust` if its controls need it.

    kind      "layer": every widget has a class `<kind>-<name>`, by which style sheets and tests find it
    controls  name -> ipywidget
    figure    an object with `figure` (a matplotlib Figure) and `words` (the same for those who cannot see it)
    more      further widgets between the status line and the picture
    """

    def __init__(self, kind: str, controls: dict[str, widgets.Widget], figure, more: tuple[widgets.Widget, ...] = ()):
        self.controls, self.figure = controls, figure
        self._busy = self._again = False
        self._timer, self._drawn = None, 0.0
        self._offered = {}
        for control in controls.values():
            control.style.description_width = "initial"
            control.observe(self._changed, "value")
        self.status = widgets.HTML()
        self.nearest = widgets.Button(
            description="Show the nearest", layout={"width": "auto", "align_self": "flex-start"}
        )
        self.nearest.tooltip = "Set the controls to the nearest recorded row"
        self.nearest.on_click(self.guarded(lambda: self.set(**self._offered)))
        self.image = widgets.Image(format="png", layout={"max_width": "100%", "object_fit": "contain"})
        self.words = widgets.HTML(layout={"display": "none"})
        self.in_words = widgets.ToggleButton(description="The picture in words")
        self.in_words.layout = {"width": "auto", "align_self": "flex-start"}
        self.in_words.observe(self._show_words, "value")
        parts = {"status": self.status, "nearest": self.nearest, "image": self.image}
        parts |= {"in-words": self.in_words, "words": self.words}
        for name, widget in {**controls, **parts}.items():
            widget.add_class(f"{kind}-{name.lower()}")
        choices = [control for control in controls.values() if isinstance(control, widgets.Dropdown)]
        sliders = [control for control in controls.values() if control not in choices]
        rows = [
            widgets.HBox(row, layout={"flex_flow": "row wrap", "grid_gap": "2px 14px"}) for row in (choices, sliders)
        ]
        super().__init__([*rows, self.status, self.nearest, *more, self.image, self.in_words, self.words])
        self.refresh()

    def show(self) -> str:
        """Measure what the controls say, draw it into `figure`, and return the status line. May call `offer`."""
        raise NotImplementedError

    def adjust(self) -> None:
        """Bring what some controls offer into line with the others. Called before `show`."""

    def set(self, **values) -> None:
        """Set several controls by name, then draw once: `set(phase="decode", step=Step(1, 1, 512))`."""
        with self._together():
            for name in sorted(values, key=list(self.controls).index):
                self.controls[name].value = values[name]
                self.adjust()  # so that the next one offers what is to be set
        self.refresh()

    def offer(self, **values) -> None:
        """Show a button that sets these controls: the way to what was recorded nearest to what was asked."""
        self._offered = values

    def say(self, said: str, wrong: bool = False) -> None:
        """Write the status line; screen readers read it out."""
        colour = " color: var(--jp-error-color1, #b00020);" if wrong else ""
        self.status.value = f'<div role="status" style="line-height: 1.4;{colour}">{html.escape(said)}</div>'

    def fail(self, error: Exception) -> None:
        """Show an error: the course's own say what to do, so as a sentence; any other with its traceback."""
        if type(error).__module__.startswith("gpukern.") or isinstance(error, ImportError):
            self.say(str(error), wrong=True)
        else:
            self.say(f"{type(error).__name__}: {error}", wrong=True)
            trace = "".join(traceback.format_exception(error))
            self.status.value += f'<pre style="overflow-x: auto; line-height: 1.3">{html.escape(trace)}</pre>'

    def guarded(self, action: Callable[[], None]) -> Callable:
        """`action` as a button's handler whose errors the learner sees: ipywidgets would lose them."""

        def handler(_):
            try:
                action()
            except Exception as error:
                self.fail(error)

        return handler

    def refresh(self) -> None:
        """Draw what the controls say now; if they are changed meanwhile, once more what they say then."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._again = True
        with self._together() as free:
            while free and self._again:
                self._draw()
        self._drawn = time.monotonic()

    def _draw(self) -> None:
        self._offered = {}
        try:
            self.adjust()
            self._again = False  # what was changed until here is drawn now
            said = self.show()
            self.image.value = png(self.figure.figure)
            self.image.layout.visibility = "visible"
            self.words.value = html.escape(self.figure.words)
            self.say(said)  # last: who reads it finds the picture that it speaks of
        except Exception as error:
            self._again = False
            self.fail(error)
            self.image.layout.visibility = "hidden"  # it shows what was asked before
        self.nearest.layout.display = "" if self._offered else "none"

    def _changed(self, _) -> None:
        if self._busy:
            self._again = True
        elif not _from_front_end():
            self.refresh()
        elif self._timer is None:
            wait = max(0.0, self._drawn + _SETTLE - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait, self.refresh)

    def _show_words(self, change) -> None:
        # Beside the picture and not its alt text: ipywidgets' Image has none, and breaks with a tooltip.
        self.words.layout.display = "" if change.new else "none"

    @contextmanager
    def _together(self):
        """Within it, changes of the controls are noted but not drawn. Gives False if that was so already."""
        free, self._busy = not self._busy, True
        try:
            yield free
        finally:
            self._busy = not free

    def _repr_mimebundle_(self, **kwargs) -> dict:
        picture = base64.b64encode(self.image.value).decode()
        bundle = super()._repr_mimebundle_(**kwargs)
        return {**bundle, "image/png": picture, "text/plain": self.figure.words}


@functools.lru_cache(maxsize=2)  # a layer's weights may fill half a gigabyte of the card
def open_layer(config: str) -> Layer:
    """The layer of a config by name, "trained" included. Its weights are made when a measurement needs them.

    In the dtype that was recorded: bfloat16 at the sizes that people run, float32 at those that a CPU simulates.
    """
    if config == "trained":
        return text.trained_layer(dtype=torch.float32)
    return Layer.random(config, torch.float32 if config == "tiny" else torch.bfloat16)


def live(config: str) -> bool:
    """Is this layer on a card, so that asking for a time measures one?"""
    return open_layer(config).device.type == "cuda"


def require_choice(name: str, value: str, known) -> None:
    """Refuse an argument that no drop-down offers."""
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known are {', '.join(known)}.")


def _from_front_end() -> bool:
    """Is the code that runs now the answer to a message from a control, rather than a cell or a plain program?"""
    kernel = getattr(get_ipython(), "kernel", None)
    parent = kernel.get_parent("shell") if hasattr(kernel, "get_parent") else {}
    return parent.get("header", {}).get("msg_type") == "comm_msg"
