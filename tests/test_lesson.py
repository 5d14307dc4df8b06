"""What a cell of a lesson calls: it shows the library's own source, and tells a prediction from what was found."""

import inspect

import pytest

from gpukern import compare, show_source
from gpukern.kernels import vector_add
from gpukern.kernels.vector_add import numba_ladder


def test_show_source_shows_the_code_and_its_place():
    shown = show_source(numba_ladder)
    assert shown.code == inspect.getsource(numba_ladder).rstrip()
    assert shown.place == "gpukern/kernels/vector_add/numba_ladder.py, line 1"
    assert shown._repr_markdown_() == f"`{shown.place}`\n```python\n{shown.code}\n```"


def test_show_source_looks_through_compilers():
    assert show_source(numba_ladder._vector_add_kernel).code.startswith("@cuda.jit\ndef _vector_add_kernel(")
    assert show_source(vector_add.versions["numba"]).code.startswith("def vector_add(")
    triton_ladder = pytest.importorskip("gpukern.kernels.vector_add.triton_ladder", exc_type=ImportError)
    assert show_source(triton_ladder._vector_add_kernel).code.startswith("@triton.jit\ndef _vector_add_kernel(")


def test_show_source_of_what_is_not_python():
    with pytest.raises(TypeError):
        show_source(len)


def test_compare(capsys):
    compare("spare", ..., 2)
    compare("spare", 2, 2)
    compare("spare", 3, 2)
    nothing, right, wrong = capsys.readouterr().out.splitlines()
    assert nothing.startswith("spare: 2. No prediction yet")
    assert right == "spare: 2, as you predicted."
    assert wrong == "spare: 2. You predicted 3."
