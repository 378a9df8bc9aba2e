"""Gives a command the flags of the process configuration, from the table in `settings.flags`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from policy_service.settings.flags import FLAGS

if TYPE_CHECKING:
    from policy_service.settings.load import LoadedConfig


@dataclass(frozen=True, slots=True)
class ProcessFlags:
    """Flags as given: the configuration file and values by dotted field name."""

    file: str | None = None
    values: Mapping[str, object] = field(default_factory=dict)

    def load(self, environment: Mapping[str, str] | None = None) -> LoadedConfig:
        """The configuration that these flags, the environment and the file make.

        Raises:
            ConfigError: everything that is wrong with them.
        """
        from policy_service.settings.load import load

        return load(file=self.file, environment=os.environ if environment is None else environment, flags=self.values)


def process_options(command: Callable[..., int]) -> Callable[..., None]:
    """Turn `command(flags, ...) -> exit code` into a Typer command with every process flag.

    The parameters of `command` after the first one become options of their own.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    def run(**given: Any) -> None:
        extra = {parameter.name: given.pop(parameter.name) for parameter in own}
        raise typer.Exit(command(_flags(given), **extra))

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([*own, *_parameters()])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def _parameters() -> list[inspect.Parameter]:
    file = Annotated[str | None, typer.Option("--config", help="Configuration file (YAML).", rich_help_panel=_PANEL)]
    more = Annotated[list[str], typer.Option("--set", help="Any other field: name=value.", rich_help_panel=_PANEL)]
    flags = [_parameter(_variable(name), _typed(name), _NONE[FLAGS[name].is_list]) for name in FLAGS]
    return [_parameter("config_file", file, None), *flags, _parameter("more", more, [])]


_PANEL = "Process configuration"
_NONE: Mapping[bool, Any] = {True: [], False: None}


def _typed(name: str) -> Any:
    flag = FLAGS[name]
    metavar = "" if flag.is_switch else None
    option = typer.Option(flag.text, help=flag.help, rich_help_panel=_PANEL, metavar=metavar)
    if flag.is_switch:
        return Annotated[bool | None, option]
    return Annotated[list[str], option] if flag.is_list else Annotated[str | None, option]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _variable(name: str) -> str:
    return name.replace(".", "_")


def _flags(given: Mapping[str, Any]) -> ProcessFlags:
    values: dict[str, object] = {}
    for text in given["more"]:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} has no value; write --set name=value, such as --set store.select_ms=30")
        values[name.strip()] = value
    for name in FLAGS:
        value = given[_variable(name)]
        if value is not None and value != []:
            values[name] = value
    return ProcessFlags(given["config_file"], values)
