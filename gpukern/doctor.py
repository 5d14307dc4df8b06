"""What `gpukern doctor` reports: this machine, the packages, and for each thing that is wrong, what to do about it."""

import platform
import shutil
import sys
import sysconfig
import tomllib
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from gpukern import device
from gpukern.kernels import vector_add
from gpukern.measure import check, provenance

_CHECKOUT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. An error stops the course, a warning takes something away from it."""

    level: str  # "error" or "warning"
    what: str
    fix: str


@dataclass
class Report:
    """Everything the doctor found. `packages` maps a name to its installed version, or to None."""

    mode: str
    card: dict
    python: str
    packages: dict[str, str | None]
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Can the course run here?"""
        return all(problem.level != "error" for problem in self.problems)

    def as_dict(self) -> dict:
        return {"ok": self.ok, **asdict(self)}


def examine() -> Report:
    """Look at this machine and its packages, and run the first kernel in both languages."""
    wanted = requirements()
    packages = {requirement.name: installed(requirement.name) for requirement in wanted}
    problems = [*package_problems(wanted, packages), *card_problems(), *compiler_problems(), *kernel_problems()]
    return Report(device.mode(), _card(), platform.python_version(), packages, problems)


def requirements() -> list[Requirement]:
    """What gpukern declares that it needs on this system, as pip installed it or as the checkout says."""
    try:
        declared = metadata.requires("gpukern") or []
    except metadata.PackageNotFoundError:  # run from the checkout, not installed
        declared = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text())["project"]["dependencies"]
    every = [Requirement(line) for line in declared]
    return [r for r in every if r.marker is None or r.marker.evaluate({"extra": "", "sys_platform": sys.platform})]


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def package_problems(wanted: list[Requirement], packages: dict[str, str | None]) -> list[Problem]:
    """Packages that are missing or whose version does not serve."""
    problems = []
    for requirement in wanted:
        name, version = requirement.name, packages[requirement.name]
        fix = f"run `make setup` in the checkout, or: {sys.executable} -m pip install '{_bare(requirement)}'"
        if version is None:
            problems.append(Problem("error", f"{name} is not installed", fix))
        elif not requirement.specifier.contains(version, prereleases=True):
            what = f"{name} {version} does not serve: {requirement.specifier} is needed"
            problems.append(Problem("error", what, fix))
    if sys.platform != "linux":
        what = f"Triton installs on Linux only; here ({platform.system()}) the Numba half of the course works"
        problems.append(Problem("warning", what, "for the Triton half use Linux, WSL 2, Binder or Colab"))
    return problems


def _bare(requirement: Requirement) -> str:
    """The requirement without its marker, as one types it."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def card_problems() -> list[Problem]:
    """A card that is there but that PyTorch cannot use."""
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if not driver or device.has_cuda():
        return []
    what = f"an NVIDIA driver is there, but {device.why_no_cuda()}: kernels run on the simulated GPU"
    if torch.version.cuda is None:
        return [Problem("warning", what, "install PyTorch's CUDA build, see pytorch.org/get-started")]
    return [Problem("warning", what, "look at what `nvidia-smi` says, and unset CUDA_VISIBLE_DEVICES")]


def compiler_problems() -> list[Problem]:
    """On a card, Triton builds each kernel's launcher with the C compiler and Python's headers."""
    if device.simulated():
        return []
    fix = "on Debian: apt-get install gcc python3-dev"
    problems = []
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        problems.append(Problem("error", "there is no C compiler, which Triton needs to launch a kernel", fix))
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        problems.append(Problem("error", "Python.h is missing, which Triton needs to launch a kernel", fix))
    return problems


def kernel_problems() -> list[Problem]:
    """The first kernel of the course must give the right answer in every language that is installed here."""
    problems = []
    for name, version in vector_add.versions.items():
        if (version.language == "triton" and sys.platform != "linux") or (version.needs_card and device.simulated()):
            continue
        try:
            verdict = check(vector_add, name, {"N": 127}, torch.float32)
        except Exception as error:  # whatever it is, it belongs into the report
            problems.append(Problem("error", f"vector_add ({name}) failed: {type(error).__name__}: {error}", _RESTORE))
        else:
            if not verdict.ok:
                problems.append(Problem("error", f"vector_add ({name}) is {verdict}", _RESTORE))
    return problems


_RESTORE = "restore the versions that were tested together: make clean setup"


def _card() -> dict:
    """Facts of the card; of the card that the simulated GPU stands in for, where there is none."""
    card = device.card()
    return {
        "name": card.name,
        "simulated": device.simulated(),
        "driver": provenance()["driver"] or None,
        "compute_capability": ".".join(map(str, card.compute_capability)),
        "sms": card.sms,
        "memory_bytes": card.memory,
        "l2_bytes": card.l2,
        "shared_per_block_bytes": card.shared_per_block,
        "bandwidth_bytes_per_s": card.bandwidth,
        "peak_flops": card.peak,
    }
