"""Autotuning: right before fast, on copies, kept under all that it depends on, whatever lies in the cache."""

import dataclasses
import json
import threading

import pytest
import torch

from gpukern import device
from gpukern.kernels import OPS
from gpukern.measure import Timing, autotune
from gpukern.measure.autotune import best_tile, copied
from gpukern.op import InputError, Op, Version

TILES = [{"BM": 1}, {"BM": 2}, {"BM": 4}, {"BM": 8}]
seen = []  # (tile, the tensor that the launcher was given)


def add_one(x: torch.Tensor, BM: int, warps: int = 1) -> torch.Tensor:
    """In place, as a cache or a residual is written; BM=1 forgets an element, BM=2 is wrong, BM=8 is refused."""
    seen.append((BM, x))
    if BM == 8:
        raise device.LimitError("BM=8 is too large")
    x += 2 if BM == 2 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[1 if BM == 1 else 0 :] = x[1 if BM == 1 else 0 :]
    return out


OP = Op(
    name="add_one",
    summary="out = x + 1",
    reference=lambda x: x.double() + 1,
    inputs=lambda shape, dtype, on, generator: {"x": torch.randn(shape["N"], generator=generator).to(dtype).to(on)},
    shapes=({"N": 8},),
    flops=lambda s: s["N"],
    bytes=lambda s, dtype: 2 * s["N"] * dtype.itemsize,
    tolerance={torch.float32: 1e-6},
    versions={
        "torch": Version("torch", f"{__name__}:add_one", {"BM": 4}),
        "ours": Version("torch", f"{__name__}:add_one", {"BM": 4, "warps": 1}),
    },
)


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A card that is none: `times` has the microseconds of a tile, `card.timed` the tiles that were timed."""
    found = {"card": "H200", "driver": "580", "torch": "2.11", "triton": "3.6", "numba": "0.68", "numba_cuda": "0.30"}
    provenance = {**found, "date": "2026-12-01"}
    times, timed = {1: 1.0, 2: 2.0, 4: 9.0, 16: 4.0, 32: 6.0}, []

    def time(runs, budget_ms):
        BM = runs[0].keywords["BM"]
        timed.append((BM, len(runs)))
        for run in runs:
            run()
        return Timing(times[BM], times[BM], times[BM], "graph", None)

    monkeypatch.setattr(device, "simulated", lambda: False)
    monkeypatch.setattr(autotune, "provenance", lambda: provenance)
    monkeypatch.setattr(autotune, "time", time)
    monkeypatch.setattr(autotune, "copies_past_l2", lambda held: 3)
    monkeypatch.setenv("GPUKERN_CACHE", str(tmp_path))
    seen.clear()
    return type("Card", (), {"timed": timed, "times": times, "provenance": provenance, "folder": tmp_path / "tiles"})


def draw(N=8):
    return OP.draw({"N": N}, torch.float32, torch.device("cpu"))


def test_the_fastest_right_tile_wins_and_no_other_is_timed(card):
    best = best_tile(OP, "ours", draw(), [*TILES, {"BM": 16, "warps": 4}, {"BM": 32}])
    assert (best.tile, best.time_us, best.source) == ({"BM": 16, "warps": 4}, 4.0, "measured")
    assert card.timed == [(4, 3), (16, 3), (32, 3)], "three copies each; 1 and 2 are wrong, 8 is refused"
    (file,) = card.folder.glob("*.json")
    tried = {row["tile"]["BM"]: row["status"] for row in json.loads(file.read_text())["tried"]}
    assert tried[1].startswith("WRONG") and tried[2].startswith("WRONG")
    assert tried[8] == "refused: BM=8 is too large" and tried[16] == "ok"


def test_the_inputs_are_never_written_to(card):
    inputs = draw()
    before = inputs["x"].clone()
    best_tile(OP, "ours", inputs, [{"BM": 4}, {"BM": 16}])
    assert torch.equal(inputs["x"], before)
    assert len(seen) >= 8 and all(x.data_ptr() != inputs["x"].data_ptr() for _, x in seen)


def test_a_second_time_comes_from_the_cache(card):
    first = best_tile(OP, "ours", draw(), [{"BM": 4}, {"BM": 16}])
    card.times[16] = 100.0
    second = best_tile(OP, "ours", draw(), [{"BM": 4}, {"BM": 16}])
    assert (first.source, second.source, second.tile, second.time_us) == ("measured", "cached", first.tile, 4.0)
    assert len(card.timed) == 2 and "H200, 2026-12-01" in second.note


def test_what_the_best_tile_depends_on_is_the_key(card, monkeypatch):
    def changed(**of_machine):
        monkeypatch.setattr(autotune, "provenance", lambda: {**card.provenance, **of_machine})
        return best_tile(OP, "ours", draw(), [{"BM": 4}])

    assert changed().source == "measured"
    for name in ("card", "driver", "torch", "triton", "numba", "numba_cuda"):
        assert changed(**{name: "another"}).source == "measured", name
    assert changed(date="2027-01-01").source == "cached", "the day changes nothing"
    assert best_tile(OP, "ours", draw(9), [{"BM": 4}]).source == "measured"
    wide = {"x": torch.zeros(16)[::2]}
    assert best_tile(OP, "ours", wide, [{"BM": 4}]).source == "measured"
    assert best_tile(OP, "ours", {"x": torch.zeros(9)[1:]}, [{"BM": 4}]).source == "measured"
    assert best_tile(OP, "torch", draw(), [{"BM": 4}]).source == "measured"
    assert best_tile(OP, "ours", draw(), [{"BM": 4}, {"BM": 16}]).source == "measured"
    monkeypatch.setattr(autotune, "source_hash", lambda module: "edited")
    assert best_tile(OP, "ours", draw(), [{"BM": 4}]).source == "measured"
    assert best_tile(OP, "ours", draw(), [{"BM": 4}]).source == "cached"


def test_the_source_is_all_of_the_kernels_and_the_cpp_files():
    matmul, softmax = (OPS[name].versions["triton"].launcher.partition(":")[0] for name in ("matmul", "softmax"))
    assert autotune.source_hash(matmul) == autotune.source_hash(softmax) != autotune.source_hash(__name__)
    assert len(autotune.source_hash(matmul)) == 16


BROKEN = ["", "{", "[]", "null", '{"key": 1}', b"\xff\xfe", '{"key": {}, "tile": {"BM": 4}, "time_us": 1, "date": ""}']


@pytest.mark.parametrize("broken", BROKEN, ids=repr)
def test_what_is_broken_or_foreign_is_ignored_and_rewritten(card, broken):
    best_tile(OP, "ours", draw(), [{"BM": 4}])
    (file,) = card.folder.glob("*.json")
    whole = file.read_bytes()
    file.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    assert best_tile(OP, "ours", draw(), [{"BM": 4}]).source == "measured"
    assert file.read_bytes() == whole


@pytest.mark.parametrize("change", [{"tile": {"BM": 64}}, {"time_us": -1.0}, {"time_us": "x"}, {"date": 3}], ids=str)
def test_a_tile_that_was_no_candidate_is_ignored(card, change):
    best_tile(OP, "ours", draw(), [{"BM": 4}])
    (file,) = card.folder.glob("*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert best_tile(OP, "ours", draw(), [{"BM": 4}]).source == "measured"


def test_writers_at_once_leave_a_whole_file_and_nothing_else(tmp_path):
    path = tmp_path / "tiles" / "a.json"
    wanted = [{"number": n, "text": "x" * 100_000} for n in range(4)]
    torn = []

    def write(found):
        for _ in range(20):
            assert autotune._write(path, found) == f"kept in {path}"
            if json.loads(path.read_text()) not in wanted:
                torn.append(found)

    writers = [threading.Thread(target=write, args=(found,)) for found in wanted]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not torn and [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_a_folder_that_cannot_be_written_costs_only_the_cache(card, monkeypatch):
    card.folder.write_text("a file is in the way")
    best = best_tile(OP, "ours", draw(), [{"BM": 4}])
    assert best.source == "measured" and "not kept" in best.note


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("GPUKERN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert autotune.cache_folder() == tmp_path / "gpukern" / "tiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert autotune.cache_folder() == tmp_path / ".cache" / "gpukern" / "tiles"


def test_no_tile_that_can_be_used(card):
    with pytest.raises(InputError, match=r"no tile of add_one by ours.*WRONG.*refused: BM=8"):
        best_tile(OP, "ours", draw(), [{"BM": 2}, {"BM": 8}])
    with pytest.raises(InputError, match="no candidates"):
        best_tile(OP, "ours", draw(), [])
    assert not list(card.folder.glob("*"))


def test_copies_lie_in_memory_as_the_inputs_do():
    base = torch.arange(64.0).reshape(8, 8)
    inputs = {
        "a": base.T, "b": base[1:, 3:], "c": base[:1].expand(4, 8), "d": base[::2, ::3], "e": base[:0], "eps": 1e-5,
        "norm": (base[0], base[1], 1e-5), "f": torch.tensor(2.0), "g": base.bfloat16()[:, 1:], "none": None,
    }  # fmt: skip
    made = copied(inputs)
    flat = lambda values: [*values.values(), *values["norm"]]  # noqa: E731
    for old, new in zip(flat(inputs), flat(made), strict=True):
        if isinstance(old, torch.Tensor):
            assert torch.equal(old, new) and old.stride() == new.stride() and old.dtype == new.dtype
            assert old.numel() == 0 or (old.data_ptr() - new.data_ptr()) % 16 == 0 and old.data_ptr() != new.data_ptr()
        elif not isinstance(old, tuple):
            assert old == new


def test_without_a_card_it_is_recorded_or_the_default_and_says_so(monkeypatch):
    monkeypatch.setattr(device, "simulated", lambda: True)
    inputs = {name: torch.empty(size, dtype=torch.bfloat16) for name, size in (("a", (1024, 3072)), ("w", (3072, 768)))}
    best = best_tile(OPS["matmul"], "triton", inputs, [{"BM": 64}])
    rows = [row for row in autotune.read("tiles") if (row.M, row.N, row.K, row.version) == (1024, 768, 3072, "triton")]
    assert best.source == "recorded" and "recorded on H200" in best.note
    assert best.tile.keys() == {"BM", "BN", "BK", "warps", "stages"}
    assert best.time_us == min(row.time_us for row in rows if row.time_us)
    inputs["a"] = inputs["a"][:1000]
    best = best_tile(OPS["matmul"], "triton", inputs, [{"BM": 64}])
    assert best.source == "default" and best.tile == OPS["matmul"].versions["triton"].tile and "no card" in best.note


@pytest.mark.gpu
def test_a_tile_is_found_on_this_card(monkeypatch, tmp_path):
    monkeypatch.setenv("GPUKERN_CACHE", str(tmp_path))
    op = OPS["matmul"]
    inputs = op.draw({"M": 512, "N": 512, "K": 512}, torch.bfloat16, torch.device("cuda"))
    tiles = [{"BM": 64, "BN": 64, "BK": 64}, {"BM": 128, "BN": 128, "BK": 64}, {"BM": 16, "BN": 16, "BK": 16}]
    best = best_tile(op, "triton", inputs, tiles)
    assert best.source == "measured" and best.time_us > 0
    assert dataclasses.replace(best, source="", note="") == dataclasses.replace(
        best_tile(op, "triton", inputs, tiles), source="", note=""
    )
