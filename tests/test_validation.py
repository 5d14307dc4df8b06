"""The simulated GPU's counters are those that Nsight Compute reads on an H200, case by case (tests/validation/).

The card's numbers are recorded in gpukern/recorded/h200/counters.csv, and what compute-sanitizer said of the planted
faults in sanitizer.csv. On a card with `ncu`, `make test-gpu` reads them anew.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from validation import hardware, sanitizer
from validation.cases import CASES
from validation.triton_cases import TRITON_CASES

from gpukern import device, inspect, measure, simulate

FOLDER = measure.RECORDED / "h200"
# A card counts branches of the compiled code: short ones are predicated away and loops unrolled. Ours are the source's.
COMPARED = [name for name in hardware.METRICS if name in simulate.report.COUNTERS and "branches" not in name]


def rows(name: str) -> list[dict]:
    with (FOLDER / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


RECORDED = {row["case"]: row for row in rows("counters")}


def simulated(case) -> tuple:
    """Its report, and the sum of its result."""
    arguments = case.arguments()
    report = simulate.run(case.kernel, case.grid, case.block, *arguments, shared=case.shared, **case.meta)
    return report, case.result(arguments)


@pytest.mark.skipif(not device.simulated(), reason="runs on the simulated GPU")
@pytest.mark.parametrize("case", [*CASES.values(), *TRITON_CASES.values()], ids=[*CASES, *TRITON_CASES])
def test_counters_are_those_of_the_card(case):
    row = RECORDED[case.name]
    report, result = simulated(case)
    assert report.faults == []
    assert result == pytest.approx(float(row["result"]), rel=1e-6)
    compared = COMPARED if case.block else [name for name in COMPARED if "sectors" in name]
    different = {name for name in compared if report.counters[name] != int(row[name])}
    assert different == set(case.differs), {n: (report.counters[n], row[n]) for n in different ^ set(case.differs)}


def test_what_differs_says_why_and_is_little():
    assert [*CASES, *TRITON_CASES] == [*RECORDED] and len(CASES) >= 40
    every = [*CASES.values(), *TRITON_CASES.values()]
    assert all(len(why.split()) > 4 for case in every for why in case.differs.values())
    assert sum(not case.differs for case in CASES.values()) > 0.9 * len(CASES)


@pytest.mark.skipif(not device.simulated(), reason="runs on the simulated GPU")
def test_floating_point_operations_are_those_of_the_card():
    """Where every operation is an addition or a multiplication; a division becomes many."""
    names = ["saxpy, grid-stride", "cube", "matmul, coalesced", "matmul, odd sizes", "matmul, tiles of 16", "scan"]
    for name in names:
        card = sum(int(RECORDED[name][kind]) * times for kind, times in (("fadd", 1), ("fmul", 1), ("ffma", 2)))
        assert simulated(CASES[name])[0].counters["flops"] == card


def test_theoretical_occupancy_is_that_of_the_profiler():
    for name, case in CASES.items():
        row = RECORDED[name]
        threads = int(np.prod(case.block))
        shared = int(row["shared_bytes"]) - 1024  # without what the driver keeps of each block
        found = inspect.occupancy(threads, int(row["registers"]), shared, "H200")
        # One row (98.4375 %) was recorded before fractions were kept; what has a fraction must agree in it.
        recorded = float(row["occupancy_percent"])
        exact = 100 * found.fraction if "." in row["occupancy_percent"] else int(100 * found.fraction)
        assert exact == pytest.approx(recorded, abs=0.01)


@pytest.mark.skipif(not device.simulated(), reason="runs on the simulated GPU")
@pytest.mark.slow
def test_registers_are_those_of_the_card():
    """Compiled here, without a card, for one; a card gives a thread at least 16."""
    for name, case in CASES.items():
        report, _ = simulated(case)
        assert max(report.compiled.registers, 16) == int(RECORDED[name]["registers"]), name


def test_what_compute_sanitizer_said_of_the_planted_faults():
    """It sees what it can: shared races, accesses outside of any allocation. The rest only the simulated GPU sees."""
    said = {row["case"]: row for row in rows("sanitizer")}
    assert said.keys() == sanitizer.planted().keys()
    found = {name for name, row in said.items() if row["ended"] == "found"}
    assert len(said) >= 20 and len(found) >= 9
    assert {said[name]["tool"] for name in found} == {"memcheck", "racecheck", "synccheck"}


@pytest.mark.gpu
def test_the_card_still_counts_what_was_recorded(tmp_path):
    if not shutil.which("ncu"):
        pytest.fail("Nsight Compute (ncu) is not on the PATH: it comes with the CUDA toolkit")
    if device.card().name != "H200":
        pytest.skip("the recorded counters are an H200's")
    for row in hardware.counters(tmp_path):
        recorded = RECORDED[row["case"]]
        assert {name: row[name] for name in COMPARED} == {name: int(recorded[name]) for name in COMPARED}, row["case"]


@pytest.mark.gpu
def test_the_sanitizer_sees_a_planted_race():
    if not shutil.which("compute-sanitizer"):
        pytest.fail("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    assert sanitizer.verdict("reversal_without_barrier", {"race"})["ended"] == "found"


@pytest.mark.slow
@pytest.mark.skipif(not device.simulated(), reason="runs on the simulated GPU")
def test_the_cases_run_as_a_script_too(tmp_path):
    """What Nsight Compute watches, run on the simulated GPU instead."""
    start = "import gpukern, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    script = Path(hardware.__file__)
    path = os.pathsep.join([str(script.parent), str(Path(simulate.__file__).parents[2])])
    command = [sys.executable, "-c", start, str(script), str(tmp_path / "results.json")]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == list(RECORDED)
