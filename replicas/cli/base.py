"""Code that all commands share: the app, options, exit codes, and the terminal."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperCommand

from replicas.cli.find_run import RunAddress
from replicas.common.foreign import ascii_controls, characters, hanging, one_line
from replicas.control.exit_codes import BAD_CONFIG, BUG, INTERRUPTED, UNAVAILABLE, USAGE
from replicas.errors import BadConfig, Disconnected, ReplicasError, SyncError, UsageError, WorldError

app = typer.Typer(
    name="replicas",
    help="Keep one set of weights in step across many separate torchrun jobs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_PIPED_COLUMNS = 400
"""Width of tables without a terminal: no row is cut."""
_OLD_RANK = re.compile(r"([^/]+/\d+)\.(\d+)")
"""``group/index.rank``, as ``logs`` wrote a rank up to release 0.2."""
_NEGATIVE = re.compile(r"-\d+")


def _complete_target(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the groups and replicas that begin with ``incomplete``, for a shell.

    A shell asks for them to complete a target; each comes with a help text. Asks the
    run, 2 s at most, or if that does not answer reads its config; an empty list on an
    error.

    :param context: the arguments so far, which name the run.
    :returns: (name, help text) each.
    """
    try:
        given = context.params.get
        place = RunAddress(given("config") or given("named"), given("endpoint"), given("token_file"))
        try:
            groups = place.status(timeout_s=2.0).groups
            found = [(group.name, f"group of {len(group.replicas)}") for group in groups]
            found += [(one.name, one.state) for group in groups for one in group.replicas]
        except Disconnected:
            planned = place.config.groups.values() if place.config is not None else ()
            found = [(group.name, f"group of {group.replicas}") for group in planned]
    except (ReplicasError, OSError):
        return []
    return [(name, what) for name, what in found if name.startswith(incomplete)]


