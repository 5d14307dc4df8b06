"""Pictures of rows: plain data in, a matplotlib Figure out. Nothing here measures, and nothing here is a widget."""

from gpukern.figures.layer import LayerFigure
from gpukern.figures.style import png
from gpukern.figures.tile import TileFigure

__all__ = ["LayerFigure", "TileFigure", "png"]
