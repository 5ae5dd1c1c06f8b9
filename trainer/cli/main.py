"""The command line ``cowrec``: all commands, and their exit codes.

Commands import what they need when they run, so that ``--help`` is fast.
"""

import logging
import sys
import traceback
from typing import Annotated

import typer

from ..runtime.environment import launched_rank, launched_world_size, log_end, prepare_process
from ..runtime.errors import Interrupted, is_message, message_of
from . import data_commands, demo, experiment_commands, model_commands, train_commands

app = typer.Typer(
    name="cowrec",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)
for commands in (demo, data_commands, train_commands, experiment_commands, model_commands):
    app.add_typer(commands.app)


def _show_version(asked: bool) -> None:
    if asked:
        from ..runtime.environment import library_versions

        print("  ".join(f"{name} {version}" for name, version in library_versions().items()))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Trains click-through-rate models at large batch sizes with CowClip.

    Counts may have a unit, in flags, in --set and as text in TOML: 64K is 65,536, and 1M is 1,024 K.
    """


def main() -> None:
    """Runs the command line.

    Exits with 0 on success, 2 after a message to the user, 130 after Ctrl-C, and 1 after a bug, with its traceback.
    """
    try:
        prepare_process()
        app()
    except Interrupted as stop:
        # All processes stop at the same step, and one of them reports it.
        if launched_rank() == 0 and log_end(logging.INFO, str(stop)):
            print(f"cowrec: {stop}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not is_message(error):
            if log_end(logging.CRITICAL, "a bug ends the command", error):
                traceback.print_exc()
            sys.exit(1)
        rank = f" (rank {launched_rank()})" if launched_world_size() > 1 else ""
        if log_end(logging.CRITICAL, message_of(error)):
            print(f"cowrec{rank}: error: {message_of(error)}", file=sys.stderr)
        sys.exit(2)
