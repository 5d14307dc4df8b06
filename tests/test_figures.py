"""The pictures say what the rows say: every number, every reason for a missing one, and nothing over anything else."""

import itertools
import math
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from browser import rows as synthetic
from browser.rows import BF16, DECODE, PREFILL

from gpukern import layer, measure
from gpukern.figures import LayerFigure, TileFigure, png, style
from gpukern.figures.labels import Labels
from gpukern.layer import CONFIGS, PLANS, Step
from gpukern.widgets.layer import _inside, _with_input

STEP = Step(1, 1024, 1024)
TILE = {"BM": 128, "BN": 128, "BK": 64, "warps": 8, "stages": 3}
SIZES = {"BM": "M = 2048", "BN": "N = 12288", "BK": "K = 4096"}


def labels(drawn) -> list:
    """The visible texts of a figure or of axes."""
    texts = [text for text in drawn.findobj(matplotlib.text.Text) if text.get_visible() and text.get_text().strip()]
    return [text for text in texts if text.axes is None or text.axes.get_visible()]


def said(figure) -> list[str]:
    return [label.get_text() for label in labels(figure)]


def heights(bars) -> list[float]:
    return [path.vertices[:, 1].max() for path in bars.get_paths()]


def spans(bars) -> list[tuple[float, float]]:
    return [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in bars.get_paths()]


def draw_layer(plan: str, rows=None, config="gpt2", step=STEP, note="", picture=None) -> LayerFigure:
    picture = picture or LayerFigure()
    plan_, config_ = PLANS[plan], CONFIGS[config]
    picture.draw(
        f"Layer {config}, {step.phase} B={step.B} T={step.T} S={step.S}, plan {plan}, bfloat16",
        layer.costs(plan_, config_, step, BF16),
        [_inside(plan_, index) for index in range(len(plan_.parts))],
        _with_input(plan_, layer.Layer.random(config, BF16), step),
        layer.boundary_bytes(plan_, config_, step, BF16),
        synthetic.plan_rows(config, step, plan) if rows is None else rows,
        note,
    )
    return picture


def limits(tile: dict) -> list[measure.Limit]:
    shared = 2 * tile["stages"] * (tile.get("BK") or 64) * (tile["BM"] + tile["BN"])
    return [
        measure.Limit("threads a block", 32 * tile["warps"], 1024, "threads"),
        measure.Limit("shared memory a block", shared, 232448, "bytes"),
        measure.Limit(
            "accumulator registers a thread", tile["BM"] * tile["BN"] // (32 * tile["warps"]), 255, "registers", False
        ),
    ]


def draw_tile(tile=TILE, rows=None, note="", stage="qkv", step=PREFILL, waves=5.82, blocks=768) -> TileFigure:
    picture = TileFigure()
    rows = synthetic.tile_rows("c4096", stage, step) if rows is None else rows
    chosen = next((row for row in rows if row.tile == tile), None)
    title = f"{stage} of c4096, {step.phase}, bfloat16, triton"
    picture.draw(title, SIZES, tile, rows, chosen, limits(tile), blocks, waves, note)
    return picture


def refused(row, status="refused: LimitError: 64 x 64 has 4096 threads; H200 allows 1024. Choose a smaller tile."):
    none = dict.fromkeys(("time_us", "low_us", "high_us", "share", "error"))
    return replace(row, **none, status=status)


# --- the layer ---


def test_each_part_is_a_box_over_its_stages_and_each_stage_is_named_in_order():
    figure = draw_layer("flash")
    assert [(round(a), round(b)) for a, b in spans(figure._boxes)] == [(0, 1), (1, 4), (4, 5), (5, 6), (6, 7), (7, 8)]
    names = [f"{number} {name}" for number, name in enumerate(layer.STAGES, 1)]
    assert [text for text in said(figure.figure) if text in names] == names
    assert "scores and probs never go to memory" in said(figure.figure)
    assert "never go to memory" not in " ".join(said(draw_layer("triton").figure))


def test_what_a_compiler_decides_is_not_claimed():
    assert any("PyTorch's choice" in text for text in said(draw_layer("compile").figure))
    assert not any("never go to memory" in text for text in said(draw_layer("compile").figure))


