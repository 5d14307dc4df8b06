"""Every example of the simulated GPU's guide runs and prints what stands below it."""

import contextlib
import io
import linecache
import re
from pathlib import Path

import pytest

from gpukern import device, simulate

pytestmark = pytest.mark.skipif(not device.simulated(), reason="the guide is about the simulated GPU")
GUIDE = Path(simulate.__file__).with_name("GUIDE.md")
EXAMPLES = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", GUIDE.read_text(), re.S)


def test_every_example_prints_what_the_guide_says(tmp_path):
    assert len(EXAMPLES) == GUIDE.read_text().count("```python") >= 10
    names = {"__name__": "guide"}
    for number, (source, printed) in enumerate(EXAMPLES):
        # A file each, so that kernels have a source and lines count from the first of the example.
        file = tmp_path / str(number) / "example.py"
        file.parent.mkdir()
        file.write_text(source)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(source, str(file), "exec"), names)
        assert said.getvalue() == printed, source
        linecache.checkcache()


def test_the_guide_names_every_counter_and_every_kind_of_fault():
    text = GUIDE.read_text()
    for kind in (*simulate.report.KINDS, *simulate.report.WARNINGS):
        assert f"`{kind}`" in text
    for counter in simulate.report.COUNTERS:
        assert f"`{counter}`" in text or f"`{counter.replace('_store_', '_load_')}`" in text
