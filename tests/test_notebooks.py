"""The lessons: run from top to bottom, each in a kernel of its own, and built as lessons are built."""

import ast
import importlib.util
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from urllib.parse import urlparse

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError

ROOT = Path(__file__).parent.parent
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))

each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


# --- Run

DEADLINE = 240  # seconds that a whole lesson may take, on a machine that does other things, too
CPU_SECONDS, PEAK_GB = 120, 4  # what the kernel may use from its start to its end
USED = """
import resource
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6)
""".strip()


class Runner(NotebookClient):
    """Runs a notebook and only listens to its widgets.

    nbclient itself imitates the front-end of an Output widget, and may then wait for ever for a reply that it missed.
    Left alone, an error inside an Output widget becomes an output of its cell. An explorer shows its errors itself:
    they are in `complaints`.
    """

    def __init__(self, notebook, deadline: float):
        where = {"metadata": {"path": str(ROOT / "notebooks")}}
        super().__init__(notebook, allow_errors=True, resources=where, extra_arguments=["--log-level=ERROR"])
        end = time.monotonic() + deadline
        self.timeout_func = lambda cell: max(end - time.monotonic(), 0.1)
        self.complaints = []

    def handle_comm_msg(self, outs, msg, cell_index):
        for value in msg["content"]["data"].get("state", {}).values():
            if isinstance(value, str) and "--jp-error-color" in value:
                self.complaints.append(f"cell {cell_index}: {value}")


def run(notebook, deadline: float = DEADLINE) -> list[str]:
    """Run all cells; returns all errors, wherever they were shown. The outputs are in the notebook."""
    runner = Runner(notebook, deadline)
    try:
        runner.execute()
    except CellTimeoutError:
        return [f"not done after {deadline} s"]
    errors = [output for output in outputs(notebook) if output.output_type == "error"]
    return [f"{error.ename}: {error.evalue}" for error in errors] + runner.complaints


def outputs(notebook) -> list:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def notebook_of(*sources: str):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE + 60)
@each_lesson
def test_a_lesson_runs_to_its_end(path):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(USED))
    assert run(notebook) == []
    warnings = [output.text for output in outputs(notebook) if output.get("name") == "stderr"]
    assert warnings == []
    seconds, peak_gb = map(float, outputs(notebook)[-1].text.split())
    print(f"{path.name}: {seconds:.1f} s of CPU time, {peak_gb:.2f} GB")
    assert seconds < CPU_SECONDS and peak_gb < PEAK_GB


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "1 / 0",
        "import ipywidgets\nwith ipywidgets.Output():\n    1 / 0",
        "import ipywidgets\nipywidgets.interact(lambda n: 1 / n, n=0)",
        "import ipywidgets\ns = ipywidgets.IntSlider()\ns.observe(lambda change: 1 / 0, 'value')\ns.value = 3",
        "import gpukern.widgets.layer as e\ne.boundary_bytes = lambda *_: 1 / 0\ne.layer_explorer()",
    ],
    ids=["cell", "Output", "interact", "callback", "explorer"],
)
def test_an_error_is_found_wherever_it_is_shown(source):
    found = run(notebook_of(source, "'a cell after it'"))
    assert found and all("division by zero" in error for error in found)


@pytest.mark.slow
def test_the_deadline_is_that_of_the_whole_notebook():
    assert run(notebook_of(*["import time\ntime.sleep(3)"] * 9), deadline=9) == ["not done after 9 s"]


# --- Form


def cells(path: Path, kind: str | None = None) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if kind in (None, cell.cell_type)]


# What an objective may start with: something that one can see a learner do.
ACTIONS = {
    "check",
    "choose",
    "compare",
    "compute",
    "count",
    "derive",
    "draw",
    "explain",
    "find",
    "measure",
    "name",
    "plug",
}
ACTIONS |= {"predict", "run", "say", "tell", "write"}


def test_lessons_are_numbered():
    assert LESSONS
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", path.name) for path in LESSONS)
    assert len({path.name[:2] for path in LESSONS}) == len(LESSONS)


@each_lesson
def test_a_lesson_starts_with_what_you_can_do_after_it(path):
    title, *lines = cells(path)[0].source.split("\n")
    assert title.startswith("# ")
    assert "**After this lesson you can**" in lines
    assert any(line.startswith("**What you need:**") for line in lines)
    objectives = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    assert 3 <= len(objectives) <= 7
    assert {objective.split()[0] for objective in objectives} <= ACTIONS


@each_lesson
def test_a_lesson_ends_with_its_takeaway_and_its_sources(path):
    last = cells(path)[-1]
    heading, takeaway, sources = re.fullmatch(r"(.+?)\n(.+?)\n\n\*\*Sources\*\*\n(.+)", last.source, re.DOTALL).groups()
    assert last.cell_type == "markdown" and heading == "## Takeaway"
    sentence = takeaway.replace("\n", " ")
    assert sentence.endswith(".") and not re.search(r"[.!?] ", sentence), "a takeaway is one sentence"
    assert sources.count("](https://") >= 3


