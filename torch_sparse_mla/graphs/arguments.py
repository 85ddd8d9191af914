"""The caller's buffers: their names, their first rows, and whether a call brings those that a graph captured."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

RESERVED = ("num_rows", "uniform")


class Signature:
    """The arguments of a step's function.

    Attributes:
        names: of all of them, in order.
        rows: of those whose first dimension is query rows.
        padding: of some of these, what padded rows hold.
    """

    def __init__(self, function: Callable, rows: Sequence[str], padding: Mapping[str, float]) -> None:
        # What calls a module takes any arguments.
        called = function.forward if isinstance(function, torch.nn.Module) else function
        parameters = inspect.signature(called).parameters.values()
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
                reject("fn", f"the parameter {parameter}", "plain parameters, each of which is one argument")
        self.names = [parameter.name for parameter in parameters]
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        for name in RESERVED:
            if name in self.names:
                reject("fn", f"a parameter '{name}'", f"other names: {' and '.join(RESERVED)} say how a step is called")
        if not isinstance(padding, Mapping):
            reject("padding", repr(padding), "a dictionary of numbers, by names of parameters")
        for argument, given in (("rows", rows), ("padding", padding)):
            for name in given:
                if name not in self.names:
                    reject(argument, repr(name), f"parameters of fn: {', '.join(self.names)}")
        for name in padding:
            if name not in rows:
                reject("padding", repr(name), f"arguments that have rows: {', '.join(rows) or 'none'}")
            if not isinstance(padding[name], int | float):
                reject("padding", f"{padding[name]!r} for {name}", "numbers")
        self.rows = tuple(self.names.index(name) for name in rows)
        self.padding = {self.names.index(name): value for name, value in padding.items()}

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """All arguments in order."""
        if not kwargs and len(args) == len(self.names):
            return args
        given = self._defaults | dict(zip(self.names, args, strict=False)) | kwargs
        if len(args) > len(self.names) or set(given) != set(self.names) or set(kwargs) & set(self.names[: len(args)]):
            raise TypeError(
                f"torch_sparse_mla.compile: got {len(args)} positional arguments and {sorted(kwargs)}; allowed: "
                f"({', '.join(self.names)}), each once"
            )
        return tuple(given[name] for name in self.names)

    def num_rows(self, arguments: tuple) -> int:
        """Rows of the first argument that has rows; 1 where none has."""
        if not self.rows:
            return 1
        first = arguments[self.rows[0]]
        if not isinstance(first, torch.Tensor) or first.dim() == 0:
            reject(self.names[self.rows[0]], type(first).__name__, "a tensor whose first dimension is rows")
        return first.shape[0]

    def checked_rows(self, arguments: tuple, num_rows: int) -> int:
        """The rows that a caller names. Refuses more than an argument brings."""
        if not isinstance(num_rows, int) or isinstance(num_rows, bool) or num_rows < 0:
            reject("num_rows", repr(num_rows), "an integer, 0 or more")
        if not self.rows:
            reject("num_rows", str(num_rows), "None where no parameter has rows")
        self.check_room(arguments, num_rows)
        return num_rows

    def check_room(self, arguments: tuple, rows: int) -> None:
        """Refuse buffers that do not hold as many rows."""
        for index in self.rows:
            buffer = arguments[index]
            if not isinstance(buffer, torch.Tensor) or buffer.dim() == 0 or buffer.shape[0] < rows:
                given = list(buffer.shape) if isinstance(buffer, torch.Tensor) else type(buffer).__name__
                reject(self.names[index], f"shape {given}", f"a tensor of at least {rows} rows")

    def pad(self, sized: tuple, rows: int) -> None:
        """Write what padded rows hold into the rows from `rows` up."""
        for index, value in self.padding.items():
            sized[index][rows:].fill_(value)


class Addresses:
    """What a graph captured of its arguments, to compare a later call with."""

    def __init__(self, signature: Signature, arguments: tuple) -> None:
        self.signature = signature
        self.arguments = arguments
        self._rows = frozenset(signature.rows)
        self._known = [_known(value) for value in arguments]

    def check(self, arguments: tuple, rows: int, always: bool) -> None:
        """Raise ValueError for an argument that is not what was captured.

        Args:
            rows: the least that arguments with rows may bring.
            always: compare even tensors that are those of the capture, whose memory may have been exchanged.
        """
        for index, (value, captured) in enumerate(zip(arguments, self.arguments, strict=True)):
            # A list may be the same and hold others.
            if value is not captured or always or not isinstance(value, torch.Tensor):
                least = rows if index in self._rows else None
                _compare(self.signature.names[index], value, self._known[index], least)


def _known(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    return value


def _compare(name: str, value: Any, known: Any, least_rows: int | None) -> None:
    if isinstance(value, torch.Tensor) and isinstance(known, tuple):
        address, shape, stride, dtype = known
        given = tuple(value.shape)
        same = given == shape
        if least_rows is not None and len(given) == len(shape):
            same = given[1:] == shape[1:] and given[0] >= least_rows
        # The stride of a single row means nothing.
        if not same or value.dtype != dtype or (value.stride() != stride and given[:1] != (1,)):
            found = f"{value.dtype} {list(given)} with strides {list(value.stride())}"
            _refuse(name, found, f"{dtype} {list(shape)} with strides {list(stride)}")
        if value.data_ptr() != address:
            _refuse(name, f"a tensor at address {value.data_ptr():#x}", f"the captured one at {address:#x}")
    elif isinstance(value, list | tuple) and isinstance(known, list) and len(value) == len(known):
        for position, (item, known_item) in enumerate(zip(value, known, strict=True)):
            _compare(f"{name}[{position}]", item, known_item, None)
    elif type(value) is not type(known) or value != known:
        _refuse(name, repr(value), f"{known!r}, which the graph has captured")


def _refuse(name: str, given: str, allowed: str) -> NoReturn:
    reject(name, given, f"{allowed} (copy new values into the buffers that were captured, or capture again)")


def reject(argument: str, given: str, allowed: str) -> NoReturn:
    raise ValueError(f"torch_sparse_mla.compile: {argument}: got {given}; allowed: {allowed}")
