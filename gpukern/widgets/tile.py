"""The tile explorer: one matrix product of the layer, with any tile, beside all the tiles that were swept."""

import math

import ipywidgets as widgets

from gpukern import measure
from gpukern.figures import TileFigure, style
from gpukern.kernels import OPS
from gpukern.layer import MATRIX_STAGES, Layer, Part, Step
from gpukern.widgets.explorer import Explorer, live, open_layer, require_choice
from gpukern.widgets.progress import Progress

ATTENTION = "scores+softmax+values"
# stage -> the operation that runs it, and the version whose tile is explored
_KERNELS = {
    "qkv": ("qkv", "triton"),
    ATTENTION: ("attention", "triton_flash"),
    **dict.fromkeys((stage for stage in MATRIX_STAGES if stage != "qkv"), ("matmul", "triton")),
}
_TOKENS = {"gpt2": 1024, "c4096": 2048}  # of the step that is offered where nothing was recorded
# What the sliders offer. Some of it no card can run: then the explorer says which limit is in the way.
_SIZES = {
    "BM": (16, 32, 64, 128, 256, 512),
    "BN": (16, 32, 64, 128, 256, 512),
    "BK": (16, 32, 64, 128, 256),
    "warps": (1, 2, 4, 8, 16, 32, 64),
    "stages": (1, 2, 3, 4, 5, 6, 7),
}
_MAP = (32, 64, 128, 256)  # sizes in a map that is measured on a card


def tile_explorer(config: str = "c4096", stage: str = "qkv") -> "TileExplorer":
    """Choose a stage, a step and a tile; see its time against the whole sweep, its waves, and its use of the card.

    Measures on a card; replays recorded rows without one, and says so. Raises ValueError for an unknown name.
    """
    return TileExplorer(config, stage)


