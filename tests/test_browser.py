"""The explorers in a real JupyterLab, driven in headless Chromium as a learner drives them: keyboard and mouse."""

import re
from pathlib import Path

import pytest
from browser import rows
from browser.lab import Notebook, server, write_notebook
from playwright.sync_api import expect, sync_playwright

pytestmark = pytest.mark.browser

ARTEFACTS = Path(__file__).parent / "artefacts"  # screenshots, to be looked at

CELLS = [
    "import gpukern\nfrom pathlib import Path\nfrom gpukern.measure import rows\nrows.RECORDED = Path({recorded!r})",
    "from gpukern import widgets\nlayer = widgets.layer_explorer()\nlayer",
    "tile = widgets.tile_explorer()\ntile",
    # A sweep as on a card, but of invented rows, one in a fifth of a second.
    """
import time
from dataclasses import replace
from gpukern import measure

swept = measure.recorded_tiles(*tile.where, "bfloat16")

def slow(layer, parts, step):
    for number, part in enumerate(parts):
        time.sleep(0.2)
        yield replace(swept[number + 1], source="measured")

measure.sweep_tiles = slow
tile.sweep.disabled = False""".lstrip(),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab whose folder has a notebook with both explorers, on synthetic recorded rows."""
    folder, home = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("home")
    rows.write(folder / "recorded")
    write_notebook(folder / "explorers.ipynb", [cell.format(recorded=str(folder / "recorded")) for cell in CELLS])
    with server(folder, home) as address:
        yield address


@pytest.fixture(scope="module")
def browser(chromium):
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def notebook(lab, browser):
    """The notebook with all its cells run. The tests below share it: each first brings the controls where it starts."""
    page = browser.new_page(viewport={"width": 1360, "height": 1300})
    page.set_default_timeout(60_000)
    expect.set_options(timeout=30_000)
    notebook = Notebook(page, lab, "explorers.ipynb")
    notebook.run_all()
    return notebook


@pytest.fixture
def page(notebook):
    """The page; afterwards nothing may have gone wrong in it, neither in the browser nor in a cell."""
    yield notebook.page
    assert notebook.problems == []
    assert notebook.errors() == []


def source(page, name: str) -> str:
    return page.locator(f"img.{name}").get_attribute("src")


def wait_for_another_picture(page, name: str, before: str) -> None:
    """Until the picture's source is another one and the browser has decoded it."""
    page.wait_for_function(
        "([name, before]) => { const i = document.querySelector(`img.${name}`);"
        " return i.src !== before && i.complete && i.naturalWidth > 500; }",
        arg=[name, before],
    )


def choose(page, phase: str, plan: str) -> None:
    """Bring the layer explorer to a phase and a plan by its drop-downs."""
    for name, value in (("phase", phase), ("plan", plan)):
        page.locator(f".layer-{name} select").select_option(value)
        expect(page.locator(".layer-status")).to_contain_text(f"{value}, " if name == "plan" else f", {value} B=1")


def keep(page, selector: str, name: str) -> None:
    """Keep a screenshot of the cell output around `selector`."""
    ARTEFACTS.mkdir(exist_ok=True)
    page.locator(".jp-OutputArea-output", has=page.locator(selector)).last.screenshot(path=ARTEFACTS / name)


def test_both_explorers_open_with_a_picture_and_say_where_it_comes_from(page):
    said = "plan triton, gpt2, prefill B=1 T=1024 S=1024: whole layer"
    expect(page.locator(".layer-status")).to_contain_text(said)
    expect(page.locator(".layer-status")).to_contain_text("recorded on test card, 2026-12-01")
    expect(page.locator(".tile-status")).to_contain_text("qkv of c4096, T=2048")
    expect(page.locator(".tile-status")).to_contain_text("recorded on test card, 2026-12-01")
    for name in ("layer-image", "tile-image"):
        wait_for_another_picture(page, name, "")
    keep(page, "img.layer-image", "layer.png")
    keep(page, "img.tile-image", "tile.png")


def test_a_slider_moved_by_keyboard_draws_anew(page):
    choose(page, "prefill", "triton")
    slider = page.locator(".layer-step [role=slider]")
    slider.press("Home")
    expect(page.locator(".layer-status")).to_contain_text("plan triton, gpt2, prefill B=1 T=256 S=256: whole layer")
    before = source(page, "layer-image")
    slider.press("ArrowRight")
    expect(page.locator(".layer-status")).to_contain_text("plan triton, gpt2, prefill B=1 T=512 S=512: whole layer")
    wait_for_another_picture(page, "layer-image", before)


def test_many_quick_presses_end_at_the_last_value(page):
    choose(page, "prefill", "triton")
    slider = page.locator(".layer-step [role=slider]")
    for key in ["End"] + ["ArrowLeft", "ArrowRight"] * 10 + ["Home"]:
        slider.press(key)
    expect(page.locator(".layer-status")).to_contain_text("T=256 S=256: whole layer")


def test_drop_downs_change_plan_and_phase(page):
    choose(page, "prefill", "triton")
    before = source(page, "layer-image")
    page.locator(".layer-plan select").select_option("flash")
    expect(page.locator(".layer-status")).to_contain_text("plan flash, gpt2, prefill")
    wait_for_another_picture(page, "layer-image", before)
    page.locator(".layer-phase select").select_option("decode")
    expect(page.locator(".layer-status")).to_contain_text("plan flash, gpt2, decode B=1 T=1 S=1024: whole layer")
    expect(page.locator(".layer-step")).to_contain_text("S tokens attended to")
    keep(page, "img.layer-image", "layer_decode_flash.png")


def test_what_was_not_recorded_says_so_and_goes_to_the_nearest_on_request(page):
    choose(page, "prefill", "numba")
    page.locator(".layer-step [role=slider]").press("End")
    expect(page.locator(".layer-status")).to_contain_text("T=2048 S=2048 was not recorded; the nearest is B=1 T=1024")
    keep(page, "img.layer-image", "layer_not_recorded.png")
    page.locator(".layer-nearest").click()
    expect(page.locator(".layer-status")).to_contain_text("plan numba, gpt2, prefill B=1 T=1024 S=1024: whole layer")
    expect(page.locator(".layer-nearest")).to_be_hidden()


def test_a_tile_is_chosen_by_keyboard(page):
    page.locator(".tile-bm [role=slider]").press("Home")
    expect(page.locator(".tile-status")).to_contain_text("BM=16 ")
    before = source(page, "tile-image")
    page.locator(".tile-bm [role=slider]").press("ArrowRight")
    expect(page.locator(".tile-status")).to_contain_text(re.compile(r"BM=32 .*TFLOP/s \(recorded on test card"))
    wait_for_another_picture(page, "tile-image", before)


def test_an_impossible_tile_names_the_limit_it_breaks(page):
    page.locator(".tile-warps [role=slider]").press("End")
    expect(page.locator(".tile-status")).to_contain_text("impossible: threads a block: 2,048 of 1,024 threads")
    keep(page, "img.tile-image", "tile_impossible.png")
    page.locator(".tile-warps [role=slider]").press("Home")
    expect(page.locator(".tile-status")).to_contain_text("warps=1 ")
    page.locator(".tile-nearest").click()
    expect(page.locator(".tile-status")).to_contain_text(re.compile(r"warps=4 .*TFLOP/s \(recorded on test card"))


def test_a_sweep_shows_its_progress_and_can_be_cancelled(page):
    page.locator(".tile-sweep").click()
    expect(page.locator(".tile-progress")).to_be_visible()
    expect(page.locator(".widget-label", has_text=re.compile(r"^[2-9] of 17"))).to_be_visible()
    keep(page, "img.tile-image", "tile_sweep.png")
    page.locator(".tile-cancel").click()
    expect(page.locator(".tile-status")).to_contain_text(re.compile("cancelled after ([2-9]|1[0-6]) of 17"))
    expect(page.locator(".tile-progress")).to_be_hidden()


def test_the_words_of_a_picture_can_be_read(page):
    choose(page, "prefill", "numba")
    expect(page.locator(".layer-words")).to_be_hidden()
    page.locator(".layer-in-words").press("Enter")
    expect(page.locator(".layer-words")).to_contain_text(re.compile(r"qkv: kernel numba, .* to memory and back"))
