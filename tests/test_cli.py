"""The command line: what it accepts, what it refuses, and how."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import wholebatch.training.bench_run as bench_run
import wholebatch.training.recipe as recipe
from wholebatch.cli import main
from wholebatch.errors import MemoryBudgetError
from wholebatch.training.settings import OF_A_BATCH, TrainingSettings

GIVEN: dict[str, Any] = {
    "data": ("texts/*.txt", "more 😀"),
    "documents": "file",
    "text_column": "body",
    "label_column": "kind",
    "context_length": 64,
    "packing": "off",
    "validation_fraction": 0.2,
    "objective": "masked-lm",
    "model": "a folder",
    "vocabulary_size": 500,
    "lora": 4,
    "dropout": 0.25,
    "dtype": "bfloat16",
    "global_batch_size": 96,
    "micro_batch_size": 8,
    "memory_budget": "2GiB",
    "max_steps": 7,
    "learning_rate": 0.5,
    "schedule": "linear",
    "schedule_unit": "tokens",
    "warm_up": 100.0,
    "final_learning_rate": 0.0,
    "weight_decay": 0.01,
    "clip_norm": 2.0,
    "output_dir": Path("elsewhere"),
    "seed": 11,
    "eval_every": 5,
    "save_every": 3,
    "keep_checkpoints": 4,
    "threads": 1,
    "track": ("wandb", "trackio"),
}
"""Every option that can be set with the others, away from its default."""

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

    def note(settings: TrainingSettings, console: object, resume: Path | None) -> SimpleNamespace:
        calls.append(settings)
        return SimpleNamespace(exit_code=0)

    monkeypatch.setattr(recipe, "train", note)
    return calls


def test_help_does_not_import_torch() -> None:
    """Help answers at once: neither torch nor transformers is loaded for it."""
    for arguments in (["--help"], ["train", "--help"], ["bench", "--help"], ["--version"]):
        command = [sys.executable, "-c", LIST_WHAT_IS_LOADED, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr.strip()) == (0, "[]")


def test_help_names_each_option_with_its_default(
    wholebatch: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # wide enough for one line each
    code, out, _ = wholebatch("train", "--help")
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", out).split())
    assert code == 0
    for field in fields(TrainingSettings):
        assert "--" + field.name.replace("_", "-") in text
        assert " ".join(field.metadata["help"].split()) in text
        if field.default not in (None, ()):
            assert f"[default: {field.default}]" in text
    assert re.findall(r"(Data|Model|Batch|Optimization|Run) (?=--)", text)


def test_each_option_reaches_the_settings(
    wholebatch: Callable[..., tuple[int, str, str]], trained: list[TrainingSettings]
) -> None:
    options = [part for name, value in GIVEN.items() for part in (f"--{name.replace('_', '-')}", *_words(value))]
    assert wholebatch("train", *options)[0] == 0
    assert [asdict(settings) for settings in trained] == [asdict(TrainingSettings()) | GIVEN]
    assert set(GIVEN) == {field.name for field in fields(TrainingSettings)} - {"epochs", "streaming"}
    assert wholebatch("train", "--streaming", "--data", "x", "--max-steps", "3")[0] == 0
    assert trained[1] == TrainingSettings(streaming=True, data=("x",), max_steps=3)
    assert wholebatch("train", "--epochs", "3")[0] == 0
    assert trained[2] == TrainingSettings(epochs=3)


def _words(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, tuple) else [str(value)]


def test_a_file_sets_options_and_flags_override_it(
    wholebatch: Callable[..., tuple[int, str, str]], trained: list[TrainingSettings], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('global-batch-size = 32\ndata = ["a", "b"]\nepochs = 2\n[optimization]\nlearning_rate = 1\n')
    assert wholebatch("train", "--config", str(file), "--max-steps", "9")[0] == 0
    assert trained == [TrainingSettings(global_batch_size=32, data=("a", "b"), max_steps=9, learning_rate=1.0)]


def test_the_printed_config_is_one_that_can_be_read(
    wholebatch: Callable[..., tuple[int, str, str]], trained: list[TrainingSettings], tmp_path: Path
) -> None:
    options = [part for name, value in GIVEN.items() for part in (f"--{name.replace('_', '-')}", *_words(value))]
    code, out, _ = wholebatch("train", *options, "--print-config")
    assert (code, trained) == (0, [])
    file = tmp_path / "printed.toml"
    file.write_text(out)
    wholebatch("train", "--config", str(file))
    assert trained == [TrainingSettings(**GIVEN)]
    assert wholebatch("train", "--config", str(file), "--print-config")[1] == out


def test_a_run_that_goes_on_has_its_own_settings(
    wholebatch: Callable[..., tuple[int, str, str]], trained: list[TrainingSettings], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(TrainingSettings(seed=5, max_steps=7, output_dir=Path("old")).toml())
    assert wholebatch("train", "--resume", str(tmp_path), "--max-steps", "9")[0] == 0
    assert trained == [TrainingSettings(seed=5, max_steps=9)]
    assert wholebatch("train", "--resume", str(tmp_path), "--output-dir", "x") == (
        2,
        "",
        "wholebatch: resume and output_dir: a run goes on in its own folder; leave output_dir out\n",
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("global_batch_size = ", "is not TOML"),
        ("batch_size = 4", "there is no option 'batch_size'"),
        ("global_batch_size = 4.5", "global_batch_size = 4.5 is not a whole number"),
        ("global_batch_size = true", "global_batch_size = True is not a whole number"),
        ('objective = "poetry"', "objective = 'poetry' is not one of 'causal-lm', 'masked-lm', 'classify'"),
        ("data = [1]", "data = [1] is not a list of text"),
        ("max_steps = 1\n[optimization]\nmax-steps = 2", "sets 'max-steps' twice"),
        ("learning_rate = -1", "learning_rate=-1.0: use a number above 0"),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_name(
    wholebatch: Callable[..., tuple[int, str, str]],
    trained: list[TrainingSettings],
    tmp_path: Path,
    content: str,
    complaint: str,
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content)
    code, _, err = wholebatch("train", "--config", str(file))
    assert (code, trained) == (2, [])
    assert complaint in err
    assert wholebatch("train", "--config", str(tmp_path / "none.toml"))[0] == 2
    assert wholebatch("train", "--resume", str(tmp_path / "none"))[0] == 2


def test_the_exit_code_is_that_of_the_run(
    wholebatch: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "train", lambda *_: SimpleNamespace(exit_code=143))
    assert wholebatch("train")[0] == 143

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "train", interrupted)
    assert wholebatch("train") == (130, "", "wholebatch: interrupted\n")


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
    def refuse(*_: object) -> None:
        raise MemoryBudgetError("needs 700 MiB, but memory_budget is 600 MiB")

    monkeypatch.setattr(recipe, "train", refuse)
    assert wholebatch("train") == (2, "", "wholebatch: needs 700 MiB, but memory_budget is 600 MiB\n")


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the user can change is put into one line."""

    def fail(*_: object) -> None:
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


