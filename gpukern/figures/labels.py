"""The text inside pictures, drawn once and then copied.

Most of the time that matplotlib takes for one of our pictures goes into text, and most of the text is the same in the
next picture. So the pixels of each text are kept, and the next picture takes a copy of them.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from gpukern.figures.style import INK, SMALL, TEXT


class Labels:
    """Texts of a figure that is redrawn: `clear`, then `put` each again."""

    def __init__(self):
        self._made = {}  # axes -> its texts
        self._used = {}  # axes -> how many of them are in use

    def clear(self) -> None:
        """Take all texts out of the picture."""
        for texts in self._made.values():
            for text in texts:
                text.set_visible(False)
        self._used.clear()

    def put(
        self,
        axes,
        x: float,
        y: float,
        said: str,
        size: float = TEXT,
        color: str = INK,
        ha: str = "center",
        va: str = "center",
        bold: bool = False,
        italic: bool = False,
        rotation: float = 0,
        ground: str | None = None,
    ) -> None:
        """Write `said` at x, y of `axes`, in points; `ground` is the colour of a box behind it."""
        texts, n = self._made.setdefault(axes, []), self._used.get(axes, 0)
        self._used[axes] = n + 1
        if n == len(texts):
            texts.append(axes.add_artist(_Label(clip_on=False, transform=axes.transData)))
        weight, style = "bold" if bold else "normal", "italic" if italic else "normal"
        look = {"fontsize": size, "color": color, "ha": ha, "va": va, "fontweight": weight, "style": style}
        look |= {"rotation": rotation, "linespacing": 1.25}
        texts[n].update({**look, "position": (x, y), "text": said, "visible": True})
        texts[n].look, texts[n].ground = tuple(look.items()), ground

    def scale(
        self, axes, grid: LineCollection, top: float | None, write: Callable[[float], str] = "{:,.10g}".format
    ) -> None:
        """Put `grid` at round numbers from 0 to `top` across the axes, and write them on the left. None: no grid."""
        left, right = axes.get_xlim()
        values = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(0, top) if top else []
        values = [y for y in values if 0 <= y <= top]
        grid.set_segments([[(left, y), (right, y)] for y in values])
        for y in values:
            self.put(axes, left - 0.007 * (right - left), y, write(y), SMALL, ha="right")


class _Label(Text):
    """A Text whose pixels are copied from the last one that said the same in the same look."""

    look, ground = (), None

    def draw(self, renderer) -> None:
        if not self.get_visible() or not self.get_text():
            return
        pixels, left, low = _pixels(self.get_text(), self.look, self.ground, renderer.dpi)
        x, y = self.get_transform().transform(self.get_position())
        graphics = renderer.new_gc()
        renderer.draw_image(graphics, round(x + left), round(y + low), pixels)
        graphics.restore()


@functools.cache
def _page(dpi: float) -> Figure:
    return Figure(dpi=dpi)


@functools.lru_cache(maxsize=4000)
def _pixels(said: str, look: tuple, ground: str | None, dpi: float) -> tuple[np.ndarray, float, float]:
    """(pixels, bottom row first; where its left and its lower edge are, seen from the text's position)."""
    text = Text(0, 0, said, **dict(look))
    text.set_figure(_page(dpi))
    box = text.get_window_extent(RendererAgg(1, 1, dpi))
    left, low = math.floor(box.x0) - 1, math.floor(box.y0) - 1
    renderer = RendererAgg(math.ceil(box.x1) + 1 - left, math.ceil(box.y1) + 1 - low, dpi)
    if ground:
        text.set_backgroundcolor(ground)
    text.set_position((-left, -low))
    text.draw(renderer)
    return np.array(renderer.buffer_rgba())[::-1], left, low
