"""What a compiler made of a kernel, read from its PTX and from what the assembler said of it."""

import re
from dataclasses import dataclass
from functools import cached_property

from gpukern import device
from gpukern.inspect import tools
from gpukern.inspect.multiprocessor import most_threads

# Instructions that tell how a kernel works, as PTX writes them. Each is counted once for each place in the code.
FEATURES = {
    "wgmma": r"wgmma\.mma_async\b",  # matrix product by four warps together (compute capability 9.0)
    "mma": r"mma\.sync\b",  # matrix product by one warp
    "tma": r"cp(?:\.reduce)?\.async\.bulk\.(?!commit|wait|prefetch)",  # copies of whole tiles by the copy engine (9.0)
    "async_copies": r"cp\.async\.c[ag]\b",  # global to shared memory, past the registers (from 8.0)
    "vector_loads": r"ld\.global[\w.:]*\.v[248]\b",  # 8 bytes or more a thread at once
    "vector_stores": r"st\.global[\w.:]*\.v[248]\b",
    "barriers": r"(?:bar|barrier)(?:\.cta)?\.(?:sync|red)\b",
    "atomics": r"(?:atom|red)\.(?!async)",
}
_STATIC = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b(\d+)\s+[\w$]+(?:\[(\d+)\])?;")


class CompileError(RuntimeError):
    """A compiler, or the assembler after it, refuses a kernel. The message has its words, and the line of the source.

    line  "file.py:12", or "" where it said none
    """

    def __init__(self, message: str, line: str = ""):
        super().__init__(f"{line}: {message}" if line else message)
        self.line = line


@dataclass(eq=False)
class Compiled:
    """A kernel, compiled for one card. None where no assembler was found to tell; `why_no_cubin` then says why.

    kernel         its name; language: "numba", "triton" or "cuda"; card: the device.Card it was compiled for
    threads        of a block, where the kernel says so (Triton's num_warps, Numba's launch_bounds), else None
    shared         bytes of shared memory a block, without what a launch adds (Numba's dynamic shared memory)
    registers      a thread
    local          bytes of local memory a thread: its local arrays, and registers that were spilled
    spills         bytes a thread moves to and from local memory for lack of registers: instructions that store and
                   load spilled registers, each counted once, in both languages
    features       {name of FEATURES: how many such instructions the PTX has}
    ptx            the compiler's output; cubin: the assembler's, bytes
    """

    kernel: str
    language: str
    card: device.Card
    threads: int | None
    shared: int
    registers: int | None
    local: int | None
    spills: int | None
    ptx: str
    cubin: bytes | None
    why_no_cubin: str = ""

    @property
    def max_threads(self) -> int | None:
        """The largest block that can be launched with so many registers a thread; None if they are not known."""
        most = most_threads(self.registers, self.card) if self.registers else None
        return min(most, self.threads) if most and self.threads else most

    @cached_property
    def features(self) -> dict[str, int]:
        code = re.sub(r"//.*", "", self.ptx)
        return {name: len(re.findall(rf"(?<![\w.]){pattern}", code)) for name, pattern in FEATURES.items()}

    @property
    def sass(self) -> str | None:
        """What the card runs, disassembled; None where that cannot be done: `why_no_sass` says why."""
        return self._disassembled[0]

    @property
    def why_no_sass(self) -> str:
        return self._disassembled[1]

    @cached_property
    def _disassembled(self) -> tuple:
        return (None, self.why_no_cubin) if self.cubin is None else tools.disassemble(self.cubin)

    def __repr__(self):
        known = {
            "threads a block": self.threads,
            "shared memory": f"{self.shared:,} bytes a block",
            "registers": self.registers,
            "local memory": self.local if self.local is None else f"{self.local:,} bytes a thread",
            "spills": self.spills if self.spills is None else f"{self.spills:,} bytes a thread",
            **{name.replace("_", " "): n for name, n in self.features.items() if n},
            "not assembled": self.why_no_cubin or None,
        }
        rows = [f"  {name:16} {value}" for name, value in known.items() if value is not None]
        return "\n".join([f"{self.kernel} ({self.language}), compiled for {self.card.name}", *rows])


def read_log(log: str) -> dict:
    """registers, local and spills, as the assembler says them with -v: of the kernel, and of functions it calls."""
    numbers = {
        name: [int(n) for n in re.findall(pattern, log)]
        for name, pattern in {
            "registers": r"Used (\d+) registers",
            "local": r"(\d+) bytes stack frame",
            "stores": r"(\d+) bytes spill stores",
            "loads": r"(\d+) bytes spill loads",
        }.items()
    }
    return {
        "registers": max(numbers["registers"], default=None),
        "local": sum(numbers["local"]) if numbers["local"] else None,
        "spills": sum(numbers["stores"] + numbers["loads"]) if numbers["stores"] else None,
    }


def static_shared(ptx: str) -> int:
    """Bytes of shared memory that the PTX declares with a size, laid one after the other."""
    end = 0
    for align, bits, count in _STATIC.findall(ptx):
        end = -(-end // int(align)) * int(align) + int(bits) // 8 * int(count or 1)
    return end
