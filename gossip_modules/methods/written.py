"""An algorithm, a graph or a schedule as the text of Python, `DiLoCo(sync_every=50)`: parsed, never evaluated."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar, cast

import torch

T = TypeVar("T")
MAX_LENGTH = 2000
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def read(text: str, names: Mapping[str, Callable[..., T]], *, option: str, seed: int | None = None) -> T:
    """Return the object of a text of Python: calls of known names with literals, and `.over(...)`.

    A name alone is the call without arguments. A call without a seed gets the seed of the run, if it has such an
    argument.

    Args:
        text: such as "GASLoC(momentum=0).over(Choco(SignNorm(), step_size=0.4))".
        names: the allowed functions and classes.
        option: the name of the option, for errors.
        seed: the seed of the run; None: each name has its own.

    Raises:
        ValueError: the text is no such expression; an unknown name or argument, with the nearest one; or the error of a
            called function or class.

    >>> read("Ring(peers=2)", {"Ring": lambda *, peers: ("ring", peers)}, option="graph")
    ('ring', 2)
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"got {option} of {len(text)} characters, expected at most {MAX_LENGTH}")
    reader = _Reader(text, names, option, seed)
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reader.refuse(f"which is no expression of Python ({error})")
    if not isinstance(body, ast.Call | ast.Name):
        reader.refuse(f"in which {_source(body)} is no call of a name")
    return cast(T, reader.value(body))


class _Reader:
    """Reads one text; see `read`."""

    def __init__(self, text: str, names: Mapping[str, Callable[..., Any]], option: str, seed: int | None) -> None:
        self.text, self.names, self.option, self.seed = text, names, option, seed

    def value(self, node: ast.expr) -> Any:
        """Return the object of a node of the syntax tree."""
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str()):
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Tuple(elts=items):
                return tuple(map(self.value, items))
            case ast.List(elts=items):
                return list(map(self.value, items))
            case ast.Dict() if None not in node.keys:
                return {self.value(key): self.value(item) for key, item in zip(node.keys, node.values, strict=True)}  # type: ignore[arg-type]
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) | ast.Name(id=name) if name in _DTYPES:
                return _DTYPES[name]
            case ast.Name(id=name):
                return self._called(name, self._known(name), [], {})
            case ast.Call(func=ast.Attribute(value=below, attr="over")):
                outer = self.value(below)
                if not hasattr(outer, "over"):
                    self.refuse(f"in which {_source(below)} is no algorithm, so that it is over nothing")
                return self._called(f"{_source(below)}.over", outer.over, *self._arguments(node))
            case ast.Call(func=ast.Name(id=name)):
                return self._called(name, self._known(name), *self._arguments(node))
            case ast.Call(func=func):
                self.refuse(f"in which {_source(func)} is no known name")
        return self.refuse(f"in which {_source(node)} is neither a literal nor a call of a known name")

    def _known(self, name: str) -> Callable[..., Any]:
        if name not in self.names:
            raise ValueError(
                f"got {self.option}={self.text!r} with the unknown name {name!r}, expected one of "
                f"{', '.join(known for known in self.names if not known.islower())}; {_hint(name, self.names)}"
            )
        return self.names[name]

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        names = [keyword.arg for keyword in node.keywords]
        if None in names:
            self.refuse(f"in which {_source(node)} has no names of arguments after **")
        if len({*names}) < len(names):
            self.refuse(f"in which {_source(node)} has an argument twice")
        return [*map(self.value, node.args)], {str(each.arg): self.value(each.value) for each in node.keywords}

    def _called(self, name: str, make: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        signature = inspect.signature(make)
        shown = f"{name}{_shown(signature)}"
        for keyword in keywords:
            if keyword not in signature.parameters:
                raise ValueError(
                    f"got {self.option}={self.text!r}, in which {name} has the argument {keyword!r}, expected some of "
                    f"{shown}; {_hint(keyword, signature.parameters)}"
                )
        try:
            given = signature.bind(*args, **keywords).arguments
            if self.seed is not None and "seed" in signature.parameters and "seed" not in given:
                keywords["seed"] = self.seed
            return make(*args, **keywords)
        except TypeError as error:  # a missing argument, or a value of another type
            raise ValueError(
                f"got {self.option}={self.text!r} ({error}), expected {shown} with values that it takes; change them"
            ) from error

    def refuse(self, why: str) -> NoReturn:
        """Raise the error of a text without such an expression."""
        raise ValueError(
            f"got {self.option}={self.text!r}, {why}, expected calls of known names with literals, such as "
            "'Choco(TopK(0.01), step_size=0.04)'; correct the text"
        )


def _hint(name: str, names: Iterable[str]) -> str:
    """The nearest of the names, or an imperative."""
    lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return f"did you mean {lower[near[0]]!r}?" if near else "choose one of them"


def _shown(signature: inspect.Signature) -> str:
    """The arguments with their defaults, without annotations."""
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _source(node: ast.expr) -> str:
    return ast.unparse(node)[:100]
