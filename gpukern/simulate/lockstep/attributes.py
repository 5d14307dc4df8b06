"""What stands behind a dot, or behind the name of a field: of records, arrays, modules, enumerations."""

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.core import ir
from numba.cuda.vector_types import VectorType

from gpukern.simulate.lockstep.kinds import dtype_of, is_number

_SPECIALS = {cuda.threadIdx: "t", cuda.blockIdx: "b", cuda.blockDim: "bd", cuda.gridDim: "gd"}


class Attributes:
    """The attributes of a BlockLowering."""

    # --- records ---

    def _field_name(self, expression) -> str:
        if isinstance(getattr(expression, "index", None), str):
            return expression.index
        self.refuse("a field of a record by anything but its name")

    def _field_view(self, source: str, record: types.Record, name: str) -> str:
        """The array of one field of all records of an array (or of a record, which is an array without axes)."""
        base = dtype_of(record).fields[name][0].base
        if any(n % base.itemsize for n in (record.offset(name), record.size)):
            self.refuse(f"the field {name} of a packed record (np.dtype(..., align=True) lays one out)")
        return f'field({source}, "{name}")'

    def _field(self, source: str, record: types.Record, name: str) -> str:
        view, type_ = self._field_view(source, record, name), record.typeof(name)
        if isinstance(type_, types.Array | types.Record):
            return view
        return f'g.load({view}, (), "{self.line}")'

    def _store_field(self, target: ir.Var, name: str, value: ir.Var) -> None:
        record = self.scope.type(target.name)
        if not isinstance(record, types.Record):
            self.refuse(f"an assignment to `.{name}` of {record}")
        view, type_ = self._field_view(self.read(target), record, name), record.typeof(name)
        if not is_number(type_):
            self.refuse(f"an assignment to a field of type {type_}; assign element by element")
        self.lines.append(f'g.store({view}, (), {self.operand(value, type_)}, "{self.line}")')

    # --- attributes ---

    def _getattr(self, value: ir.Expr, target: str) -> tuple:
        owner, name = self.scope.type(value.value.name), value.attr
        type_ = self.scope.type(target)
        if isinstance(owner, types.Array):
            return self._array_attribute(value, owner), type_
        if isinstance(owner, types.Record):
            return self._field(self.read(value.value), owner, name), type_
        if isinstance(owner, types.BaseNamedTuple):
            return f"{self.read(value.value)}[{owner.fields.index(name)}]", type_
        if isinstance(owner, VectorType):
            return f"{self.read(value.value)}[{owner.attr_names.index(name)}]", type_
        if isinstance(owner, types.RangeType) and name in ("start", "stop", "step"):
            first, left, step = (f"{self.read(value.value)}[{n}]" for n in range(3))
            if name == "stop":
                self.refuse("`.stop` of a range")
            return (first if name == "start" else step), type_
        if isinstance(owner, types.EnumMember) and name == "value":
            return self.read(value.value), type_
        if isinstance(owner, types.EnumClass):
            return self._constant(getattr(owner.instance_class, name), type_), type_
        if is_number(owner) and name in ("real", "imag"):
            if isinstance(owner, types.Complex):
                return f"{self.read(value.value)}.{name}", type_
            return (self.read(value.value) if name == "real" else self._zero(owner)), type_
        module = self._known(value.value)
        if module in _SPECIALS:
            return f'g.special("{_SPECIALS[module]}{name}")', type_
        if module is cuda and name == "laneid":
            return 'g.special("lane")', type_
        if module is cuda and name == "warpsize":
            return self.code.constant(np.int32(32)), type_
        found = getattr(module, name, None)
        if isinstance(found, int | float | complex | np.generic):
            return self._constant(found, type_), type_
        self.refuse(f"`.{name}` of {owner}")

    def _array_attribute(self, value: ir.Expr, owner: types.Array) -> str:
        sources = {
            "shape": "{0}.shape",
            "size": "{0}.size",
            "strides": "{0}.byte_strides",
            "T": "{0}.T",
            "flat": "{0}",
            "ndim": self.code.constant(np.int64(owner.ndim)),
            "itemsize": self.code.constant(np.int64(dtype_of(owner.dtype).itemsize)),
            "nbytes": "{0}.size * " + self.code.constant(np.int64(dtype_of(owner.dtype).itemsize)),
        }
        if isinstance(owner.dtype, types.Record) and value.attr in owner.dtype.fields:
            return self._field_view(self.read(value.value), owner.dtype, value.attr)
        if isinstance(owner.dtype, types.Complex) and value.attr in ("real", "imag"):
            return f'part({self.read(value.value)}, "{value.attr}")'
        if value.attr == "flat":
            return self.start_of_flat(self.read(value.value))
        if value.attr == "real":
            return self.read(value.value)
        if value.attr not in sources:
            self.refuse(f"`.{value.attr}` of an array")
        return sources[value.attr].format(self.read(value.value))

    def _known(self, variable: ir.Var):
        """The Python object (module, function) that a variable stands for."""
        definition = self.scope.typed.ir.get_definition(variable)
        if isinstance(definition, ir.Global | ir.FreeVar | ir.Const):
            return definition.value
        if isinstance(definition, ir.Expr) and definition.op == "getattr":
            return getattr(self._known(definition.value), definition.attr, None)
        return None