@pytest.mark.parametrize("plan", ["triton", "flash", "compile"])
@pytest.mark.parametrize("step", [STEP, DECODE], ids=["prefill", "decode"])
def test_every_boundary_has_its_bytes_and_every_tensor_that_crosses_it(plan, step):
    figure = draw_layer(plan, step=step)
    crossings = layer.crossings(PLANS[plan], CONFIGS["gpt2"], step, BF16)
    for index, n_bytes in enumerate(layer.boundary_bytes(PLANS[plan], CONFIGS["gpt2"], step, BF16)):
        x = figure._boxes.get_paths()[index].vertices[:, 0].max() + 0.07
        there = {
            t.get_text() for t in figure.partition.texts if t.get_visible() and abs(t.get_position()[0] - x) < 0.01
        }
        assert style.size(n_bytes).replace(" ", "\n") in there
        assert " ".join(sorted({c.tensor for c in crossings if c.writer <= index < c.reader})) in there
    assert len(figure._paths.get_segments()) == sum(c.reader == c.writer + 1 for c in crossings) + 2  # x in, z out


def test_tensors_that_skip_parts_are_drawn_from_their_writer_to_their_reader():
    figure = draw_layer("triton")
    ends = [(round(path[0][0], 1), round(path[-1][0], 1)) for path in figure._skips.get_segments()]
    # The input to the residual of stage 5, v to stage 4, y to the residual of stage 8.
    assert ends == [(0.0, 4.3), (0.8, 3.3), (4.8, 7.3)] or sorted(ends) == [(0.0, 4.4), (0.8, 3.4), (4.8, 7.4)]
    for tensor in "xvy":
        assert f"{tensor} 1.57 MB" in said(figure.figure)
    depths = [path[1][1] for path in figure._skips.get_segments()]
    assert depths[0] != depths[1], "x and v pass each other in one lane"


def test_bars_are_the_times_and_their_dark_part_the_least_time():
    rows = synthetic.plan_rows("gpt2", STEP, "triton")
    figure = draw_layer("triton", rows)
    assert heights(figure._time_bars) == pytest.approx([row.time_us for row in rows[:-1]])
    assert heights(figure._least_bars) == pytest.approx([row.time_us * row.share for row in rows[:-1]])
    assert heights(figure._share_bars) == pytest.approx([row.share for row in rows[:-1]])
    whiskers = [segment for segment in figure._whiskers.get_segments() if segment[0][0] == segment[1][0]]
    assert [(low, high) for (_, low), (_, high) in whiskers] == [
        pytest.approx((row.low_us, row.high_us)) for row in rows[:-1]
    ]
    for row in rows[:-1]:
        assert style.microseconds(row.time_us) in said(figure.figure)
        assert style.percent(row.share) in said(figure.figure)
        assert style.verdict(row.error, row.tolerance) in said(figure.figure)


def test_the_head_says_the_whole_and_where_it_comes_from():
    rows = synthetic.plan_rows("gpt2", STEP, "triton")
    figure = draw_layer("triton", rows)
    assert f"whole layer {style.microseconds(rows[-1].time_us)}" in figure.headline.get_text()
    assert "✓ 0.004 ≤ 0.03" in figure.headline.get_text()
    assert figure.source.get_text() == "recorded on test card, 2026-12-01"
    measured = [replace(row, source="measured", card="NVIDIA T4") for row in rows]
    assert draw_layer("triton", measured).source.get_text() == "measured on NVIDIA T4, 2026-12-01"


def test_a_part_without_a_time_says_why_on_the_plot():
    rows = synthetic.plan_rows("gpt2", STEP, "triton")
    rows[2] = refused(rows[2])
    rows[5] = replace(refused(rows[5], "wrong: error 3.0e-01, tolerance 2e-02"), error=0.3)
    figure = draw_layer("triton", rows)
    assert len(heights(figure._time_bars)) == 6
    text = " ".join(said(figure.times)).replace("\n", " ")
    assert "refused: LimitError: 64 x 64 has 4096 threads" in text and "wrong: error 3.0e-01" in text
    assert "not checked" in said(figure.figure) and "✗ 0.3 > 0.015" in said(figure.figure)


