"""How a command's options are shown in groups, and read from the environment. Knows no option."""

from collections.abc import Callable
from typing import Any

import click

ENVIRONMENT = "LLAMAGRAPH_ARG_"


def grouped(*options: Callable, title: str = "") -> Callable:
    """One decorator of several options, shown in their order under a title of the help.

    Each can be set by an environment variable too: LLAMAGRAPH_ARG_ and one of its long names, or
    what its own `envvar` says.
    """

    def decorate(command: Any) -> Any:
        n_before = len(getattr(command, "__click_params__", []))
        for option in reversed(options):
            command = option(command)
        for param in command.__click_params__[n_before:]:
            if isinstance(param, click.Option) and not hasattr(param, "title"):
                param.title = title  # type: ignore[attr-defined]
                own = [param.envvar] if isinstance(param.envvar, str) else []
                param.envvar = variables(param) + own
        return command

    return decorate


def variables(option: click.Option) -> list[str]:
    """LLAMAGRAPH_ARG_CTX_SIZE for --ctx-size; one for each of an option's long names."""
    names = [name[2:] for name in option.opts if name.startswith("--")]
    return [ENVIRONMENT + name.upper().replace("-", "_") for name in names]


class OneText(click.ParamType):
    """Text, also for options that may be repeated: in the environment it is not split at spaces."""

    name = "text"

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]


class GroupedCommand(click.Command):
    """A command whose help shows options under the titles of their groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "title", ""), []).append(record)
        groups["Other"] = groups.pop("", [])
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class LineError(click.ClickException):
    """A wrong use that one line explains."""

    exit_code = 2
