"""What the threads of one block did with memory: lanes over time, threads on elements, lanes on sectors and on banks.

Each picture draws a trace: the accesses of one block, as the simulated GPU keeps them (any object with the fields of
`simulate.Access` will do: step, line, space, doing, array, shape, itemsize, threads, index, address).
"""

import numpy as np
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure

from gpukern.figures import style
from gpukern.figures.style import BLUE, FAINT, GREEN, INK, MUTED, ORANGE, PAPER, RED, SKY, SMALL, TITLE, rectangle

_WARP, _BANKS, _SECTOR = 32, 32, 32  # threads; banks of 4 bytes; bytes
_COLOURS = {
    ("global", "load"): BLUE,
    ("global", "store"): ORANGE,
    ("shared", "load"): SKY,
    ("shared", "store"): GREEN,
    ("local", "load"): MUTED,
    ("local", "store"): MUTED,
}
_MOST_STEPS, _MOST_ROWS, _MOST_WRITTEN = 64, 64, 512


def draw(kind: str, trace: list, **options) -> Figure:
    """The picture called `kind`, one of PICTURES, with its options. Raises ValueError for another name."""
    if kind not in PICTURES:
        raise ValueError(f"there is no picture {kind!r}; there are {', '.join(PICTURES)}.")
    with style.settings():
        return PICTURES[kind](trace, **options)


