"""The eight-stage table of `gpukern layer`: what each part moves and computes, how long it takes, if it is right."""

import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich import box
from rich.table import Table

from gpukern import device, measure
from gpukern.layer import CARD_ONLY, PLANS, Layer, Plan, Step, costs, text
from gpukern.op import FLOATS, InputError

# What the simulated GPU runs in about 20 seconds on two CPU cores, by language; more is not run here. Small programs
# (Triton) and blocks (Numba) cost what it takes to start one, however little they compute.
SIMULATED_FLOPS = {"torch": 2e10, "triton": 2e9, "numba": 1.5e9}
SIMULATED_LAUNCHED = {"torch": float("inf"), "triton": 2500, "numba": 30_000}
SIMULATED_BYTES = 1e9  # that a run here may hold


def layer_table(layer: Layer, plan: Plan, step: Step) -> dict:
    """One entry a part and a `total`: bytes, FLOPs and round trips derived from the plan; times measured or recorded;
    errors against float64 from a run on this machine, or recorded where that run would take the simulated GPU too long.

    An entry's `time_us` and `error` are None where nobody has measured them, and its `status` says why.
    """
    plan = plan.at(step)
    costs = layer.costs(plan, step)
    try:
        rows, message = measure.plan_rows(layer, plan, step), None
    except measure.NotRecorded as missing:
        rows, message = [None] * (len(costs) + 1), missing.message
    errors = _run_here(layer, plan, step, sum(c.flops for c in costs)) if device.simulated() else None
    entries = []
    for index, cost in enumerate(costs):
        entries.append(
            {
                "part": cost.part.name,
                "kernel": cost.part.version,
                "tile": layer.tile(cost.part, step),
                "bytes": cost.bytes,
                "flops": cost.flops,
                "round_trips": list(cost.round_trips),
                **_timed(rows[index], message),
                **_checked(rows[index], errors and errors[index]),
            }
        )
    total = {
        "part": "all",
        "bytes": sum(c.bytes for c in costs),
        "flops": sum(c.flops for c in costs),
        "round_trips": sum(len(c.round_trips) for c in costs),
        "launches": len(costs) if all(c.part.version != "torch_compile" for c in costs) else None,
        **_timed(rows[-1], message),
        **_checked(rows[-1], errors and errors[-1]),
    }
    return {
        "config": asdict(layer.config),
        "step": {"phase": step.phase, **asdict(step)},
        "dtype": str(layer.dtype).removeprefix("torch."),
        "plan": plan.name,
        "mode": device.mode(),
        "card": device.card().name,
        "simulated": device.simulated(),
        "parts": entries,
        "total": total,
    }


def _timed(row, message) -> dict:
    if row is None:
        return {"time_us": None, "low_us": None, "high_us": None, "share": None, "time_source": None, "status": message}
    return {
        **{name: getattr(row, name) for name in ("time_us", "low_us", "high_us", "share")},
        "time_source": row.provenance if row.time_us is not None else None,
        "status": row.status,
    }


def _checked(row, here) -> dict:
    """The error of the run on this machine if there was one, else the recorded one."""
    if here is not None:
        largest = min(here[0], sys.float_info.max)  # JSON has no infinity
        return {"error": largest, "tolerance": here[1], "check": device.mode()}
    if row is None or row.error is None:
        return {"error": None, "tolerance": None, "check": None}
    return {"error": row.error, "tolerance": row.tolerance, "check": row.source}


def _run_here(layer: Layer, plan: Plan, step: Step, flops: int) -> list | None:
    """(error, tolerance) of every part and of the whole, run on the simulated GPU; None if that would take too long."""
    languages = {part.version.partition("_")[0] for part in plan.parts}
    if any(part.version in CARD_ONLY for part in plan.parts) or held_bytes(layer, step) > SIMULATED_BYTES:
        return None
    if flops > min(SIMULATED_FLOPS[language] for language in languages):
        return None
    if launched(layer, plan, step) > min(SIMULATED_LAUNCHED[language] for language in languages):
        return None
    x, cache = layer.inputs(step)
    state = layer.start(x, cache)
    result = []
    with measure.poisoned():
        for part in plan.parts:
            exact = layer.exact_part(part, state)
            layer.run_part(part, state)
            result.append((measure.found_error(layer.made(part, state), exact), layer.tolerance(part)))
    result.append((measure.found_error(state["z"], layer.exact(x, cache)), layer.tolerance()))
    return result


def right(table: dict) -> bool:
    """False if any part was run, here or on the card that was recorded, and found wrong."""
    checked = [entry for entry in (*table["parts"], table["total"]) if entry["error"] is not None]
    return all(entry["error"] <= entry["tolerance"] for entry in checked)


