"""Which tile a stage runs with where its part names none: a rule by shape, for the Triton products and flash attention.

The rule was read off the recorded sweep of the H200, and a test holds it against that sweep.
"""

from gpukern import device
from gpukern.layer.config import Config, Step
from gpukern.layer.stages import MATRIX_STAGES, product

_FEW_ROWS = {"BM": 16, "BN": 32, "BK": 128, "warps": 4, "stages": 4}  # decode: many programs, long strips of W
_ONE_WAVE = {"BM": 128, "BN": 256, "BK": 64, "warps": 8, "stages": 4}  # the most reuse, if every SM gets a tile
_SMALL = {"BM": 64, "BN": 128, "BK": 64, "warps": 8, "stages": 4}  # otherwise more tiles, so that more SMs work
_FLASH = {"BM": 64, "BN": 64, "warps": 4, "stages": 3}


def tile_for(stages: tuple[str, ...], version: str, config: Config, step: Step) -> dict[str, int]:
    """The tile of a part at a step, or {} where the version's default serves."""
    if version == "triton_flash":
        return dict(_FLASH)
    if version != "triton" or len(stages) != 1 or stages[0] not in MATRIX_STAGES:
        return {}
    _, M, N, _ = product(stages[0], config, step)
    if M <= 16:
        return dict(_FEW_ROWS)
    tiles = -(-M // _ONE_WAVE["BM"]) * -(-N // _ONE_WAVE["BN"])
    return dict(_ONE_WAVE if tiles >= device.card().sms else _SMALL)
