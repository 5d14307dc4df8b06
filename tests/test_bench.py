"""bench: the comparisons run and are right; how fast they are on a busy machine is nobody's promise."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gpukern import bench, cli, device
from gpukern.bench import library
from gpukern.op import InputError

pytestmark = pytest.mark.skipif(not device.simulated(), reason="compares simulators")


def run(*arguments):
    return CliRunner().invoke(cli.app, ["bench", *arguments])


def test_a_comparison_is_a_ratio_with_what_is_wanted():
    result = run("simulator", "--only", "checks of transpose", "--json")
    (found,) = json.loads(result.stdout)
    assert found["what"] == "checks of transpose" and found["wanted"] == "<= 3"
    assert 0.5 < found["ratio"] < 50 and found["ok"] == (found["ratio"] <= 3)
    assert result.exit_code == (0 if found["ok"] else 1)


def test_a_ratio_that_is_not_as_wanted_fails_the_command(monkeypatch):
    def results(only):
        yield bench.Result("a", "b", "c", 2.0, "<= 3", True)
        yield bench.Result("d", "e", "f", 4.0, "<= 3", False)

    monkeypatch.setitem(bench.BENCHES, "simulator", results)
    result = run("simulator")
    assert result.exit_code == 1
    ok, bad = result.stdout.splitlines()
    assert ok.startswith("ok  a") and bad.startswith("NOT d") and "e / f = 4" in bad


def test_peers_are_raced_on_a_card_only():
    assert isinstance(run("peers").exception, device.DeviceError)


def test_every_piece_of_work_of_the_peers_is_described():
    names = [work.name for work in library.works()]
    assert len(names) == len(set(names)) >= 20
    assert all(work.ours and work.peers and work.floor > 0 and work.bytes > 0 for work in library.works())
    assert [w.name for w in library.works("matvec")] == [name for name in names if "matvec" in name]


def test_unknown_names_are_refused():
    assert isinstance(run("kernels").exception, InputError)
    assert isinstance(run("simulator", "--only", "nothing").exception, InputError)


@pytest.mark.slow
@pytest.mark.parametrize("only", ["numba matmul", "triton softmax", "10^7", "empty", "growth"])
def test_every_kind_of_comparison_runs(only):
    results = list(bench.simulator(only))
    assert results and all(result.ratio > 0 for result in results)


def test_the_other_simulators_know_nothing_of_gpukern():
    for script in ("numba_kernels", "triton_kernels"):
        code = f"import sys; sys.path.insert(0, {str(bench._HERE)!r}); import {script}; print('gpukern' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"
