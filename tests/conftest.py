"""One module of tests a room. Markers: gpu (needs a CUDA card), browser (drives Chromium), slow (not in `make quick`).

A skipped test is never a passed one: the summary counts them by reason, and under CI=true a reason that is not in
ALLOWED_SKIPS fails the run.
"""

import os
import shutil
from collections import Counter

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # Triton's interpreter multiplies small tiles: threads only wait

import torch

from gpukern import device

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_CARD = "needs a CUDA card"
NEEDS_CHROMIUM = "needs Chromium; on Debian: apt-get install chromium"
NEEDS_CUTLASS = "needs CUTLASS, an extra of the course"
ALLOWED_SKIPS = {NEEDS_CARD, NEEDS_CUTLASS}

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers already fill the cores


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the system's Chromium. For tests marked `browser`, which are skipped where there is none."""
    return CHROMIUM


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("gpu") and device.simulated():
            item.add_marker(pytest.mark.skip(reason=NEEDS_CARD))
        if item.get_closest_marker("browser"):
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason=NEEDS_CHROMIUM))
            if config.pluginmanager.hasplugin("xdist"):
                item.add_marker(pytest.mark.xdist_group(item.path.name))  # they share a server and a browser
    # The long ones first, so that no worker is left with one of them at the end.
    items.sort(key=lambda item: not (item.get_closest_marker("slow") or item.get_closest_marker("browser")))


def _skips(reporter) -> Counter:
    """How many tests were skipped for each reason."""
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", []))


def _forbidden(skips: Counter) -> set:
    return set(skips) - ALLOWED_SKIPS if os.environ.get("CI") == "true" else set()


def pytest_terminal_summary(terminalreporter):
    skips = _skips(terminalreporter)
    if skips:
        terminalreporter.section(f"{skips.total()} tests did not run")
    for reason, count in skips.most_common():
        fails = " (a failure, because CI=true)" if reason in _forbidden(skips) else ""
        terminalreporter.line(f"{count:5} {reason}{fails}")


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not hasattr(session.config, "workerinput") and _forbidden(_skips(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
