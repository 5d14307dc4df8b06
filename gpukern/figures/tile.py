"""A tile's picture: its place in the whole sweep, the waves it makes over the SMs, and what it takes of the card."""

import math
import textwrap

import matplotlib
from matplotlib.collections import LineCollection, PolyCollection

from gpukern.figures import style
from gpukern.figures.labels import Labels
from gpukern.figures.style import BLUE, FAINT, INK, MUTED, ORANGE, PAPER, RED, SMALL, TEXT, TITLE

_COLOURS = matplotlib.colormaps["viridis"]
_MOST_WAVES = 9  # drawn one by one


class TileFigure:
    """One picture of one tile among all tiles of a sweep, redrawn in place.

    Left, a map of TFLOP/s over BM and BN, for the BK, warps and stages that are chosen (over BK and BN where the sweep
    has one BM only, as in decode); its colours mean the same whatever is chosen. Right, all tiles of the sweep in order
    of speed with the chosen one marked, its waves, and its share of the card's limits. `figure` is the matplotlib
    Figure; `words` says the same for those who cannot see it.
    """

    def __init__(self):
        self.figure = style.new_figure(10.0, 6.6)
        self.words = ""
        self._labels = Labels()
        with style.settings():
            self.title = self.figure.text(0.012, 0.970, "", fontsize=TITLE, fontweight="bold", va="center")
            self.source = self.figure.text(0.988, 0.970, "", fontsize=TEXT, va="center", ha="right", color=MUTED)
            self.others = self.figure.text(0.988, 0.902, "", fontsize=SMALL, va="center", ha="right", color=MUTED)
            self.headline = self.figure.text(0.012, 0.945, "", fontsize=TEXT + 1, va="top", linespacing=1.35)
            self.map = style.bare_axes(self.figure, 0.07, 0.115, 0.405, 0.71)
            self.speeds = style.bare_axes(self.figure, 0.565, 0.52, 0.42, 0.29)
            self.waves = style.bare_axes(self.figure, 0.525, 0.305, 0.46, 0.10)
            self.limits = style.bare_axes(self.figure, 0.525, 0.03, 0.46, 0.21)
            self._prepare()

    def _prepare(self):
        def shapes(axes, **look):
            return axes.add_collection(PolyCollection([], **look))

        self._cells = shapes(self.map, edgecolor=PAPER, lw=1.5)
        self._no_time = shapes(self.map, facecolor=PAPER, edgecolor=MUTED, lw=0.8, hatch="///")
        self._blank = shapes(self.map, facecolor=PAPER, edgecolor=FAINT, lw=0.8)
        self._chosen_cell = shapes(self.map, facecolor="none", edgecolor=RED, lw=3, zorder=3)
        self._grid = self.speeds.add_collection(style.grid())
        self._lines = self.speeds.add_collection(LineCollection([], linestyles=["-", ":"], lw=1.6))
        self._dots = self.speeds.plot([], [], "o", color=BLUE, ms=3, mec="none")[0]
        self._chosen_dot = self.speeds.plot([], [], "o", color=RED, ms=9, mfc="none", mew=2.5, clip_on=False)[0]
        self._tiled = shapes(self.waves, facecolor=BLUE)
        self._idle = shapes(self.waves, facecolor=FAINT)
        self._room = shapes(self.limits, facecolor=FAINT, alpha=0.6)
        self._used = shapes(self.limits, facecolor=BLUE)
        self._broken = shapes(self.limits, facecolor=PAPER, edgecolor=RED, hatch="////")

    def draw(
        self, title: str, sizes: dict, tile: dict, rows, chosen, limits, blocks: int, waves: float, note: str = ""
    ) -> None:
        """Show `tile` in its sweep.

        sizes   what BM, BN and BK cut: {"BM": "M = 2048", ...}
        tile    what is chosen: BM, BN, warps, stages and, for a matrix product, BK
        rows    the sweep: one Row a tile, and, where there is one, the library's row, its version "torch"
        chosen  the Row of `tile`, or None, and `note` says why
        limits  measure.Limit: what the tile takes of the card
        blocks  blocks of the launch, one a tile of the result
        waves   blocks over SMs, one block an SM at a time
        """
        library = next((row for row in rows if row.version == "torch" and row.time_us), None)
        swept = [row for row in rows if row.version != "torch"]
        timed = sorted((row for row in swept if row.tflops is not None), key=lambda row: row.tflops)
        with style.settings():
            self._labels.clear()
            self.title.set_text(title)
            timed_now = chosen is not None and chosen.time_us is not None
            self.headline.set_text(_headline(tile, chosen, timed, library, note))
            self.headline.set_color(INK if timed_now else RED)
            sources = list(dict.fromkeys(row.provenance for row in ([chosen] if chosen else []) + list(rows)))
            self.source.set_text(sources[0] if sources else "nothing recorded")
            self.others.set_text(f"other tiles: {' and '.join(sources[1:])}" if sources[1:] else "")
            self._draw_map(sizes, tile, swept, timed)
            self._draw_speeds(chosen if timed_now else None, timed, library)
            self._draw_waves(blocks, waves)
            self._draw_limits(limits, chosen)
        self.words = f"{title}. {self.headline.get_text()} {_in_words(blocks, waves, limits)} {self.source.get_text()}."

    def _draw_map(self, sizes, tile, swept, timed):
        put, axes = self._labels.put, self.map
        side = "BK" if len({row.BM for row in swept}) == 1 and "BK" in tile else "BM"
        across = sorted({row.BN for row in swept} | {tile["BN"]})
        down = sorted({getattr(row, side) for row in swept} | {tile[side]})
        others = {name: n for name, n in tile.items() if name not in (side, "BN")}
        held = [row for row in swept if all(getattr(row, name) == n for name, n in others.items())]
        at = {(getattr(row, side), row.BN): row for row in held}
        axes.set(xlim=(-0.02, len(across) + 0.02), ylim=(len(down) + 0.02, -0.02))
        cells, colours, no_time, blank = [], [], [], []
        for y, n_down in enumerate(down):
            for x, n_across in enumerate(across):
                cell, row = style.rectangle(x, x + 1, y, y + 1), at.get((n_down, n_across))
                if row is None:
                    blank.append(cell)
                elif row.tflops is None:
                    no_time.append(cell)
                else:
                    cells.append(cell)
                    colours.append(_COLOURS(row.tflops / timed[-1].tflops))
                    star = "★ " if row is timed[-1] else ""
                    dark = 0.3 * colours[-1][0] + 0.59 * colours[-1][1] + 0.11 * colours[-1][2] < 0.5
                    put(axes, x + 0.5, y + 0.5, f"{star}{style.count(row.tflops)}", color=PAPER if dark else INK)
        self._cells.set_verts(cells)
        self._cells.set_facecolor(colours)
        self._no_time.set_verts(no_time)
        self._blank.set_verts(blank)
        x, y = across.index(tile["BN"]), down.index(tile[side])
        self._chosen_cell.set_verts([style.rectangle(x + 0.02, x + 0.98, y + 0.02, y + 0.98)])
        width, height = len(across), len(down)
        for x, n in enumerate(across):
            put(axes, x + 0.5, 1.03 * height, str(n))
        for y, n in enumerate(down):
            put(axes, -0.03 * width, y + 0.5, str(n), ha="right")
        put(axes, width / 2, 1.075 * height, f"BN  of  {sizes['BN']}", TEXT + 1, bold=True)
        put(axes, -0.125 * width, height / 2, f"{side}  of  {sizes[side]}", TEXT + 1, bold=True, rotation=90)
        at_these = [f"{name} {n}" + (f" of {sizes[name]}" if name in sizes else "") for name, n in others.items()]
        put(axes, 0, -0.03 * height, f"TFLOP/s at {', '.join(at_these)}", TEXT + 1, ha="left", va="bottom", bold=True)
        key = "★ fastest of the sweep    hatched: refused or wrong    blank: not in the sweep"
        put(axes, 0, 1.125 * height, key, SMALL, MUTED, ha="left")

    def _draw_speeds(self, chosen, timed, library):
        put, axes, n = self._labels.put, self.speeds, max(len(timed), 1)
        bound = next((row.tflops / row.share for row in timed if row.share), None)
        heights = [row.tflops for row in [*timed, *filter(None, (chosen, library))]] + ([bound] if bound else [])
        top = 1.12 * max(heights, default=1.0)
        axes.set(xlim=(-0.03 * n, 1.03 * n), ylim=(0, top))
        self._dots.set_data(range(len(timed)), [row.tflops for row in timed])
        rank = sum(row.tflops < chosen.tflops for row in timed) if chosen else 0
        self._chosen_dot.set_data(*([rank], [chosen.tflops]) if chosen else ([], []))
        lines = [(f"torch {style.count(library.tflops)}", library.tflops, ORANGE)] if library else []
        lines += [(f"limit {style.count(bound)}", bound, INK)] if bound else []
        self._lines.set_segments([[(-n, y), (2 * n, y)] for _, y, _ in lines])
        self._lines.set_color([colour for *_, colour in lines])
        for said, y, _ in lines:
            put(axes, -0.01 * n, y + 0.01 * top, said, SMALL, ha="left", va="bottom")
        self._labels.scale(axes, self._grid, top)
        put(axes, -0.03 * n, 1.06 * top, "TFLOP/s", ha="left", bold=True)
        said = (
            f"all {len(timed)} tiles of the sweep that ran, slowest to fastest" if timed else "no sweep to compare with"
        )
        put(axes, 0.5 * n, -0.08 * top, said)

    def _draw_waves(self, blocks, waves):
        put, tiled, idle = self._labels.put, [], []
        put(self.waves, 0, 1.08, _waves_in_words(blocks, waves), ha="left", va="bottom")
        busy = f"a block is there for {style.percent(_busy(waves))} of the SMs' time, one an SM at a time"
        put(self.waves, 0, -0.02, busy, color=MUTED, ha="left", va="top")
        fills = [1.0] * int(waves) + ([waves % 1] if waves % 1 else [])
        # Of many waves the first few and the last are drawn, with a gap that stands for the others.
        shown = fills if len(fills) <= _MOST_WAVES else [*fills[: _MOST_WAVES - 2], None, fills[-1]]
        for n, fill in enumerate(shown):
            left, right = n / len(shown) + 0.004, (n + 1) / len(shown) - 0.004
            if fill is None:
                put(self.waves, (left + right) / 2, 0.5, f"+ {len(fills) - _MOST_WAVES + 1}")
                continue
            split = left + fill * (right - left)
            tiled.append(style.rectangle(left, split, 0.15, 0.9))
            idle.append(style.rectangle(split, right, 0.15, 0.9))
        self._tiled.set_verts(tiled)
        self._idle.set_verts(idle)

    def _draw_limits(self, limits, chosen):
        put, axes, room, used, broken = self._labels.put, self.limits, [], [], []
        left, right = 0.40, 0.58
        for n, limit in enumerate(limits):
            y = 0.88 - 0.25 * n
            room.append(style.rectangle(left, right, y - 0.08, y + 0.08))
            end = left + (right - left) * min(limit.used / limit.limit, 1.0)
            (broken if limit.broken else used).append(style.rectangle(left, end, y - 0.08, y + 0.08))
            colour = RED if limit.broken else INK
            put(axes, 0, y, limit.name + (", bytes" if limit.unit == "bytes" else ""), SMALL, colour, ha="left")
            put(axes, right + 0.015, y, _taken(limit), SMALL, colour, ha="left")
        if chosen is not None and chosen.registers is not None:
            spills = "no spills" if not chosen.spills else f"{chosen.spills:,} spills"
            shared = "" if chosen.shared is None else f", {chosen.shared:,} bytes shared"
            said = f"compiled: {chosen.registers} registers a thread, {spills}{shared}"
            put(axes, 0, 0.88 - 0.25 * len(limits), said, color=MUTED, ha="left")
        self._room.set_verts(room)
        self._used.set_verts(used)
        self._broken.set_verts(broken)


