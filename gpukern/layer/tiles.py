"""Which tile a part runs with where it names none: a rule by shape, for Triton's products, attention and decode.

The rule for products and for `triton_flash` was read off the recorded sweep of the H200, and a test holds it against
that sweep.
"""

from gpukern import device
from gpukern.layer.config import Config, Step
from gpukern.layer.stages import MATRIX_STAGES, product

_FEW_ROWS = {"BM": 16, "BN": 32, "BK": 128, "warps": 4, "stages": 4}  # decode: many programs, long strips of W
_ONE_WAVE = {"BM": 128, "BN": 256, "BK": 64, "warps": 8, "stages": 4}  # the most reuse, if every SM gets a tile
_SMALL = {"BM": 64, "BN": 128, "BK": 64, "warps": 8, "stages": 4}  # otherwise more tiles, so that more SMs work
_NORMED = {"BM": 128, "BN": 128, "BK": 64, "warps": 8, "stages": 3}  # norm and product: the rows go through registers
_NORMED_SMALL = {"BM": 64, "BN": 128, "BK": 64, "warps": 4, "stages": 3}
_STRIP = 8192  # weights that a program of four warps takes at once in decode
_FLASH = {"BM": 64, "BN": 64, "warps": 4, "stages": 3}


def tile_for(stages: tuple[str, ...], version: str, config: Config, step: Step) -> dict[str, int]:
    """The tile of a part at a step, or {} where the version's default serves."""
    sms = device.card().sms
    if version == "triton_flash":
        return dict(_FLASH)
    if version == "triton_split_kv":  # two programs an SM, of a tile of columns each at the least
        return {"splits": _power_of_two(min(2 * sms // (step.B * config.H), -(-step.S // 64)))}
    if version == "triton_one_kernel":
        return _one_kernel(config, sms)
    if stages[-1] not in MATRIX_STAGES:
        return {}
    _, M, N, K = product(stages[-1], config, step)
    if version == "triton_decode":
        return {"BN": _power_of_two(_STRIP // K)}
    if version == "triton_matvec":  # W in columns: few of them, and of each as much as the threads can hold
        BK = min(_STRIP // 2, 2 * _power_of_two(K - 1))
        return {"BN": _STRIP // 2 // BK, "BK": BK}
    if version != "triton":
        return {}
    if M <= 16:
        return dict(_FEW_ROWS)
    large, small = (_ONE_WAVE, _SMALL) if len(stages) == 1 else (_NORMED, _NORMED_SMALL)
    tiles = -(-M // large["BM"]) * -(-N // large["BN"])
    return dict(large if tiles >= sms else small)


def _one_kernel(config: Config, sms: int) -> dict[str, int]:
    """All programs must run at once. A narrow layer is bound by waiting: more and smaller programs, two on some SMs."""
    narrow = config.C <= 1024
    programs = max(32, (3 * sms // 2 if narrow else sms) // 32 * 32)
    size = {"warps": 4, "stages": 3} if narrow else {"warps": 8, "stages": 4}
    return {"programs": programs, "splits": _power_of_two(programs // config.H), **size}


def _power_of_two(n: int) -> int:
    """The largest power of two that is at most n, and at least 1."""
    return 1 << max(0, n.bit_length() - 1)