@each_lesson
def test_a_lesson_predicts_before_it_measures(path):
    every = cells(path)
    asked = [at for at, cell in enumerate(every) if cell.cell_type == "markdown" and "**Predict.**" in cell.source]
    assert asked
    for at in asked:
        question, answer, found = every[at : at + 3]
        assert question.source.count("**Predict.**") == 1
        assert answer.cell_type == found.cell_type == "code"
        for line in answer.source.split("\n"):
            name = re.fullmatch(r"(my_\w+) = \.\.\.(  # .+)?", line)[1]
            assert len(re.findall(rf"\bcompare\(\"[^\"]+\", {name},", found.source)) == 1, name
    assert sum("= ..." in cell.source for cell in cells(path, "code")) == len(asked)


@each_lesson
def test_a_lesson_names_misconceptions(path):
    assert sum(len(re.findall(r'(?m)^> \*\*Not so: "', cell.source)) for cell in cells(path, "markdown")) >= 2


def functions(source: str) -> set[str]:
    """The bodies of all functions of `source`, docstrings aside."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            found.add("\n".join(map(ast.unparse, body)))
    return found


LIBRARY = set().union(*(functions(path.read_text()) for path in (ROOT / "gpukern").rglob("*.py")))


@each_lesson
def test_a_lesson_is_thin_and_pastes_no_library_code(path):
    assert functions((ROOT / "gpukern/kernels/vector_add/numba_ladder.py").read_text()) <= LIBRARY
    for cell in cells(path, "code"):
        assert cell.source.count("\n") < 20, f"a long cell; its code belongs into gpukern:\n{cell.source}"
        assert not functions(cell.source) & LIBRARY, f"show_source shows library code:\n{cell.source}"


# --- Prose

QUANTITY = re.compile(
    r"\d[\d.,]*\s?(?:%|×(?!\s?\d)|per cent|[kKMGT]?B(?:/s)?\b|bytes?\b|[kMGTP]?FLOPs?\b|[kMG]Hz|[mµun]?s\b"
    r"|(?:milli|micro|nano)?seconds?\b|times\b)"
)
OFFERED = re.compile(r"[Aa]bout [^.?]*\?")  # the choices that a question offers claim nothing


def claims(prose: str) -> list[str]:
    """Quantities that `prose` states, where a cell should compute them. Code and names are none."""
    return QUANTITY.findall(OFFERED.sub("", re.sub(r"`[^`]*`|\bfloat\d+|\bbfloat\d+", "", prose)))


@each_lesson
def test_prose_states_no_quantity_that_a_cell_should_compute(path):
    for cell in cells(path, "markdown"):
        assert claims(cell.source) == [], cell.source


def test_a_stated_quantity_is_found():
    for prose in ("It takes 121.7 µs.", "1,879 MB", "4.8 TB/s", "65 % of it", "1.4 times", "989 TFLOP", "1.4× faster"):
        assert claims(prose), prose
    for prose in ("stages 2 to 4", "`T = 2048` and 2048 tokens", "About 10 times, or 2 times?", "in float64", "3 × 4"):
        assert not claims(prose), prose


@each_lesson
def test_links_are_well_formed(path):
    for cell in cells(path, "markdown"):
        prose = re.sub(r"`[^`]*`", "", cell.source)
        targets = re.findall(r"\[[^\][]+\]\(([^()\s]+)\)", prose)
        assert len(targets) == prose.count("]("), f"a link that Markdown does not see:\n{prose}"
        assert len(re.findall(r"https?:", prose)) == len([t for t in targets if ":" in t]), f"a bare address:\n{prose}"
        for target in targets:
            address = urlparse(target)
            if address.scheme:
                assert address.scheme == "https" and "." in address.netloc, target
            else:
                assert (path.parent / address.path).exists(), target


# --- The set-up cell


@each_lesson
def test_every_lesson_starts_with_the_same_code(path):
    assert cells(path, "code")[0].source == cells(LESSONS[0], "code")[0].source


@pytest.fixture
def setup_cell(monkeypatch):
    """The set-up cell as a function of (is this Colab?, what finding gpukern gives)."""

    def execute(colab: bool, found) -> list:
        commands = []
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
        monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
        monkeypatch.setattr(sys, "path", list(sys.path))
        if colab:
            monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
        exec(cells(LESSONS[0], "code")[0].source, {})
        return commands

    return execute


def test_the_set_up_cell_does_nothing_where_the_course_is(setup_cell):
    before = list(sys.path)
    assert setup_cell(False, importlib.util.find_spec("gpukern")) == []
    assert setup_cell(True, importlib.util.find_spec("json")) == []
    assert sys.path == before


@pytest.mark.parametrize("colab", [True, False])
def test_the_set_up_cell_says_how_to_get_the_course(setup_cell, colab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImportError, match=r"git clone.*make lab"):
        setup_cell(colab, None)


@pytest.mark.parametrize("where", [".", "..", "notebooks"])
def test_the_set_up_cell_installs_a_checkout_on_colab(setup_cell, where, tmp_path, monkeypatch):
    checkout = tmp_path / "gpukern"  # what `git clone` makes: a folder that import takes for a package without origin
    (checkout / "gpukern").mkdir(parents=True)
    (checkout / "gpukern" / "device.py").touch()
    (checkout / "notebooks").mkdir()
    monkeypatch.chdir({".": checkout, "..": tmp_path, "notebooks": checkout / "notebooks"}[where])
    (command,) = setup_cell(True, types.SimpleNamespace(origin=None))
    assert command[0] == sys.executable and command[-2:] == ["--editable", str(checkout)]
    assert sys.path[0] == str(checkout)
