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
        with style.settings():
            self.title = self.figure.text(0.012, 0.973, "", fontsize=TITLE, fontweight="bold", va="center")
            self.source = self.figure.text(0.988, 0.973, "", fontsize=TEXT, va="center", ha="right", color=MUTED)
            self.headline = self.figure.text(0.012, 0.938, "", fontsize=TEXT + 0.5, va="center")
            self.partition, self.times, self.shares = (
                self.figure.add_axes((0.06, bottom, 0.922, height))
                for bottom, height in ((0.505, 0.405), (0.265, 0.2), (0.085, 0.135))
            )
            for axes in (self.partition, self.times, self.shares):
                axes.set_xlim(0, STAGES)
            self._prepare_partition()
            self._prepare_plots()
        self._labels = Labels()

    def _prepare_partition(self):
        axes = self.partition
        style.bare(axes)
        axes.set_ylim(-0.02, 1.02)
        axes.fill_between([0, STAGES], *_MEMORY, color=SAND, lw=0)
        axes.text(0.04, 0.012, "HBM: the card's memory", fontsize=SMALL, color=MUTED, va="bottom")
        dashed = "dashed: it waits there for a later part"
        axes.text(STAGES - 0.04, 0.012, dashed, fontsize=SMALL, color=MUTED, va="bottom", ha="right")
        axes.text(0.13, 0.345, "x", fontsize=SMALL, color=BLUE, ha="center", va="center")
        axes.text(STAGES - 0.12, 0.345, "z", fontsize=SMALL, color=BLUE, ha="center", va="center")
        self._boxes = axes.add_collection(PolyCollection([], facecolor=PAPER, edgecolor=INK, lw=1.3))
        self._seams = axes.add_collection(LineCollection([], color=MUTED, lw=0.8, ls=":"))
        self._paths = axes.add_collection(LineCollection([], color=BLUE, lw=1.6))
        self._skips = axes.add_collection(LineCollection([], color=ORANGE, lw=1.6, ls="--"))
        self._up = axes.plot([], [], "^", color=BLUE, ms=5)[0]
        self._skips_up = axes.plot([], [], "^", color=ORANGE, ms=5)[0]
        self._down = axes.plot([], [], "v", color=BLUE, ms=5)[0]

    def _prepare_plots(self):
        for axes, label in ((self.times, "time, µs"), (self.shares, "of the limit")):
            style.plain(axes)
            axes.set_ylabel(label, fontsize=TEXT)
            axes.yaxis.set_label_coords(-0.045, 0.5)
            axes.set_xticks([])
        self._time_bars = self.times.add_collection(PolyCollection([], color=SKY))
        self._least_bars = self.times.add_collection(PolyCollection([], color=BLUE))
        self._whiskers = self.times.add_collection(LineCollection([], color=INK, lw=1.2))
        self._full_bars = self.shares.add_collection(PolyCollection([], color=FAINT, alpha=0.5))
        self._share_bars = self.shares.add_collection(PolyCollection([], color=BLUE))
        self.shares.set_ylim(0, 1)
        self.shares.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
        said = "dark: the least time that the card's limit allows    whisker: 20 % to 80 % of the runs"
        self._legend = self.figure.text(0.982, 0.482, said, fontsize=SMALL, color=MUTED, ha="right", va="center")

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
            for shown in (self.shares, self._legend, self.times.spines["left"], self.times.spines["bottom"]):
                shown.set_visible(bool(parts))
            self._draw_times(parts, spans, note)
            self._draw_shares(parts, spans)
        self.words = _words(title, self.headline.get_text(), self.source.get_text(), costs, boundaries, parts, note)

    def _draw_boxes(self, costs, insides, spans, rows):
        low, high = _BOX
        self._boxes.set_verts([style.rectangle(left + 0.07, right - 0.07, low, high) for left, right in spans])
        inner = [x for left, right in spans for x in range(left + 1, right)]
        self._seams.set_segments([[(x, high - 0.03), (x, high - 0.12)] for x in inner])
        for index, (cost, inside, (left, right)) in enumerate(zip(costs, insides, spans, strict=True)):
            tile = rows[index].tile if rows else {}
            for column, stage in enumerate(cost.part.stages, left):
                put = {"ha": "center", "va": "baseline", "fontsize": TEXT, "fontweight": "bold"}
                self._labels.put(self.partition, column + 0.5, high - 0.09, f"{column + 1} {stage}", color=INK, **put)
            put = {"ha": "center", "va": "top", "fontsize": SMALL, "linespacing": 1.3}
            middle = (left + right) / 2
            self._labels.put(self.partition, middle, high - 0.14, "\n".join(_details(cost, tile)), color=MUTED, **put)
            if inside:
                self._labels.put(self.partition, middle, low + 0.06, inside, color=GREEN, **put)

    def _draw_tensors(self, spans, crossings, boundaries):
        """One way down for each part that writes, a path in memory, one way up for each tensor that a part reads."""
        low, last = _BOX[0], len(spans) - 1
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
            if end - start > 1:
                put = {"ha": "center", "va": "center", "fontsize": SMALL, "style": "italic", "color": INK}
                label = f"{c.tensor} {style.size(c.bytes)}"
                self._labels.put(self.partition, (start + end) / 2, depth, label, ground=SAND, **put)
        self._up.set_data([p[-1][0] for p in paths], [low - 0.02] * len(paths))
        self._skips_up.set_data([p[-1][0] for p in skips], [low - 0.02] * len(skips))
        out = spans[last][1] - _LEG
        self._down.set_data([out], [_FLOOR + 0.02])
        self._paths.set_segments([*paths, [(out, low), (out, _FLOOR)]])
        self._skips.set_segments(skips)
        for index, n_bytes in enumerate(boundaries):
            x = spans[index][1]
            names = sorted({c.tensor for c in crossings if 0 <= c.writer <= index < c.reader})
            put = {"ha": "center", "va": "center", "fontsize": SMALL}
            both = style.size(n_bytes).replace(" ", "\n")
            self._labels.put(self.partition, x, 0.475, both, fontweight="bold", color=INK, **put)
            self._labels.put(self.partition, x, 0.345, " ".join(names), color=BLUE, **put)

    def _draw_times(self, parts, spans, note):
        axes, bars, least, whiskers = self.times, [], [], []
        tallest = max((row.high_us or row.time_us for row in parts if row.time_us is not None), default=0.0)
        axes.set_ylim(0, 1.3 * tallest or 1.0)
        axes.yaxis.set_visible(bool(tallest))
        put = {"ha": "center", "va": "center", "fontsize": SMALL, "linespacing": 1.2, "color": RED}
        if not parts:
            self._labels.put(axes, STAGES / 2, 0.5, textwrap.fill(note, 110), **{**put, "fontsize": TEXT + 1})
        for row, (left, right) in zip(parts, spans, strict=False):
            x = (left + right) / 2
            if row.time_us is None:
                why = textwrap.fill(row.status, 19 * (right - left), max_lines=6)
                self._labels.put(axes, x, axes.get_ylim()[1] / 2, why, **put)
                continue
            bars.append(style.rectangle(x - 0.25, x + 0.25, 0, row.time_us))
            if row.share is not None:
                least.append(style.rectangle(x - 0.25, x + 0.25, 0, row.time_us * min(row.share, 1.0)))
            top = row.time_us
            if row.low_us is not None and row.high_us is not None:
                top = row.high_us
                whiskers.append([(x, row.low_us), (x, top)])
                whiskers.extend([(x - 0.06, y), (x + 0.06, y)] for y in (row.low_us, top))
            above = {**put, "va": "bottom", "color": INK, "fontsize": TEXT}
            self._labels.put(axes, x, top + 0.04 * tallest, style.microseconds(row.time_us), **above)
        self._time_bars.set_verts(bars)
        self._least_bars.set_verts(least)
        self._whiskers.set_segments(whiskers)

    def _draw_shares(self, parts, spans):
        axes, full, bars = self.shares, [], []
        for row, (left, right) in zip(parts, spans, strict=False):
            x = (left + right) / 2
            if row.share is not None:
                full.append(style.rectangle(x - 0.25, x + 0.25, 0, 1))
                bars.append(style.rectangle(x - 0.25, x + 0.25, 0, min(row.share, 1.0)))
                doubt = row.share > 1
                put = {"ha": "left", "va": "center", "fontsize": TEXT, "color": RED if doubt else INK}
                said = style.percent(row.share) + ("\ndoubtful" if doubt else "")
                self._labels.put(axes, x + 0.27, 0.5, said, **put)
            put = {"ha": "center", "va": "baseline", "fontsize": SMALL}
            name = row.part if right - left < STAGES else "all eight stages"
            self._labels.put(axes, x, -0.18, name, fontweight="bold", color=INK, **put)
            said = style.verdict(row.error, row.tolerance)
            colour = RED if "✗" in said else GREEN if "✓" in said else MUTED
            self._labels.put(axes, x, -0.38, said, color=colour, **put)
        if parts:
            put = {"ha": "right", "va": "baseline", "fontsize": SMALL, "color": MUTED}
            self._labels.put(axes, -0.02, -0.38, "error", **put)
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
            said.append(f"whole layer: {whole.status}")
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
