"""--help of the training scripts: options in groups, each under the name that it has in the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from gossip_modules import registry
from gossip_modules.methods import METHODS
from train.command_line import read_command_line
from train.job.errors import UsageError
from train.option_groups import groups_of, help_texts
from train.run_config import RunConfig
from train.tasks.images.config import Config
from train.tasks.language_model.config import LanguageModelConfig
from train.tasks.translation.config import TranslationConfig

CONFIGS = [Config, TranslationConfig, LanguageModelConfig]
OTHER_VALUES: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: not value,
    int: lambda value: value * 4 or 4,
    float: lambda value: value / 2 + 0.2,
    tuple: lambda value: (*value, 99),
}


@dataclass(frozen=True)
class OwnConfig(RunConfig):
    """Of a task of a user's own."""

    subject = "own"
    epochs: int = 3
    patience: int = 7
    """Epochs
    without progress."""


def help_of(config_type: type[RunConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        read_command_line(config_type, description="A line\nand another\n\n    $ command", arguments=["--help"])
    assert not end.value.code
    return capsys.readouterr().out


def boxes_of(text: str) -> dict[str, str]:
    """The text in each box by its title; lines are drawn or made of dashes, as the terminal can."""
    boxes: dict[str, str] = {}
    title = ""
    for line in text.splitlines():
        words = " ".join(line.strip("│╭╮╰╯─ ").split())
        if words.endswith(" options"):
            title = words.removesuffix(" options")
            boxes[title] = ""
        elif title and words.strip("-"):
            boxes[title] = f"{boxes[title]} {words}".strip()
    return boxes


@pytest.mark.parametrize("config_type", CONFIGS)
def test_help_shows_every_option_once_in_its_group_and_fits_100_columns(
    config_type: type[RunConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(config_type, monkeypatch, capsys)
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("A line\nand another\n\n    $ command\n")
    boxes = boxes_of(text)
    shown = {
        title: set(re.findall(r"(?<![\w,] )--([a-z-]+)(?= [A-Z\[{]|, --no-)", box)) for title, box in boxes.items()
    }
    expected = {
        heading: {name.replace("_", "-") for name in names} for heading, names in groups_of(config_type).items()
    }
    expected["general"] |= {"preset", "import"}
    for heading, names in expected.items():
        assert names <= shown[heading], heading
        others = set().union(*(names for title, names in expected.items() if title != heading))
        assert not shown[heading] & others, heading
    assert "Only with dpsgd, sgp, osgp." in boxes["gossip"]


@pytest.mark.parametrize("config_type", [*CONFIGS, OwnConfig])
def test_every_option_is_in_one_group_and_has_a_text(config_type: type[RunConfig]) -> None:
    names = [name for group in groups_of(config_type).values() for name in group]
    assert sorted(names) == sorted(field.name for field in fields(config_type))
    assert set(names) == help_texts(config_type).keys() & set(names)
    assert ("task" in groups_of(config_type)) == (config_type is OwnConfig)


@pytest.mark.parametrize("config_type", [TranslationConfig, LanguageModelConfig, OwnConfig])
def test_the_options_of_a_task_do_not_speak_of_images(config_type: type[RunConfig]) -> None:
    assert [name for name, text in help_texts(config_type).items() if "image" in text.lower()] == []


def test_the_options_of_a_task_of_ones_own_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    boxes = boxes_of(help_of(OwnConfig, monkeypatch, capsys))
    assert boxes["task"] == "--patience INT Epochs without progress. (default: 7)"
    assert "--epochs INT Passes over the training data. (default: 3)" in boxes["training"]
    assert "preset" not in boxes["general"]
    assert read_command_line(OwnConfig, description=None, arguments=["--patience", "2"]).patience == 2


@pytest.mark.parametrize("config_type", CONFIGS)
def test_an_option_has_the_name_of_its_field(config_type: type[RunConfig]) -> None:
    expected, changed = config_type(), []
    for option in fields(config_type):
        value = getattr(expected, option.name)
        if not isinstance(value, str) and option.name not in (
            "images_per_node",
            "files",
            "elastic",
            "momentum",
            "second_moment_period",
            "quorum",
            "grace",
        ):
            expected = replace(expected, **{option.name: OTHER_VALUES[type(value)](value)})
            changed.append(option.name)
    assert len(changed) > 25
    for spelt in (lambda name: name, lambda name: name.replace("_", "-")):
        arguments = []
        for name in changed:
            value = getattr(expected, name)
            if isinstance(value, bool):
                arguments.append(f"--{spelt(name)}" if value else f"--no-{spelt(name)}")
            else:
                arguments += [f"--{spelt(name)}", *map(str, value if isinstance(value, tuple) else [value])]
        assert read_command_line(config_type, description=None, arguments=arguments) == expected


def test_overlap_and_delay_may_be_measured() -> None:
    def read(*arguments: str) -> Config:
        return read_command_line(Config, description=None, arguments=arguments)

    assert read("--overlap", "auto", "--wire-dtype", "auto").overlap == "auto"
    assert read("--overlap", "--epochs", "2").overlap is read("--overlap").overlap is True
    assert read("--no-overlap").overlap is read().overlap is False
    assert read("--recipe", "diloco", "--delay", "auto").algorithm == "DiLoCo(sync_every=10, delay='auto')"
    assert read("--delay", "2", "--algorithm", "GASLoC(4).over(Choco(SignNorm(), step_size=0.4))").chosen.text == (
        "GASLoC(sync_every=4, delay=2).over(Choco(compressor=SignNorm(2048), step_size=0.4))"
    )
    for arguments, expected in (
        (("--delay", "auto"), r"got delay='auto' with SGP, expected one of localsgd, diloco.*take --overlap auto"),
        (("--recipe", "noloco", "--delay", "auto"), r"NoLoCo: got delay='auto', expected a number of steps"),
        (("--elastic", "--overlap", "auto"), r"workers that join later have measured no round"),
    ):
        with pytest.raises(UsageError, match=expected):
            read(*arguments)
    with pytest.raises(SystemExit):
        read("--overlap", "maybe")


def test_a_value_out_of_bounds_is_the_users_error() -> None:
    with pytest.raises(UsageError, match=r"^got epochs=0, expected more than 0; see --help$"):
        read_command_line(Config, description=None, arguments=["--epochs", "0"])


def test_help_counts_methods_that_are_registered_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(registry._METHODS, "half", replace(METHODS["sgp"], name="half"))
    assert "Only with dpsgd, sgp, osgp, half." in boxes_of(help_of(Config, monkeypatch, capsys))["gossip"]