def test_without_rows_the_partition_stands_and_the_reason_takes_the_place_of_the_times():
    figure = draw_layer("triton", [], note="plan triton at T=3 was not recorded; the nearest is T=16.")
    assert len(figure._boxes.get_paths()) == 8 and heights(figure._time_bars) == []
    assert any("was not recorded" in text for text in said(figure.figure))
    assert not any("µs" in text or "%" in text or "limit" in text for text in said(figure.figure))
    draw_layer("triton", picture=figure)
    assert len(heights(figure._time_bars)) == 8 and "share of the limit" in said(figure.figure)


def test_more_than_the_limit_is_doubted():
    rows = synthetic.plan_rows("gpt2", STEP, "triton")
    rows[0] = replace(rows[0], share=1.3)
    assert "130 %\ndoubtful" in said(draw_layer("triton", rows).figure)


# --- the tile ---


def chosen_cell(figure) -> tuple[int, int]:
    (low, _), (left, _) = figure._chosen_cell.get_paths()[0].vertices.min(axis=0)[[1, 0]][:, None].repeat(2, 1)
    return round(left), round(low)


def test_the_map_holds_the_speeds_at_the_chosen_depth():
    rows = synthetic.tile_rows("c4096", "qkv", PREFILL)
    figure = draw_tile(rows=rows)
    slice_ = [r for r in rows if (r.BK, r.warps, r.stages) == (64, 8, 3)]
    assert len(slice_) == 16
    shown = " ".join(said(figure.map)).replace("★ ", "").split()
    for row in slice_:
        assert style.count(row.tflops) in shown
    assert chosen_cell(figure) == (2, 2)  # of 32, 64, 128, 256
    assert any("BK 64 of K = 4096, warps 8, stages 3" in text for text in said(figure.map))
    best = max((r for r in rows if r.tflops and r.version != "torch"), key=lambda r: r.tflops)
    assert f"★ {style.count(best.tflops)}" in said(draw_tile(best.tile, rows).map)


def test_colours_mean_the_same_whatever_is_chosen():
    rows = synthetic.tile_rows("c4096", "qkv", PREFILL)
    best = max((r for r in rows if r.tflops and r.version != "torch"), key=lambda r: r.tflops)
    brightest = matplotlib.colormaps["viridis"](1.0)
    assert any(np.allclose(colour, brightest) for colour in draw_tile(best.tile, rows)._cells.get_facecolor())
    worst = {**TILE, "BK": 32, "stages": 2, "warps": 4}
    assert not any(np.allclose(colour, brightest) for colour in draw_tile(worst, rows)._cells.get_facecolor())


def test_refused_cells_are_hatched_and_cells_outside_the_sweep_blank():
    rows = synthetic.tile_rows("c4096", "qkv", PREFILL)
    tile = {**TILE, "BK": 128, "stages": 4}
    figure = draw_tile(tile, rows)
    count = sum(r.status != "ok" for r in rows if (r.BK, r.warps, r.stages) == (128, 8, 4))
    assert count == len(figure._no_time.get_paths()) > 0
    outside = draw_tile({**TILE, "BM": 512}, rows, note="was not recorded")
    assert len(outside._blank.get_paths()) == 4
    assert chosen_cell(outside) == (2, 4)


def test_the_sweep_is_in_order_with_the_chosen_tile_torch_and_the_limit():
    rows = synthetic.tile_rows("c4096", "qkv", PREFILL)
    figure = draw_tile(rows=rows)
    speeds = sorted(row.tflops for row in rows if row.tflops and row.version != "torch")
    assert figure._dots.get_ydata() == pytest.approx(speeds)
    chosen = next(row for row in rows if row.tile == TILE)
    (rank,), (speed,) = figure._chosen_dot.get_data()
    assert speed == chosen.tflops and speeds[rank] == pytest.approx(chosen.tflops)
    torch_row = rows[0]
    levels = [segment[0][1] for segment in figure._lines.get_segments()]
    assert levels == pytest.approx([torch_row.tflops, torch_row.tflops / torch_row.share])
    assert f"torch {style.count(torch_row.tflops)}" in said(figure.speeds)
    assert f"{chosen.tflops / torch_row.tflops:.2f} of torch" in figure.headline.get_text()
    assert len(draw_tile(rows=rows[1:])._lines.get_segments()) == 1


