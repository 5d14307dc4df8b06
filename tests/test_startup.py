"""The course starts: a fresh clone, `make setup`, JupyterLab, the first lesson to its end. And set-ups that fail."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
import urllib.request
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
import websocket
from jupyter_server.services.kernels.connection.base import deserialize_binary_message
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
TOKEN = uuid.uuid4().hex
# Set by this test run, and not there when a newcomer starts.
OURS = ("NUMBA_ENABLE_CUDASIM", "TRITON_INTERPRET", "PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")


def newcomer(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a newcomer: this one, without this run's settings and with no settings of Jupyter."""
    jupyter = {f"JUPYTER_{kind}_DIR": str(folder / "jupyter" / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    return {name: value for name, value in os.environ.items() if name not in OURS} | jupyter | more


def make(where: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", *arguments],
        cwd=where,
        env=newcomer(where.parent, **environment),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


# --- The whole way, from the last commit


@contextmanager
def jupyterlab(clone: Path):
    """`make lab` in `clone`, until it answers. Yields the server's port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = f"--no-browser --ServerApp.port={port} --ServerApp.port_retries=0 --IdentityProvider.token={TOKEN}"
    log = clone.parent / "lab.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            ["make", "lab", f"LAB_ARGS={arguments}"],
            cwd=clone,
            env=newcomer(clone.parent),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            for _ in range(600):
                assert server.poll() is None, log.read_text()
                try:
                    ask(port, "/api/status")
                    break
                except OSError:
                    time.sleep(0.1)
            else:
                raise AssertionError(f"JupyterLab does not answer:\n{log.read_text()}")
            yield port
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=60)


def ask(port: int, path: str, post: dict | None = None) -> bytes:
    """The body of the server's answer. Raises OSError if there is none, or one that is not a success."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if post is None else json.dumps(post).encode(),
        headers={"Authorization": f"token {TOKEN}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def execute(channel: websocket.WebSocket, code: str) -> list[dict]:
    """Run a cell in the kernel behind `channel`, as JupyterLab does. Returns the kernel's messages about it."""
    header = {
        "msg_id": uuid.uuid4().hex,
        "msg_type": "execute_request",
        "session": "test",
        "username": "",
        "version": "5.3",
    }
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
    request = {"channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content}
    channel.send(json.dumps(request))
    messages = []
    while not messages or messages[-1]["content"].get("execution_state") != "idle":
        frame = channel.recv()
        message = json.loads(frame) if isinstance(frame, str) else deserialize_binary_message(frame)
        if message["parent_header"].get("msg_id") == header["msg_id"]:
            messages.append(message)
    return messages


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_fresh_clone_sets_itself_up_and_runs_the_first_lesson_in_jupyterlab(tmp_path):
    clone = tmp_path / "a fresh clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    done = make(clone, "setup")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (clone / ".venv" / "ready").exists()

    again = make(clone, "setup")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", ""), "a second set-up has nothing to do"

    python = clone / ".venv" / "bin" / "python"
    listing = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, check=True).stdout
    found = {canonicalize_name(entry["name"]): entry["version"] for entry in json.loads(listing)}
    pinned = [Requirement(line) for line in (clone / "constraints.txt").read_text().splitlines() if "==" in line]
    wrong = [str(r) for r in pinned if found.get(canonicalize_name(r.name), str(r.specifier)[2:]) not in r.specifier]
    assert not wrong, f"installed in another version than constraints.txt says: {wrong}"

    (lesson, *_) = sorted((clone / "notebooks").glob("00_*.ipynb"))
    with jupyterlab(clone) as port:
        assert b"jupyter-config-data" in ask(port, f"/lab/tree/notebooks/{lesson.name}")
        news = json.loads(ask(port, "/lab/api/settings/@jupyterlab/apputils-extension:notification"))
        assert news["schema"]["properties"]["fetchNews"]["default"] == "false", "JupyterLab will ask about news"
        cells = json.loads(ask(port, f"/api/contents/notebooks/{lesson.name}"))["content"]["cells"]
        sources = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
        assert sources, "a lesson without code"
        session = {"path": f"notebooks/{lesson.name}", "name": "", "type": "notebook", "kernel": {"name": "python3"}}
        kernel = json.loads(ask(port, "/api/sessions", post=session))["kernel"]["id"]
        url = f"ws://127.0.0.1:{port}/api/kernels/{kernel}/channels?session_id=test&token={TOKEN}"
        channel = websocket.create_connection(url, timeout=120)
        try:
            for source in sources:
                errors = [m["content"] for m in execute(channel, source) if m["header"]["msg_type"] == "error"]
                assert not errors, f"{source}\n{errors[0]['ename']}: {errors[0]['evalue']}"
            (reply, *_) = [
                m for m in execute(channel, "import gpukern; print(gpukern.__file__)") if "text" in m["content"]
            ]
            assert str(clone) in reply["content"]["text"], "the lesson ran another gpukern than the clone's"
        finally:
            channel.close()


# --- Set-ups that fail say what to do, and leave nothing that the next one would trust


@pytest.fixture
def checkout(tmp_path):
    """The files that `make setup` reads, and nothing else."""
    folder = tmp_path / "checkout"
    (folder / "tools").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tools/setup.sh"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def fake_python(folder: Path, script: str) -> str:
    path = folder / "fake-python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return f"PYTHON={path}"


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (None, "there is no '/nowhere/python3' here. Install Python 3.11 or newer"),
        ('case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac', "Python 3.9.2 is too old"),
        ('case "$2" in *ensurepip*) exit 1;; esac', "cannot make virtual environments"),
        ('case "$1$2" in -mvenv) mkdir -p .venv/bin; exit 1;; esac', "could not make .venv"),
    ],
)
def test_a_python_that_does_not_serve_is_refused(checkout, script, complaint):
    choice = "PYTHON=/nowhere/python3" if script is None else fake_python(checkout.parent, script)
    done = make(checkout, "setup", choice)
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert complaint in line
    assert not (checkout / ".venv").exists()


@pytest.mark.slow
def test_packages_that_cannot_be_installed_leave_no_environment(checkout):
    nothing = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = make(checkout, "setup", **nothing)
    assert done.returncode != 0
    assert "error: pip could not install the packages (see above)" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.slow
def test_a_half_made_environment_is_not_trusted(checkout):
    """An interpreter that starts but has no pip, and a note that says it is ready: it is made anew, not believed."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "ready").write_text("whatever")
    (checkout / ".venv" / "bin" / "python").symlink_to("/bin/false")
    done = make(checkout, "setup", PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert "Making .venv with Python 3" in done.stdout
    assert done.returncode != 0 and not (checkout / ".venv").exists()
