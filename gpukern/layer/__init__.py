"""The live layer: eight stages, the plans that partition them, weights, a KV cache, and the small trained model."""

from gpukern.layer.config import CONFIGS, Config, Step
from gpukern.layer.graph import LayerGraph
from gpukern.layer.layer import Cache, Layer
from gpukern.layer.plan import CARD_ONLY, PLANS, Part, Plan, boundary_bytes, costs, crossings, plan
from gpukern.layer.stages import MATRIX_STAGES, STAGES
from gpukern.layer.weights import CheckpointError, Weights

__all__ = [
    "CARD_ONLY",
    "CONFIGS",
    "MATRIX_STAGES",
    "PLANS",
    "STAGES",
    "Cache",
    "CheckpointError",
    "Config",
    "Layer",
    "LayerGraph",
    "Part",
    "Plan",
    "Step",
    "Weights",
    "boundary_bytes",
    "costs",
    "crossings",
    "plan",
]
