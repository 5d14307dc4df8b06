"""Lines of kernels: where in a file the program that runs is, as its author sees it."""

import sys
import weakref

# Code of kernels and of the functions that they call (its id, for equal code may lie in two files) -> its file's name.
# Triton's own is not here: what happens in tl.softmax happens on the line that calls it.
_files = {}
paths = {}  # "file.py" -> where it lies


def know(code, file: str, path: str) -> None:
    """`code` is part of a kernel, and lies in `file`."""
    _files[id(code)], paths[file] = file, path
    weakref.finalize(code, _files.pop, id(code), None)


def here() -> tuple:
    """("file.py", 12): the line of the kernel that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        file = _files.get(id(frame.f_code))
        if file is not None:
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def where() -> str:
    """ "file.py:12", the line of the kernel that is being run."""
    file, line = here()
    return f"{file}:{line}"


def of(error: BaseException) -> str | None:
    """ "file.py:12", where in a kernel an error was raised; None if in none."""
    found, trace = None, error.__traceback__
    while trace is not None:
        file = _files.get(id(trace.tb_frame.f_code))
        found = f"{file}:{trace.tb_lineno}" if file is not None else found
        trace = trace.tb_next
    return found
