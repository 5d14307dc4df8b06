"""Planted faults under compute-sanitizer, on this machine's card: does it see what the simulated GPU sees?

As a script (what compute-sanitizer watches): `python sanitizer.py NAME` launches one faulty kernel of
tests/test_lockstep_faults.py. `verdicts()` runs the fitting tool on each and returns what it said.
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The kind of fault -> the tool that looks for it. It sees no negative index: Numba makes another element of it.
TOOLS = {
    "out_of_bounds": "memcheck",
    "negative_index": "memcheck",
    "race": "racecheck",
    "same_value_race": "racecheck",
    "divergent_barrier": "synccheck",
    "divergent_warp": "synccheck",
    "uninitialised": "initcheck",
}
SECONDS = 60  # a kernel that waits for ever is stopped


def planted() -> dict:
    """{name: (kernel, kinds, grid, block, arguments, shared)}"""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import test_lockstep_faults

    return {param.id: param.values for param in test_lockstep_faults.FAULTY}


def verdicts() -> list[dict]:
    """One row a planted fault: our kinds, the tool, how it ended and what it said first. Needs `compute-sanitizer`."""
    cases = planted()
    with ThreadPoolExecutor(10) as pool:
        return list(pool.map(verdict, cases, (values[1] for values in cases.values())))


def verdict(name: str, kinds: set) -> dict:
    """What the fitting tool says of one planted fault."""
    tool = TOOLS[min(kinds, key=list(TOOLS).index)]
    apart = ["--padding", "512"] if tool == "memcheck" else []  # so that past one array is not inside the next
    command = ["compute-sanitizer", "--tool", tool, *apart, "--error-exitcode", "9", sys.executable, __file__, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        said, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as stopped:
        said, code = (stopped.stdout or b"").decode(), None
    words = r"Invalid|Race reported|Barrier error|Uninitialized|Hazard"
    finding = next((line for line in said.splitlines() if re.search(words, line)), "")
    ended = "found" if finding else {0: "clean", None: "stopped"}.get(code, f"exit {code}")
    said = re.sub(r"\[abi.*?\]|\(.*?\)|[0-9a-fA-Fx]{9,}", "", finding.strip("= "))[:120]
    return {"case": name, "kinds": " ".join(sorted(kinds)), "tool": tool, "ended": ended, "said": said}


def main(name: str) -> None:
    from numba import cuda

    kernel, _, grid, block, arguments, shared = planted()[name]
    made = [a[0](*a[1:]) if isinstance(a, tuple) else a for a in arguments]
    on_card = [cuda.to_device(a) if hasattr(a, "shape") and a.shape else a for a in made]
    kernel[grid, block, 0, shared](*on_card)
    cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
