"""Explorers for notebooks: controls, then measure, then figures. One file each; the only importer of ipywidgets."""

from gpukern.widgets.layer import layer_explorer
from gpukern.widgets.tile import tile_explorer

__all__ = ["layer_explorer", "tile_explorer"]
