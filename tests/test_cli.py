"""cli: what the commands print, the exit codes, and one line instead of a traceback for what a user can put right."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpukern import cli, device, doctor
from gpukern.op import InputError, Version

ROOT = Path(__file__).parent.parent


@pytest.fixture
def gpukern(monkeypatch, capsys):
    """Run `gpukern ARGUMENTS` in this process; returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpukern", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code or 0, *capsys.readouterr())

    return run


def test_doctor_finds_this_machine_fit(gpukern):
    code, out, err = gpukern("doctor", "--json")
    report = json.loads(out)
    assert (code, err, report["ok"]) == (0, "", True)
    assert report["mode"] == device.mode()
    assert report["card"]["name"] == device.card().name and report["card"]["sms"] == device.card().sms
    assert report["card"]["simulated"] == device.simulated()
    assert {"torch", "numpy", "numba", "jupyterlab", "ipywidgets", "matplotlib"} <= report["packages"].keys()
    assert all(report["packages"].values()), "a package without a version"
    assert not [problem for problem in report["problems"] if problem["level"] == "error"]


def test_doctor_prints_a_table_for_a_person(gpukern):
    code, out, _ = gpukern("doctor")
    assert code == 0
    for word in ("mode", device.mode(), device.card().name, "numba-cuda", "jupyterlab", "The course can run here."):
        assert word in out


def test_doctor_works_as_a_command_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "gpukern.cli", "doctor", "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]


@pytest.mark.parametrize(
    ("package", "version", "what", "fix"),
    [
        ("jupyterlab", None, "jupyterlab is not installed", "pip install 'jupyterlab>="),
        ("numba-cuda", None, "numba-cuda is not installed", "pip install 'numba-cuda[cu13]>="),
        ("numpy", "2.5.0", "numpy 2.5.0 does not serve", "<2.5"),
        ("torch", "1.13.1+cu117", "torch 1.13.1+cu117 does not serve", "make setup"),
    ],
)
def test_doctor_names_a_package_that_does_not_serve(gpukern, monkeypatch, package, version, what, fix):
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: version if name == package else real(name))
    code, out, _ = gpukern("doctor", "--json")
    (problem,) = (p for p in json.loads(out)["problems"] if p["level"] == "error")
    assert code == 1 and not json.loads(out)["ok"]
    assert what in problem["what"] and fix in problem["fix"]
    code, out, _ = gpukern("doctor")
    assert code == 1 and "The course cannot run here yet." in out and what in out.replace("\n", " ")


def test_doctor_warns_of_a_card_that_pytorch_cannot_use(gpukern, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    code, out, _ = gpukern("doctor", "--json")
    (problem,) = json.loads(out)["problems"]
    assert (code, problem["level"]) == (0, "warning")
    assert "an NVIDIA driver is there" in problem["what"] and "simulated GPU" in problem["what"] and problem["fix"]


def test_doctor_says_what_other_systems_lack(gpukern, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    code, out, _ = gpukern("doctor", "--json")
    report = json.loads(out)
    (problem,) = report["problems"]
    assert (code, problem["level"]) == (0, "warning")
    assert "Linux only" in problem["what"] and "triton" not in report["packages"]


def test_doctor_wants_a_compiler_on_a_card(monkeypatch):
    monkeypatch.setattr(device, "simulated", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: "/nowhere")
    found = doctor.compiler_problems()
    assert [p.level for p in found] == ["error", "error"]
    assert "C compiler" in found[0].what and "Python.h" in found[1].what and "apt-get install" in found[0].fix


@pytest.mark.parametrize(
    ("launcher", "what"),
    [
        ("gpukern.nowhere:add", "failed: ModuleNotFoundError"),
        ("torch:sub", "is WRONG"),
        ("torch:zeros", "failed: TypeError"),
    ],
)
def test_doctor_runs_a_kernel_and_checks_it(gpukern, monkeypatch, launcher, what):
    add = doctor.vector_add
    if launcher == "torch:sub":  # an answer of the right shape that is wrong
        monkeypatch.setattr("torch.sub", lambda x, y: x - y)
    versions = {**add.versions, "numba": Version("numba", launcher)}
    monkeypatch.setattr(doctor, "vector_add", dataclasses.replace(add, versions=versions))
    code, out, _ = gpukern("doctor", "--json")
    (problem,) = (p for p in json.loads(out)["problems"] if p["level"] == "error")
    assert code == 1
    assert f"vector_add (numba) {what}" in problem["what"]


@pytest.mark.parametrize(
    "refusal",
    [InputError("no"), device.LimitError("no"), device.DeviceError("no"), ImportError("no"), ModuleNotFoundError("no")],
)
def test_a_refusal_is_one_line_and_exit_code_2(gpukern, monkeypatch, refusal):
    monkeypatch.setattr(doctor, "examine", lambda: (_ for _ in ()).throw(refusal))
    assert gpukern("doctor") == (2, "", "error: no\n")


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpukern", "doctor"])
    monkeypatch.setattr(doctor, "examine", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.parametrize("arguments", [["dcotor"], ["doctor", "--xml"], ["doctor", "me"]])
def test_wrong_usage_is_exit_code_2(gpukern, arguments):
    code, out, err = gpukern(*arguments)
    assert code == 2 and not out and "Usage" in err and "Traceback" not in err


def test_lab_opens_the_first_lesson_and_passes_jupyterlab_its_arguments(gpukern, monkeypatch, tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in ("07_later.ipynb", "00_first.ipynb"):
        (folder / name).write_text("{}")
    calls = []
    monkeypatch.setattr(cli, "NOTEBOOKS", folder)
    monkeypatch.setattr(cli.subprocess, "call", lambda command: calls.append(command) or 7)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert gpukern("lab", "--no-browser", "--port=8899")[0] == 7, "JupyterLab's exit code is the command's"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    gpukern("lab")
    as_root, as_user = calls
    assert as_root[:3] == [sys.executable, "-m", "jupyterlab"] and as_root[-1] == str(folder / "00_first.ipynb")
    assert {"--no-browser", "--port=8899", "--allow-root"} <= set(as_root)
    assert f"--ServerApp.root_dir={tmp_path}" in as_root
    assert "--allow-root" not in as_user


def test_lab_without_lessons_says_where_to_run_it(gpukern, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "NOTEBOOKS", tmp_path / "notebooks")
    code, _, err = gpukern("lab")
    assert code == 2
    assert err.startswith("error: there is no lesson in ") and "checkout" in err and err.count("\n") == 1
