"""A JupyterLab of our own for the browser tests: its own settings, a free port, no token, no news, no network."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat

_OVERRIDES = """{
  "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false},
  "@jupyterlab/apputils-extension:themes": {"theme": "%s"}
}
"""
_START_SECONDS = 120


def write_notebook(path: Path, cells: list[str]) -> None:
    """A notebook of code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


@contextmanager
def server(folder: Path, home: Path, theme: str = "JupyterLab Light") -> Iterator[str]:
    """The address of a JupyterLab that serves `folder` and keeps all that is its own in `home`."""
    (home / "config" / "labconfig").mkdir(parents=True)
    (home / "config" / "labconfig" / "default_setting_overrides.json").write_text(_OVERRIDES % theme)
    own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_DATA_DIR": "data"}
    own |= {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython"}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    process = subprocess.Popen(
        command,
        env=os.environ | {name: str(home / part) for name, part in own.items()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    log, address, started = [], [], threading.Event()

    def read():
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(?!0/)\d+", line):
                address.append(found.group())
                started.set()
        started.set()  # it ended

    threading.Thread(target=read, daemon=True).start()
    try:
        assert started.wait(_START_SECONDS) and address, "JupyterLab did not start:\n" + "".join(log[-30:])
        yield address[0]
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


class Notebook:
    """A notebook open in JupyterLab, in a page of Playwright."""

    def __init__(self, page, address: str, name: str):
        self.page, self.problems = page, []
        page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))
        page.goto(f"{address}/lab/tree/{name}?reset")
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        # Cells run before the kernel answers are not run at all.
        page.locator(".jp-StatusBar-TextItem", has_text=re.compile(r"\| Idle$")).wait_for()

    def run_all(self) -> None:
        """Run all cells by the menu, and wait until the last of them has a number."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
        self.page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()
        numbered = re.compile(r"\[\d+\]:")
        self.page.locator(".jp-CodeCell .jp-InputPrompt").last.filter(has_text=numbered).wait_for()

    def errors(self) -> list[str]:
        """Texts of error outputs."""
        mark = '[data-mime-type="application/vnd.jupyter.error"], [data-mime-type="application/vnd.jupyter.stderr"]'
        return self.page.locator(mark).all_inner_texts()
