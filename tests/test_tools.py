"""tools/notebooks.py: the canonical form, byte for byte, and exercises made from solutions."""

import importlib.util
import json
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebooks)

SOLUTION = """\
def add(x, y):
    out = x.copy()
    ### BEGIN SOLUTION
    # element by element

    for i in range(len(x)):
        out[i] = x[i] + y[i]
    ### END SOLUTION
    return out"""

STUB = """\
def add(x, y):
    out = x.copy()
    # YOUR CODE HERE (about 2 lines)
    ...
    return out"""


@pytest.fixture
def course(tmp_path):
    """A checkout with the three folders of notebooks and nothing in them."""
    for folder in ("notebooks", "solutions", "exercises"):
        (tmp_path / folder).mkdir()
    return tmp_path


def write(path: Path, *sources: str) -> None:
    """A notebook as Jupyter leaves it after a run: outputs, counts, metadata of the front end."""
    cells = [nbformat.v4.new_markdown_cell("# A lesson"), *map(nbformat.v4.new_code_cell, sources)]
    for count, cell in enumerate(cells[1:], start=1):
        cell.execution_count = count
        cell.outputs = [nbformat.v4.new_output("stream", text="3\n")]
        cell.metadata = {"collapsed": False, "tags": ["check"]}
    notebook = nbformat.v4.new_notebook(
        cells=cells, metadata={"widgets": {}, "language_info": {"name": "python", "version": "3.11.7"}}
    )
    path.write_text(nbformat.v4.writes(notebook))


def run(course: Path, action: str) -> int:
    return notebooks.main([action, str(course)])


def test_canonical_form_keeps_ids_and_sources_and_drops_what_a_run_leaves(course):
    path = course / "notebooks" / "01_first.ipynb"
    write(path, "1 + 2", "print(3)")
    before = json.loads(path.read_text())
    assert run(course, "--check") == 1
    assert json.loads(path.read_text()) == before, "--check must not write"
    assert run(course, "--fix") == 0
    after = json.loads(path.read_text())
    assert [cell["id"] for cell in after["cells"]] == [cell["id"] for cell in before["cells"]]
    assert [cell["source"] for cell in after["cells"]] == [cell["source"] for cell in before["cells"]]
    assert (after["nbformat"], after["nbformat_minor"]) == (4, 5)
    assert after["metadata"] == notebooks.NOTEBOOK_METADATA
    for cell in after["cells"][1:]:
        assert cell["outputs"] == [] and cell["execution_count"] is None and cell["metadata"] == {"tags": ["check"]}


def test_canonical_bytes_are_sorted_one_space_json_and_a_fixed_point(course):
    path = course / "notebooks" / "01_first.ipynb"
    write(path, "'µ'")
    run(course, "--fix")
    text = path.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert run(course, "--check") == 0
    path.write_text(text.replace("\n", "\r\n"), newline="")
    assert run(course, "--check") == 1, "another line end is another file"


def test_a_cell_without_id_gets_the_same_one_every_time(course):
    path = course / "notebooks" / "01_first.ipynb"
    texts = []
    for _ in range(2):
        write(path, "1 + 2")
        raw = json.loads(path.read_text())
        for cell in raw["cells"]:
            del cell["id"]
        path.write_text(json.dumps(raw))
        assert run(course, "--fix") == 0
        texts.append(path.read_text())
    assert texts[0] == texts[1]


def test_a_repeated_id_is_an_error(course, capsys):
    path = course / "notebooks" / "01_first.ipynb"
    write(path, "1", "2")
    raw = json.loads(path.read_text())
    raw["cells"][2]["id"] = raw["cells"][1]["id"]
    path.write_text(json.dumps(raw))
    assert run(course, "--fix") == 1
    assert "cell 2 repeats the id" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": [], "nbformat": 3}', '{"nbformat": 4}'])
def test_a_file_that_is_no_notebook_is_named(course, capsys, text):
    (course / "notebooks" / "01_first.ipynb").write_text(text)
    assert run(course, "--check") == 1
    assert "01_first.ipynb: not" in capsys.readouterr().err


def test_exercise_is_the_solution_with_its_regions_emptied_and_ids_inherited(course):
    write(course / "solutions" / "01_first.ipynb", SOLUTION, "add([1], [2])")
    assert run(course, "--fix") == 0
    solution, made = (
        json.loads((course / folder / "01_first.ipynb").read_text())["cells"] for folder in ("solutions", "exercises")
    )
    assert [cell["id"] for cell in made] == [cell["id"] for cell in solution]
    assert "".join(made[1]["source"]) == STUB
    assert made[0] == solution[0] and made[2] == solution[2]
    assert "".join(solution[1]["source"]) == SOLUTION, "the solution itself is left as it was"
    assert run(course, "--check") == 0, "making it again must change nothing"


def test_an_edited_or_missing_exercise_fails_the_check(course):
    write(course / "solutions" / "01_first.ipynb", SOLUTION)
    run(course, "--fix")
    path = course / "exercises" / "01_first.ipynb"
    good = path.read_text()
    path.write_text(good.replace("out = x.copy()", "out = list(x)"))
    assert run(course, "--check") == 1
    path.unlink()
    assert run(course, "--check") == 1
    assert run(course, "--fix") == 0
    assert path.read_text() == good


def test_an_exercise_without_a_solution_is_an_error(course, capsys):
    write(course / "exercises" / "09_orphan.ipynb", "...")
    assert run(course, "--fix") == 1
    assert "09_orphan.ipynb: made from no solution" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("### BEGIN SOLUTION\nx = 1", "without an '### END SOLUTION'"),
        ("x = 1\n### END SOLUTION", "without a '### BEGIN SOLUTION'"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\nx = 1\n### END SOLUTION", "still open"),
        ("### BEGIN SOLUTION\n# only words\n\n### END SOLUTION", "without code"),
        ("## BEGIN SOLUTION\nx = 1\n## END SOLUTION", "is not a marker"),
        ("x = 1  ### BEGIN SOLUTION\n### END SOLUTION", "is not a marker"),
        ("x = 1", "nothing to solve"),
    ],
)
def test_wrong_markers_are_errors_and_write_nothing(course, capsys, source, complaint):
    write(course / "solutions" / "01_first.ipynb", source)
    assert run(course, "--fix") == 1
    assert complaint in capsys.readouterr().err
    assert not list((course / "exercises").iterdir())


def test_several_regions_each_say_their_length():
    region = "### BEGIN SOLUTION\na = 1\n### END SOLUTION"
    source = f"{region}\nb = 2\nif b:\n\t### BEGIN SOLUTION\n\tc = 3\n\td = 4\n\te = 5\n\t### END SOLUTION"
    made, regions = notebooks.without_solutions(source, "here")
    assert regions == 2
    assert made == ("# YOUR CODE HERE (about 1 line)\n...\nb = 2\nif b:\n\t# YOUR CODE HERE (about 3 lines)\n\t...")
