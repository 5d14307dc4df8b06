"""Synthetic rows for the tests of figures and explorers: plausible, the same every time, measured on no card.

Their card is called "test card". They are never written into gpukern/recorded.
"""

import itertools
import math
from pathlib import Path

import torch

from gpukern import layer, measure
from gpukern.layer import CONFIGS, PLANS, Step
from gpukern.layer.stages import product

FROM = {"source": "recorded", "card": "test card", "date": "2026-12-01"}
BF16 = torch.bfloat16
PREFILL, DECODE = Step(1, 2048, 2048), Step(1, 1, 2048)
STEPS = [Step(1, T, T) for T in (256, 512, 1024, 2048)] + [Step(1, 1, S) for S in (512, 1024, 2048)]


def _sizes(config: str, step: Step) -> dict:
    c = CONFIGS[config]
    return {"config": config, "dtype": "bfloat16", "C": c.C, "H": c.H, "F": c.F, "B": step.B, "T": step.T, "S": step.S}


def _bound_us(flops: float, n_bytes: float) -> float:
    return max(flops / 989.4e12, n_bytes / 4.8e12) * 1e6


def plan_rows(config: str, step: Step, plan: str) -> list[measure.Row]:
    """A row a part and one for the whole layer: the bound over a share that differs from part to part, plus 1 us."""
    costs = layer.costs(PLANS[plan], CONFIGS[config], step, BF16)
    rows, total = [], 0.0
    for index, cost in enumerate(costs):
        bound = _bound_us(cost.flops, cost.bytes)
        time_us = bound / (0.9 - 0.07 * index) + 1
        total += time_us
        rows.append(
            measure.Row(
                sweep="plans",
                part=cost.part.name,
                version=cost.part.version,
                plan=plan,
                time_us=time_us,
                low_us=0.97 * time_us,
                high_us=1.05 * time_us,
                bytes=cost.bytes,
                flops=cost.flops,
                share=bound / time_us,
                error=0.002 + 0.001 * index,
                tolerance=0.015,
                **layer.Layer.random(config, BF16).tile(cost.part, step),
                **_sizes(config, step),
                **FROM,
            )
        )
    whole = sum(_bound_us(cost.flops, cost.bytes) for cost in costs)
    rows.append(
        measure.Row(
            sweep="plans",
            part="all",
            version=plan,
            plan=plan,
            time_us=total,
            low_us=0.98 * total,
            high_us=1.02 * total,
            bytes=sum(cost.bytes for cost in costs),
            flops=sum(cost.flops for cost in costs),
            share=whole / total,
            error=0.004,
            tolerance=0.03,
            **_sizes(config, step),
            **FROM,
        )
    )
    return rows


def tile_rows(config: str, stage: str, step: Step) -> list[measure.Row]:
    """PyTorch's row and a grid of tiles whose speed rises with their area; too much shared memory is refused."""
    batch, M, N, K = product("values" if "+" in stage else stage, CONFIGS[config], step)
    cost = layer.Layer.random(config, BF16).part_cost(layer.Part(tuple(stage.split("+")), "triton"), step)
    flops, n_bytes = cost.flops, cost.bytes
    bound = _bound_us(flops, n_bytes)
    same = {
        "sweep": "tiles",
        "part": stage,
        "bytes": n_bytes,
        "flops": flops,
        "M": M,
        "N": N,
        "K": K,
        "error": 0.004,
        "tolerance": 0.015,
        **_sizes(config, step),
        **FROM,
    }
    rows = [measure.Row(version="torch", time_us=bound / 0.76, share=0.76, **same)]
    sides = (32, 64, 128, 256) if step.T > 1 else (16,)
    version, depths = ("triton_flash", (None,)) if "+" in stage else ("triton", (32, 64, 128))
    for BM, BN, BK, warps, stages in itertools.product(sides, (32, 64, 128, 256), depths, (4, 8), (2, 3, 4)):
        tile = {"BM": BM, "BN": BN, "BK": BK, "warps": warps, "stages": stages}
        shared = 2 * stages * (BK or 64) * (BM + BN)
        if shared > 227 * 1024:
            status = f"refused: OutOfResources: shared memory {shared} > 232448"
            rows.append(measure.Row(version=version, status=status, **{**same, "error": None}, **tile))
            continue
        waves = batch * math.ceil(M / BM) * math.ceil(N / BN) / 132
        share = 0.8 * (1 - math.exp(-BM * BN / 9000)) * waves / math.ceil(waves)
        share *= (1 - 0.1 * abs(math.log2((BK or 64) / 64))) * (1 - 0.05 * abs(stages - 3)) * (0.9 if warps == 4 else 1)
        time_us = bound / share
        spread = {"low_us": 0.98 * time_us, "high_us": 1.03 * time_us, "share": share}
        taken = {"registers": 168, "shared": shared, "spills": 0}
        rows.append(measure.Row(version=version, time_us=time_us, **same, **tile, **spread, **taken))
    return rows


def everything() -> dict[str, list[measure.Row]]:
    """Both sweeps, by name; plan `numba` lacks T = 2048, plan `compile` was recorded nowhere."""
    plans = [
        row
        for config, step, plan in itertools.product(("gpt2", "c4096"), STEPS, ("reference", "numba", "triton", "flash"))
        if plan != "numba" or step.T != 2048
        for row in plan_rows(config, step, plan)
    ]
    tiles = [
        row
        for stage, step in itertools.product(("qkv", "output", "scores+softmax+values"), (PREFILL, DECODE))
        if "+" not in stage or step.T > 1
        for row in tile_rows("c4096", stage, step)
    ]
    return {"plans": plans, "tiles": tiles}


def write(folder: Path) -> None:
    """Both sweeps as a recording that `measure.read` finds if `measure.rows.RECORDED` is `folder`."""
    for sweep, rows in everything().items():
        measure.write(folder / "test-card", sweep, rows)
