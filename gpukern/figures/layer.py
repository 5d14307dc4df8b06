"""The layer's picture: the parts of a plan, what they hand to each other through memory, and what each part costs."""

import textwrap

from matplotlib.collections import LineCollection, PolyCollection

from gpukern.figures import style
from gpukern.figures.labels import Labels
from gpukern.figures.style import BLUE, FAINT, GREEN, INK, MUTED, ORANGE, PAPER, RED, SAND, SKY, SMALL, TEXT, TITLE

STAGES = 8
# Heights in the drawing of the partition: the boxes, and below them the bar that stands for the card's memory.
_BOX = (0.58, 1.0)
_MEMORY = (0.0, 0.29)
_FLOOR = 0.235  # where what one part hands to the next turns round
_LANES = (0.17, 0.065)  # below it the paths of tensors that skip parts: the first, and how far apart they are
_LEG = 0.25  # from a boundary to the way down before it and the way up after it


class LayerFigure:
    """One picture of one plan, redrawn in place.

    Three panels share one x axis, a column for each of the eight stages: the partition, the time of each part and its
    share of the limit. `figure` is the matplotlib Figure; `words` says the same for those who cannot see it.
    """

    def __init__(self):
        self.figure = style.new_figure(10.0, 7.3)
        self.words = ""
        self._labels = Labels()
        with style.settings():
            self.title = self.figure.text(0.012, 0.973, "", fontsize=TITLE, fontweight="bold", va="center")
            self.source = self.figure.text(0.988, 0.973, "", fontsize=TEXT, va="center", ha="right", color=MUTED)
            self.headline = self.figure.text(0.012, 0.938, "", fontsize=TEXT + 0.5, va="center")
            self.partition, self.times, self.shares = (
                style.bare_axes(self.figure, 0.06, bottom, 0.922, height, (0, STAGES), y)
                for bottom, height, y in ((0.505, 0.405, (-0.02, 1.02)), (0.265, 0.2, (0, 1)), (0.085, 0.135, (0, 1)))
            )
            self._prepare_partition()
            self._prepare_plots()

    def _prepare_partition(self):
        axes = self.partition
        axes.fill_between([0, STAGES], *_MEMORY, color=SAND, lw=0)
        self._boxes = axes.add_collection(PolyCollection([], facecolor=PAPER, edgecolor=INK, lw=1.3))
        self._seams = axes.add_collection(LineCollection([], color=MUTED, lw=0.8, ls=":"))
        self._paths = axes.add_collection(LineCollection([], color=BLUE, lw=1.6))
        self._skips = axes.add_collection(LineCollection([], color=ORANGE, lw=1.6, ls="--"))
        self._up = axes.plot([], [], "^", color=BLUE, ms=5)[0]
        self._skips_up = axes.plot([], [], "^", color=ORANGE, ms=5)[0]
        self._down = axes.plot([], [], "v", color=BLUE, ms=5)[0]

    def _prepare_plots(self):
        self._time_grid = self.times.add_collection(style.grid())
        self._share_grid = self.shares.add_collection(style.grid())
        self._time_bars = self.times.add_collection(PolyCollection([], color=SKY))
        self._least_bars = self.times.add_collection(PolyCollection([], color=BLUE))
        self._whiskers = self.times.add_collection(LineCollection([], color=INK, lw=1.2))
        self._full_bars = self.shares.add_collection(PolyCollection([], color=FAINT, alpha=0.6))
        self._share_bars = self.shares.add_collection(PolyCollection([], color=BLUE))

    def draw(self, title: str, costs, inside, crossings, boundaries, rows, note: str = "") -> None:
        """Show a plan.

        costs       one layer.Cost a part, in order
        inside      for each part, a few words on what stays inside it, or ""
        crossings   layer.Crossing: every tensor that one part leaves in memory for another; writer -1 is the input
        boundaries  bytes to memory and back at each boundary between parts
        rows        one Row a part in order, then the whole layer's; or none, and `note` says why
        """
        parts, whole = rows[:-1], rows[-1] if rows else None
        spans = _spans([cost.part for cost in costs])
        with style.settings():
            self._labels.clear()
            self.title.set_text(title)
            self.headline.set_text(_headline(whole, len(costs)))
            self.source.set_text(whole.provenance if whole else "no time to show")
            self._draw_boxes(costs, inside, spans, parts)
            self._draw_tensors(spans, crossings, boundaries)
            self._draw_times(parts, spans)
            self._draw_shares(parts, spans)
            if not parts:
                said = textwrap.fill(note, 110)
                self._labels.put(self.times, STAGES / 2, 0.5 * self.times.get_ylim()[1], said, TEXT + 1, RED)
        self.words = _words(title, self.headline.get_text(), self.source.get_text(), costs, boundaries, parts, note)

    def _draw_boxes(self, costs, insides, spans, rows):
        put, (low, high) = self._labels.put, _BOX
        self._boxes.set_verts([style.rectangle(left + 0.07, right - 0.07, low, high) for left, right in spans])
        inner = [x for left, right in spans for x in range(left + 1, right)]
        self._seams.set_segments([[(x, high - 0.03), (x, high - 0.12)] for x in inner])
        for index, (cost, inside, (left, right)) in enumerate(zip(costs, insides, spans, strict=True)):
            for column, stage in enumerate(cost.part.stages, left):
                put(self.partition, column + 0.5, high - 0.09, f"{column + 1} {stage}", va="baseline", bold=True)
            middle = (left + right) / 2
            details = "\n".join(_details(cost, rows[index].tile if rows else {}))
            put(self.partition, middle, high - 0.14, details, SMALL, MUTED, va="top")
            put(self.partition, middle, low + 0.045, inside, SMALL, GREEN)

    def _draw_tensors(self, spans, crossings, boundaries):
        """One way down for each part that writes, a path in memory, one way up for each tensor that a part reads."""
        put, axes, low = self._labels.put, self.partition, _BOX[0]
        paths, skips = [], []
        lanes = []  # where each lane is free again
        for c in crossings:
            start, end = (0.0 if c.writer < 0 else spans[c.writer][1] - _LEG), spans[c.reader][0] + _LEG
            if c.reader == c.writer + 1:
                paths.append([(start, low if c.writer >= 0 else _FLOOR), (start, _FLOOR), (end, _FLOOR), (end, low)])
                continue
            end += 0.1  # beside the way up of what the part before hands over
            lane = next((n for n, free in enumerate(lanes) if free < start), len(lanes))
            lanes[lane : lane + 1] = [end]
            depth = _LANES[0] - lane * _LANES[1]
            skips.append([(start, _FLOOR if c.writer >= 0 else depth), (start, depth), (end, depth), (end, low)])
            label = f"{c.tensor} {style.size(c.bytes)}"
            put(axes, (start + end) / 2, depth, label, SMALL, italic=True, ground=SAND)
        self._up.set_data([p[-1][0] for p in paths], [low - 0.02] * len(paths))
        self._skips_up.set_data([p[-1][0] for p in skips], [low - 0.02] * len(skips))
        out = STAGES - _LEG
        self._down.set_data([out], [_FLOOR + 0.02])
        self._paths.set_segments([*paths, [(out, low), (out, _FLOOR)]])
        self._skips.set_segments(skips)
        put(axes, 0.13, 0.345, "x", SMALL, BLUE)
        put(axes, STAGES - 0.12, 0.345, "z", SMALL, BLUE)
        for index, n_bytes in enumerate(boundaries):
            names = sorted({c.tensor for c in crossings if 0 <= c.writer <= index < c.reader})
            put(axes, spans[index][1], 0.475, style.size(n_bytes).replace(" ", "\n"), SMALL, bold=True)
            put(axes, spans[index][1], 0.345, " ".join(names), SMALL, BLUE)
        put(axes, 0.04, 0.035, "HBM: the card's memory", SMALL, MUTED, ha="left")
        if skips:
            put(axes, STAGES - 0.04, 0.035, "dashed: it waits there for a later part", SMALL, MUTED, ha="right")

    def _draw_times(self, parts, spans):
        put, axes, bars, least, whiskers = self._labels.put, self.times, [], [], []
        tallest = max((row.high_us or row.time_us for row in parts if row.time_us is not None), default=0.0)
        top = 1.3 * tallest or 1.0
        axes.set_ylim(0, top)
        if parts:
            put(axes, 0, 1.08 * top, "time, µs", ha="left", bold=True)
            legend = "dark: the least time that the card's limit allows    whisker: 20 % to 80 % of the runs"
            put(axes, STAGES, 1.08 * top, legend, SMALL, MUTED, ha="right")
        self._labels.scale(axes, self._time_grid, top if tallest else None)
        for row, (left, right) in zip(parts, spans, strict=False):
            x = (left + right) / 2
            if row.time_us is None:
                put(axes, x, top / 2, textwrap.fill(row.status, 19 * (right - left), max_lines=6), SMALL, RED)
                continue
            bars.append(style.rectangle(x - 0.25, x + 0.25, 0, row.time_us))
            if row.share is not None:
                least.append(style.rectangle(x - 0.25, x + 0.25, 0, row.time_us * min(row.share, 1.0)))
            end = row.time_us
            if row.low_us is not None and row.high_us is not None:
                end = row.high_us
                whiskers.append([(x, row.low_us), (x, end)])
                whiskers.extend([(x - 0.06, y), (x + 0.06, y)] for y in (row.low_us, end))
            put(axes, x, end + 0.04 * tallest, style.microseconds(row.time_us), va="bottom")
        self._time_bars.set_verts(bars)
        self._least_bars.set_verts(least)
        self._whiskers.set_segments(whiskers)

    def _draw_shares(self, parts, spans):
        put, axes, full, bars = self._labels.put, self.shares, [], []
        if parts:
            put(axes, 0, 1.13, "share of the limit", ha="left", bold=True)
            put(axes, -0.04, -0.34, "error", SMALL, MUTED, ha="right")
        self._labels.scale(axes, self._share_grid, 1.0 if parts else None, style.percent)
        for row, (left, right) in zip(parts, spans, strict=False):
            x = (left + right) / 2
            if row.share is not None:
                full.append(style.rectangle(x - 0.25, x + 0.25, 0, 1))
                bars.append(style.rectangle(x - 0.25, x + 0.25, 0, min(row.share, 1.0)))
                doubt = row.share > 1
                said = style.percent(row.share) + ("\ndoubtful" if doubt else "")
                put(axes, x + 0.27, 0.5, said, color=RED if doubt else INK, ha="left", ground=PAPER)
            name = row.part if right - left < STAGES else "all eight stages"
            put(axes, x, -0.18, name, SMALL, va="baseline", bold=True)
            said = style.verdict(row.error, row.tolerance)
            colour = RED if "✗" in said else GREEN if "✓" in said else MUTED
            put(axes, x, -0.38, said, SMALL, colour, va="baseline")
        self._full_bars.set_verts(full)
        self._share_bars.set_verts(bars)


