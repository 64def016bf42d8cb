"""The command line: parse, call, print.

What is wrong with the input is printed without a traceback, and the exit code is 2. No command imports torch before it
runs, so that `wholebatch --help` answers at once.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from wholebatch.errors import ConfigurationError, WholeBatchError
from wholebatch.training.settings import OF_A_BATCH, OPTIONS, TrainingSettings, read_toml, recorded, settings_of
from wholebatch.training.versions import installed_version

if TYPE_CHECKING:
    from cyclopts import App

_OF_THE_EXTRA = {
    "cyclopts", "datasets", "peft", "plotly", "rich", "safetensors", "tensorboardX", "tokenizers", "transformers",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that `arguments` state (by default those of the process).

    Exit codes: 0; 2 for what is refused, and for a run that gave up; 130 and 143 for one stopped by Ctrl-C or SIGTERM.
    """
    try:
        command_line()(arguments)
    except WholeBatchError as error:
        _refuse(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _OF_THE_EXTRA:
            raise
        _refuse(f"this needs {error.name}, which is not installed: pip install 'wholebatch[train]'")
    except KeyboardInterrupt:
        sys.stderr.write("wholebatch: interrupted\n")
        sys.exit(130)


def _refuse(message: str) -> None:
    sys.stderr.write(f"wholebatch: {message}\n")
    sys.exit(2)


def command_line() -> "App":
    """The commands and their options; those of `train` are the fields of its settings, and `bench` has some of them."""
    from cyclopts import App, Parameter

    app = App(
        name="wholebatch",
        help="You choose the batch. wholebatch makes it fit in memory, and the update is the whole batch's.",
        version=lambda: installed_version("wholebatch"),
        default_parameter=Parameter(converter=_exactly, negative=()),
        suppress_keyboard_interrupt=False,
    )
    _add_train(app)
    _add_bench(app)
    return app


def _add_train(app: "App") -> None:
    from cyclopts import Parameter

    @app.command
    @_with_options(OPTIONS)
    def train(
        *,
        config: Annotated[
            Path | None, Parameter(group="Run", help="TOML file with options; flags override it.")
        ] = None,
        resume: Annotated[
            Path | None, Parameter(group="Run", help="Folder of a run to go on with; flags override its settings.")
        ] = None,
        print_config: Annotated[
            bool, Parameter(group="Run", help="Print all options as TOML, for --config, and stop.")
        ] = False,
        **flags: Any,
    ) -> None:
        """Train a Transformer on text, in whole batches under a memory budget.

        Without options: a small causal language model on Python's own documentation.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        if resume is not None and "output_dir" in given:
            raise ConfigurationError("resume and output_dir: a run goes on in its own folder; leave output_dir out")
        settings = settings_of(
            {} if resume is None else recorded(resume), {} if config is None else read_toml(config), given
        )
        if print_config:
            sys.stdout.write(settings.toml())
            return

        from rich.console import Console

        from wholebatch.training.recipe import train as run

        sys.exit(run(settings, Console(), resume).exit_code)


def _add_bench(app: "App") -> None:
    from cyclopts import Parameter

    @app.command
    @_with_options(OF_A_BATCH)
    def bench(
        *,
        batches: Annotated[int, Parameter(group="Measurement", help="Batches measured, after one to warm up.")] = 3,
        output: Annotated[
            Path | None,
            Parameter(
                group="Measurement",
                help="Folder for bench.json and bench.html; the next free one of runs/bench-1, ... if not named.",
            ),
        ] = None,
        config: Annotated[
            Path | None, Parameter(group="Measurement", help="TOML file with options of train; flags override it.")
        ] = None,
        **flags: Any,
    ) -> None:
        """Measure speed and memory of your model and text at each micro-batch size, side by side; trains nothing.

        The options for data, model and batch are those of train; without options, so are model and text.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        settings = settings_of({} if config is None else read_toml(config), given)

        from rich.console import Console

        from wholebatch.training.bench_run import bench as run

        run(settings, Console(), batches, output)


def _with_options(names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag for each of these settings, in its group; None where a flag is not given."""
    return lambda command: _having_options(command, names)


def _having_options(command: Callable[..., None], names: Iterable[str]) -> Callable[..., None]:
    from cyclopts import Parameter

    signature = inspect.signature(command)
    own = [one for one in signature.parameters.values() if one.kind is inspect.Parameter.KEYWORD_ONLY]
    kinds: Mapping[str, Any] = get_type_hints(TrainingSettings)
    options = []
    for name, option in ((name, OPTIONS[name]) for name in names):
        parameter = Parameter(
            group=option.metadata["group"],
            help=option.metadata["help"],
            consume_multiple=get_origin(kinds[name]) is tuple,
            show_default=_shown(option.default),
        )
        annotated: Any = Annotated[Union[kinds[name], None], parameter]  # noqa: UP007  made at run time
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotated))

    def called(**flags: Any) -> None:
        command(**flags)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = signature.replace(parameters=[*options, *own])  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in (*options, *own)}
    return called


def _shown(default: Any) -> Callable[[Any], str] | Literal[False]:
    """The default as `--help` shows it; nothing where the text tells what happens without the flag."""
    return False if default is None or default == () else lambda _: str(default)


def _exactly(kind: Any, tokens: Sequence[Any]) -> Any:
    """The option's text, as the first of its types that reads it: `4.5` is no whole number, nor rounded to one."""
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], token.value) for token in tokens)
    return _read(kind, tokens[0].value)


def _read(kind: Any, text: str) -> Any:
    for candidate in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        if get_origin(candidate) is Literal:
            if text in get_args(candidate):
                return text
        elif candidate is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        elif candidate is not type(None):
            with suppress(ValueError):
                return candidate(text)
    raise ValueError
