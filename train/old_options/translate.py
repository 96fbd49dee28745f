"""`translated`: a command line with the options of this project in place of old ones, before a parser sees it.

Where an old option has the same meaning under a new name, it works, and one warning for the whole line says how to
write it now. Where it has not, one line says what to do.
"""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from train.job.errors import UsageError
from train.old_options.actions import MATCHA_MODELS, Action, Gone, New, Same, Without, factors, model, resumed
from train.old_options.settings import SETTINGS, algorithm_text
from train.old_options.tables import OPTIONS, POWERGOSSIP, POWERGOSSIP_METHODS


def translated(arguments: Sequence[str], fields: Mapping[str, Any]) -> list[str]:
    """A command line with the options of this project in place of old ones.

    Args:
        arguments: the arguments of the command.
        fields: the options of the script, with their defaults. One of these is never an old one, but for a flag with
            True or False, and `--resume` with one of these.

    Raises:
        UsageError: an old option has no counterpart, or contradicts another option.

    Warns:
        UserWarning: there were old options; says how to write the line now.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept: list[str] = []
    change = _Translation(fields, written=_written)
    for word, values in _options(arguments[:end]):
        name, typed, value = _parts(word, values)
        setting, off = name.removeprefix("no_"), name.startswith("no_")
        if name not in fields and setting in SETTINGS:
            change.add_setting(setting, f"{typed} {value}".strip(), "False" if off else value or "True")
            continue
        action = _own_action(name, value, fields) if name in fields else OPTIONS.get(name)
        if action is None:
            kept += [word, *values]
            change.given[name] = value
        else:
            change.add(name, f"{typed} {value}".strip(), value, action)
    change.finish()
    new = [word for name, value in change.new.items() for word in _words(name, value)]
    return [*kept, *new, *arguments[end:]]


def translated_config(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same for `train.config` of PowerGossip: options of this project by name.

    Args:
        config: keys of PowerGossip or of this project, with values.
        fields: the options of the task, with their defaults.

    Raises, warns: see `translated`.
    """
    change = _Translation(fields, written=lambda name, value: f"{name}={_like(fields.get(name, ''), value)!r}")
    own: dict[str, Any] = {}
    for name, value in config.items():
        action = POWERGOSSIP.get(name)
        # A token task has an option "optimizer" of its own, with other values.
        if action is None or (name in fields and value not in POWERGOSSIP_METHODS):
            own[name] = value
        else:
            change.add(name, f"{name}={value!r}", str(value), action)
    change.given |= {name: str(value) for name, value in own.items()}
    change.finish()
    return own | {name: _like(fields.get(name, ""), value) for name, value in change.new.items()}


