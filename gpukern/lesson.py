"""What a cell of a lesson calls: show library code as it is, and hold a prediction against what was found."""

import inspect
from dataclasses import dataclass
from pathlib import Path

_CHECKOUT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Source:
    """Source code and where it stands; a notebook shows it in the colours of its theme."""

    code: str
    place: str

    def _repr_markdown_(self) -> str:
        return f"`{self.place}`\n```python\n{self.code}\n```"

    def __repr__(self) -> str:
        return f"# {self.place}\n{self.code}"


def show_source(thing) -> Source:
    """The source of a function, class, module, Numba-CUDA or Triton kernel, or of a Version's launcher.

    Raises TypeError for anything that was not written in Python.
    """
    for attribute in ("function", "py_func", "fn"):  # a Version, a compiled Numba kernel, a simulated or a Triton one
        thing = getattr(thing, attribute, thing)
    code, line = inspect.getsourcelines(thing)
    path = Path(inspect.getsourcefile(thing))
    name = path.relative_to(_CHECKOUT) if path.is_relative_to(_CHECKOUT) else path.name
    return Source("".join(code).rstrip(), f"{name}, line {max(line, 1)}")


def compare(what: str, predicted, found) -> None:
    """Print what a learner predicted (`...` if nothing) beside what was found."""
    if predicted is ...:
        print(f"{what}: {found}. No prediction yet: replace the dots and run both cells.")
    elif predicted == found:
        print(f"{what}: {found}, as you predicted.")
    else:
        print(f"{what}: {found}. You predicted {predicted}.")