def as_rich(table: dict) -> Table:
    """The table for a terminal."""
    step, config = table["step"], table["config"]
    title = (
        f"{config['name']}: C={config['C']} H={config['H']} F={config['F']}, {step['phase']} "
        f"B={step['B']} T={step['T']} S={step['S']}, {table['dtype']}, plan {table['plan']}"
    )
    out = Table(title=title, caption=_caption(table), box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    left = ("part", "kernel", "reads back", "check")
    for heading in ("part", "kernel", "bytes", "FLOPs", "reads back", "µs", "limit", "error", "check"):
        out.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading != "reads back")
    for entry in table["parts"]:
        out.add_row(entry["part"].replace("+", "+\n"), entry["kernel"], *_cells(entry, " ".join(entry["round_trips"])))
    total = table["total"]
    launches = f"{total['launches'] or '?'} launches"
    out.add_section()
    out.add_row("all", launches, *_cells(total, f"{total['round_trips']} round trips"))
    return out


def _cells(entry: dict, trips: str) -> list[str]:
    def shown(value, form):
        return "-" if value is None else form.format(value)

    verdict = "-"
    if entry["error"] is not None:
        verdict = "right" if entry["error"] <= entry["tolerance"] else "WRONG"
    return [
        _si(entry["bytes"]),
        _si(entry["flops"]),
        trips,
        shown(entry["time_us"], "{:,.1f}"),
        shown(entry["share"], "{:.0%}"),
        shown(entry["error"], "{:.1e}"),
        verdict,
    ]


def _si(n: float) -> str:
    """n with three digits and a decimal prefix: 1234567 -> 1.23 M."""
    for prefix in ("", "k", "M", "G", "T"):
        if n < 1000 or prefix == "T":
            return f"{n:.3g} {prefix}".rstrip()
        n /= 1000


def _caption(table: dict) -> str:
    sources = sorted({entry["time_source"] for entry in table["parts"] if entry["time_source"]})
    lines = [f"Times: {', '.join(sources)}." if sources else "No times."]
    lines += sorted({e["status"] for e in (*table["parts"], table["total"]) if e["status"] and e["status"] != "ok"})
    check = table["total"]["check"]
    lines.append(f"Check against float64: {check}." if check else "Not checked.")
    if check != "counted" and table["mode"] == "counted":
        lines.append("Not run here: it would take the simulated GPU too long.")
    return "\n".join(lines)


def held_bytes(layer: Layer, step: Step) -> int:
    """Bytes, roughly, of what a run and its float64 check hold at once: weights, caches, scores, probs, activations."""
    unfused = costs(PLANS["reference"], layer.config, step, torch.float64)
    return sum(cost.bytes for cost in unfused)


def launched(layer: Layer, plan: Plan, step: Step) -> int:
    """Programs or blocks, roughly, that a run by Triton or Numba launches: one a row or a tile of what each part makes.

    Flash attention, whose programs loop over the keys, counts one for each tile of scores.
    """
    rows = {"softmax": step.B * layer.config.H * step.T, "norm": step.B * step.T}
    total = 0
    for part in plan.parts:
        tile = layer.tile(part, step)
        if part.name in rows:
            total += rows[part.name]
        elif "BM" in tile:
            batch, M, N, _ = layer.product(part.stages[0], step) or layer.product(part.stages[-1], step)
            total += batch * -(-M // tile["BM"]) * -(-N // tile["BN"])
    return total


def step_named(phase: str, tokens: int | None, context: int | None, batch: int) -> Step:
    """The Step that the command line asks for. Raises InputError for a phase or sizes that do not go together."""
    if phase not in ("prefill", "decode"):
        raise InputError(f"unknown phase {phase!r}; use prefill or decode.")
    if phase == "decode":
        if tokens not in (None, 1):
            raise InputError(f"decode takes one new token, not {tokens}; use --phase prefill for more.")
        if context is not None and context < 2:
            raise InputError(f"--context {context}: a decode step attends to its own token and at least one before it.")
        return Step(batch, 1, 128 if context is None else context)
    T = 16 if tokens is None else tokens
    return Step(batch, T, T if context is None else context)


def layer_named(config: str | None, weights: Path | None, index: int, dtype: str | None) -> Layer:
    """The layer that the command line asks for: a config by name, the trained model's, or a checkpoint's."""
    if config is not None and weights is not None:
        raise InputError("--config and --weights name two layers; give one of them.")
    if index != 0 and weights is None and config != "trained":
        raise InputError("--index chooses a layer of a checkpoint: it goes with --weights or with --config trained.")
    config = config or "tiny"
    kind = dtype_named(("bfloat16" if config in ("gpt2", "c4096") else "float32") if dtype is None else dtype)
    if weights is not None:
        return Layer.from_checkpoint(weights, index, dtype=kind)
    if config == "trained":
        return text.trained_layer(index, kind)
    return Layer.random(config, kind)


def dtype_named(name: str) -> torch.dtype:
    """float32, float16 or bfloat16 by name. Raises InputError for any other."""
    for dtype in FLOATS:
        if str(dtype) == f"torch.{name}":
            return dtype
    raise InputError(f"unknown dtype {name!r}; use float32, float16 or bfloat16.")
