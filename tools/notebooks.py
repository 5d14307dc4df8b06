"""The notebooks' one stored form, and the exercises made from the solutions.

    python tools/notebooks.py --check    say what differs; exit with 1 if anything does
    python tools/notebooks.py --fix      rewrite what differs

Canonical form: nbformat 4.5, no outputs, no execution counts, the least metadata, cell ids kept, the bytes that Jupyter
itself would save. An exercise is its solution, cell for cell, with each region between `### BEGIN SOLUTION` and
`### END SOLUTION` (nbgrader's markers) replaced by a comment that says how much to write, and `...`.
"""

import argparse
import copy
import hashlib
import sys
from pathlib import Path

import nbformat

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
CELL_METADATA = ("nbgrader", "slideshow", "tags")
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class NotebookError(ValueError):
    """A notebook that no rewriting puts right; the message names the notebook, the cell and the fault."""


def load(path: Path) -> nbformat.NotebookNode:
    """The notebook at `path`. Raises NotebookError if it is not one of nbformat 4."""
    try:
        notebook = nbformat.v4.reads(path.read_text(encoding="utf-8"))
        if notebook.nbformat != 4:
            raise ValueError(f"nbformat {notebook.nbformat}; open and save it in JupyterLab first")
    except (ValueError, AttributeError, TypeError) as error:
        raise NotebookError(f"{path}: not a notebook of nbformat 4: {error}") from error
    return notebook


def canonical(notebook: nbformat.NotebookNode, name: str) -> str:
    """The text that is stored for `notebook`. `name` is what errors call it."""
    stored = copy.deepcopy(notebook)
    stored.nbformat_minor = 5
    stored.metadata = nbformat.from_dict(NOTEBOOK_METADATA)
    seen = set()
    for position, cell in enumerate(stored.cells):
        cell.metadata = {key: cell.metadata[key] for key in CELL_METADATA if key in cell.metadata}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        cell.setdefault("id", _made_id(position, cell.source))
        if cell.id in seen:
            raise NotebookError(f"{name}: cell {position} repeats the id {cell.id!r}; delete the id of one of the two")
        seen.add(cell.id)
    try:
        nbformat.validate(stored)
    except nbformat.ValidationError as error:
        raise NotebookError(f"{name}: not valid: {error}") from error
    return nbformat.v4.writes(stored) + "\n"


def _made_id(position: int, source: str) -> str:
    """The id of a cell that was written without one: the same on every machine."""
    return hashlib.sha256(f"{position}\n{source}".encode()).hexdigest()[:8]


def exercise(solution: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode:
    """What a learner gets: `solution` with its regions emptied. Raises NotebookError if there is none to empty."""
    made = copy.deepcopy(solution)
    regions = 0
    for position, cell in enumerate(made.cells):
        where = f"{name}, cell {position}"
        if cell.cell_type == "code":
            cell.source, found = without_solutions(cell.source, where)
            regions += found
        elif BEGIN in cell.source or END in cell.source:
            raise NotebookError(f"{where}: a solution's markers belong in a code cell")
    if not regions:
        raise NotebookError(f"{name}: no {BEGIN!r} anywhere, so there is nothing to solve")
    return made


def without_solutions(source: str, where: str) -> tuple[str, int]:
    """`source` with its solution regions emptied, and their number. `where` is what errors call it."""
    kept, region, regions, indent = [], None, 0, ""
    for line in source.split("\n"):
        marker = line.strip()
        if marker == BEGIN:
            if region is not None:
                raise NotebookError(f"{where}: {BEGIN!r} inside a region that is still open")
            region, regions, indent = [], regions + 1, line[: len(line) - len(line.lstrip())]
        elif marker == END:
            if region is None:
                raise NotebookError(f"{where}: {END!r} without a {BEGIN!r} before it")
            kept += [f"{indent}# YOUR CODE HERE ({_length(region, where)})", f"{indent}..."]
            region = None
        elif "BEGIN SOLUTION" in line or "END SOLUTION" in line:
            raise NotebookError(f"{where}: {marker!r} is not a marker; write {BEGIN!r} or {END!r} on a line of its own")
        elif region is None:
            kept.append(line)
        else:
            region.append(line)
    if region is not None:
        raise NotebookError(f"{where}: {BEGIN!r} without an {END!r} after it")
    return "\n".join(kept), regions


def _length(region: list[str], where: str) -> str:
    """How much there is to write: the region's lines that are neither blank nor only a comment."""
    lines = sum(1 for line in region if line.strip() and not line.strip().startswith("#"))
    if not lines:
        raise NotebookError(f"{where}: a solution region without code")
    return f"about {lines} line{'s' if lines > 1 else ''}"


def wanted(root: Path) -> dict[Path, str]:
    """{path: text} of every notebook under `root` as it should be stored, the exercises made anew."""
    texts = {}
    for folder in ("notebooks", "solutions"):
        for path in sorted((root / folder).glob("*.ipynb")):
            notebook = load(path)
            texts[path] = canonical(notebook, str(path))
            if folder == "solutions":
                learners = root / "exercises" / path.name
                texts[learners] = canonical(exercise(nbformat.v4.reads(texts[path]), str(path)), str(learners))
    return texts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="say what differs; exit with 1 if anything does")
    action.add_argument("--fix", action="store_true", help="rewrite what differs")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent, help="the checkout")
    args = parser.parse_args(argv)
    try:
        texts = wanted(args.root)
        for path in sorted((args.root / "exercises").glob("*.ipynb")):
            if path not in texts:
                raise NotebookError(f"{path}: made from no solution; write solutions/{path.name} or delete it")
    except NotebookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    differing = [path for path, text in texts.items() if not path.exists() or path.read_bytes() != text.encode()]
    for path in differing:
        if args.fix:
            path.write_bytes(texts[path].encode())
        print(f"{path}: {'rewritten' if args.fix else 'not as it should be stored; run `make notebooks`'}")
    return 1 if args.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
