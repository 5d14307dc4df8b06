"""A tile's picture: its place in the whole sweep, the waves it makes over the SMs, and what it takes of the card."""

import math
import textwrap

import matplotlib
from matplotlib.collections import LineCollection, PolyCollection

from gpukern.figures import style
from gpukern.figures.labels import Labels
from gpukern.figures.style import BLUE, FAINT, INK, MUTED, ORANGE, PAPER, RED, SKY, SMALL, TEXT, TITLE

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
        with style.settings():
            self.title = self.figure.text(0.012, 0.970, "", fontsize=TITLE, fontweight="bold", va="center")
            self.source = self.figure.text(0.988, 0.970, "", fontsize=TEXT, va="center", ha="right", color=MUTED)
            self.others = self.figure.text(0.988, 0.902, "", fontsize=SMALL, va="center", ha="right", color=MUTED)
            self.headline = self.figure.text(0.012, 0.945, "", fontsize=TEXT + 1, va="top", linespacing=1.35)
            self.map = self.figure.add_axes((0.06, 0.115, 0.415, 0.71))
            self.speeds = self.figure.add_axes((0.565, 0.52, 0.42, 0.305))
            self.waves = self.figure.add_axes((0.525, 0.305, 0.46, 0.10))
            self.limits = self.figure.add_axes((0.525, 0.03, 0.46, 0.21))
            self._prepare_map()
            self._prepare_speeds()
            for axes in (self.waves, self.limits):
                style.bare(axes)
                axes.set_xlim(0, 1)
                axes.set_ylim(0, 1)
            self._tiled = self.waves.add_collection(PolyCollection([], facecolor=BLUE))
            self._idle = self.waves.add_collection(PolyCollection([], facecolor=FAINT))
            self._room = self.limits.add_collection(PolyCollection([], facecolor=FAINT, alpha=0.6))
            self._used = self.limits.add_collection(PolyCollection([], facecolor=BLUE))
            self._broken = self.limits.add_collection(PolyCollection([], facecolor=PAPER, edgecolor=RED, hatch="////"))
        self._labels = Labels()

    def _prepare_map(self):
        axes = self.map
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(fontsize=TEXT + 1, fontweight="bold")
        axes.tick_params(length=0, labelsize=TEXT)
        for spine in axes.spines.values():
            spine.set_visible(False)
        self._cells = axes.add_collection(PolyCollection([], edgecolor=PAPER, lw=1.5))
        self._no_time = axes.add_collection(PolyCollection([], facecolor=PAPER, edgecolor=MUTED, lw=0.8, hatch="///"))
        self._blank = axes.add_collection(PolyCollection([], facecolor=PAPER, edgecolor=FAINT, lw=0.8))
        self._chosen_cell = axes.add_collection(PolyCollection([], facecolor="none", edgecolor=RED, lw=3, zorder=3))
        key = "★ fastest of the sweep    hatched: refused or wrong    blank: not in the sweep"
        self.figure.text(0.06, 0.025, key, fontsize=SMALL, color=MUTED)

    def _prepare_speeds(self):
        axes = self.speeds
        style.plain(axes)
        axes.set_ylabel("TFLOP/s", fontsize=TEXT)
        axes.set_xticks([])
        self._dots = axes.plot([], [], "o", color=SKY, ms=3, mec="none")[0]
        self._chosen_dot = axes.plot([], [], "o", color=RED, ms=9, mfc="none", mew=2.5, clip_on=False)[0]
        self._lines = axes.add_collection(LineCollection([], colors=[ORANGE, INK], linestyles=["-", ":"], lw=1.6))

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
        axes = self.map
        side = "BK" if len({row.BM for row in swept}) == 1 and "BK" in tile else "BM"
        across = sorted({row.BN for row in swept} | {tile["BN"]})
        down = sorted({getattr(row, side) for row in swept} | {tile[side]})
        others = {name: n for name, n in tile.items() if name not in (side, "BN")}
        held = [row for row in swept if all(getattr(row, name) == n for name, n in others.items())]
        at = {(getattr(row, side), row.BN): row for row in held}
        top = timed[-1].tflops if timed else 1.0
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
                    colours.append(_COLOURS(row.tflops / top))
                    star = "★ " if row is timed[-1] else ""
                    dark = 0.3 * colours[-1][0] + 0.59 * colours[-1][1] + 0.11 * colours[-1][2] < 0.5
                    put = {"ha": "center", "va": "center", "fontsize": TEXT, "color": PAPER if dark else INK}
                    self._labels.put(axes, x + 0.5, y + 0.5, f"{star}{style.count(row.tflops)}", **put)
        self._cells.set_verts(cells)
        self._cells.set_facecolor(colours)
        self._no_time.set_verts(no_time)
        self._blank.set_verts(blank)
        x, y = across.index(tile["BN"]), down.index(tile[side])
        self._chosen_cell.set_verts([style.rectangle(x + 0.02, x + 0.98, y + 0.02, y + 0.98)])
        axes.set_xlim(-0.02, len(across) + 0.02)
        axes.set_ylim(len(down) + 0.02, -0.02)
        axes.set_xticks([n + 0.5 for n in range(len(across))], across)
        axes.set_yticks([n + 0.5 for n in range(len(down))], down)
        axes.set_ylabel(f"{side}  of  {sizes[side]}")
        axes.set_xlabel(f"BN  of  {sizes['BN']}")
        put = {"ha": "left", "va": "bottom", "fontsize": TEXT + 1, "fontweight": "bold", "color": INK}
        at_these = ", ".join(
            f"{name} {n}" + (f" of {sizes[name]}" if name in sizes else "") for name, n in others.items()
        )
        self._labels.put(axes, 0, -0.025 * len(down), f"TFLOP/s at {at_these}", **put)

    def _draw_speeds(self, chosen, timed, library):
        axes, n = self.speeds, len(timed)
        bound = next((r.tflops / r.share for r in timed if r.share), None)
        heights = [r.tflops for r in [*timed, *filter(None, (chosen, library))]]
        highest = max([*heights, bound or 0.0], default=0.0) or 1.0
        axes.set_xlim(-0.03 * max(n, 1), 1.03 * max(n, 1))
        axes.set_ylim(0, 1.12 * highest)
        self._dots.set_data(range(n), [row.tflops for row in timed])
        rank = sum(row.tflops < chosen.tflops for row in timed) if chosen else 0
        self._chosen_dot.set_data(*([rank], [chosen.tflops]) if chosen else ([], []))
        lines = [(f"torch {style.count(library.tflops)}", library.tflops, ORANGE)] if library else []
        lines += [(f"limit {style.count(bound)}", bound, INK)] if bound else []
        self._lines.set_segments([[(-n, y), (2 * n + 1, y)] for _, y, _ in lines])
        self._lines.set_color([colour for *_, colour in lines])
        for said, y, _ in lines:
            put = {"ha": "left", "va": "bottom", "fontsize": SMALL, "color": INK}
            self._labels.put(axes, axes.get_xlim()[0] + 0.02 * max(n, 1), y + 0.01 * highest, said, **put)
        put = {"ha": "center", "va": "top", "fontsize": TEXT, "color": INK}
        said = f"all {n} tiles of the sweep that ran, slowest to fastest" if n else "no sweep of this was recorded"
        self._labels.put(axes, sum(axes.get_xlim()) / 2, -0.05 * highest, said, **put)

    def _draw_waves(self, blocks, waves):
        axes, tiled, idle = self.waves, [], []
        put = {"ha": "left", "va": "bottom", "fontsize": TEXT, "color": INK}
        self._labels.put(axes, 0, 1.08, _waves_in_words(blocks, waves), **put)
        busy = f"a block is there for {style.percent(_busy(waves))} of the SMs' time, one an SM at a time"
        self._labels.put(axes, 0, -0.02, busy, **{**put, "va": "top", "color": MUTED})
        fills = [1.0] * int(waves) + ([waves % 1] if waves % 1 else [])
        # Of many waves the first few and the last are drawn, with a gap that stands for the others.
        shown = fills if len(fills) <= _MOST_WAVES else [*fills[: _MOST_WAVES - 2], None, fills[-1]]
        for n, fill in enumerate(shown):
            left, right = n / len(shown) + 0.004, (n + 1) / len(shown) - 0.004
            if fill is None:
                middle = {"ha": "center", "va": "center", "fontsize": TEXT, "color": INK}
                self._labels.put(axes, (left + right) / 2, 0.5, f"+ {len(fills) - _MOST_WAVES + 1}", **middle)
                continue
            split = left + fill * (right - left)
            tiled.append(style.rectangle(left, split, 0.15, 0.9))
            idle.append(style.rectangle(split, right, 0.15, 0.9))
        self._tiled.set_verts(tiled)
        self._idle.set_verts(idle)

    def _draw_limits(self, limits, chosen):
        axes, room, used, broken = self.limits, [], [], []
        for n, limit in enumerate(limits):
            y = 0.88 - 0.25 * n
            left, right = 0.40, 0.58
            room.append(style.rectangle(left, right, y - 0.08, y + 0.08))
            end = left + (right - left) * min(limit.used / limit.limit, 1.0)
            (broken if limit.broken else used).append(style.rectangle(left, end, y - 0.08, y + 0.08))
            put = {"ha": "left", "va": "center", "fontsize": SMALL, "color": RED if limit.broken else INK}
            self._labels.put(axes, 0, y, limit.name + (", bytes" if limit.unit == "bytes" else ""), **put)
            self._labels.put(axes, right + 0.015, y, _taken(limit), **put)
        if chosen is not None and chosen.registers is not None:
            spills = "no spills" if not chosen.spills else f"{chosen.spills:,} spills"
            shared = "" if chosen.shared is None else f", {chosen.shared:,} bytes shared"
            put = {"ha": "left", "va": "center", "fontsize": TEXT, "color": MUTED}
            said = f"compiled: {chosen.registers} registers a thread, {spills}{shared}"
            self._labels.put(axes, 0, 0.88 - 0.25 * len(limits), said, **put)
        self._room.set_verts(room)
        self._used.set_verts(used)
        self._broken.set_verts(broken)


def _named(tile: dict) -> str:
    sizes = " × ".join(str(tile[name]) for name in ("BM", "BN", "BK") if name in tile)
    return ", ".join([sizes, *(f"{tile[name]} {name}" for name in ("warps", "stages") if name in tile)])


def _headline(tile, chosen, timed, library, note: str) -> str:
    if chosen is None or chosen.time_us is None:
        why = note or (chosen.status if chosen else "")
        return textwrap.fill(f"{_named(tile)}: no time. {why}", 122)
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