def _complete_group(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the groups that begin with ``incomplete``, for a shell to complete one.

    Asks the run, 2 s at most, or if that does not answer reads its config; an empty
    list on an error.

    :param context: the arguments so far, which name the run.
    :returns: (name, help text) each.
    """
    return [(name, what) for name, what in _complete_target(context, incomplete) if "/" not in name]


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_TARGET: dict[str, Any] = {"metavar": "TARGET", "help": "A group, or GROUP/INDEX.", "autocompletion": _complete_target}
TargetArgument = Annotated[str, typer.Argument(**_TARGET)]
OptionalTarget = Annotated[str | None, typer.Argument(**_TARGET)]
OptionalRanks = Annotated[
    str | None, typer.Argument(**{**_TARGET, "help": "A group, GROUP/INDEX or GROUP/INDEX/RANK."})
]


def _checked(group: str) -> str:
    """Return the group's name unchanged; raise BadParameter for ``GROUP=N``.

    typer calls it for ``scale``, which takes group and number as two arguments.
    """
    if "=" in group:
        raise typer.BadParameter(f'"{group}" was read as the group; write: replicas scale {group.replace("=", " ")}')
    return group


GroupArgument = Annotated[
    str, typer.Argument(metavar="GROUP", help="The name of a group.", autocompletion=_complete_group, callback=_checked)
]

_OPTIONAL = (OptionalTarget, OptionalRanks)

_CONFIG: dict[str, Any] = {"metavar": "CONFIG", "help": "The run's TOML file. Default: the run below this folder."}
_FIRST = {"config": Annotated[Path | None, typer.Argument(**_CONFIG)]}
_NAMED = {"named": Annotated[Path | None, typer.Option("--config", "-c", **_CONFIG)]}
_ADDRESS = {
    "endpoint": Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The run's control port, in place of CONFIG; or unix:PATH.")
    ],
    "token_file": Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the run's token, for an --endpoint HOST:PORT.")
    ],
}
ThisRun = Annotated[RunAddress, _FIRST | _NAMED | _ADDRESS]
"""A parameter ``place`` of a :func:`command`: the run, from these options, or from an
argument that follows the others."""
Addressed = Annotated[RunAddress, _NAMED | _ADDRESS]
"""As :data:`ThisRun`, by options alone."""


def command(*, failed: int = UNAVAILABLE) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that turns a function with keyword parameters into a command.

    The wrapped function shows typer the options of its parameter ``place`` instead of
    ``place``, and builds the :class:`RunAddress` from their values. It refuses a config
    file given as a target. If the function raises a library error, the command prints
    the error as one message on stderr, and exits with the error's exit code.

    :param failed: the exit code for a WorldError or SyncError.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        """Return ``body`` wrapped: typer makes its options from the new signature."""
        given = inspect.signature(body, eval_str=True)
        options: dict[str, Any] = {}
        parameters = []
        for name, one in given.parameters.items():
            if name == "place":
                options = one.annotation.__metadata__[0]
                parameters += [one.replace(name=key, annotation=kind, default=None) for key, kind in options.items()]
            else:
                parameters.append(one)
        targets = [one.name for one in parameters if one.annotation in (TargetArgument, GroupArgument, *_OPTIONAL)]
        optional = [one.name for one in parameters if one.annotation in _OPTIONAL]

        @functools.wraps(body)
        def run(**values: Any) -> None:
            """Run the command with the values that typer has parsed.

            :raises typer.Exit: with the exit code of an error, which is printed on
                stderr.
            """
            try:
                if optional:
                    _config_first(values, optional[0])
                if options:
                    values["place"] = place_of(**{option: values.pop(option) for option in options})
                for name in targets:
                    target = values[name] = slashed(values[name])
                    if target is not None and target.endswith(".toml"):
                        raise UsageError(
                            f'"{target}" is not a group or replica', hint="write CONFIG after it, or -c CONFIG"
                        )
                body(**values)
            except ReplicasError as error:
                complain(str(error))
                raise typer.Exit(exit_code_of(error, failed)) from error
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None

        run.__signature__ = given.replace(parameters=parameters)  # type: ignore[attr-defined]  # what typer reads
        return run

    return decorate


def slashed(target: str | None) -> str | None:
    """Return a target in the form ``group/index/rank``.

    ``group/index.rank``, as older releases wrote it, is changed; any other is not.
    """
    return target if target is None else _OLD_RANK.sub(r"\1/\2", target)


def _config_first(values: dict[str, Any], target: str) -> None:
    """Swap two arguments of a command, TARGET and CONFIG, if TARGET is a .toml file.

    So a user may leave TARGET out, and give CONFIG as the only argument.

    :param values: the parsed arguments and options by name, which are changed in place.
    :param target: the name in ``values`` under which TARGET is.
    """
    given = values[target]
    if given is not None and given.endswith(".toml"):
        rest = values["config"]
        values["config"], values[target] = Path(given), None if rest is None else str(rest)


def place_of(
    config: Path | None = None, named: Path | None = None, endpoint: str | None = None, token_file: Path | None = None
) -> RunAddress:
    """Return the run that a command line names; read and request nothing yet.

    :param config: CONFIG given as an argument. :param named: CONFIG given as an option.
    :param endpoint: ``HOST:PORT`` or ``unix:PATH`` of its supervisor.
    :param token_file: file with the run's token.
    :raises UsageError: CONFIG was given twice.
    """
    if config is not None and named is not None:
        raise UsageError("give CONFIG once")
    return RunAddress(config if config is not None else named, endpoint, token_file)


def exit_code_of(error: ReplicasError, failed: int = UNAVAILABLE) -> int:
    """Return the exit code for an error.

    :param failed: the code for a WorldError or SyncError.
    """
    if isinstance(error, BadConfig):
        return BAD_CONFIG
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, Disconnected):
        return UNAVAILABLE
    return failed if isinstance(error, WorldError | SyncError) else BUG


class Screen(Console):
    """The Rich console of all commands; it escapes control characters in any text.

    Text is never read as markup. Unprintable characters are replaced during rendering,
    also in live displays.

    :param to_stderr: draw on stderr, not stdout.
    :param soft_wrap: leave long lines to the terminal.
    """

    def __init__(self, *, to_stderr: bool = False, soft_wrap: bool = False) -> None:
        """Draw on stdout, or on stderr; without a terminal use 400 columns.

        So no row of a table is cut in a file or pipe.

        :param soft_wrap: leave long lines to the terminal.
        """
        super().__init__(stderr=to_stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.size = ConsoleDimensions(_PIPED_COLUMNS, 25)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield Rich's segments, with unprintable characters of texts replaced."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():  # control: Rich's own codes, for live displays
                yield segment
            else:
                yield Segment(characters(segment.text), segment.style)


class Command(TyperCommand):
    """A command that takes a negative number as an argument, not as an option."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # click's own class
        """Parse the arguments; a negative number is one, not an unknown option."""
        ctx.ignore_unknown_options = any(_NEGATIVE.fullmatch(arg) for arg in args)
        return super().parse_args(ctx, args)


def complain(text: str) -> None:
    """Print ``replicas: text`` to stderr, further lines indented; end nothing."""
    print(f"replicas: {hanging(text)}", file=sys.stderr)


def json_text(value: object) -> str:
    """Return the value as indented JSON; values without a JSON form become text."""
    return ascii_controls(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode())


@contextmanager
def patience(doing: str) -> Iterator[Callable[[str], None]]:
    """Context manager: show a progress line on stderr, if that is a terminal.

    Yields a function that changes its text, and does nothing without a terminal. The
    line is removed at the end of the block.

    :param doing: the line's text, such as "waiting", before " ...".
    """
    console = Screen(to_stderr=True)
    if not console.is_terminal:
        yield lambda doing: None
        return
    with console.status(_under_way(doing)) as spinner:
        yield lambda doing: spinner.update(_under_way(doing))


def _under_way(doing: str) -> Text:
    """Return the progress line of an action: ``doing ...``."""
    return Text(f"{one_line(doing)} ...")
