"""The command line: parse, call, print.

What is wrong with the input is printed without a traceback, and the exit code is 2. No command imports torch before it
runs, so that `wholebatch --help` answers at once.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from wholebatch.errors import WholeBatchError
from wholebatch.training.settings import TrainingSettings
from wholebatch.training.versions import installed_version

if TYPE_CHECKING:
    from cyclopts import App

_OF_THE_EXTRA = {"cyclopts", "rich", "safetensors", "tokenizers", "transformers"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that `arguments` state (by default those of the process)."""
    try:
        command_line()(arguments)
    except WholeBatchError as error:
        _refuse(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _OF_THE_EXTRA:
            raise
        _refuse(f"this needs {error.name}, which is not installed: pip install 'wholebatch[train]'")


def _refuse(message: str) -> None:
    sys.stderr.write(f"wholebatch: {message}\n")
    sys.exit(2)


def command_line() -> "App":
    """The commands and their options; the options are the fields of the settings they fill."""
    from cyclopts import App, Parameter

    app = App(
        name="wholebatch",
        help="You choose the batch. wholebatch makes it fit in memory, and the update is the whole batch's.",
        version=lambda: installed_version("wholebatch"),
        default_parameter=Parameter(converter=_exactly),
    )

    defaults = TrainingSettings()

    @app.command
    def train(settings: Annotated[TrainingSettings, Parameter(name="*")] = defaults) -> None:
        """Train a small causal language model on Python's documentation, in whole batches under a memory budget."""
        from rich.console import Console

        from wholebatch.training.recipe import train as run

        run(settings, Console())

    return app


def _exactly(kind: Any, tokens: Sequence[Any]) -> Any:
    """The option's text, as the first of its types that reads it: `4.5` is no whole number, nor rounded to one."""
    text = tokens[0].value
    for candidate in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        if get_origin(candidate) is Literal:
            if text in get_args(candidate):
                return text
        else:
            with suppress(ValueError):
                return candidate(text)
    raise ValueError
