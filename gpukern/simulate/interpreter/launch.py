"""Launching a Triton kernel on the simulated GPU: its arguments are bound, its programs run one after the other."""

import functools
import math
import operator
import traceback
from dataclasses import dataclass, fields
from inspect import signature

import numpy as np
import torch
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime import autotuner, interpreter, jit
from triton.runtime.errors import InterpreterError

from gpukern import device, inspect
from gpukern.simulate import report as reports
from gpukern.simulate.interpreter import functions, language, lines
from gpukern.simulate.interpreter.arguments import check, tensors_of, type_of, value_of
from gpukern.simulate.interpreter.builder import builder
from gpukern.simulate.interpreter.memory import Memory
from gpukern.simulate.interpreter.races import MOST_LINES, Order
from gpukern.simulate.interpreter.turns import Stop, Turns
from gpukern.simulate.report import FaultError, Refused, Report

_COMPILER_OPTIONS = {field.name for field in fields(CUDAOptions)} | {"stream", "launch_cooperative_grid", "launch_pdl"}
# A program that has made so many atomics that change nothing, or loads of one place, waits: others may run meanwhile.
_TRIES, _LOADS = 16, 1_000
# After so many it waits for ever; of several that wait, each has so many tries.
_PATIENCE, _LOAD_PATIENCE, _PATIENCE_OF_EACH = 10_000, 100_000, 200
_launches = 0
_autotune = autotuner.Autotuner.run


@dataclass
class _Options:
    """What simulate.run asks of a launch; a launch in the normal way has the defaults."""

    inputs: tuple = ()
    outputs: tuple = ()
    trace: int | None = None
    checks: bool = True
    report: Report | None = None


_asked: _Options | None = None  # what simulate.run, which is now being executed, asks


def install() -> None:
    """Run every Triton kernel of this process on the simulated GPU."""
    interpreter.InterpretedFunction.run = _run
    interpreter.InterpretedFunction.__call__ = _call
    autotuner.Autotuner.run = _run_autotuned
    autotuner.Autotuner._bench = _accepts


def run(kernel, grid, args: tuple, meta: dict, inputs=(), outputs=(), trace: int | None = 0, checks=True) -> Report:
    """Run `kernel` and return what was counted and found: the Triton half of `simulate.run`, which explains it all."""
    global _asked
    if not isinstance(kernel, jit.KernelInterface):
        raise TypeError(f"{kernel!r} is no Triton kernel. With block=None, pass a function decorated with @triton.jit.")
    grid = (grid,) if isinstance(grid, int) else grid
    _asked = options = _Options(inputs, outputs, trace, checks)
    try:
        kernel[grid](*map(_as_tensor, args), **{name: _as_tensor(value) for name, value in meta.items()})
    finally:
        _asked = None
    return options.report


def _as_tensor(value):
    """NumPy arrays and arrays of the simulated card become tensors over the same memory."""
    value = getattr(value, "host", value)
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _run(kernel, *args, grid, warmup, **kwargs):
    """InterpretedFunction.run: `kernel[grid](*args, **kwargs)`."""
    if warmup:  # compiles on a card, and does not run
        return
    options = _asked or _Options()
    options.report = Report(kernel.fn.__name__, "triton", device.card(), shared=None)
    reports.keep(options.report)
    Launch(kernel, options).run(args, grid, kwargs)
    if options is not _asked and options.report.errors:
        raise FaultError(options.report)


def _call(kernel, *args, **kwargs):
    """InterpretedFunction.__call__: a kernel calls another function."""
    if builder.launch is None:
        raise RuntimeError(f"{kernel.fn.__name__} is called as a function; launch a kernel as kernel[grid](...).")
    return functions.prepared(kernel, _launches)(*args, **kwargs)


def _run_autotuned(tuner, *args, **kwargs):
    """Autotuner.run: nothing is timed, so the first configuration that the card takes is used."""
    try:
        return _autotune(tuner, *args, **kwargs)
    finally:
        if getattr(tuner, "best_config", None) is not None:
            reports.last().config = str(tuner.best_config)


def _accepts(tuner, *args, config, **meta):
    """Autotuner._bench: the same "time" for each configuration that the card takes, none for the others."""
    conflicts = meta.keys() & config.kwargs.keys()
    if conflicts:
        raise ValueError(f"{', '.join(conflicts)}: given by the launch and by the autotuner. Leave it to one of them.")
    try:
        _check_warps(config.num_warps)
    except device.LimitError:
        return [float("inf")] * 3
    return [1.0] * 3


def _check_warps(warps: int) -> None:
    card = device.card()
    if not isinstance(warps, int):
        raise TypeError(f"num_warps={warps!r}: it is a whole number.")
    if warps < 1 or warps & (warps - 1):
        raise device.LimitError(f"num_warps={warps} is not a power of two; choose 1, 2, 4, 8, 16 or 32.")
    if warps * card.warp > card.threads_per_block:
        raise device.LimitError(
            f"num_warps={warps} is a block of {warps * card.warp} threads; {card.name} allows {card.threads_per_block}."
        )