def _spans(parts) -> list[tuple[int, int]]:
    """(first, last + 1) column of each part."""
    spans, at = [], 0
    for part in parts:
        spans.append((at, at + len(part.stages)))
        at += len(part.stages)
    return spans


def _details(cost, tile: dict) -> list[str]:
    """The lines in a box: the kernel and its tile, and what the part reads besides the tensors of other parts."""
    lines = [cost.part.version]
    if "BM" in tile:
        lines.append(" × ".join(str(tile[name]) for name in ("BM", "BN", "BK") if name in tile))
    if cost.weights_read:
        lines.append(f"weights {style.size(cost.weights_read)}")
    if cost.cache_read:
        lines.append(f"cache {style.size(cost.cache_read)}")
    return lines


def _headline(whole, parts: int) -> str:
    said = [f"{parts} {'part' if parts == 1 else 'parts'}"]
    if whole is not None:
        if whole.time_us is None:
            said.append("whole layer: " + textwrap.shorten(whole.status, 90))
        else:
            said.append(f"whole layer {style.microseconds(whole.time_us)}")
            if whole.low_us is not None and whole.high_us is not None:
                said[-1] += f" (20 % to 80 %: {style.count(whole.low_us)} to {style.count(whole.high_us)})"
        if whole.share is not None:
            said.append(f"{style.percent(whole.share)} of the limit")
        said.append(f"error {style.verdict(whole.error, whole.tolerance)}")
    return "    ".join(said)


def _words(title, headline, source, costs, boundaries, parts, note) -> str:
    said = [f"{title}.", f"{headline}.", f"{source}."]
    if note:
        said.append(note)
    for index, cost in enumerate(costs):
        line = f"{cost.part.name}: kernel {cost.part.version}"
        if index < len(parts):
            row = parts[index]
            time = row.status if row.time_us is None else style.microseconds(row.time_us)
            share = "" if row.share is None else f", {style.percent(row.share)} of the limit"
            line += f", {time}{share}, error {style.verdict(row.error, row.tolerance)}"
        if index < len(boundaries):
            line += f"; then {style.size(boundaries[index])} to memory and back"
        said.append(f"{line}.")
    return " ".join(said)
