"""From Numba's typed functions to one flat program of basic blocks, numbered so that threads find together again.

Device functions are laid into the kernel where they are called, so a thread's whole state is one number, its program
counter: which block it runs next. A block ends where control can change: in a jump, a branch, a barrier or the exit.

The numbers are the heart of reconvergence. A block is numbered before the blocks that follow it, and a loop is numbered
as one piece before whatever comes after the loop. The machine always runs the threads with the least number, so those
that left a loop early, or took the short side of an `if`, wait at the first block that all of them must pass (the
immediate post-dominator, where a card's reconvergence stack would hold them, too) until the others arrive.
"""

from dataclasses import dataclass, field
from pathlib import Path

from numba import cuda
from numba.cuda import types
from numba.cuda.core import ir
from numba.cuda.types.ext_types import GridGroup

from gpukern.simulate.lockstep import callees
from gpukern.simulate.lockstep.callees import Callee, callee, sources
from gpukern.simulate.lockstep.frontend import Typed
from gpukern.simulate.report import Refused

# Where Python lies whose lines mean nothing to whoever wrote the kernel.
_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (cuda, callees))
_BARRIERS = {
    cuda.syncthreads: "sync",
    cuda.syncthreads_count: "count",
    cuda.syncthreads_and: "and",
    cuda.syncthreads_or: "or",
}


@dataclass
class Scope:
    """One use of a typed function: the kernel itself, or a device function at one place where it is called."""

    typed: Typed
    prefix: str = ""
    depth: int = 0
    at: str | None = None  # in Numba's own Python, and in a stand-in: the line of the kernel that called it

    def type(self, name: str):
        return self.typed.typemap[name]

    def register(self, name: str) -> str:
        """The variable's name in the flat program."""
        return self.prefix + name

    def line(self, loc) -> str:
        return self.at or f"{loc.filename.rsplit('/', 1)[-1]}:{loc.line}"


@dataclass
class Move:
    """A value handed over between scopes: an argument into a device function, or its result out of it."""

    to: Scope
    target: str
    source_scope: Scope
    source: object  # as in callees.Callee
    passed_as: object  # the type at the border, to which the source is cast
    loc: ir.Loc


@dataclass
class Block:
    """Straight-line code. `end` is ("jump", next), ("branch", condition, yes, no), ("barrier", ...) or ("exit",)."""

    scope: Scope
    statements: list = field(default_factory=list)
    end: tuple = ()
    loc: ir.Loc = None

    @property
    def successors(self) -> tuple:
        kind = self.end[0]
        return {"jump": self.end[1:2], "branch": self.end[2:4], "barrier": self.end[1:2], "exit": ()}[kind]


def flatten(kernel: Typed) -> list[Block]:
    """The blocks of `kernel`, device functions laid in, in the order of their numbers; successors are numbers."""
    blocks = {}
    entry = _lay_in(Scope(kernel), blocks, leave=None)
    order = number(entry, {key: block.successors for key, block in blocks.items()})
    pc = {key: n for n, key in enumerate(order)}
    for block in blocks.values():
        # Every key in `end` that names a block becomes its number.
        block.end = tuple(pc[part] if isinstance(part, tuple) and part in pc else part for part in block.end)
    return [blocks[key] for key in order]


def _lay_in(scope: Scope, blocks: dict, leave) -> tuple:
    """Add the blocks of one scope; returns the key of its first. `leave(block, var, loc)` ends a block that returns."""
    if scope.depth > 20:
        raise Refused("a device function that calls itself", scope.line(scope.typed.ir.loc))
    for label, source in scope.typed.ir.blocks.items():
        key = (scope.prefix, label, 0)
        block = blocks[key] = Block(scope, loc=source.loc)
        for statement in source.body:
            barrier = _barrier(scope, statement)
            laid_in = None if barrier else callee(scope, statement)
            if barrier is None and laid_in is None:
                _add(scope, block, statement, leave)
                continue
            rest = (scope.prefix, label, key[2] + 1)
            if barrier:
                args = statement.value.args
                predicate = args[0] if args else None
                block.end = ("barrier", rest, barrier, predicate, statement.target, statement.loc)
            else:
                block.end = ("jump", _call(scope, statement, laid_in, block, blocks, rest, len(blocks)))
            key, block = rest, Block(scope, loc=statement.loc)
            blocks[key] = block
    return (scope.prefix, min(scope.typed.ir.blocks), 0)


def _barrier(scope: Scope, statement) -> str | None:
    """The kind of barrier that this statement is; None for any other statement."""
    value = getattr(statement, "value", None)
    if not (isinstance(statement, ir.Assign) and isinstance(value, ir.Expr) and value.op == "call"):
        return None
    function = scope.type(value.func.name)
    if isinstance(function, types.BoundFunction) and isinstance(function.this, GridGroup):
        return "grid"
    key = getattr(function, "typing_key", None)
    return _BARRIERS.get(key) if isinstance(key, type(cuda.syncthreads)) else None