class Launch:
    """One launch. What the builder and the memory ask while a program runs: which one, on which line.

    program  its place in the grid (x, y, z); number: counted along x, then y, then z
    """

    def __init__(self, kernel, options: _Options):
        self.kernel, self.options, self.report = kernel, options, options.report
        self.checks = options.checks
        self.tensor_cores_take_tf32 = device.card().compute_capability >= (8, 0)
        self.order = Order()
        self.unsettled = []  # shadows with notes of the running program
        self.lines, self._line_numbers = [], {}  # ("file.py", 12) and its place in the list
        self._counts = {}  # (counter, line) -> n
        self.program, self.number, self.at, self.tracing = (0, 0, 0), 0, ("", 0), False
        self._tries, self._polled, self._polls = 0, None, 0
        self._idle = 0  # tries of all programs since one of them changed something

    def run(self, args: tuple, grid, kwargs: dict) -> None:
        global _launches
        _launches += 1
        _check_warps(kwargs.get("num_warps", 4))
        names, bound = self._bind(args, kwargs)
        for hook in self.kernel.pre_run_hooks:
            hook(*args, **{name: value for name, value in kwargs.items() if name in names})
        self.grid = _sizes(self._of_meta(grid, {**kwargs, **bound}) if callable(grid) else grid)
        self.report.grid = self.grid
        warps, card = kwargs.get("num_warps", 4), device.card()
        self.report.block = (warps * card.warp, 1, 1)
        self.resident = card.sms * min(card.blocks_per_sm, card.warps_per_sm // warps)  # at once, if registers allow
        empty = 0 in self.grid  # launches nothing, on a card as here
        if not empty:
            device.check_launch(self.grid, 1)
        self._let_compile(bound, kwargs)
        if empty:
            return
        constant = {name for name, kind in self.kinds.items() if kind == "constexpr"}
        tensors = [pair for name, value in bound.items() if name not in constant for pair in tensors_of(name, value)]
        self.memory = Memory(self, tensors, self.options.inputs, self.options.outputs)
        builder.launch = self
        try:
            with language.patched():
                self._run_programs(bound)
        finally:
            builder.launch = None
            self._finish()

    def _bind(self, args: tuple, kwargs: dict) -> tuple:
        """The kernel's parameters, and {parameter: value}."""
        declared = signature(self.kernel.fn)
        names = declared.parameters.keys()
        unknown = kwargs.keys() - names - _COMPILER_OPTIONS
        if unknown:
            raise TypeError(f"{self.report.kernel} has no parameter {', '.join(unknown)}; it has {', '.join(names)}.")
        try:
            bound = declared.bind(*args, **{name: value for name, value in kwargs.items() if name in names})
        except TypeError as error:
            raise TypeError(f"{self.report.kernel} takes {', '.join(names)}: {error}.") from None
        bound.apply_defaults()
        for name in (*self.options.inputs, *self.options.outputs):
            if name not in names:
                raise ValueError(f"{self.report.kernel} has no argument {name!r}; it has {', '.join(names)}.")
        kinds = {name: str(jit._normalize_ty(p.annotation)) for name, p in declared.parameters.items()}
        self.kinds = {name: "" if "empty" in kind else kind for name, kind in kinds.items()}
        for name, value in bound.arguments.items():
            check(name, value, self.kinds[name])
        for name in (*self.options.inputs, *self.options.outputs):
            if not list(tensors_of(name, bound.arguments[name])):
                raise ValueError(f"{name} is named as an input or output of {self.report.kernel}, and is no tensor.")
        return names, bound.arguments

    def _of_meta(self, grid, meta: dict):
        """The grid that a function computes from the arguments and the meta-parameters."""
        try:
            return grid(meta)
        except KeyError as error:
            has = ", ".join(meta)
            raise KeyError(f"the grid asks for meta[{error}]; {self.report.kernel} is launched with {has}") from None

    def _let_compile(self, bound: dict, kwargs: dict) -> None:
        """Let the report compile the kernel for the card, for these types, when it is asked to.

        What tl.dot needs of shared memory is the compiler's to say, so simulate.run asks at once if there is a tl.dot.
        """
        types = {n: type_of(v) for n, v in bound.items() if v is not None and self.kinds[n] != "constexpr"}
        constants = {n: v for n, v in bound.items() if v is None or self.kinds[n] == "constexpr"}
        options = {n: v for n, v in kwargs.items() if n not in bound}
        kernel, card = self.kernel, device.card().name

        def compile():
            return inspect.compiled(kernel, types, card, **constants, **options)

        self.report.compile = functools.cache(compile)
        if self.options is _asked and self.checks and functions.uses(kernel, "dot", _launches):
            try:
                self.report.compile()
            except inspect.CompileError as error:
                if "shared memory" in str(error):
                    raise device.LimitError(str(error)) from None

    def _run_programs(self, bound: dict) -> None:
        try:
            call = functions.prepared(self.kernel, _launches)
            addresses = iter(self.memory.addresses)
            values = {name: value_of(value, self.kinds[name], addresses) for name, value in bound.items()}

            def program(number: int) -> None:
                x, y, _ = self.grid
                self.number, self.program = number, (number % x, number // x % y, number // (x * y))
                self.tracing = self.checks and number == self.options.trace
                self._tries = 0
                with np.errstate(all="ignore"):  # a card does not warn of inf and NaN
                    if call(**values) is not None:
                        raise TypeError("a kernel returns nothing: store what it has with tl.store.")
                self._settle()

            self.turns = Turns(program, math.prod(self.grid), self.resident)
            self.turns.run_all()
        except Stop:
            pass
        except (device.LimitError, Refused, InterpreterError) as error:
            line = lines.of(error)
            if isinstance(error, device.LimitError) and line is not None:
                raise device.LimitError(f"{line}: {error}") from None
            raise
        except Exception as error:
            line = lines.of(error) or functions.line(self.kernel)
            raise InterpreterError(f"{line}: {type(error).__name__}: {_words(error)}") from error

    def _settle(self) -> None:
        """The running program ends, or lets others run: what it has read is entered."""
        for shadow in self.unsettled:
            shadow.settle()
        self.unsettled.clear()

    def _finish(self) -> None:
        self._settle()
        self.report.files = dict(lines.paths)
        self.memory.settle(self.options.outputs, functions.line(self.kernel))
        for (name, (file, line)), n in self._counts.items():
            self.report.lines[name, f"{file}:{line}"] += n
        self.report.finish()

    # What a running program's operations ask

    def look(self) -> None:
        """Find the line that is being run: what is counted from now on belongs to it."""
        self.at = lines.here()

    def who(self, number: int | None = None) -> str:
        """ "program 7", or "program (3, 1)" of a grid with more axes."""
        number = self.number if number is None else number
        x, y, z = self.grid
        place = number % x, number // x % y, number // (x * y)
        used = 3 if z > 1 else 2 if y > 1 else 1
        return f"program {place[0]}" if used == 1 else f"program ({', '.join(map(str, place[:used]))})"

    def count(self, name: str, n: int) -> None:
        key = name, self.at
        self._counts[key] = self._counts.get(key, 0) + n

    def count_at(self, name: str, line: tuple, n: int) -> None:
        self._counts[name, line] = self._counts.get((name, line), 0) + n

    def line_number(self) -> int:
        """The place of the present line in `lines`."""
        number = self._line_numbers.get(self.at)
        if number is None:
            number = self._line_numbers[self.at] = min(len(self.lines), MOST_LINES - 1)
            self.lines.append(self.at)
        return number

    def fault(self, kind: str, message: str, who: list, array, index, count: int) -> None:
        self.report.add(kind, message, lines.where(), who, array, index, count)

    def meet(self, address: int, acquires: bool, releases: bool, changed: bool) -> None:
        """An atomic on one element: it may order programs. Too many that change nothing are a program that waits."""
        self.order.add(self.number, address, acquires, releases)
        self._tries, self._idle = (0, 0) if changed else (self._tries + 1, self._idle + 1)
        if self._tries > _TRIES:
            alone = not self._let_others_run()
            if self._idle > (_PATIENCE if alone else _PATIENCE_OF_EACH * (self.turns.waiting + 1)):
                self._hang()

    def poll(self, address: int | None) -> None:
        """A plain load of one element, or (None) a store. Who loads one place for ever, and stores nothing, waits."""
        self._polls = self._polls + 1 if address is not None and address == self._polled else 0
        self._polled = address
        if address is None:
            self._idle = 0
        elif self._polls and self._polls % _LOADS == 0:
            self._let_others_run()
            if self._polls > _LOAD_PATIENCE:
                self._hang()

    def _let_others_run(self) -> bool:
        """The running program waits: others get their turn, and this one later goes on as it was."""
        self._settle()
        mine = self.program, self.number, self.tracing, self.at, self._tries, self._polled, self._polls
        ran = self.turns.let_others_run()
        self.program, self.number, self.tracing, self.at, self._tries, self._polled, self._polls = mine
        return ran

    def _hang(self) -> None:
        what = f"{self.who()} waits ({lines.where()}) for what no program does that can run before it goes on. "
        most = f"{self.report.card.name} runs at most {self.resident:,} of these at once"
        advice = f"Programs start in any order, and {most}: wait only for those, and only for what they always do."
        self.fault("hang", what + advice, [self.who()], None, None, 1)
        raise Stop


def _sizes(grid) -> tuple:
    """The grid in x, y, z."""
    axes = tuple(grid) if isinstance(grid, tuple | list) else (grid,)
    try:
        grid = tuple(map(operator.index, axes))
    except TypeError:
        raise TypeError(f"the grid is {grid!r}: give one to three whole numbers, or a function of meta.") from None
    if not grid:
        raise TypeError("the grid is empty: give one to three whole numbers, or a function of meta.")
    if len(grid) > 3:
        raise device.LimitError(f"the grid has {len(grid)} axes; there are x, y and z.")
    return (*grid, 1, 1)[:3]


def _words(error: Exception) -> str:
    """What an error says; an assertion of Triton's that says nothing is its own text."""
    if isinstance(error, NameError) and functions.unknown(error):
        return functions.unknown(error)
    if str(error):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.line or ""
