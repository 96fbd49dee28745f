"""An algorithm, a graph or a schedule as the text of Python, `DiLoCo(sync_every=50)`: parsed, never evaluated."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

MAX_LENGTH = 2000
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def read(text: str, names: Mapping[str, Callable[..., Any]], *, option: str, seed: int | None = None) -> Any:
    """The object that a text of Python describes: calls of known names with literals, and `.over(...)`.

    A name alone is the call without arguments. A call of a name that takes a seed, and is given none, gets that of the
    run.

    Args:
        text: such as "GASLoC().over(Choco(SignNorm(), step_size=0.4))".
        names: the functions and classes that may be called.
        option: the name of the option, for errors.
        seed: of the run; None: each name has its own.

    Raises:
        ValueError: the text is no such expression; an unknown name or argument, with the nearest one; or the error of
            a function or class that was called.

    >>> read("Ring(peers=2)", {"Ring": lambda *, peers: ("ring", peers)}, option="graph")
    ('ring', 2)
    """
    return _Reader(text, names, option, seed).read()


class _Reader:
    """Reads one text; see `read`."""

    def __init__(self, text: str, names: Mapping[str, Callable[..., Any]], option: str, seed: int | None) -> None:
        self.text, self.names, self.option, self.seed = text, names, option, seed

    def read(self) -> Any:
        """The object."""
        if len(self.text) > MAX_LENGTH:
            raise ValueError(f"got {self.option} of {len(self.text)} characters, expected at most {MAX_LENGTH}")
        try:
            body = ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self._refuse(f"which is no expression of Python ({error})")
        if not isinstance(body, ast.Call | ast.Name):
            self._refuse(f"in which {_source(body)} is no call of a name")
        return self._value(body)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str()):
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Tuple() | ast.List():
                items = [self._value(item) for item in node.elts]
                return items if isinstance(node, ast.List) else tuple(items)
            case ast.Dict() if None not in node.keys:
                return {self._value(key): self._value(item) for key, item in zip(node.keys, node.values, strict=True)}  # type: ignore[arg-type]
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in _DTYPES:
                return _DTYPES[name]
            case ast.Name(id=name) if name in _DTYPES:
                return _DTYPES[name]
            case ast.Name():
                return self._call(node, [], {})
            case ast.Call(func=func):
                args = [self._value(item) for item in node.args]
                if any(keyword.arg is None for keyword in node.keywords):
                    self._refuse(f"in which {_source(node)} has no names of arguments after **")
                names = [keyword.arg for keyword in node.keywords]
                if len({*names}) < len(names):
                    self._refuse(f"in which {_source(node)} has an argument twice")
                keywords = {str(keyword.arg): self._value(keyword.value) for keyword in node.keywords}
                if isinstance(func, ast.Attribute) and func.attr == "over":
                    outer = self._value(func.value)
                    if not hasattr(outer, "over"):
                        self._refuse(f"in which {_source(func.value)} is no algorithm, so that it is over nothing")
                    return self._made(outer.over, args, keywords, _source(func.value) + ".over")
                return self._call(func, args, keywords)
        return self._refuse(f"in which {_source(node)} is neither a literal nor a call of a known name")

    def _call(self, func: ast.expr, args: list[Any], keywords: dict[str, Any]) -> Any:
        if not isinstance(func, ast.Name):
            self._refuse(f"in which {_source(func)} is no known name")
        name = func.id
        if name not in self.names:
            raise ValueError(
                f"got {self.option}={self.text!r} with the unknown name {name!r}, expected one of "
                f"{', '.join(known for known in self.names if not known.islower())}; {_hint(name, self.names)}"
            )
        make = self.names[name]
        parameters = inspect.signature(make).parameters
        if self.seed is not None and "seed" in parameters and "seed" not in keywords:
            position = list(parameters).index("seed")
            if len(args) <= position or parameters["seed"].kind is inspect.Parameter.KEYWORD_ONLY:
                keywords["seed"] = self.seed
        return self._made(make, args, keywords, name)

    def _made(self, make: Callable[..., Any], args: list[Any], keywords: dict[str, Any], name: str) -> Any:
        signature = inspect.signature(make)
        for keyword in keywords:
            if keyword not in signature.parameters:
                raise ValueError(
                    f"got {self.option}={self.text!r}, in which {name} has the argument {keyword!r}, expected some of "
                    f"{name}{_shown(signature)}; {_hint(keyword, signature.parameters)}"
                )
        try:
            signature.bind(*args, **keywords)
        except TypeError as error:
            raise ValueError(
                f"got {self.option}={self.text!r} ({error}), expected {name}{_shown(signature)}; give {name} what it "
                "needs"
            ) from error
        try:
            return make(*args, **keywords)
        except TypeError as error:  # a value of another type, which the class does not check by itself
            raise ValueError(
                f"got {self.option}={self.text!r} ({error}), expected values that {name}{_shown(signature)} takes; "
                "change them"
            ) from error

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(
            f"got {self.option}={self.text!r}, {why}, expected calls of known names with literals, such as "
            "'Choco(TopK(0.01), step_size=0.04)'; correct the text"
        )


def _hint(name: str, names: Mapping[str, Any]) -> str:
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