@dataclass
class _Translation:
    """What has been read so far: new options, and what there is to say about the old ones.

    Args:
        fields: the options of today, with their defaults.
        written: a new option and its value as text.
    """

    fields: Mapping[str, Any]
    written: Any
    given: dict[str, str] = field(default_factory=dict)
    """The options that were given by their names of today, with their values."""
    settings: dict[str, str] = field(default_factory=dict)
    """Old options that set arguments of an algorithm."""
    typed_settings: list[str] = field(default_factory=list)
    new: New = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    push_sum: tuple[str, New] | None = None
    """SGP's --push_sum as it was typed, and its meaning, which counts where no other option names a method."""

    def add(self, name: str, typed: str, value: str, action: Action) -> None:
        """Take one old option."""
        if isinstance(action, Gone):
            self.problems.append(f"got {typed}, which has no place here: {action.remedy}")
            return
        if isinstance(action, Without):
            self.said.append(f"{typed} is left out, as {action.why}")
            return
        try:
            new = action.write(value)
        except ValueError as error:
            self.problems.append(f"got {typed}: {error}")
            return
        if name == "push_sum":
            self.push_sum = typed, new
        else:
            self._take(typed, new, action.note)

    def add_setting(self, name: str, typed: str, value: str) -> None:
        """Take an option of version 0.1 that set an argument of an algorithm."""
        self.typed_settings.append(typed)
        self.settings[name] = value

    def _write_settings(self) -> None:
        """Turn these into the text of the algorithm."""
        recipe = self.new.get("recipe") or self.given.get("recipe") or self.fields.get("recipe", "")
        typed = " ".join(self.typed_settings)
        try:
            text = algorithm_text(recipe, self.settings)
        except ValueError as error:
            self.problems.append(f"got {typed}: {error}")
            return
        if not text:
            self.said.append(f"{typed} is left out, as it changes nothing")
            return
        if "algorithm" in self.given:
            self.problems.append(f"got {typed} beside algorithm: give the text alone")
        self.new.pop("recipe", None)
        self.new["algorithm"] = text
        self.said.append(f"{typed} is now {self.written('algorithm', text)}")

    def _take(self, typed: str, new: New, note: str = "") -> None:
        own = {*SETTINGS} - {*self.fields}
        if settings := {name: value for name, value in new.items() if name in own}:
            self.settings |= settings
            self.typed_settings.append(typed)
            new = {name: value for name, value in new.items() if name not in settings}
            if not new:
                return
        for name, value in new.items():
            if name not in self.fields and name != "task":
                self.problems.append(f"got {typed}: leave it out, as there is no {self.written(name, value)} here")
            elif self.new.get(name, value) != value:
                other = self.written(name, self.new[name])
                self.problems.append(f"got {typed} beside an option that means {other}: give one of them")
        self.new |= new
        now = " ".join(self.written(name, value) for name, value in new.items())
        self.said.append(f"{typed} is now {now}" if now else f"{typed} is left out, as it is the default")
        if note:
            self.said[-1] += f" ({note})"

    def finish(self) -> None:
        """Raise where there are problems, and warn where there is something to say."""
        if self.push_sum is not None and "recipe" in self.new:
            method = self.written("recipe", self.new["recipe"])
            self.said.append(f"{self.push_sum[0]} is left out beside {method}, which does not use it")
        elif self.push_sum is not None:
            self._take(*self.push_sum)
        if self.settings:
            self._write_settings()
        for name in sorted(set(self.given) & set(self.new)):
            new = self.written(name, self.new[name])
            self.problems.append(f"got an old option that means {new}, and {name} itself: give one of them")
        if str(self.new.get("graph", "")).startswith("matcha") and not {"recipe", "algorithm"} & {
            *self.new,
            *self.given,
        }:
            self.problems.append(
                "got --graphid without --matcha: pass --matcha, or for D-PSGD on this graph "
                "--algorithm 'MATCHA(budget=1.0)'"
            )
        if self.problems:
            raise UsageError("; ".join(self.problems))
        if self.said:
            text = f"got options of another system or version, which work: {'; '.join(self.said)}"
            warnings.warn(text, UserWarning, stacklevel=4)


def _own_action(name: str, value: str, fields: Mapping[str, Any]) -> Action | None:
    """What becomes of an option of today that has a value as of old; None: it has none."""
    if name == "resume" and value in ("", "True", "False"):
        return Same(resumed, "--resume auto")
    if name == "schedule" and value[:1].isdecimal():
        return Same(factors, "--milestones and --milestone-factor")
    if name == "model" and value in MATCHA_MODELS:
        return Same(model, "--model")
    if value not in ("True", "False"):
        return None
    if isinstance(fields[name], bool):
        return Same(lambda value: {name: value == "True"}, "")
    return None


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with the words that follow it."""
    found: list[tuple[str, list[str]]] = []
    for word in arguments:
        is_option = word.startswith("-") and re.fullmatch(r"-[\d.]+(e-?\d+)?", word) is None
        if is_option or not found:
            found.append((word, []))
        else:
            found[-1][1].append(word)
    yield from found


def _parts(word: str, values: Sequence[str]) -> tuple[str, str, str]:
    """Of an option: its name without dashes, the name as it was typed, and its value, joined by blanks."""
    typed, has_value, value = word.partition("=")
    words = [value, *values] if has_value else values
    return typed.lstrip("-").replace("-", "_"), typed, " ".join(words)


def _written(name: str, value: Any) -> str:
    """An option of today with its value, as it is typed."""
    return shlex.join(_words(name, value))


def _words(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", *(value if isinstance(value, tuple) else (str(value),))]


def _like(default: Any, value: Any) -> Any:
    """The text of a value as a value of the type of this default."""
    if isinstance(default, tuple):
        return tuple(int(part) for part in value)
    if isinstance(default, bool):
        return value in (True, "True")
    return type(default)(value)