# ---- bench ----

Benched = list[tuple[TrainingSettings, int, Path | None]]


@pytest.fixture
def benched(monkeypatch: pytest.MonkeyPatch) -> Benched:
    """What `bench` was called with; nothing is measured."""
    calls: Benched = []
    monkeypatch.setattr(bench_run, "bench", lambda settings, _, *rest: calls.append((settings, *rest)))
    return calls


def test_help_lists_bench_with_the_options_of_a_batch(
    wholebatch: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert re.search(r"bench +Measure speed and memory of your model and text", wholebatch("--help")[1])
    code, out, _ = wholebatch("bench", "--help")
    listed = {name.replace("-", "_") for name in re.findall(r"--([a-z-]+)", re.sub(r"needs --[a-z-]+", "", out))}
    assert code == 0
    assert {*OF_A_BATCH, "batches", "output", "config"} <= listed
    assert not listed & {"micro_batch_size", "learning_rate", "epochs", "output_dir", "track", "resume", "streaming"}
    assert re.search(r"--batches .*\[default: 3\]", out)


def test_each_option_reaches_the_bench(
    wholebatch: Callable[..., tuple[int, str, str]], benched: Benched, tmp_path: Path
) -> None:
    given = {name: value for name, value in GIVEN.items() if name in OF_A_BATCH}
    assert set(given) == set(OF_A_BATCH)
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", *_words(value))]
    assert wholebatch("bench", *options, "--batches", "7", "--output", "there") == (0, "", "")
    assert benched == [(TrainingSettings(**given), 7, Path("there"))]
    (tmp_path / "run.toml").write_text("max_steps = 9\nglobal_batch_size = 8\n")
    wholebatch("bench", "--config", str(tmp_path / "run.toml"), "--packing", "off")
    assert benched[1] == (TrainingSettings(max_steps=9, global_batch_size=8, packing="off"), 3, None)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--micro-batch-size", "4"], "--micro-batch-size"),
        (["--batches", "2.5"], "2.5"),
        (["--batches", "0"], "batches=0"),
        (["--global-batch-size", "0"], "global_batch_size=0"),
        (["--memory-budget", "7"], "below 1 MiB"),
        (["--data", "no/such/place"], "no/such/place"),
        (["--output", "file"], "output='file'"),
    ],
)
def test_bad_input_to_bench_is_refused_and_leaves_nothing(
    wholebatch: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    code, _, err = wholebatch("bench", *arguments)
    assert code == 2
    assert complaint in err
    assert "Traceback" not in err
    assert os.listdir() == ["file"]


def tiny(folder: Path) -> list[str]:
    """Options of a bench of seconds."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 16} | sizes))
    (folder / "lines.txt").write_text("\n".join(f"{n} binds names " * (1 + n % 3) for n in range(40)))
    given = {"data": "lines.txt", "documents": "line", "model": "config.json", "vocabulary-size": 300, "seed": 1}
    given |= {"context-length": 16, "global-batch-size": 2, "threads": 1, "batches": 1}
    return ["bench", *(part for name, value in given.items() for part in (f"--{name}", str(value)))]


def test_bench_measures_and_prints_what_to_use(
    wholebatch: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The whole command on a tiny model."""
    monkeypatch.chdir(tmp_path)
    code, out, err = wholebatch(*tiny(tmp_path))
    assert (code, err) == (0, "")
    for name in ("1 in order", "whole batch", "1 by length", "2 by length", "auto"):
        assert re.search(rf"^ *(→ )?{name} +\d.*█", out, re.MULTILINE)
    assert max(map(len, out.partition("recommended")[0].splitlines())) <= 100
    assert re.search(
        r"^recommended: \w+.*\nto use it: (wholebatch train .*--micro-batch-size \w+|wb\.Grad.*)$", out, re.M
    )
    assert {file.name for file in Path("runs/bench-1").iterdir()} == {"bench.html", "bench.json"}


def test_bench_stopped_by_ctrl_c_leaves_nothing_behind(
    wholebatch: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the middle of the measurement."""
    monkeypatch.chdir(tmp_path)
    arguments = tiny(tmp_path)
    before = sorted(os.listdir())

    def interrupted(*_: object, say: Callable[[str], None], **__: object) -> None:
        say("1 in order: warming up")
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "compare", interrupted)
    code, _, err = wholebatch(*arguments)
    assert (code, err) == (130, "wholebatch: interrupted\n")
    assert sorted(os.listdir()) == before