def lanes(trace: list, warp: int = 0, first: int = 0) -> Figure:
    """Lanes x time: one column an access of the warp, one row a lane; a gap is a lane that sits out.

    warp   its number in the block; first: the first of the accesses that are shown (64 at most)
    """
    mine = [access for access in trace if (access.threads // _WARP == warp).any()]
    shown = mine[first : first + _MOST_STEPS]
    figure = style.new_figure(max(4.5, 1.6 + 0.24 * len(shown)), 5.6)
    axes = figure.add_axes((0.9 / figure.get_figwidth(), 0.29, 1 - 1.1 / figure.get_figwidth(), 0.61))
    axes.set(xlim=(0, max(len(shown), 1)), ylim=(_WARP, 0), ylabel="lane", yticks=range(0, _WARP, 4))
    for column, access in enumerate(shown):
        active = access.threads[access.threads // _WARP == warp] % _WARP
        boxes = [rectangle(column + 0.08, column + 0.92, lane + 0.08, lane + 0.92) for lane in active]
        axes.add_collection(PolyCollection(boxes, facecolor=_colour(access)))
    axes.set_xticks(np.arange(len(shown)) + 0.5, [_said(access) for access in shown], rotation=90, fontsize=SMALL)
    axes.tick_params(length=0)
    left_out = len(mine) - len(shown)
    for n, ((space, doing), colour) in enumerate(list(_COLOURS.items())[:4]):
        x, y = (0.1 + 1.1 * n) / figure.get_figwidth(), 0.15 / figure.get_figheight()
        figure.text(x, y, f"■ {space} {doing}", fontsize=SMALL, color=colour, va="center")
    _title(figure, f"warp {warp}: {len(mine)} accesses" + (f", {left_out} more are not drawn" if left_out else ""))
    return figure


def access(trace: list, array: str | None = None, doing: str = "load") -> Figure:
    """Which thread accesses which element of an array: its number in the block, darker the more often.

    array  its name in the kernel; default: the first that the block accesses in this way
    A vector is drawn in rows of 32; of more than two axes, the last two, at the first index of the others.
    """
    chosen = [a for a in trace if a.doing == doing and (array is None or a.array == array)]
    if not chosen:
        there = sorted({f"{a.doing} {a.array}" for a in trace})
        raise ValueError(f"the trace has no {doing} of {array or 'any array'}; it has {', '.join(there) or 'nothing'}.")
    array, shape = chosen[0].array, chosen[0].shape
    chosen = [a for a in chosen if a.array == array and a.shape == shape]
    rows, columns, origin, places = _as_matrix(chosen, shape)
    times = np.zeros((rows, columns), int)
    who = np.full((rows, columns), -1)
    for one, (inside, row, column) in zip(chosen, places, strict=True):
        np.add.at(times, (row[inside], column[inside]), 1)
        who[row[inside], column[inside]] = one.threads[inside]
    figure = style.new_figure(max(4.5, min(12, 1.2 + 0.3 * columns)), max(2.0, min(10, 1.3 + 0.3 * rows)))
    axes = figure.add_axes((0.08, 0.06, 0.9, 0.94 - 0.6 / figure.get_figheight()))
    picture = np.ma.masked_equal(times, 0)
    edges = np.arange(columns + 1) + origin[1], np.arange(rows + 1) + origin[0]
    axes.pcolormesh(*edges, picture, cmap="Blues", vmin=0, vmax=2 * times.max(), edgecolors=FAINT, lw=0.4)
    axes.invert_yaxis()
    axes.tick_params(labelsize=SMALL)
    if rows * columns <= _MOST_WRITTEN:
        for row, column in np.argwhere(times):
            axes.text(
                column + origin[1] + 0.5, row + origin[0] + 0.5, who[row, column], fontsize=6, ha="center", va="center"
            )
    most = f"up to {times.max()} times" if times.max() > 1 else "once each"
    _title(figure, f"{doing} {array}: {np.count_nonzero(times):,} elements, {most}; the number is the (last) thread's")
    return figure


def sectors(trace: list, step: int | None = None, warp: int = 0) -> Figure:
    """The lanes of a warp on the 32-byte sectors of global memory that one access touches.

    step  which access of the trace; default: the one with the most sectors
    """
    one = _chosen(trace, "global", step, warp, lambda a: len(np.unique(a // _SECTOR)))
    lane, address = _of_warp(one, warp)
    touched = np.unique(address // _SECTOR)
    figure = style.new_figure(10, 3)
    axes = style.bare_axes(figure, 0.02, 0.04, 0.96, 0.74, (0, _WARP), (0, 4))
    width = _WARP / max(len(touched), 4)
    place = np.searchsorted(touched, address // _SECTOR) * width + address % _SECTOR / _SECTOR * width
    slots = [rectangle(n * width + 0.03, (n + 1) * width - 0.03, 0.4, 1.2) for n in range(len(touched))]
    axes.add_collection(PolyCollection(slots, facecolor=FAINT, edgecolor=MUTED, lw=0.6))
    size = one.itemsize / _SECTOR * width
    axes.add_collection(PolyCollection([rectangle(x, x + size, 0.4, 1.2) for x in place], facecolor=_colour(one)))
    lines = [[(n + 0.5, 3.0), (x + size / 2, 1.2)] for n, x in zip(lane, place, strict=True)]
    axes.add_collection(LineCollection(lines, colors=_colour(one), lw=0.8))
    _lane_boxes(axes, lane, 3.0, 3.8)
    for n, sector in enumerate(touched):
        if len(touched) <= _WARP // 2:
            axes.text((n + 0.5) * width, 0.15, f"byte {sector * _SECTOR:,}", ha="center", va="center", fontsize=SMALL)
    moved, used = len(touched) * _SECTOR, len(np.unique(address)) * one.itemsize
    _title(figure, f"{_said(one)}: {_many(len(touched), 'sector')}, {moved} bytes moved for {used} used")
    return figure


def banks(trace: list, step: int | None = None, warp: int = 0) -> Figure:
    """The lanes of a warp on the 32 banks of shared memory, one row a wavefront.

    step  which access of the trace; default: the one with the most wavefronts
    """
    one = _chosen(trace, "shared", step, warp, lambda a: max(np.bincount(np.unique(a // 4) % _BANKS)))
    lane, address = _of_warp(one, warp)
    cells = wavefronts(lane, address, one.itemsize, one.doing == "load")
    rows = 1 + max(row for row, _ in cells)
    drawn = min(rows, _WARP)
    figure = style.new_figure(11, 1.3 + 0.28 * drawn)
    height = 1 - 0.95 / figure.get_figheight()
    axes = style.bare_axes(figure, 0.07, 0.35 / figure.get_figheight(), 0.92, height, (0, _BANKS), (drawn, 0))
    empty = [rectangle(bank, bank + 1, row, row + 1) for bank in range(_BANKS) for row in range(drawn)]
    axes.add_collection(PolyCollection(empty, facecolor=PAPER, edgecolor=FAINT, lw=0.8))
    full = [rectangle(bank, bank + 1, row, row + 1) for row, bank in cells if row < drawn]
    axes.add_collection(PolyCollection(full, facecolor=_colour(one), edgecolor=PAPER, lw=0.8))
    for (row, bank), who in cells.items():
        if row < drawn:
            said = str(who[0]) + ("+" if len(who) > 1 else "")
            ink = PAPER if one.doing == "store" else INK
            axes.text(bank + 0.5, row + 0.5, said, ha="center", va="center", fontsize=SMALL - 1, color=ink)
    for bank in range(0, _BANKS, 4):
        axes.text(bank + 0.5, drawn + 0.5, f"bank {bank}", ha="center", va="center", fontsize=SMALL, color=MUTED)
    for row in range(drawn):
        axes.text(-0.3, row + 0.5, f"wave {row}", ha="right", va="center", fontsize=SMALL, color=MUTED)
    more = f" ({rows - drawn} more are not drawn)" if rows > drawn else ""
    _title(figure, f"{_said(one)}: {_many(rows, 'wavefront')}{more}; the number is the lane")
    return figure


def wavefronts(lane: np.ndarray, address: np.ndarray, itemsize: int, loads: bool) -> dict:
    """{(wavefront, bank): lanes}: the n-th distinct word that is asked of a bank comes in the n-th wavefront.

    Elements of 8 bytes: half a warp after the other, of 16 a quarter; twice as many load at once if neighbours (all
    lanes t and t ^ 1, or all lanes t and t ^ 2) want the same, or one of them nothing.
    """
    wanted = dict(zip(lane.tolist(), address.tolist(), strict=True))
    agree = any(all(wanted.get(n ^ apart, at) == at for n, at in wanted.items()) for apart in (1, 2))
    size = min(_WARP * 4 // itemsize * (2 if loads and agree else 1), _WARP)  # threads that go at once
    cells, start = {}, 0
    for first in range(0, _WARP, size):
        team = (lane >= first) & (lane < first + size)
        asked = {}  # bank -> its words, in order
        for who, byte in zip(lane[team], address[team], strict=True):
            for word in range(byte // 4, (byte + itemsize - 1) // 4 + 1):
                words = asked.setdefault(word % _BANKS, [])
                if word not in words:
                    words.append(word)
                cells.setdefault((start + words.index(word), int(word % _BANKS)), []).append(int(who))
        start += max(map(len, asked.values()), default=0)
    return cells


PICTURES = {"lanes": lanes, "access": access, "sectors": sectors, "banks": banks}


def _as_matrix(chosen: list, shape: tuple) -> tuple:
    """Rows and columns of the part that is drawn, where it begins, and the places in it of each access."""
    if len(shape) < 2:
        places = [(a.index[0] // _WARP, a.index[0] % _WARP) for a in chosen]
    else:
        places = [(a.index[-2], a.index[-1]) for a in chosen]
    first = [min(int(p[axis].min()) for p in places) for axis in (0, 1)]
    last = [max(int(p[axis].max()) for p in places) for axis in (0, 1)]
    if len(shape) < 2:
        first[1], last[1] = 0, _WARP - 1
    last = [min(a, b + _MOST_ROWS - 1) for a, b in zip(last, first, strict=True)]
    kept = []
    for row, column in places:
        inside = (row <= last[0]) & (column <= last[1])
        kept.append((inside, row - first[0], column - first[1]))
    return last[0] - first[0] + 1, last[1] - first[1] + 1, first, kept


def _chosen(trace: list, space: str, step: int | None, warp: int, cost):
    there = [a for a in trace if a.space == space and (a.threads // _WARP == warp).any()]
    if step is not None:
        there = [a for a in there if a.step == step]
    if not there:
        at = f" at step {step}" if step is not None else ""
        raise ValueError(f"the trace has no access to {space} memory by warp {warp}{at}.")
    return max(there, key=lambda a: cost(_of_warp(a, warp)[1]))


def _of_warp(access, warp: int) -> tuple:
    mine = access.threads // _WARP == warp
    return access.threads[mine] % _WARP, access.address[mine]


def _colour(access) -> str:
    return RED if access.doing == "atomic" else _COLOURS[access.space, access.doing]


def _said(access) -> str:
    return f"{access.line.rpartition(':')[2]}: {access.doing} {access.array}"


def _many(n: int, what: str) -> str:
    return f"{n} {what}" + ("s" if n != 1 else "")


def _lane_boxes(axes, active: np.ndarray, low: float, high: float) -> None:
    boxes = [rectangle(n + 0.08, n + 0.92, low, high) for n in range(_WARP)]
    colours = [SKY if n in active else PAPER for n in range(_WARP)]
    axes.add_collection(PolyCollection(boxes, facecolor=colours, edgecolor=MUTED, lw=0.6))
    for n in range(_WARP):
        axes.text(n + 0.5, (low + high) / 2, n, ha="center", va="center", fontsize=SMALL, color=INK)


def _title(figure: Figure, said: str) -> None:
    figure.text(0.012, 1 - 0.22 / figure.get_figheight(), said, fontsize=TITLE - 1, fontweight="bold", va="center")
