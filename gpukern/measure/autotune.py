"""The best tile of a version for given inputs: measured once on a card, and kept on disk.

Tuning runs a kernel many times, and a kernel may write into its inputs (a KV cache, a residual), so it only ever sees
copies. Every candidate is checked before it is timed, into memory full of NaN: one that leaves gaps cannot pass because
another filled them. What was found holds for one card, one driver, one set of library versions, one source of the
kernel, and inputs of one form; all of that is the key under which it is kept.
"""

import functools
import hashlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from gpukern import device
from gpukern.measure.check import Verdict, poisoned
from gpukern.measure.layers import provenance, why_not
from gpukern.measure.rows import read
from gpukern.measure.timing import copies_past_l2, time
from gpukern.op import InputError, Op, error

_MOST_BYTES = 8e9  # of copies held at once


@dataclass(frozen=True)
class Best:
    """A tile and where it comes from.

    source   "measured": now; "cached": earlier, with this key; "recorded": on a named card; "default": nobody measured
    time_us  median microseconds of one run, None for a default
    note     one line that says so
    """

    tile: dict[str, int]
    time_us: float | None
    source: str
    note: str


def best_tile(op: Op, version: str, inputs: dict, candidates: Iterable[Mapping[str, int]]) -> Best:
    """The fastest of `candidates` for `version` of `op` on these inputs, which are copied and never written to.

    inputs      keyword arguments of the operation, tensors on the card; values matter only as far as times depend on
                them (give random ones)
    candidates  tiles; what one leaves out is the version's default

    Measured on a card unless the cache has it. Without a card: the best of the recorded sweep for a product of this
    size, else the version's default; `note` says which. Raises InputError if no candidate runs and is right.
    """
    made = op.versions[version]
    tiles = [{**made.tile, **candidate} for candidate in candidates]
    if device.simulated():
        return _without_card(op, version, inputs)
    key = cache_key(op, version, inputs, tiles)
    path = cache_folder() / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"
    kept = _read(path, key, tiles)
    if kept:
        return Best(kept["tile"], kept["time_us"], "cached", f"measured on {key['card']}, {kept['date']}")
    tried = [(tile, *_try(op, made, inputs, tile)) for tile in tiles]
    right = [(time_us, tile) for tile, time_us, _ in tried if time_us is not None]
    if not right:
        why = "; ".join(f"{tile}: {status}" for tile, _, status in tried)
        raise InputError(f"no tile of {op.name} by {version} can be used: {why or 'there are no candidates'}.")
    time_us, tile = min(right, key=lambda pair: pair[0])
    found = {"key": key, "tile": tile, "time_us": time_us, "date": provenance()["date"]}
    found["tried"] = [{"tile": tile, "time_us": time_us, "status": status} for tile, time_us, status in tried]
    return Best(tile, time_us, "measured", f"the best of {len(right)} right ones; {_write(path, found)}")


def cache_folder() -> Path:
    """$GPUKERN_CACHE, or gpukern/ in the user's cache folder as the XDG Base Directory Specification has it."""
    if os.environ.get("GPUKERN_CACHE"):
        return Path(os.environ["GPUKERN_CACHE"]) / "tiles"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpukern" / "tiles"


def cache_key(op: Op, version: str, inputs: dict, tiles: list[dict]) -> dict:
    """All that the best tile depends on, as JSON has it."""
    key = {name: value for name, value in provenance().items() if name != "date"}
    key |= {"op": op.name, "version": version, "inputs": _each(_form, inputs), "tiles": tiles}
    key["source"] = source_hash(op.versions[version].launcher.partition(":")[0])
    return json.loads(json.dumps(key))


