"""The layer explorer: one transformer layer, run by a plan, part by part."""

import math

import ipywidgets as widgets

from gpukern import measure
from gpukern.figures import LayerFigure, style
from gpukern.layer import CONFIGS, PLANS, STAGES, Layer, Plan, Step, boundary_bytes, crossings
from gpukern.layer.plan import Crossing
from gpukern.layer.stages import CACHED, elements
from gpukern.widgets.explorer import Explorer, live, open_layer, require_choice

PHASES = ("prefill", "decode")
_CONFIGS = (*CONFIGS, "trained")
# Tokens that the slider offers on a card, or where nothing was recorded: T in prefill, S in decode.
_TOKENS = {"prefill": (16, 64, 256, 512, 1024, 2048), "decode": (128, 512, 1024, 2048, 4096, 8192)}


def layer_explorer(config: str = "gpt2", phase: str = "prefill", plan: str = "triton") -> "LayerExplorer":
    """Choose a config, a phase, its tokens and a plan; see the partition, the round trips and the time of each part.

    Measures on a card; replays recorded rows without one, and says so. Raises ValueError for an unknown name.
    """
    return LayerExplorer(config, phase, plan)


class LayerExplorer(Explorer):
    def __init__(self, config: str, phase: str, plan: str):
        for name, value, known in (("config", config, _CONFIGS), ("phase", phase, PHASES), ("plan", plan, PLANS)):
            require_choice(name, value, known)
        self._rows = {}  # measured in this session
        self._adjusted = None  # the config and phase whose steps the slider has
        controls = {
            "config": widgets.Dropdown(options=_CONFIGS, value=config, description="config"),
            "phase": widgets.Dropdown(options=PHASES, value=phase, description="phase"),
            "step": widgets.SelectionSlider(options=_steps(config, phase), continuous_update=False),
            "plan": widgets.Dropdown(options=tuple(PLANS), value=plan, description="plan"),
        }
        for name, width in (("config", "150px"), ("phase", "150px"), ("step", "480px"), ("plan", "160px")):
            controls[name].layout.width = width
        super().__init__("layer", controls, LayerFigure())

    def adjust(self) -> None:
        """Give the slider the steps of the config and phase; keep its value if it can, else go near 1024 tokens."""
        config, phase, before = (self.controls[name].value for name in ("config", "phase", "step"))
        if (config, phase) == self._adjusted:
            return
        slider, steps = self.controls["step"], _steps(config, phase)
        slider.description = "T tokens" if phase == "prefill" else "S tokens attended to"
        slider.options = steps
        known = [step for _, step in steps]
        kept = self._adjusted is not None and before in known
        slider.value = before if kept else min(known, key=lambda s: (s.B, abs(math.log2(s.S / 1024))))
        self._adjusted = config, phase

    def show(self) -> str:
        config, phase, step, name = (control.value for control in self.controls.values())
        layer, plan = open_layer(config), PLANS[name].at(step)
        sizes = f"B={step.B} T={step.T} S={step.S}"
        try:
            rows, note = self._measure(layer, plan, step), ""
        except measure.NotRecorded as missing:
            rows, note = [], missing.message
            if missing.nearest:
                self.offer(step=Step(missing.nearest.B, missing.nearest.T, missing.nearest.S))
        self.figure.draw(
            f"Layer {config}, {phase} {sizes}, plan {name}, {style.dtype_name(layer.dtype)}",
            layer.costs(plan, step),
            [_inside(plan, index) for index in range(len(plan.parts))],
            _with_input(plan, layer, step),
            boundary_bytes(plan, layer.config, step, layer.dtype),
            rows,
            note,
        )
        if note:
            return note
        whole = rows[-1]
        time = whole.status if whole.time_us is None else style.microseconds(whole.time_us)
        return f"plan {name}, {config}, {phase} {sizes}: whole layer {time} ({whole.provenance})"

    def _measure(self, layer: Layer, plan: Plan, step: Step) -> list[measure.Row]:
        if not live(layer.config.name):
            return measure.plan_rows(layer, plan, step)
        asked = layer.config.name, plan.name, step
        if asked not in self._rows:
            self.say(f"measuring plan {plan.name} at B={step.B} T={step.T} S={step.S} …")
            self._rows[asked] = measure.plan_rows(layer, plan, step)
        return self._rows[asked]


def _steps(config: str, phase: str) -> list[tuple[str, Step]]:
    """What the slider offers: (label, step). Recorded steps, and on a card, where any can be measured, a range more."""
    steps = {Step(*sizes) for sizes in measure.recorded_plan_steps(config, phase, open_layer(config).dtype)}
    if not steps or live(config):
        steps |= {Step(1, n if phase == "prefill" else 1, n) for n in _TOKENS[phase]}
    ordered = sorted(steps, key=lambda s: (s.B, s.T, s.S))
    return [(f"{'' if s.B == 1 else f'{s.B} × '}{s.T if phase == 'prefill' else s.S}", s) for s in ordered]


def _with_input(plan: Plan, layer: Layer, step: Step) -> list[Crossing]:
    """The plan's crossings, and before them the layer's input x to each part that reads it, from writer -1."""
    n_bytes = elements("x", layer.config, step) * layer.dtype.itemsize
    readers = [i for i, part in enumerate(plan.parts) if any("x" in STAGES[stage].reads for stage in part.stages)]
    return [Crossing("x", -1, i, n_bytes) for i in readers] + crossings(plan, layer.config, step, layer.dtype)


def _inside(plan: Plan, index: int) -> str:
    """A few words on what a part keeps to itself, or "" if it is one stage."""
    part = plan.parts[index]
    if len(part.stages) == 1:
        return ""
    if part.version.startswith("torch"):
        return "how many kernels run, and what passes through memory between them, is PyTorch's choice"
    later = {tensor for after in plan.parts[index + 1 :] for stage in after.stages for tensor in STAGES[stage].reads}
    read = {tensor for stage in part.stages for tensor in STAGES[stage].reads}
    made = [tensor for stage in part.stages for tensor in STAGES[stage].writes]
    kept = [tensor for tensor in made if tensor in read and tensor not in later and tensor not in CACHED]
    return f"{' and '.join(kept)} never go to memory" if kept else ""
