"""The command line of a training script: its configuration, from a preset if one is named."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import tyro

from train.run_config import RunConfig

ConfigType = TypeVar("ConfigType", bound=RunConfig)


def read_command_line(
    config_type: type[ConfigType], *, description: str | None, arguments: Sequence[str] | None = None
) -> ConfigType:
    """The configuration that `arguments` describe.

    `--preset NAME`, an entry of `config_type.PRESETS`, sets the defaults; every other option is a field.

    Args:
        config_type: what is configured.
        description: for --help.
        arguments: of the command; None: those of this process.
    """
    # tyro takes the defaults before it reads the options, so this one is read first.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", choices=sorted(config_type.PRESETS), default=None)
    known, others = parser.parse_known_args(arguments)
    preset = config_type.PRESETS[known.preset] if known.preset else {}
    default = replace(config_type(), **preset)
    if config_type.PRESETS:
        names = ", ".join(config_type.PRESETS)
        description = f"{description or ''}\n--preset NAME: other defaults of the options; one of {names}."
    return tyro.cli(config_type, description=description, args=others, default=default)