@pytest.mark.parametrize(
    ("waves", "tiled", "idle", "busy"),
    [(0.25, 1, 0.75, "25 %"), (1.0, 1, 0.0, "100 %"), (5.82, 6, 0.18, "97 %"), (40.5, 8, 0.5, "99 %")],
)
def test_waves_are_drawn_with_the_last_one_as_full_as_it_is(waves, tiled, idle, busy):
    figure = draw_tile(waves=waves, blocks=round(waves * 132))
    assert len(figure._tiled.get_paths()) == tiled
    (left, split), (same, right) = spans(figure._tiled)[-1], spans(figure._idle)[-1]
    assert split == same and (right - split) / (right - left) == pytest.approx(idle, abs=0.01)
    text = " ".join(said(figure.waves))
    assert f"{waves:.2f} waves, so {math.ceil(waves)} in turn" in text and busy in text and "over 132 SMs" in text


def test_limits_are_bars_and_a_broken_one_is_told_in_words():
    figure = draw_tile()
    assert len(figure._used.get_paths()) == 3 and len(figure._broken.get_paths()) == 0
    assert "98,304 of 232,448" in said(figure.limits)
    assert "compiled: 168 registers a thread, no spills, 98,304 bytes shared" in said(figure.limits)
    note = "impossible: shared memory a block: 1,048,576 of 232,448 bytes. Choose a smaller tile."
    broken = draw_tile({**TILE, "BM": 512, "BN": 512, "BK": 256, "stages": 4}, note=note)
    assert len(broken._broken.get_paths()) == 2
    assert "2,097,152 of 232,448 ✗ too much" in said(broken.limits)
    assert "about 1,024 of 255 ✗ spills" in said(broken.limits)
    assert "no time. impossible: shared memory a block" in broken.headline.get_text().replace("\n", " ")
    assert broken.headline.get_color() == style.RED
    assert len(broken._chosen_dot.get_xdata()) == 0


def test_where_only_one_bm_was_swept_the_map_is_over_bk():
    rows = synthetic.tile_rows("c4096", "qkv", DECODE)
    figure = draw_tile({"BM": 16, "BN": 64, "BK": 64, "warps": 4, "stages": 3}, rows, step=DECODE, blocks=192)
    assert "BK  of  K = 4096" in said(figure.map) and len(figure._cells.get_paths()) == 12
    assert any("TFLOP/s at BM 16" in text for text in said(figure.map))


def test_two_sources_are_both_named():
    rows = synthetic.tile_rows("c4096", "qkv", PREFILL)
    index = next(i for i, row in enumerate(rows) if row.tile == TILE)
    rows[index] = replace(rows[index], source="measured")
    figure = draw_tile(rows=rows)
    assert figure.source.get_text() == "measured on test card, 2026-12-01"
    assert figure.others.get_text() == "other tiles: recorded on test card, 2026-12-01"


# --- both ---


def pictures() -> dict:
    slow = [
        replace(row, time_us=row.time_us and 1e4 * row.time_us) for row in synthetic.plan_rows("gpt2", STEP, "flash")
    ]
    bad = [refused(row) for row in synthetic.plan_rows("c4096", PREFILL, "triton")]
    bad[-1] = replace(bad[-1], status="refused: RuntimeError: " + "PassManager::run failed " * 9)
    long_note = (
        "tile BM=512 BN=512 BK=256 warps=64 stages=7 of qkv, c4096, bfloat16, B=1 T=2048 S=2048 was not recorded. " * 2
    )
    return {
        "layer triton": lambda: draw_layer("triton", config="c4096", step=PREFILL),
        "layer decode": lambda: draw_layer("triton", config="c4096", step=Step(8, 1, 8192)),
        "layer flash": lambda: draw_layer("flash", [replace(row, low_us=None, high_us=None) for row in slow]),
        "layer compile": lambda: draw_layer("compile"),
        "layer refused": lambda: draw_layer("triton", bad, config="c4096", step=PREFILL),
        "layer no rows": lambda: draw_layer("triton", [], note=long_note),
        "tile": draw_tile,
        "tile impossible": lambda: draw_tile({**TILE, "BM": 512, "BN": 512, "warps": 64, "stages": 7}, note=long_note),
        "tile attention": lambda: draw_tile({**TILE, "BK": None}, stage="scores+softmax+values", waves=40.5),
        "tile decode": lambda: draw_tile({**TILE, "BM": 16, "BK": 32}, step=DECODE, blocks=96, waves=0.73),
        "tile without a sweep": lambda: draw_tile(rows=[], note="nothing like it was recorded"),
    }


