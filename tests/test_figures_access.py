"""The pictures of a trace show what was accessed, and their counts are the simulated GPU's."""

import re

import matplotlib
import numpy as np
import pytest
from validation.cases import CASES

from gpukern import device, simulate
from gpukern.figures import access

pytestmark = pytest.mark.skipif(not device.simulated(), reason="draws what the simulated GPU traces")


def report(name):
    case = CASES[name]
    return simulate.run(case.kernel, case.grid, case.block, *case.arguments(), shared=case.shared)


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text().strip()]


def title(figure):
    return figure.texts[-1].get_text()


def shapes(figure):
    return [c for c in figure.findobj(matplotlib.collections.PolyCollection) if len(c.get_paths())]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("shared ") or "transpose, " in name])
def test_the_wavefronts_drawn_are_those_counted(name):
    made = report(name)
    for doing in ("load", "store"):
        rows = 0
        for one in made.trace:
            if (one.space, one.doing) == ("shared", doing):
                for warp in np.unique(one.threads // 32):
                    mine = one.threads // 32 == warp
                    cells = access.wavefronts(
                        one.threads[mine] % 32, one.address[mine], one.itemsize, one.doing == "load"
                    )
                    rows += 1 + max(row for row, _ in cells)
        blocks = int(np.prod(made.grid))
        assert rows * blocks == made.counters[f"shared_{doing}_wavefronts"]


def test_banks_of_a_conflict():
    figure = report("transpose, tile").figure("banks")
    assert "32 wavefronts" in title(figure)
    assert [t for t in texts(figure) if t.isdigit()] == [str(n) for n in range(32)]
    assert "1 wavefront;" in title(report("transpose, padded tile").figure("banks"))


def test_sectors_of_a_stride():
    assert "32 sectors, 1024 bytes moved for 128 used" in title(report("copy every 8th").figure("sectors"))
    assert "4 sectors, 128 bytes moved for 128 used" in title(report("copy").figure("sectors"))
    assert "5 sectors, 160 bytes moved for 128 used" in title(report("copy from element 1").figure("sectors"))


def test_lanes_over_time_leave_gaps_where_a_lane_sits_out():
    made = report("tree reduction, interleaved")
    figure = made.figure("lanes")
    first = [a for a in made.trace if a.threads.min() < 32]
    drawn = [len(shape.get_paths()) for shape in shapes(figure)]
    assert drawn == [int((a.threads < 32).sum()) for a in first]
    assert drawn[:2] == [32, 32] and drawn[-1] == 1
    assert f"warp 0: {len(first)} accesses" == title(figure)
    assert len(shapes(made.figure("lanes", warp=3))) < len(first)


def test_an_access_map_names_the_thread_of_every_element():
    figure = report("transpose, naive").figure("access", array="x")
    assert "load x: 256 elements, once each" in title(figure)
    assert sorted(int(t) for t in texts(figure.axes[0]) if t.isdigit())[-1] == 255
    assert "up to 16 times" in title(report("matmul, coalesced").figure("access", array="a"))
    assert "store out" in title(report("copy").figure("access", doing="store"))


def test_what_is_not_in_the_trace_is_named():
    made = report("copy")
    with pytest.raises(ValueError, match="no picture 'heat'; there are lanes, access, sectors, banks"):
        made.figure("heat")
    with pytest.raises(ValueError, match="no load of y; it has load x, store out"):
        made.figure("access", array="y")
    with pytest.raises(ValueError, match="no access to shared memory by warp 0"):
        made.figure("banks")
    assert re.search(r"warp 9: 0 accesses", title(made.figure("lanes", warp=9)))
