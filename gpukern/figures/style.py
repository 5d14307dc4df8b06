"""The look that all pictures share: colours, text sizes, how numbers are written, and a Figure as PNG bytes.

The colours are those of Okabe and Ito (*Color Universal Design*, 2008), told apart with every common kind of colour
blindness; no picture says by colour alone what it does not also say in words. The ground is white, so that a picture
is the same in a light and in a dark JupyterLab.
"""

import io

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

INK = "#1a1a1a"
MUTED = "#5c5c5c"
FAINT = "#d9d9d9"
PAPER = "#ffffff"
BLUE = "#0072b2"
SKY = "#8cc7ea"
ORANGE = "#e69f00"
GREEN = "#00775a"
RED = "#c04800"
SAND = "#f4ead2"

TITLE, TEXT, SMALL = 12, 9, 8  # points

# Set for every picture, so that a learner's own matplotlib settings (a dark style, say) do not leak into it.
_SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "text.color": INK,
    "axes.facecolor": PAPER,
    "hatch.linewidth": 0.6,
    "hatch.color": MUTED,
    "figure.facecolor": PAPER,
    "text.usetex": False,
    "text.parse_math": False,
}


def settings():
    """A context in which figures are made and drawn in the course's look."""
    return matplotlib.rc_context(_SETTINGS)


def new_figure(width: float, height: float) -> Figure:
    """An empty white Figure of width x height inches with its own canvas; pyplot does not know of it."""
    with settings():
        figure = Figure(figsize=(width, height), dpi=100, facecolor=PAPER)
        FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    """The picture as PNG. Compressed lightly: a local browser is nearer than the time a smaller file costs."""
    buffer = io.BytesIO()
    with settings():
        figure.canvas.print_png(buffer, pil_kwargs={"compress_level": 1})
    return buffer.getvalue()


def bare_axes(figure: Figure, left: float, bottom: float, width: float, height: float, x=(0, 1), y=(0, 1)):
    """Axes without ticks and frame, at fractions of the figure, that reach from x[0] to x[1] and y[0] to y[1].

    Matplotlib's own ticks take a third of the time of a picture; Labels writes the numbers.
    """
    axes = figure.add_axes((left, bottom, width, height), xlim=x, ylim=y)
    axes.set_axis_off()
    return axes


def grid() -> LineCollection:
    """Faint lines behind a plot; Labels.scale says where."""
    return LineCollection([], color=FAINT, lw=0.8, zorder=0, clip_on=False)


def rectangle(left: float, right: float, low: float, high: float) -> list[tuple[float, float]]:
    """Its corners, as a PolyCollection takes them."""
    return [(left, low), (right, low), (right, high), (left, high)]


def count(n: float) -> str:
    """A number with three digits, or whole with thousands marked: 2.30, 45.1, 1,235."""
    return f"{n:,.0f}" if n >= 99.95 else f"{n:#.3g}"


def size(n_bytes: float) -> str:
    """Bytes as '12.6 MB' (1 MB = 10^6 bytes)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if n_bytes >= scale:
            return f"{count(n_bytes / scale)} {unit}"
    return f"{n_bytes:.0f} B"


def microseconds(time_us: float) -> str:
    """A time as '16.0 µs'."""
    return f"{count(time_us)} µs"


def percent(share: float) -> str:
    """A share as '63 %'; below one in a hundred with a digit more."""
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else f"{100 * share:.1f} %"


def verdict(error: float | None, tolerance: float | None) -> str:
    """What the check found: '✓ 0.002 ≤ 0.015', '✗ 0.3 > 0.015' or 'not checked'."""
    if error is None or tolerance is None:
        return "not checked"
    return f"✓ {error:.2g} ≤ {tolerance:.2g}" if error <= tolerance else f"✗ {error:.2g} > {tolerance:.2g}"


def dtype_name(dtype) -> str:
    """torch.bfloat16 as 'bfloat16'."""
    return str(dtype).removeprefix("torch.")