@pytest.mark.parametrize("name", pictures())
def test_no_text_is_cut_off_or_written_over_another(name):
    figure = pictures()[name]().figure
    png(figure)
    width, height = figure.canvas.get_width_height()
    boxes = [(label.get_text(), label.get_window_extent()) for label in labels(figure)]
    assert len(boxes) > 15
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, f"cut off: {text!r} {box}"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        over = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(over) <= 2, f"{one!r} and {other!r} overlap by {over} pixels"


@pytest.mark.parametrize("draw", [lambda p: draw_layer("flash", picture=p), lambda p: draw_layer("numba", picture=p)])
def test_drawing_again_makes_no_new_artists(draw):
    picture = draw_layer("triton")
    before = len(picture.figure.findobj())
    draw(picture)
    draw_layer("triton", picture=picture)
    assert len(picture.figure.findobj()) == before


def test_a_picture_is_the_same_whatever_was_drawn_before_it():
    picture = draw_layer("triton", [], note="nothing")
    draw_layer("flash", config="c4096", step=DECODE, picture=picture)
    assert png(draw_layer("triton", picture=picture).figure) == png(draw_layer("triton").figure)


def test_the_learners_own_style_does_not_leak_in():
    normal = png(draw_layer("triton").figure)
    with matplotlib.rc_context({"text.color": "red", "axes.facecolor": "black", "font.size": 20, "text.usetex": True}):
        assert png(draw_layer("triton").figure) == normal


@pytest.mark.parametrize("rotation", [0, 90])
def test_a_kept_text_looks_like_matplotlibs_own(rotation):
    look = {"ha": "center", "va": "baseline", "color": style.RED, "rotation": rotation}
    images = []
    for own in (True, False):
        figure = style.new_figure(3, 1)
        axes = style.bare_axes(figure, 0, 0, 1, 1, x=(0, 300), y=(0, 100))
        with style.settings():
            if own:
                axes.text(150, 50, "qkv 12.6 MB\n✓ µs", fontsize=9, fontweight="bold", linespacing=1.25, **look)
            else:
                Labels().put(axes, 150, 50, "qkv 12.6 MB\n✓ µs", 9, bold=True, **look)
        figure.canvas.draw()
        images.append(np.asarray(figure.canvas.buffer_rgba()).astype(float))
    assert (images[0] < 200).any(axis=2).sum() > 200  # there is text
    assert np.abs(images[0] - images[1]).mean() < 3


@pytest.mark.parametrize("figure", [draw_layer("flash"), draw_tile()], ids=["layer", "tile"])
def test_the_words_hold_what_the_picture_shows(figure):
    assert figure.title.get_text() in figure.words and figure.source.get_text() in figure.words
    for number in ("µs", "of the limit", "✓"):
        assert number in figure.words


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (style.size(1_572_864), "1.57 MB"),
        (style.size(999), "999 B"),
        (style.size(33.6e9), "33.6 GB"),
        (style.count(2.3), "2.30"),
        (style.count(99.96), "100"),
        (style.count(1234.5), "1,234"),
        (style.microseconds(16), "16.0 µs"),
        (style.percent(0.631), "63 %"),
        (style.percent(0.004), "0.4 %"),
        (style.percent(0.0), "0 %"),
        (style.verdict(0.002, 0.015), "✓ 0.002 ≤ 0.015"),
        (style.verdict(math.nan, 0.015), "✗ nan > 0.015"),
        (style.verdict(None, 0.015), "not checked"),
    ],
)
def test_numbers_are_written(written, text):
    assert written == text
