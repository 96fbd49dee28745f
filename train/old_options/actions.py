"""What becomes of an option of another system: it has a new name, it changes nothing, or it has no counterpart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

New: TypeAlias = "dict[str, Any]"
"""Options of this project by name, such as {"graph": "ring"}; a value is a string, a bool or a tuple of strings."""


@dataclass(frozen=True)
class Same:
    """The option has another name here, or other values of the same meaning.

    Args:
        write: the new options that a value stands for; none where it is the default. Raises ValueError, with the
            remedy, for a value that has no counterpart.
        shown: the new options, for people.
        note: a difference in the meaning of other options, which the warning adds.
    """

    write: Callable[[str], New]
    shown: str
    note: str = ""

    def __str__(self) -> str:
        return f"write {self.shown}{f'; {self.note}' if self.note else ''}"


@dataclass(frozen=True)
class Without:
    """The option changes nothing that is learnt, so that it is left out.

    Args:
        why: the reason, as a clause.
    """

    why: str

    def __str__(self) -> str:
        return f"leave it out: {self.why}"


@dataclass(frozen=True)
class Gone:
    """The option has no counterpart of the same meaning.

    Args:
        remedy: what to do instead, as an imperative clause.
    """

    remedy: str

    def __str__(self) -> str:
        return self.remedy


Action: TypeAlias = Same | Without | Gone


def named(new: str) -> Same:
    """The same value under another name."""
    return Same(lambda value: {new: value}, f"--{new.replace('_', '-')}")


def one_of(new: str, names: Mapping[str, str | None]) -> Same:
    """Values under other names; None: the default."""

    def write(value: str) -> New:
        if value not in names:
            raise ValueError(f"pass one of {', '.join(names)}, or --{new.replace('_', '-')} with a name of --help")
        chosen = names[value]
        return {} if chosen is None else {new: chosen}

    shown = ", ".join(f"{old}: {'(left out)' if name is None else name}" for old, name in names.items())
    return Same(write, f"--{new.replace('_', '-')} ({shown})")


def flag(on: New, off: New | None, shown: str, note: str = "") -> Same:
    """True or False; an option without a value is True."""

    def write(value: str) -> New:
        if value not in ("", "True", "False"):
            raise ValueError("pass True or False")
        return (off or {}) if value == "False" else on

    return Same(write, shown, note)


def factors(value: str) -> New:
    """SGP's --schedule: epoch factor epoch factor ..."""
    numbers = value.split()
    epochs, factors = numbers[::2], numbers[1::2]
    if len(numbers) % 2 or not numbers or len({float(factor) for factor in factors}) != 1:
        raise ValueError("pass --milestones EPOCH ... and --milestone-factor, one factor for all")
    return {"milestones": tuple(epochs), "milestone_factor": factors[0]}


def peers(value: str) -> New:
    """SGP's --peers_per_itr_schedule: epoch peers epoch peers ..."""
    numbers = value.split()
    if len(numbers) % 2 or not all(number.isdecimal() for number in numbers):
        raise ValueError("pass --peers-per-itr 0:1,30:2, pairs of an epoch and a number of peers")
    return {"peers_per_itr": ",".join(map(":".join, zip(numbers[::2], numbers[1::2], strict=True)))}


def staleness(value: str) -> New:
    """SGP's --synch_freq: the forwards for which a round may be late."""
    if not value.isdecimal():
        raise ValueError("pass a number of steps")
    return {} if int(value) == 0 else {"max_staleness": value}


def resumed(value: str) -> New:
    """--resume of SGP, True or False, and of dpwa, without a value."""
    return {} if value == "False" else {"resume": "auto"}


def only(expected: Collection[str], remedy: str) -> Same:
    """Values that name the default; others are refused."""

    def write(value: str) -> New:
        if value not in expected:
            raise ValueError(remedy)
        return {}

    return Same(write, f"(left out; other values: {remedy})")


def powergossip_task(value: str) -> New:
    """PowerGossip's task, whose network for text was an LSTM."""
    if value == "Cifar":
        return {"dataset": "cifar10", "model": "resnet20"}
    if value == "LSTM":
        return {"task": "language_model", "model": "lstm"}
    raise ValueError("pass Cifar or LSTM, or a task of this project: images, translation, language_model")


def model(value: str) -> New:
    """MATCHA's --model: networks that are not here."""
    raise ValueError(
        f"pass --model resnet20 or cnn: the network that MATCHA calls {value} is not here; to train it, give it to "
        "GossipDataParallel, or to gossip_modules.communicator, in a script of yours"
    )


MATCHA_MODELS = ("res", "ResNet", "VGG", "wrn", "mlp")
"""The values of MATCHA's --model."""
