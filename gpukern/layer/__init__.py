"""The live layer: eight stages, the plans that partition them, weights, a KV cache, and the small trained model."""

from gpukern.layer.config import CONFIGS, Config, Step
from gpukern.layer.layer import Cache, Layer
from gpukern.layer.plan import PLANS, Part, Plan, boundary_bytes, costs, crossings, plan
from gpukern.layer.stages import MATRIX_STAGES, STAGES
from gpukern.layer.weights import CheckpointError, Weights

__all__ = [
    "CONFIGS",
    "MATRIX_STAGES",
    "PLANS",
    "STAGES",
    "Cache",
    "CheckpointError",
    "Config",
    "Layer",
    "Part",
    "Plan",
    "Step",
    "Weights",
    "boundary_bytes",
    "costs",
    "crossings",
    "plan",
]