def _named(tile: dict) -> str:
    sizes = " × ".join(str(tile[name]) for name in ("BM", "BN", "BK") if name in tile)
    return ", ".join([sizes, *(f"{tile[name]} {name}" for name in ("warps", "stages") if name in tile)])


def _headline(tile, chosen, timed, library, note: str) -> str:
    if chosen is None or chosen.time_us is None:
        why = note or (chosen.status if chosen else "")
        return textwrap.fill(f"{_named(tile)}: no time. {why}", 122, max_lines=2)
    said = [f"{_named(tile)}:  {style.microseconds(chosen.time_us)}", f"{style.count(chosen.tflops)} TFLOP/s"]
    if chosen.gbytes_per_s is not None:
        said.append(f"{style.count(chosen.gbytes_per_s)} GB/s")
    if chosen.share is not None:
        said.append(f"{style.percent(chosen.share)} of the limit")
    if library:
        said.append(f"{chosen.tflops / library.tflops:.2f} of torch")
    said.append(f"error {style.verdict(chosen.error, chosen.tolerance)}")
    best = f"\nfastest of the sweep: {_named(timed[-1].tile)}, {style.count(timed[-1].tflops)} TFLOP/s" if timed else ""
    return "    ".join(said) + best


def _busy(waves: float) -> float:
    """The part of the SMs' time in which they have a block: the last wave lasts as long as a full one."""
    return waves / math.ceil(waves)


def _waves_in_words(blocks: int, waves: float) -> str:
    return f"{blocks:,} blocks over {round(blocks / waves)} SMs: {waves:.2f} waves, so {math.ceil(waves)} in turn"


def _taken(limit) -> str:
    """What a tile takes of a limit. An estimate that is too large is not refused: the compiler spills."""
    over = "" if not limit.broken else " ✗ too much" if limit.exact else " ✗ spills"
    return f"{'' if limit.exact else 'about '}{limit.used:,} of {limit.limit:,}{over}"


def _in_words(blocks, waves, limits) -> str:
    said = [f"{_waves_in_words(blocks, waves)}, {style.percent(_busy(waves))} of the SMs' time has a block"]
    said += [f"{limit.name}: {_taken(limit)} {limit.unit}" for limit in limits]
    return "; ".join(said) + "."
