"""What can be set about a training run. Imports no torch, so that `wholebatch --help` answers at once."""

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from wholebatch.errors import ConfigurationError

Objective: TypeAlias = Literal["causal-lm", "masked-lm", "classify"]
DType: TypeAlias = Literal["float32", "float64", "bfloat16", "float16"]

SETTINGS_FILE = "run.toml"
"""In the folder of a run: what it was started with."""

DEFAULT_STEPS = 150
"""Updates where neither `max_steps` nor `epochs` is set."""

BEFORE_RECORDED = {"packing": "off"}
"""How runs were before they recorded it."""


def _option(default: Any, group: str, text: str) -> Any:
    return field(default=default, metadata={"group": group, "help": text})


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """A training run as the user states it. Each field carries the text that `--help` shows.

    Raises:
        ConfigurationError: A value that cannot be right. The micro-batch size and the memory budget are judged by
            `GradientAccumulator`.
    """

    data: tuple[str, ...] = _option(
        (), "Data", "Files, folders or globs of .txt, .jsonl or .parquet; Python's own documentation if none is named."
    )
    documents: Literal["paragraph", "line", "file"] = _option(
        "paragraph", "Data", "What one document is in a .txt file; a paragraph ends at an empty line."
    )
    text_column: str = _option("text", "Data", "Column of .jsonl and .parquet that holds the text.")
    label_column: str = _option("label", "Data", "Column that holds the class, for classify.")
    context_length: int = _option(128, "Data", "Tokens of an example at most; longer documents are cut.")
    packing: Literal["auto", "on", "off"] = _option(
        "auto",
        "Data",
        "causal-lm: documents end to end in full contexts; auto: on a GPU, where the model keeps them apart.",
    )
    validation_fraction: float = _option(
        0.1, "Data", "Part of the documents held out; which ones is decided by their content alone."
    )
    streaming: bool = _option(
        False, "Data", "Read the data anew in each epoch, in order, instead of holding it in memory; needs --max-steps."
    )

    objective: Objective = _option("causal-lm", "Model", "What is learned: the next token, masked tokens, or a class.")
    model: str = _option(
        "tiny", "Model", "tiny, small (from nothing), a config.json, a folder with a pretrained model, or a hub name."
    )
    vocabulary_size: int = _option(1024, "Model", "Tokens of the tokenizer trained where the model brings none.")
    lora: int = _option(0, "Model", "Rank of LoRA adapters, the rest frozen; 0: all parameters are trained.")
    dropout: float | None = _option(None, "Model", "Dropout probability in place of the model's own.")
    dtype: DType = _option("float32", "Model", "bfloat16 and float16: autocast, the parameters stay in float32.")

    global_batch_size: int = _option(64, "Batch", "Examples of one update.")
    micro_batch_size: int | Literal["auto"] = _option(
        "auto", "Batch", "Examples in one forward and backward pass at most; auto: measured on the first ones."
    )
    memory_budget: int | float | str = _option(
        "auto", "Batch", "Memory for the process (GPU: the device): bytes, 6GiB, a fraction such as 0.9, or auto."
    )

    max_steps: int | None = _option(
        None, "Optimization", f"Updates in all; {DEFAULT_STEPS} where --epochs is not set either."
    )
    epochs: int | None = _option(None, "Optimization", "Passes over the data, instead of --max-steps.")
    learning_rate: float | None = _option(
        None, "Optimization", "Its peak; 6e-3 for tiny, 1e-3 for other models from nothing, 5e-5 pretrained, 2e-4 LoRA."
    )
    schedule: Literal["cosine", "linear", "constant"] = _option(
        "cosine", "Optimization", "How the learning rate falls after the warm-up; set once per update."
    )
    schedule_unit: Literal["examples", "tokens"] = _option(
        "examples", "Optimization", "What the schedule goes by, so that it is the same at another batch size."
    )
    warm_up: float = _option(
        0.1, "Optimization", "Part of the run in which the learning rate rises; from 1 up: examples or tokens."
    )
    final_learning_rate: float = _option(0.1, "Optimization", "At the end, as a part of the peak.")
    weight_decay: float = _option(0.1, "Optimization", "AdamW's, on matrices only.")
    clip_norm: float = _option(1.0, "Optimization", "Largest norm of an update's gradient; 0: not clipped.")

    output_dir: Path | None = _option(
        None, "Run", "Folder of the run; the next free one of runs/1, runs/2, ... if not named."
    )
    seed: int | None = _option(
        None, "Run", "Decides everything that is random; if set, also sizes do not depend on timings. Else 0."
    )
    eval_every: int = _option(0, "Run", "Updates between two evaluations; 0: before the first and after the last.")
    save_every: int = _option(50, "Run", "Updates between two checkpoints; 0: at the end, and when stopped.")
    keep_checkpoints: int = _option(2, "Run", "Checkpoints kept, the newest ones.")
    threads: int | None = _option(None, "Run", "Threads of torch on the CPU; half of the cores if not set.")
    track: tuple[Literal["wandb", "trackio"], ...] = _option(
        (), "Run", "Also log to wandb or trackio, where installed; metrics.jsonl and TensorBoard are always written."
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be right before any work is done."""
        self._check_numbers()
        self._check_together()
        for name, value in self.given().items():
            texts = value if isinstance(value, list) else [value]
            if any("\udc80" <= sign <= "\udcff" for text in texts for sign in str(text)):  # how Python shows such bytes
                raise ConfigurationError(f"{name}={value!r}: a path that is not UTF-8 cannot be recorded")

    def _check_numbers(self) -> None:
        for name in ("global_batch_size", "max_steps", "epochs", "keep_checkpoints", "threads"):
            self._at_least(name, 1)
        for name in ("eval_every", "save_every", "lora", "seed"):
            self._at_least(name, 0)
        self._at_least("context_length", 2)
        self._at_least("vocabulary_size", 260)  # every byte has a token of its own
        self._number("learning_rate", above=0.0)
        self._number("validation_fraction", above=0.0, high=0.9)
        for name in ("warm_up", "weight_decay", "clip_norm"):
            self._number(name, low=0.0)
        for name in ("final_learning_rate", "dropout"):
            self._number(name, low=0.0, high=1.0)
        if isinstance(self.micro_batch_size, int) and self.micro_batch_size < 1:
            raise ConfigurationError(
                f'micro_batch_size={self.micro_batch_size}: use "auto", or a whole number from 1 up'
            )
        if self.seed is not None and self.seed >= 2**63:
            raise ConfigurationError(f"seed={self.seed}: use a whole number from 0 to 2**63 - 1")

    def _check_together(self) -> None:
        if self.max_steps is not None and self.epochs is not None:
            raise ConfigurationError(f"max_steps={self.max_steps} and epochs={self.epochs}: set one of them")
        if self.streaming and self.max_steps is None:
            raise ConfigurationError("streaming: how long the data is, is not known before it is read; set max_steps")
        if self.streaming and (not self.data or self.schedule_unit == "tokens"):
            what = 'schedule_unit="tokens" needs to know all of it' if self.data else "name the files with data"
            raise ConfigurationError(f"streaming: the data is read from files as the run goes on; {what}")
        if self.packing == "on" and self.objective != "causal-lm":
            raise ConfigurationError(
                f'packing="on" with objective={self.objective!r}: only texts for causal-lm can be laid end to end; use '
                '"off" or "auto"'
            )

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is not None and value < low:
            raise ConfigurationError(f"{name}={value}: use a whole number from {low} up")

    def _number(self, name: str, *, low: float = 0.0, high: float = math.inf, above: float | None = None) -> None:
        value = getattr(self, name)
        if value is None or (math.isfinite(value) and low <= value <= high and (above is None or value > above)):
            return
        wanted = f"above {above:g}" if above is not None else f"from {low:g}"
        wanted += f" to {high:g}" if high < math.inf else " up" if above is None else ""
        raise ConfigurationError(f"{name}={value}: use a number {wanted}")

    def given(self) -> dict[str, Any]:
        """The values, without those that are None, as TOML and JSON can hold them."""
        plain = {name: _plain(value) for name, value in dataclasses.asdict(self).items()}
        return {name: value for name, value in plain.items() if value is not None}

    def toml(self) -> str:
        """As a file for `--config`, in the groups of `--help`."""
        lines, given = [], self.given()
        for group, names in option_groups().items():
            lines.append(f"# {group}")
            for name in names:
                comment = f"  # {OPTIONS[name].metadata['help']}"
                shown = f"{name} = {_toml_value(given[name])}" if name in given else f"# {name} ="
                lines.append(shown + comment)
            lines.append("")
        return "\n".join(lines)


OPTIONS: Mapping[str, "dataclasses.Field[Any]"] = {one.name: one for one in dataclasses.fields(TrainingSettings)}
"""Every option by name."""


OF_A_BATCH = (
    "data", "documents", "text_column", "label_column", "context_length", "packing", "validation_fraction",
    "objective", "model", "vocabulary_size", "lora", "dropout", "dtype",
    "global_batch_size", "memory_budget", "seed", "threads",
)  # fmt: skip
"""The options that decide what a batch is and what it costs, but for how it is cut."""


def option_groups() -> dict[str, list[str]]:
    """The names of the options by group, in order."""
    groups: dict[str, list[str]] = {}
    for name, option in OPTIONS.items():
        groups.setdefault(option.metadata["group"], []).append(name)
    return groups


def settings_of(*layers: Mapping[str, Any]) -> TrainingSettings:
    """The defaults, overridden by each layer in turn. Setting one of `max_steps` and `epochs` unsets the other."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for one, other in (("max_steps", "epochs"), ("epochs", "max_steps")):
            if one in layer and other not in layer:
                merged.pop(other, None)
        merged |= layer
    return TrainingSettings(**merged)


def recorded(run: Path) -> dict[str, Any]:
    """The settings of a run to go on with; not its folder, which is known, and may have been moved.

    Raises:
        ConfigurationError: There is no run.
    """
    if not (run / SETTINGS_FILE).exists():
        raise ConfigurationError(f"resume={str(run)!r}: no run there ({SETTINGS_FILE} is missing)")
    given = BEFORE_RECORDED | read_toml(run / SETTINGS_FILE)
    return {name: value for name, value in given.items() if name != "output_dir"}


def read_toml(file: Path) -> dict[str, Any]:
    """The options that a TOML file sets; names with `_` or `-`, in tables or not.

    Raises:
        ConfigurationError: No such file, not TOML, an option that does not exist, or a value of the wrong type.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"config {str(file)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"config {str(file)!r} is not TOML: {error}") from error
    options: dict[str, Any] = {}
    for key, value in _flat(content):
        name = key.replace("-", "_")
        if name not in OPTIONS:
            raise ConfigurationError(f"config {str(file)!r}: there is no option {key!r}; see wholebatch train --help")
        if name in options:
            raise ConfigurationError(f"config {str(file)!r} sets {key!r} twice")
        options[name] = typed(name, value, f"config {str(file)!r}")
    return options


def _flat(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, value


def typed(name: str, value: Any, where: str) -> Any:
    """`value` as the type of an option; a list as a tuple, text as a path.

    Raises:
        ConfigurationError: It is of another type.
    """
    kind = get_type_hints(TrainingSettings)[name]
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for one in kinds:
        if get_origin(one) is tuple and isinstance(value, (list, tuple, str)):
            items = (value,) if isinstance(value, str) else tuple(value)
            if all(_is(item, get_args(one)[0]) for item in items):
                return items
        elif one is Path and isinstance(value, (str, Path)):
            return Path(value)
        elif one is float and type(value) is int and int not in kinds:
            return float(value)
        elif _is(value, one):
            return value
    raise ConfigurationError(f"{where}: {name} = {value!r} is not {' or '.join(_words(one) for one in kinds)}")


def _is(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return type(value) is kind


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        return "a list of " + _words(get_args(kind)[0])
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
    return names.get(kind, "unset")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
