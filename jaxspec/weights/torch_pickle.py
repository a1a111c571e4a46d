"""Host. Reads the pickle inside a PyTorch file: a dictionary of tensors, and nothing else that a pickle can say.

A pickle is a program. pickle.Unpickler with a guarded find_class would still allocate what an opcode merely claims
and hash whatever a file nests, so the opcodes that state dicts are written with are carried out here, on values that
cannot act, and every other one is refused by name.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

MAX_PICKLE_BYTES = 1 << 24  # a hundred thousand tensors; what it describes lies outside it

_TYPED_STORAGES = {
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "DoubleStorage": np.float64,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
# Newer dtypes come as an untyped storage and the name of a dtype.
_NAMED_DTYPES = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
}
_CALLS = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
)
ALLOWED_GLOBALS = frozenset(
    (
        *_CALLS,
        "torch.storage.UntypedStorage",
        *(f"torch.{name}" for name in _TYPED_STORAGES),
        *(f"torch.{name}" for name in _NAMED_DTYPES),
    )
)


@dataclass(frozen=True)
class Storage:
    """Bytes that tensors are views of: `key` names the file's entry, num_values counts in `dtype` (uint8: untyped)."""

    dtype: np.dtype
    key: str
    num_values: int
    is_typed: bool


@dataclass(frozen=True)
class StoredTensor:
    """A view of a storage; offset and strides count values of `dtype`. Its numbers are integers, not yet checked."""

    storage: Storage
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Global:
    name: str


class _Mark:
    """Where a run of values on the stack begins."""


def read_state_dict(pickle: bytes) -> dict[str, StoredTensor]:
    """The tensors of a pickled state dict by name.

    Raises:
      ValueError: saying what in the pickle is not part of a state dict; nothing of it is ever run.
    """
    result = read_value(pickle)
    if not isinstance(result, dict):
        raise ValueError(f"the pickle holds {_kind(result)}, not a dictionary of tensors; save the state dict alone")
    for name, value in result.items():
        if not isinstance(value, StoredTensor):
            raise ValueError(
                f"entry {name!r:.100} is {_kind(value)}, not a tensor; save the state dict alone, without the rest"
            )
    return result


def read_value(pickle: bytes) -> Any:
    """Whatever a pickle holds that cannot act: tensors as views, numbers, strings, None, and tuples, lists and
    dictionaries of these.

    Raises:
      ValueError: saying what in the pickle is none of these; nothing of it is ever run.
    """
    if len(pickle) > MAX_PICKLE_BYTES:
        raise ValueError(f"a pickle of {len(pickle)} bytes is longer than the {MAX_PICKLE_BYTES} that are read")
    return _Machine().run(pickle)


