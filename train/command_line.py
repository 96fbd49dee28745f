"""The command line of a training script: its configuration, from a preset if one is named."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import fields, replace
from typing import NoReturn, TypeVar

from train.job.errors import UsageError, leave, own_rank, refuse, usage_errors
from train.job.preemption import ignore_signals
from train.job.world import World
from train.old_options.translate import translated
from train.option_groups import read_groups
from train.run_config import RunConfig
from train.tasks.base import Task
from train.training.elastic.worker import run_elastic
from train.training.process import run

ConfigType = TypeVar("ConfigType", bound=RunConfig)


def main(
    config_type: type[ConfigType], make_task: Callable[[ConfigType, World], Task], *, description: str | None
) -> NoReturn:
    """A training script: run what the command line says, and end this process with its exit code.

    What a user can mend is one line of rank 0, and code 2.

    Args:
        config_type: what is configured.
        make_task: makes what is learnt, given (config, world).
        description: for --help.
    """
    rank = own_rank()
    try:
        with ExitStack() as stack:
            if rank:  # all read the same options: rank 0 prints
                said = io.StringIO()
                stack.enter_context(redirect_stderr(said))
                stack.enter_context(redirect_stdout(said))
            config = read_command_line(config_type, description=description)
        exit_code = (run_elastic if config.elastic else run)(config, make_task)
    except UsageError as error:
        refuse(error, rank)
    except SystemExit as end:
        if rank and end.code:
            refuse(said.getvalue(), rank)
        raise
    except Exception:  # noqa: BLE001 - printed as by the interpreter, which then ends by another way
        sys.excepthook(*sys.exc_info())
        leave(1)
    ignore_signals()
    sys.exit(exit_code)


def read_command_line(
    config_type: type[ConfigType], *, description: str | None, arguments: Sequence[str] | None = None
) -> ConfigType:
    """The configuration that `arguments` describe.

    `--preset NAME`, an entry of `config_type.PRESETS`, sets the defaults, and `--import MODULE` imports a module that
    registers methods; every other option is a field, or one of another system, see `old_options.translate.translated`.

    Args:
        config_type: what is configured.
        description: for --help.
        arguments: the arguments of the command; None: those of this process.

    Raises:
        UsageError: an option has a value that is out of bounds, or does not fit another one; or a module to
            import is not there.
        SystemExit: an option that does not exist, or --help.
    """
    # tyro takes the defaults, and help the methods, before it reads the options, so these two are read first.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", choices=sorted(config_type.PRESETS), default=None)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    known, others = parser.parse_known_args(arguments)
    with usage_errors():
        for module in known.modules:
            importlib.import_module(module)
    preset = config_type.PRESETS[known.preset] if known.preset else {}
    shown = {"import MODULE": "A module that registers methods, which are recipes then; may be given several times."}
    if config_type.PRESETS:
        shown["preset NAME"] = f"Other defaults of the options; one of {', '.join(config_type.PRESETS)}."
    with usage_errors():
        default = replace(config_type(), **preset)
        others = translated(others, {option.name: getattr(default, option.name) for option in fields(default)})
        config = read_groups(default, description=description, arguments=_with_values(others), shown=shown)
        config.check_preset(preset)
        return config


def _with_values(arguments: Sequence[str]) -> list[str]:
    """`--overlap` and `--no-overlap` as an option with a value, which may be auto too."""
    found = []
    for word, following in zip(arguments, [*arguments, "--"][1:], strict=True):
        is_flag = word == "--no-overlap" or (word == "--overlap" and following.startswith("-"))
        found += ["--overlap", str(word == "--overlap")] if is_flag else [word]
    return found
