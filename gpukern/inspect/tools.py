"""NVIDIA's assembler and disassembler: where they lie, and how they are called.

Triton's wheel brings both; a CUDA toolkit on PATH has them, too. Of several, the first that takes the file is used.
"""

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path


def find(name: str) -> list[str]:
    """Every `name` ("ptxas", "nvdisasm") there is: of Triton's wheel, then on PATH."""
    triton = importlib.util.find_spec("triton")
    shipped = (
        [Path(root) / "backends/nvidia/bin" / name for root in triton.submodule_search_locations] if triton else []
    )
    return [str(path) for path in shipped if path.exists()] + [path for path in [shutil.which(name)] if path]


def disassemble(cubin: bytes) -> tuple[str | None, str]:
    """The SASS of a cubin, and "" or why there is none."""
    reasons = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        for tool in find("nvdisasm"):
            done = subprocess.run([tool, "-c", str(file)], capture_output=True, text=True)
            if done.returncode == 0:
                return done.stdout, ""
            reasons.append(done.stderr.strip())
    return None, "; ".join(reasons) or "there is no nvdisasm: Triton's wheel brings it, and so does the CUDA toolkit."