class _Machine:
    """A pickle machine of few opcodes. Values are numbers, strings, None, tuples, lists, dicts, and views."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, pickle: bytes) -> Any:
        try:
            for opcode, argument, _ in pickletools.genops(pickle):
                if opcode.name == "STOP":
                    return self.pop()
                step = _STEPS.get(opcode.name)
                if step is None:
                    raise ValueError(f"opcode {opcode.name} has no place in a dictionary of tensors")
                step(self, argument)
        except (IndexError, KeyError, TypeError, OverflowError, MemoryError, DeprecationWarning) as error:
            raise ValueError(f"the pickle is damaged ({type(error).__name__}: {str(error)[:100]})") from error
        raise ValueError("the pickle breaks off")

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_run(self) -> list[Any]:
        """The values since the last mark, which goes too."""
        for at in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[at], _Mark):
                values = self.stack[at + 1 :]
                del self.stack[at:]
                return values
        raise ValueError("the pickle is damaged (a run of values without a mark)")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_tuple(self, size: int) -> None:
        if size > len(self.stack):
            raise IndexError("the stack is empty")
        values = tuple(self.stack[len(self.stack) - size :])
        del self.stack[len(self.stack) - size :]
        self.push(values)

    def push_global(self, module: Any, name: Any) -> None:
        path = f"{module}.{name}"
        if path not in ALLOWED_GLOBALS:
            raise ValueError(
                f"the pickle asks for {path[:200]}, which no dictionary of tensors needs and which could run code; "
                "where you trust the file, save its state dict alone or as safetensors"
            )
        self.push(_Global(path))

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise TypeError("items are set on what is no dictionary")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, str):
                raise ValueError(f"a dictionary has {_kind(key)} for a key; tensor names are strings")
            if key in target:
                raise ValueError(f"name {key!r:.100} occurs twice")
            target[key] = value

    def append(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise TypeError("values are appended to what is no list")
        self.stack[-1].extend(values)

    def build(self) -> None:
        """Attributes of an OrderedDict: PyTorch hangs its version table there, which says nothing about tensors."""
        state, target = self.pop(), self.stack[-1]
        if not isinstance(target, dict) or not isinstance(state, dict) or not set(state) <= {"_metadata"}:
            raise ValueError(f"attributes are set on {_kind(target)}, which only a state dict's _metadata may be")

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        name = function.name if isinstance(function, _Global) else ""
        if name not in _CALLS or not isinstance(arguments, tuple):
            raise ValueError(f"{name or _kind(function)} is called, which no dictionary of tensors needs")
        self.push(_call(name.rpartition(".")[2], arguments))


def _call(name: str, arguments: tuple[Any, ...]) -> Any:
    if name == "OrderedDict":
        if arguments:
            raise ValueError("an OrderedDict is made from values, which no state dict does")
        return {}
    if name == "_rebuild_parameter":
        if not arguments or not isinstance(arguments[0], StoredTensor):
            raise ValueError("a parameter is made of what is no tensor")
        return arguments[0]
    if len(arguments) < (7 if name == "_rebuild_tensor_v3" else 4):
        raise ValueError(f"the pickle is damaged ({name} of {len(arguments)} arguments)")
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError("a tensor is made of what is no storage, shape and strides")
    if any(type(number) is not int for number in (offset, *shape, *strides)):
        raise ValueError("a tensor's offset, shape and strides are not all whole numbers")
    dtype = storage.dtype
    if name == "_rebuild_tensor_v3":
        named = arguments[6].name.rpartition(".")[2] if isinstance(arguments[6], _Global) else ""
        if named not in _NAMED_DTYPES or storage.is_typed:
            raise ValueError(f"a tensor of dtype {named or _kind(arguments[6])} is made of an unfitting storage")
        dtype = np.dtype(_NAMED_DTYPES[named])
    elif not storage.is_typed:
        raise ValueError("a tensor without a dtype is made of an untyped storage")
    return StoredTensor(storage, dtype, offset, shape, strides)


def _storage(identity: Any) -> Storage:
    """("storage", its type, key, location, number of values), as PyTorch names what lies outside the pickle."""
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise ValueError("the pickle refers to something outside it that is no storage")
    _, kind, key, _, num_values = identity
    name = kind.name.rpartition(".")[2] if isinstance(kind, _Global) else ""
    if type(key) is not str or type(num_values) is not int or num_values < 0:
        raise ValueError("a storage's key and size are not a string and a whole number")
    if name == "UntypedStorage":
        return Storage(np.dtype(np.uint8), key, num_values, is_typed=False)
    if name not in _TYPED_STORAGES:
        raise ValueError(f"a storage has {_kind(kind)} for its type")
    return Storage(np.dtype(_TYPED_STORAGES[name]), key, num_values, is_typed=True)


def _kind(value: Any) -> str:
    """What a value is, in few words: never its contents, which a file may have nested without end."""
    return f"the global {value.name}" if isinstance(value, _Global) else f"a {type(value).__name__.strip('_')}"


def _pop_global(machine: _Machine, _: Any) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        raise ValueError("a global's name is no string")
    machine.push_global(module, name)


def _push_argument(machine: _Machine, argument: Any) -> None:
    machine.push(argument)


def _remember(machine: _Machine, argument: int) -> None:
    machine.memo[argument] = machine.stack[-1]


def _ignore(machine: _Machine, argument: Any) -> None:
    pass


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _ignore,
    "FRAME": _ignore,
    "MARK": lambda machine, _: machine.push(_Mark()),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "BININT": _push_argument,
    "BININT1": _push_argument,
    "BININT2": _push_argument,
    "LONG1": _push_argument,
    "BINFLOAT": _push_argument,
    "BINUNICODE": _push_argument,
    "SHORT_BINUNICODE": _push_argument,
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_run())),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_run()),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.pop()]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_run()),
    "BINPUT": _remember,
    "LONG_BINPUT": _remember,
    "MEMOIZE": lambda machine, _: _remember(machine, len(machine.memo)),
    "BINGET": lambda machine, argument: machine.push(machine.memo[argument]),
    "LONG_BINGET": lambda machine, argument: machine.push(machine.memo[argument]),
    "GLOBAL": lambda machine, argument: machine.push_global(*argument.split(" ", 1)),
    "STACK_GLOBAL": _pop_global,
    "BINPERSID": lambda machine, _: machine.push(_storage(machine.pop())),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
}
