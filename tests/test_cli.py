"""The command line: what it accepts, what it refuses, and how."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

import wholebatch.training.recipe as recipe
from wholebatch.cli import main
from wholebatch.errors import MemoryBudgetError
from wholebatch.training.settings import TrainingSettings

LIST_WHAT_IS_LOADED = """
import sys
from wholebatch.cli import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"torch", "transformers", "tokenizers"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.fixture
def wholebatch(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process: exit code, what was printed, what was complained of."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        printed = capsys.readouterr()
        return int(exit_.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainingSettings]:
    """The settings that `train` was called with; nothing is trained."""
    calls: list[TrainingSettings] = []
    monkeypatch.setattr(recipe, "train", lambda settings, console: calls.append(settings))
    return calls


def test_help_does_not_import_torch() -> None:
    """Help answers at once: neither torch nor transformers is loaded for it."""
    for arguments in (["--help"], ["train", "--help"], ["--version"]):
        command = [sys.executable, "-c", LIST_WHAT_IS_LOADED, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr.strip()) == (0, "[]")


def test_help_names_each_option_with_its_default(wholebatch: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = wholebatch("train", "--help")
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", out).split())
    assert code == 0
    for field in fields(TrainingSettings):
        assert "--" + field.name.replace("_", "-") in text
        assert f"[default: {field.default}]" in text


def test_each_option_reaches_the_settings(
    wholebatch: Callable[..., tuple[int, str, str]], trained: list[TrainingSettings]
) -> None:
    given = {
        "global_batch_size": 96,
        "micro_batch_size": 8,
        "memory_budget": "2GiB",
        "max_steps": 7,
        "learning_rate": 0.5,
        "output_dir": Path("elsewhere"),
        "seed": 11,
    }
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    assert wholebatch("train", *options)[0] == 0
    assert [asdict(settings) for settings in trained] == [given]


def test_without_options_the_defaults_hold(
    wholebatch: Callable[..., tuple[int, str, str]], trained: list[TrainingSettings]
) -> None:
    assert wholebatch("train")[0] == 0
    assert trained == [TrainingSettings()]


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("--micro-batch-size", "auto", "auto"),
        ("--micro-batch-size", "4", 4),
        ("--memory-budget", "0.9", 0.9),
        ("--memory-budget", "1073741824", 1073741824),
        ("--memory-budget", "6GiB", "6GiB"),
        ("--memory-budget", "auto", "auto"),
        ("--learning-rate", "3e-4", 3e-4),
    ],
)
def test_an_option_of_several_kinds_keeps_its_kind(
    wholebatch: Callable[..., tuple[int, str, str]], trained: list[TrainingSettings], option: str, text: str, value: Any
) -> None:
    """A fraction is no number of bytes, and a number of bytes is no fraction."""
    wholebatch("train", option, text)
    found = getattr(trained[0], option[2:].replace("-", "_"))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "--batch-size", "4"], "--batch-size"),
        (["trian"], "train"),
        (["train", "unasked"], "unasked"),
        (["train", "--max-steps"], "--max-steps"),
        (["train", "--max-steps", "2.5"], "2.5"),  # not rounded
        (["train", "--micro-batch-size", "4.5"], "4.5"),
        (["train", "--micro-batch-size", "many"], "many"),
        (["train", "--global-batch-size", "0"], "global_batch_size=0"),
        (["train", "--learning-rate", "nan"], "learning_rate=nan"),
    ],
)
def test_bad_input_is_refused_by_name_with_exit_code_2(
    wholebatch: Callable[..., tuple[int, str, str]],
    trained: list[TrainingSettings],
    arguments: list[str],
    complaint: str,
) -> None:
    code, out, err = wholebatch(*arguments)
    assert (code, out, trained) == (2, "", [])
    assert complaint in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--micro-batch-size", "0"], "micro_batch_size=0"),
        (["--memory-budget", "7"], "below 1 MiB"),
        (["--memory-budget", "1.5"], "memory_budget=1.5"),
        (["--memory-budget", "lots"], "memory_budget='lots'"),
    ],
)
def test_what_the_library_refuses_is_printed_without_a_traceback(
    wholebatch: Callable[..., tuple[int, str, str]], tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    code, _, err = wholebatch("train", *arguments, "--output-dir", str(tmp_path))
    assert code == 2
    assert err.startswith("wholebatch: ")
    assert complaint in err
    assert "Traceback" not in err


def test_an_error_of_the_run_keeps_its_numbers(
    wholebatch: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(settings: TrainingSettings, console: object) -> None:
        raise MemoryBudgetError("needs 700 MiB, but memory_budget is 600 MiB")

    monkeypatch.setattr(recipe, "train", refuse)
    assert wholebatch("train") == (2, "", "wholebatch: needs 700 MiB, but memory_budget is 600 MiB\n")


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the user can change is put into one line."""

    def fail(settings: TrainingSettings, console: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(recipe, "train", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


@pytest.mark.parametrize("missing", ["cyclopts", "rich.console", "wholebatch.training.recipe"])
def test_a_missing_extra_says_what_to_install(
    wholebatch: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "wholebatch.training.recipe":  # imported anew, it finds no transformers
        monkeypatch.delitem(sys.modules, missing)
        monkeypatch.delitem(sys.modules, "wholebatch.training.model")
        missing = "transformers"
    monkeypatch.setitem(sys.modules, missing, None)
    code, _, err = wholebatch("train")
    assert code == 2
    assert err == f"wholebatch: this needs {missing}, which is not installed: pip install 'wholebatch[train]'\n"


def test_a_missing_module_of_our_own_is_no_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wholebatch.training.recipe", None)
    with pytest.raises(ModuleNotFoundError):
        main(["train"])


def test_version_is_the_installed_one(
    wholebatch: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", {"wholebatch": "1.2.3"}.__getitem__)
    assert wholebatch("--version") == (0, "1.2.3\n", "")