class TileExplorer(Explorer):
    def __init__(self, config: str, stage: str):
        require_choice("config", config, _TOKENS)
        require_choice("stage", stage, _KERNELS)
        self._measured = {}  # (config, stage, step) -> {version and tile: Row}, in this session
        self._adjusted = (None, None, None)  # the config, stage and step that the controls were last adjusted to
        controls = {
            "config": widgets.Dropdown(options=tuple(_TOKENS), value=config, description="config"),
            "stage": widgets.Dropdown(options=tuple(_KERNELS), value=stage, description="stage"),
            "step": widgets.Dropdown(options=[("", None)], description="step"),
        }
        for name, sizes in _SIZES.items():
            slider = widgets.SelectionSlider(options=sizes, description=name, continuous_update=False)
            slider.layout.width = "290px"
            controls[name] = slider
        for name, width in (("config", "150px"), ("stage", "250px"), ("step", "260px")):
            controls[name].layout.width = width
        on_card = live(config)
        self.sweep = widgets.Button(description="Measure this map", icon="play", disabled=not on_card)
        self.sweep.layout.width = "auto"
        needs = "Needs a CUDA card; without one the map shows recorded rows"
        self.sweep.tooltip = "Measure every cell of the map with these warps and stages" if on_card else needs
        self.sweep.on_click(self.guarded(self._sweep))
        self.sweep.add_class("tile-sweep")
        self.progress = Progress("tile")
        super().__init__("tile", controls, TileFigure(), (widgets.HBox([self.sweep, self.progress]),))

    @property
    def tile(self) -> dict[str, int]:
        """The tile that the sliders say; attention has no BK."""
        sizes = {name: self.controls[name].value for name in _SIZES}
        if self.controls["stage"].value == ATTENTION:
            del sizes["BK"]
        return sizes

    @property
    def where(self) -> tuple[str, str, Step]:
        """Config, stage and step."""
        return tuple(self.controls[name].value for name in ("config", "stage", "step"))

    def part(self, **sizes) -> Part:
        """The stage as a part of a plan, with the present tile and, over it, `sizes`."""
        stage = self.controls["stage"].value
        return Part(tuple(stage.split("+")), _KERNELS[stage][1], self.tile | sizes)

    def adjust(self) -> None:
        """Offer the steps of this config and stage; go to a tile that their sweep has."""
        if self.where[:2] != self._adjusted[:2]:
            self._offer_steps()
        if self.where != self._adjusted:
            self._settle()
        self._adjusted = self.where

    def _offer_steps(self) -> None:
        config, stage, before = self.where
        rows = measure.recorded_tiles(config, stage, None, open_layer(config).dtype)
        steps = {Step(row.B, row.T, row.S) for row in rows} or {Step(1, _TOKENS[config], _TOKENS[config])}
        ordered = sorted(steps, key=lambda s: (-s.T, s.S))  # prefill first
        self.controls["step"].options = [(f"{s.phase} B={s.B} T={s.T} S={s.S}", s) for s in ordered]
        self.controls["step"].value = before if before in ordered else ordered[0]
        self.controls["BK"].disabled = stage == ATTENTION

    def _settle(self) -> None:
        """Where this sweep lacks the present tile, go to the possible one nearest to the kernel's default."""
        config, _, step = self.where
        tiles = [row.tile for row in self._swept() if row.status == "ok" and row.version != "torch"]
        tiles = [tile for tile in tiles if not _impossible(self._limits(tile))]
        if not tiles or self.tile in tiles:
            return
        default = {**self.tile, **open_layer(config).tile(Part(self.part().stages, self.part().version), step)}
        nearest = min(tiles, key=lambda tile: sum(abs(math.log2(n / default[name])) for name, n in tile.items()))
        for name, n in nearest.items():
            self.controls[name].value = n

    def _swept(self) -> list[measure.Row]:
        """Rows of the sweep: recorded ones, and over them what this session has measured.

        Two cards are never mixed: once something was measured here, recordings of other cards are left out.
        """
        config, stage, step = self.where
        versions = (_KERNELS[stage][1], "torch")
        rows = measure.recorded_tiles(config, stage, step, open_layer(config).dtype)
        rows = [row for row in rows if row.version in versions]
        mine = self._measured.get(self.where)
        if not mine:
            return rows
        here = next(iter(mine.values())).card
        return list(({_key(row): row for row in rows if row.card == here} | mine).values())

    def show(self) -> str:
        config, stage, step = self.where
        layer, part = open_layer(config), self.part()
        limits = self._limits(self.tile)
        chosen, note = None, _impossible(limits)
        if not note:
            try:
                chosen = self._measure(layer, part, step)
            except measure.NotRecorded as missing:
                note = missing.message
                if missing.nearest:
                    self.offer(**missing.nearest.tile)
        # Attention is one product after another; a block makes BM rows of the last one, whatever BN is.
        batch, M, N, K = layer.product("values" if stage == ATTENTION else stage, step)
        cut = self.tile | ({"BN": N} if stage == ATTENTION else {})
        blocks = batch * math.ceil(M / cut["BM"]) * math.ceil(N / cut["BN"])
        sizes = {"BM": f"M = {M}", "BN": f"N = {N}", "BK": f"K = {K}"}
        if stage == ATTENTION:
            sizes = {"BM": f"T = {step.T}", "BN": f"S = {step.S}"}
        title = f"{stage} of {config}, {step.phase}, {style.dtype_name(layer.dtype)}, {part.version}"
        waves = measure.waves(M, N, batch, cut)
        self.figure.draw(title, sizes, self.tile, self._swept(), chosen, limits, blocks, waves, note)
        if note and not _impossible(limits):
            return note
        sizes = " ".join(f"{name}={n}" for name, n in self.tile.items())
        return f"{stage} of {config}, T={step.T} S={step.S}, {sizes}: {note or _found(chosen)}"

    def _limits(self, tile: dict) -> list[measure.Limit]:
        config, stage, _ = self.where
        op, version = _KERNELS[stage]
        layer = open_layer(config)
        head = {"D": layer.config.D} if stage == ATTENTION else {}
        return measure.tile_limits(OPS[op].versions[version], tile, layer.dtype, **head)

    def _measure(self, layer: Layer, part: Part, step: Step) -> measure.Row:
        if not live(layer.config.name):
            return measure.tile_row(layer, part, step)
        mine = self._measured.setdefault(self.where, {})
        key = part.version, tuple(sorted(part.tile.items()))
        if key not in mine:
            self.say("measuring " + " ".join(f"{name}={n}" for name, n in part.tile.items()) + " …")
            mine[key] = measure.tile_row(layer, part, step)
        return mine[key]

    def _sweep(self) -> None:
        """Measure the map: PyTorch's kernel, then BM x BN (BK x BN in decode, which has one row), else as chosen."""
        where = config, stage, step = self.where
        side = "BK" if step.phase == "decode" and stage != ATTENTION else "BM"
        tiles = [{side: n, "BN": BN} for n in _MAP for BN in _MAP]
        parts = [Part(self.part().stages, "torch"), *(self.part(**sizes) for sizes in tiles)]

        def take(row):
            self._measured.setdefault(where, {})[_key(row)] = row
            self.refresh()

        self.progress.run(measure.sweep_tiles(open_layer(config), parts, step), len(parts), take, self._swept_all)

    def _swept_all(self, ended: str, error: Exception | None) -> None:
        if error is not None:
            self.fail(error)
        else:
            self.say(f"measuring the map: {ended}; the picture shows what was measured.")


def _impossible(limits: list[measure.Limit]) -> str:
    """Which limits are broken and what to do, or "". What is only estimated does not count: the compiler spills."""
    broken = [str(limit) for limit in limits if limit.broken and limit.exact]
    return f"impossible: {'; '.join(broken)}. Choose a smaller tile, or fewer stages or warps." if broken else ""


def _key(row) -> tuple:
    return row.version, tuple(sorted(row.tile.items()))


def _found(row) -> str:
    if row.time_us is None:
        return f"{row.status} ({row.provenance})"
    return f"{style.microseconds(row.time_us)}, {style.count(row.tflops)} TFLOP/s ({row.provenance})"
