"""The project holds together: rooms and arrows, packages and pins, files and sizes, documents and what they name."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent

# Who may import whom. A kernel does not know that it is timed or simulated; a figure does not know where its rows came
# from.
ARROWS = {
    "device": set(),
    "op": set(),
    "figures": set(),
    "lesson": set(),
    "kernels": {"op", "device"},
    "simulate": {"device", "inspect", "figures"},
    "inspect": {"device"},
    "layer": {"kernels", "op", "device"},
    "measure": {"op", "device", "simulate", "inspect"},
    "widgets": {"layer", "kernels", "measure", "simulate", "inspect", "figures"},
    "grade": {"op", "kernels", "layer", "measure", "simulate", "inspect", "figures"},
}
# The command line may import every room; what only it needs stands beside it, and no room imports these.
COMMANDS = {"bench", "cli", "doctor", "record", "table"}
DATA = {"recorded"}
TOP_LEVEL = {
    *("README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff"),
    *("Makefile", "pyproject.toml", "constraints.txt", "environment.yml", ".ci", ".gitignore"),
    *("gpukern", "notebooks", "solutions", "exercises", "tests", "tools"),
}


def committed(*patterns: str) -> list[Path]:
    """Files of the checkout that match, committed or about to be (not ignored)."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [file for file in files if file.exists()]


def room(module: Path) -> str:
    """The room a file of gpukern is in: the folder or the module directly under gpukern."""
    first = module.relative_to(ROOT / "gpukern").parts[0]
    return "gpukern" if first == "__init__.py" else first.removesuffix(".py")