def _call(scope: Scope, statement, callee: Callee, block: Block, blocks: dict, rest, serial: int) -> tuple:
    """Lay `callee` in for one call: arguments moved in, its result moved out, then on to `rest`."""
    typed = callee.typed
    file = typed.ir.loc.filename
    at = scope.line(statement.loc) if scope.at or file.startswith(_LIBRARIES) or not Path(file).is_absolute() else None
    inner = Scope(typed, f"{scope.prefix}{typed.ir.func_id.func_name}#{serial}.", scope.depth + 1, at)
    for name, source, to in zip(typed.ir.arg_names, callee.sources, typed.signature.args, strict=True):
        block.statements.append(Move(inner, "arg." + name, scope, source, to, statement.loc))
    result = typed.signature.return_type

    def leave(last: Block, value: ir.Var, loc) -> None:
        if isinstance(statement, ir.Assign):
            last.statements.append(Move(scope, statement.target.name, inner, value, result, loc))
        last.end = ("jump", rest)

    return _lay_in(inner, blocks, leave)


def _add(scope: Scope, block: Block, statement, leave) -> None:
    if isinstance(statement, ir.Jump):
        block.end = ("jump", (scope.prefix, statement.target, 0))
    elif isinstance(statement, ir.Branch):
        yes, no = ((scope.prefix, label, 0) for label in (statement.truebr, statement.falsebr))
        block.end = ("branch", statement.cond, yes, no, statement.loc)
    elif isinstance(statement, ir.Return):
        if leave is None:
            block.end = ("exit",)
        else:
            leave(block, statement.value, statement.loc)
    elif isinstance(statement, ir.Raise | ir.StaticRaise | ir.DynamicRaise):
        block.end = ("exit",)  # compiled without debug=True, a raise ends the thread and tells nobody
    else:
        block.statements.append(statement)


def number(entry, successors: dict) -> list:
    """The blocks in an order where each comes before its followers, and a loop, as one piece, before what follows it.

    (A weak topological order after Bourdoncle, 1993: strongly connected components in topological order; inside a
    component its head first, then the rest in the same way without the edges back to the head.)
    """

    def arrange(starts, members: set) -> list:
        order = []
        for component in _components(starts, members, successors):
            head = component[0]
            order.append(head)
            if len(component) > 1:
                rest = set(component) - {head}
                order += arrange([s for s in successors[head] if s in rest], rest)
        return order

    return arrange([entry], set(successors))


def _components(starts, members: set, successors: dict) -> list:
    """Strongly connected components of `members` that `starts` reach, in topological order, heads first (Tarjan)."""
    index, low, stack, found = {}, {}, [], []
    for start in starts:
        way = [] if start in index else [(start, iter(successors[start]))]  # not recursive: a way may be long
        while way:
            node, afters = way[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
            after = next((s for s in afters if s in members and (s not in index or low[s] is not None)), None)
            if after is None:  # all that follow it have been seen
                way.pop()
                if way:
                    low[way[-1][0]] = min(low[way[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    found.append(stack[at:])
                    low.update(dict.fromkeys(stack[at:]))  # None: its component is known
                    del stack[at:]
            elif after in index:
                low[node] = min(low[node], low[after])
            else:
                way.append((after, iter(successors[after])))
    return found[::-1]


def live_registers(blocks: list[Block], uses: list[set], defines: list[set]) -> list[set]:
    """For each block the registers that it or a follower may still read: all that a group of threads has to carry."""
    live = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for n in reversed(range(len(blocks))):
            after = set().union(*(live[s] for s in blocks[n].successors))
            now = uses[n] | (after - defines[n])
            if now != live[n]:
                live[n], changed = now, True
    return live


def touched(blocks: list[Block]) -> tuple:
    """The kernel's arguments that are written, and that are read, followed through assignments, slices and calls."""
    comes_from = {}  # register -> registers whose array it may be

    def name(scope, variable):
        return scope.register(variable if isinstance(variable, str) else variable.name)

    stored, loaded = set(), set()
    for block in blocks:
        scope = block.scope
        for statement in block.statements:
            if isinstance(statement, Move):
                to = comes_from.setdefault(name(statement.to, statement.target), set())
                to |= {name(statement.source_scope, v) for v in sources(statement.source)}
                continue
            if isinstance(statement, ir.SetItem | ir.StaticSetItem | ir.SetAttr):
                stored.add(name(scope, statement.target))
            if not isinstance(statement, ir.Assign):
                continue
            to, value = comes_from.setdefault(name(scope, statement.target), set()), statement.value
            if isinstance(value, ir.Arg):
                to.add(scope.register("arg." + value.name))
            elif isinstance(value, ir.Var):
                to.add(name(scope, value))
            elif isinstance(value, ir.Expr):
                to |= {name(scope, v) for v in value.list_vars()}
                if value.op in ("getitem", "static_getitem", "iternext", "getattr"):
                    loaded.add(name(scope, value.value))
                if value.op == "call":  # an atomic writes its first argument
                    stored |= {name(scope, v) for v in value.args if isinstance(scope.type(v.name), types.Array)}

    def roots(names):
        seen, todo = set(), list(names)
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += comes_from.get(at, ())
        return {n.removeprefix("arg.") for n in seen if n.startswith("arg.")}

    return roots(stored), roots(loaded)