def _form(value) -> object:
    """A tensor's shape, dtype, strides and alignment; of anything else its text."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return [list(value.shape), str(value.dtype), list(value.stride()), value.data_ptr() % 16]


@functools.cache
def source_hash(module: str) -> str:
    """A hash of the kernel's source: of every file of the package it is in (gpukern.kernels), as kernels share code."""
    file = getattr(importlib.import_module(module), "__file__", None)
    folder = getattr(sys.modules.get(".".join(module.split(".")[:2])), "__path__", None)
    if folder:
        files = sorted(path for path in Path(folder[0]).rglob("*") if path.suffix in (".py", ".cu"))
    else:
        files = [Path(file)] if file else []
    digest = hashlib.sha256()
    if not files:  # a notebook's cell, which may change: what is found holds for this process only
        digest.update(os.urandom(16))
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _read(path: Path, key: dict, tiles: list[dict]) -> dict | None:
    """What the cache has for the key; None if there is nothing, or nothing that can be used."""
    try:
        kept = json.loads(path.read_text())
        usable = kept["key"] == key and kept["tile"] in tiles and kept["time_us"] > 0 and isinstance(kept["date"], str)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return kept if usable else None


def _write(path: Path, found: dict) -> str:
    """Keep `found`: written beside and renamed, so that whoever reads finds a whole file, the old or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
            json.dump(found, part, indent=1)
        os.replace(part.name, path)
    except OSError as failure:
        return f"not kept: {failure}"
    return f"kept in {path}"


def _try(op: Op, made: Callable, inputs: dict, tile: dict) -> tuple[float | None, str]:
    """Median microseconds with one tile and "ok", or None and why there is no time."""
    held = sum(value.nbytes for value in _tensors(inputs))
    try:
        copies = [copied(inputs)]
        wanted = op.reference(**copied(inputs))
        with poisoned():
            out = made(**copies[0], **tile)
        verdict = Verdict(error(out, wanted), op.tolerance[_tensors(inputs)[0].dtype])
        if not verdict.ok:
            return None, str(verdict)
        more = min(copies_past_l2(held), int(_MOST_BYTES // max(held, 1))) - 1
        copies += [copied(inputs) for _ in range(more)]
        return time([functools.partial(made, **copy, **tile) for copy in copies], budget_ms=20).median_us, "ok"
    except Exception as failure:
        return None, why_not(failure)


def copied(inputs: dict) -> dict:
    """The inputs with every tensor in memory of its own, with the same strides and the same alignment to 16 bytes."""
    return _each(_copy, inputs)


def _copy(value):
    if not isinstance(value, torch.Tensor):
        return value
    steps = zip(value.shape, value.stride(), strict=True)
    span = 1 + sum((n - 1) * stride for n, stride in steps) if value.numel() else 0  # elements, first to last
    start = value.data_ptr() % 16 // value.element_size()
    memory = torch.empty(start + span, dtype=value.dtype, device=value.device)
    memory[start:] = value.as_strided((span,), (1,), value.storage_offset())
    return memory.as_strided(value.shape, value.stride(), start)


def _each(change: Callable, value):
    """`change` of every value in a dict, also of those in tuples and lists in it."""
    if isinstance(value, Mapping):
        return {name: _each(change, part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_each(change, part) for part in value)
    return change(value)


def _tensors(inputs: dict) -> list[torch.Tensor]:
    found = []
    _each(lambda value: found.append(value) if isinstance(value, torch.Tensor) else None, inputs)
    return found


def _without_card(op: Op, version: str, inputs: dict) -> Best:
    if op.name == "matmul":
        (M, K), N = inputs["a"].shape, inputs["w"].shape[1]
        asked = M, N, K, str(inputs["a"].dtype).removeprefix("torch."), version
        rows = [r for r in read("tiles") if (r.M, r.N, r.K, r.dtype, r.version) == asked and r.time_us]
        if rows:
            best = min(rows, key=lambda row: row.time_us)
            return Best(best.tile, best.time_us, "recorded", f"the best of {len(rows)} tiles, {best.provenance}")
    note = "the version's default: this machine has no card to measure on, and nobody recorded this"
    return Best(dict(op.versions[version].tile), None, "default", note)