def imports(source: str, package: str) -> set[str]:
    """Every module that `source` imports, anywhere in it; `from a import b` counts as `a` and as `a.b`.

    package  the dotted name of the package that the source is in, for relative imports
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*base, *filter(None, [node.module])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def rooms_imported(source: str, package: str = "gpukern") -> set[str]:
    """The rooms of gpukern that `source` imports; a name that is only in gpukern/__init__ counts as a room, too."""
    return {name.split(".")[1] for name in imports(source, package) if name.startswith("gpukern.")}


MODULES = committed("gpukern/*.py")


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_are_never_backwards(module):
    here = room(module)
    package = ".".join(module.relative_to(ROOT).parent.parts)
    there = rooms_imported(module.read_text(), package) - {here}
    if here == "gpukern":
        assert not there & COMMANDS
    elif here in COMMANDS:
        assert there <= ARROWS.keys() | COMMANDS
    else:
        assert here in ARROWS, f"{here} is no room of the design"
        assert there <= ARROWS[here], f"{here} may import {sorted(ARROWS[here])}, not {sorted(there - ARROWS[here])}"


def test_the_arrow_test_sees_every_form_of_import():
    source = "import gpukern.a\nfrom gpukern import b as x\nfrom gpukern.c.d import e\ndef f():\n from ..g import h\n"
    assert rooms_imported(source, "gpukern.kernels") == {"a", "b", "c", "g"}
    assert rooms_imported("from . import h", "gpukern.kernels") == {"kernels"}
    assert rooms_imported("import numpy\nimport gpukern_other") == set()


def test_every_room_of_the_design_is_there_and_no_other():
    found = {room(module) for module in MODULES} - {"gpukern"}
    assert found <= ARROWS.keys() | COMMANDS
    assert found >= ARROWS.keys()
    folders = {path.relative_to(ROOT / "gpukern").parts[0] for path in committed("gpukern/*/*")}
    assert folders - found == DATA


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_and_folder_says_its_purpose(module):
    purpose = ast.get_docstring(ast.parse(module.read_text()))
    assert purpose, "the file starts with no docstring"
    assert len(purpose.split("\n")[0].split()) >= 3, "the docstring's first line is no purpose"
    assert (module.parent / "__init__.py").exists(), f"{module.parent} has no __init__.py to say its purpose"


def test_only_widgets_import_ipywidgets_and_nothing_opens_pyplot_windows():
    for module in MODULES:
        names = {name.split(".")[0] for name in imports(module.read_text(), "gpukern")}
        assert "ipywidgets" not in names or room(module) == "widgets", module
        assert "matplotlib.pyplot" not in imports(module.read_text(), "gpukern"), f"{module}: use matplotlib's Figure"


def test_tools_import_nothing_of_gpukern():
    tools = committed("tools/*.py")
    assert tools
    for tool in tools:
        assert not {name for name in imports(tool.read_text(), "tools") if name.split(".")[0] == "gpukern"}, tool


def test_top_level_names():
    assert {path.relative_to(ROOT).parts[0] for path in committed()} == TOP_LEVEL


def test_the_license_is_apache_2_and_everybody_says_so():
    text = (ROOT / "LICENSE").read_text()
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text
    assert project()["license"] == "Apache-2.0"
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"] == "Apache-2.0"
    assert "Apache" in (ROOT / "README.md").read_text()


def test_files_are_small():
    for path in committed():
        limit = 8_000_000 if path.suffix == ".safetensors" else 2_000_000
        assert path.stat().st_size <= limit, f"{path} has {path.stat().st_size:,} bytes"


def test_notebooks_are_canonical_and_exercises_are_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "notebooks.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_notebooks_hold_no_outputs():
    for path in committed("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None, path


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff_is_content(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- Packages: pyproject.toml declares, constraints.txt pins, environment.yml uses both.


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(text: str) -> dict[str, str]:
    """{canonical name: version} of a constraints file. Raises AssertionError at a line that is no exact pin."""
    found = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line:
            name, equal, version = line.partition("==")
            assert equal and re.fullmatch(r"[\w.+!-]+", version), f"constraints.txt: {line!r} is no exact pin"
            assert canonicalize_name(name) not in found, f"constraints.txt pins {name} twice"
            found[canonicalize_name(name)] = version
    return found


def disagreements(project: dict, constraints: str, environment: dict, ruff_target: str) -> list[str]:
    """Where the files that say which packages the course uses contradict each other."""
    pinned, found = pins(constraints), []
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *(line for extra in extras.values() for line in extra)]:
        requirement = Requirement(line)
        version = pinned.get(canonicalize_name(requirement.name))
        if version is None:
            found.append(f"{requirement.name} has no pin in constraints.txt")
        elif version not in requirement.specifier:
            found.append(f"constraints.txt pins {requirement.name}=={version}; pyproject.toml says {line}")

    if environment["channels"] not in (["conda-forge"], ["conda-forge", "nodefaults"]):
        found.append("environment.yml uses another channel than conda-forge")
    names = {line.split()[0]: line for line in environment["dependencies"] if isinstance(line, str)}
    if names.keys() != {"python", "pip"}:
        found.append(f"environment.yml names {sorted(names)}; packages are declared in pyproject.toml")
    floor = Requirement(names["python"].replace(" ", "")).specifier
    lowest = project["requires-python"].removeprefix(">=")
    if f">={lowest}" not in str(floor).split(","):
        found.append(f"environment.yml takes {names['python']}; pyproject.toml {project['requires-python']}")
    if ruff_target != f"py{lowest.replace('.', '')}":
        found.append(f"ruff checks for {ruff_target}; pyproject.toml takes Python from {lowest}")
    (pip,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    constrained, editable = pip
    if constrained != "-c constraints.txt":
        found.append("environment.yml installs without constraints.txt")
    wanted = re.fullmatch(r"-e \.(?:\[([\w,]+)\])?", editable)
    if not wanted or not set(filter(None, (wanted[1] or "").split(","))) <= extras.keys():
        found.append(f"environment.yml installs {editable!r}; the extras are {sorted(extras)}")
    return found


def package_files() -> dict:
    return {
        "project": project(),
        "constraints": (ROOT / "constraints.txt").read_text(),
        "environment": yaml.safe_load((ROOT / "environment.yml").read_text()),
        "ruff_target": tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["target-version"],
    }


def test_pyproject_constraints_and_environment_agree():
    assert disagreements(**package_files()) == []
    for script in ("Makefile", "tools/setup.sh", "README.md"):
        named = set(re.findall(r"(?:Python|python) \(?(?:≥ ?)?(3\.\d+)\)? or newer", (ROOT / script).read_text()))
        assert named <= {project()["requires-python"].removeprefix(">=")}, f"{script} names another oldest Python"
    major, minor = project()["requires-python"].removeprefix(">=").split(".")
    assert f"sys.version_info < ({major}, {minor})" in (ROOT / "tools" / "setup.sh").read_text()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda f: f["project"]["dependencies"].append("attrs>=9999"), "attrs"),
        (lambda f: f["project"]["dependencies"].append("unheard-of"), "unheard-of has no pin"),
        (lambda f: f["project"]["optional-dependencies"]["cutlass"].append("unheard-of>=1"), "unheard-of has no pin"),
        (lambda f: f.update(constraints=re.sub(r"(?m)^torch==.*$", "", f["constraints"])), "torch has no pin"),
        (lambda f: f.update(constraints=re.sub(r"(?m)^numpy==.*$", "numpy==2.5.0", f["constraints"])), "numpy==2.5.0"),
        (lambda f: f["project"].update({"requires-python": ">=3.12"}), "environment.yml takes python"),
        (lambda f: f.update(ruff_target="py312"), "ruff checks for py312"),
        (lambda f: f["environment"]["channels"].append("defaults"), "another channel"),
        (lambda f: f["environment"]["dependencies"].insert(0, "numpy"), "environment.yml names"),
        (lambda f: f["environment"]["dependencies"][-1].update(pip=["-c constraints.txt", "-e .[all]"]), "-e .[all]"),
        (lambda f: f["environment"]["dependencies"][-1].update(pip=["-c pins.txt", "-e ."]), "without constraints"),
    ],
)
def test_a_disagreement_is_found(change, complaint):
    files = package_files()
    change(files)
    assert complaint in " ".join(disagreements(**files))


def test_a_loose_pin_is_refused():
    for line in ("torch>=2.13", "torch", "torch==2.*", "torch==2.13.0\ntorch==2.13.1"):
        with pytest.raises(AssertionError, match="constraints.txt"):
            pins(line)


# --- Documents: what they name exists.


def test_the_documents_name_commands_that_exist():
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    assert {"lab", "test", "quick", "test-gpu", "setup", "notebooks", "lint", "clean"} <= targets
    for document in ("README.md", "CONTRIBUTING.md", "exercises/README.md", "solutions/README.md"):
        named = set(re.findall(r"(?m)`?\bmake ((?!it\b)[a-z-]+)(?=`| #|$)", (ROOT / document).read_text()))
        assert named <= targets, f"{document} names {sorted(named - targets)}"
    assert {"lab", "test"} <= set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()))


def test_the_readme_names_every_room_and_every_lesson():
    readme = (ROOT / "README.md").read_text()
    for name in (*ARROWS, *DATA, "cli", "notebooks", "solutions", "exercises", "tests", "tools"):
        assert f"`{name}/`" in readme or f"`{name}.py`" in readme, f"the README's map lacks {name}"
    lessons = {path.name for path in committed("notebooks/*.ipynb")}
    linked = set(re.findall(r"\(notebooks/([^)]+\.ipynb)\)", readme))
    assert linked == lessons, f"the README's table and notebooks/ differ in {sorted(linked ^ lessons)}"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "exercises/README.md", "solutions/README.md"])
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), f"{document} links to {target}"


def test_the_version_is_one():
    version = project()["version"]
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
