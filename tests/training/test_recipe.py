"""Short training runs, from the settings to the saved model."""

import errno
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
)

from wholebatch.errors import ConfigurationError, MemoryBudgetError, TooManySkippedBatchesError
from wholebatch.training import checkpoint, data, loop
from wholebatch.training.data import load_corpus, python_documentation
from wholebatch.training.documents import Document
from wholebatch.training.order import Drawn, Shuffled
from wholebatch.training.recipe import train
from wholebatch.training.run_report import RunReport, arithmetic
from wholebatch.training.settings import TrainingSettings, read_toml, settings_of

STEPS = 4

Run = Callable[..., tuple[RunReport, str]]


def trained(settings: TrainingSettings, resume: Path | None = None) -> tuple[RunReport, str]:
    """A run: its report, and what it printed."""
    out = io.StringIO()
    return train(settings, Console(file=out, width=120), resume), out.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunReport, str]:
    """A run of a few updates on Python's documentation."""
    folder = tmp_path_factory.mktemp("runs") / "nested" / "first"
    return trained(TrainingSettings(max_steps=STEPS, micro_batch_size=16, memory_budget="8GiB", output_dir=folder))


@pytest.fixture(scope="module")
def corpus() -> Any:
    return load_corpus(map(Document, python_documentation()), TrainingSettings())


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run of seconds: a Llama of a few thousand parameters, on 40 lines."""
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    lines = [f"The statement number {number} binds {number % 7} names" for number in range(40)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    return {
        "data": (str(tmp_path / "lines.txt"),),
        "documents": "line",
        "model": str(tmp_path / "config.json"),
        "context_length": 16,
        "vocabulary_size": 300,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "learning_rate": 1e-2,
        "threads": 1,
        "output_dir": tmp_path / "run",
    }


def lines_of(folder: Path, part: str = "train") -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["part"] == part]


def parameters(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return torch.cat([parameter.flatten() for parameter in model.parameters()]).detach()


# ---- One run ----


def test_the_validation_loss_falls(run: tuple[RunReport, str]) -> None:
    """It starts near the price of knowing nothing, the logarithm of the vocabulary's size."""
    report, _ = run
    assert report.validation_before["loss"] == pytest.approx(math.log(1024), abs=0.4)
    assert report.validation_after["loss"] < report.validation_before["loss"] - 0.5


def test_what_is_saved_is_what_was_trained(run: tuple[RunReport, str], corpus: Any) -> None:
    """Loaded again and evaluated by one plain pass, the model has the reported loss; the tokenizer reads the same."""
    report, _ = run
    for name in ("last", "best"):
        model = AutoModelForCausalLM.from_pretrained(Path(report.folder, name)).eval()
        batch = corpus.objective.collate([Drawn(example, 0) for example in corpus.validation])
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        assert float(loss) == pytest.approx(report.validation_after["loss"], abs=1e-5)
        tokenizer = AutoTokenizer.from_pretrained(Path(report.folder, name))
        assert tokenizer.encode("The yield") == corpus.objective.tokenizer.encode("The yield")
        assert tokenizer.decode(tokenizer.encode("The yield"), skip_special_tokens=True) == "The yield"


def test_the_totals_are_those_of_the_batches(run: tuple[RunReport, str], corpus: Any) -> None:
    """64 examples per update, in the order that the seed decides; each predicts all its tokens but the first."""
    report, _ = run
    seen = [len(drawn.example.ids) for drawn in Shuffled(corpus.train, 0).epoch(0, 0)][: 64 * STEPS]
    assert (report.updates.num_units, report.updates.num_tokens) == (sum(seen) - len(seen), sum(seen))
    assert sum(report.updates.micro_batch_sizes) == 64
    assert max(report.updates.micro_batch_sizes) <= 16
    assert report.updates.num_tokens <= report.updates.padded_tokens < 1.05 * report.updates.num_tokens
    assert (report.updates.batches, report.updates.skipped_batches) == (STEPS, 0)
    assert report.guess == f"unigram entropy {corpus.guess_value:.3f}"


def test_the_report_is_complete(run: tuple[RunReport, str]) -> None:
    report, _ = run
    folder = Path(report.folder)
    figures = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert figures.keys() == {*asdict(report), "within_memory_budget"}
    assert figures["updates"]["gradient_accumulation_steps"] == len(report.updates.micro_batch_sizes)
    assert figures["updates"]["tokens_per_second"] == report.updates.tokens_per_second > 0
    assert figures["settings"] == report.settings.given()
    assert figures["versions"].keys() == {"python", "wholebatch", "torch", "transformers", "tokenizers"}
    if report.updates.peak_memory_bytes is not None:  # it is None where the system does not tell
        assert 50 * 2**20 < report.updates.peak_memory_bytes < 8 * 2**30
        assert figures["within_memory_budget"] is True
    readable = (folder / "report.md").read_text(encoding="utf-8")
    for figure in (
        "64 examples = ",
        "with padding 1.0",
        f"loss {report.validation_before['loss']:.3f} nats per token",
        f"loss {report.validation_after['loss']:.3f} nats per token",
        report.guess,
        "memory budget | 8,192 MiB",
    ):
        assert figure in readable


def test_the_arithmetic_and_the_losses_are_printed(run: tuple[RunReport, str]) -> None:
    report, printed = run
    assert f"{arithmetic(report.updates.micro_batch_sizes)}\n" in printed
    assert f"4 updates of 64 examples ({4 * 64 / report.num_train_examples:.3g} epochs)" in printed
    assert "learning rate up to 0.006, cosine" in printed
    assert f"before training: loss {report.validation_before['loss']:.3f} nats per token ({report.guess})\n" in printed
    assert f"after training: loss {report.validation_after['loss']:.3f} nats per token ({report.guess})\n" in printed
    assert f"to train longer: wholebatch train --resume {report.folder} --max-steps {2 * STEPS}\n" in printed


def test_each_update_has_a_line_in_the_log(run: tuple[RunReport, str]) -> None:
    report, _ = run
    lines = lines_of(Path(report.folder))
    assert [line["update"] for line in lines] == list(range(1, STEPS + 1))
    assert sum(line["count"] for line in lines) == report.updates.num_units
    assert all(line["gradient_norm"] > 0 and line["skipped"] is None for line in lines)
    validation = lines_of(Path(report.folder), "validation")
    assert [(line["update"], line["loss"]) for line in validation] == [
        (0, report.validation_before["loss"]),
        (STEPS, report.validation_after["loss"]),
    ]
    assert list(Path(report.folder, "tensorboard").iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cut_does_not_change_the_training(small: dict[str, Any], tmp_path: Path, dtype: str) -> None:
    """At micro-batch 1, 3 and in one pass a run ends in the same model, but for rounding."""
    ends = []
    for size in (1, 3, 4):
        folder = tmp_path / str(size)
        trained(
            TrainingSettings(**small | {"micro_batch_size": size, "max_steps": 3, "output_dir": folder, "dtype": dtype})
        )
        ends.append(parameters(folder / "last"))
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert all(float((end - ends[-1]).norm() / ends[-1].norm()) < tolerance for end in ends)


def test_float16_learns_too(small: dict[str, Any]) -> None:
    """A few updates at most are skipped while the scaler looks for its scale."""
    given = small | {"dtype": "float16", "model": "tiny", "max_steps": 12, "learning_rate": 1e-3}
    report, _ = trained(TrainingSettings(**given))
    assert report.updates.skipped_batches < 4
    assert report.validation_after["loss"] < report.validation_before["loss"] - 0.5


def test_masked_tokens_are_learned_from_nothing(small: dict[str, Any]) -> None:
    report, _ = trained(TrainingSettings(**small | {"objective": "masked-lm", "model": "tiny", "max_steps": 6}))
    assert report.validation_after["loss"] < report.validation_before["loss"]
    AutoModelForMaskedLM.from_pretrained(Path(report.folder, "best"))


def test_classes_are_learned_and_named(small: dict[str, Any], tmp_path: Path) -> None:
    """Whether a line speaks of cats or of dogs: all held out are told right in the end."""
    rows = [{"body": f"{animal} number {n} sleeps", "kind": animal} for n in range(60) for animal in ("cat", "dog")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = small | {
        "data": (str(tmp_path / "rows.jsonl"),),
        "objective": "classify",
        "model": "tiny",
        "text_column": "body",
        "label_column": "kind",
        "max_steps": 25,
        "global_batch_size": 16,
        "micro_batch_size": 8,
        "learning_rate": 1e-3,
        "dropout": 0.0,
    }
    report, printed = trained(TrainingSettings(**given))
    assert report.validation_after["accuracy"] == 1.0
    assert "always the most frequent class: accuracy" in printed
    assert "nats per example" in printed
    assert "2 classes: cat, dog\n" in printed
    model = AutoModelForSequenceClassification.from_pretrained(Path(report.folder, "best"))
    assert model.config.id2label == {0: "cat", 1: "dog"}


def test_a_stream_is_trained_on_without_a_length(small: dict[str, Any]) -> None:
    report, printed = trained(TrainingSettings(**small | {"streaming": True, "max_steps": 11}))
    held_out, seen = report.num_validation_examples, 40 - report.num_validation_examples
    sizes = [line["num_examples"] for line in lines_of(Path(report.folder))]
    full, rest = divmod(seen, 4)
    epoch = [4] * full + ([rest] if rest else [])
    assert (held_out > 0, sizes) == (True, (epoch * 2)[:11])
    assert "lines.txt (1 file): examples of at most 16 tokens to train on" in printed
    assert "so few are held out that their loss says little" in printed


# ---- Going on ----


def test_longer_than_it_was(small: dict[str, Any]) -> None:
    first, _ = trained(TrainingSettings(**small | {"max_steps": 3}))
    folder = Path(first.folder)
    report, printed = trained(TrainingSettings(**small | {"max_steps": 5}), folder)
    assert "going on after update 3, 12 examples (update-00000003)" in printed
    assert "changed: max_steps 3 -> 5" in printed
    assert [line["update"] for line in lines_of(folder)] == [1, 2, 3, 4, 5]
    assert report.updates.batches == 5
    assert report.validation_before == first.validation_before


def as_if_stopped_after(update: int, folder: Path) -> None:
    for later in (folder / "checkpoints").iterdir():
        if later.name > f"update-{update:08d}":
            shutil.rmtree(later)


def test_another_batch_size_goes_on_with_the_same_example(small: dict[str, Any]) -> None:
    """It says so, and ends after the same examples, each of them seen as often."""
    given = small | {"epochs": 2, "save_every": 1, "keep_checkpoints": 99}
    whole, _ = trained(TrainingSettings(**given))
    folder, before = Path(whole.folder), lines_of(Path(whole.folder))
    as_if_stopped_after(3, folder)
    report, printed = trained(TrainingSettings(**given | {"global_batch_size": 6}), folder)
    assert "going on after update 3, 12 examples" in printed
    assert "changed: global_batch_size 4 -> 6" in printed
    lines = lines_of(folder)
    assert [line["examples_seen"] for line in lines[:5]] == [4, 8, 12, 18, 24]
    assert lines[-1]["examples_seen"] == before[-1]["examples_seen"] == 2 * report.num_train_examples
    assert report.updates.num_tokens == whole.updates.num_tokens
    assert len(lines) < len(before)
    rates = {line["examples_seen"]: line["learning_rate"] for line in before}
    following = {line["examples_seen"]: line["learning_rate"] for line in lines[4:]}
    both = [(rates[seen], following[seen]) for seen in rates.keys() & following.keys()]
    assert both
    assert all(following_rate >= rate for rate, following_rate in both)  # set at the beginning of a larger update


def test_another_micro_batch_size_has_the_same_course(small: dict[str, Any], tmp_path: Path) -> None:
    """In float64, without dropout, to 1e-9: the same schedule, the same order."""
    given = small | {"dtype": "float64", "dropout": 0.0, "max_steps": 8, "save_every": 4, "keep_checkpoints": 9}
    folders = [Path(trained(TrainingSettings(**given | {"output_dir": tmp_path / name}))[0].folder) for name in "ab"]
    as_if_stopped_after(4, folders[1])
    changed = {"micro_batch_size": 1, "memory_budget": "7GiB", "output_dir": folders[1]}
    trained(TrainingSettings(**given | changed), folders[1])
    logs = [lines_of(folder) for folder in folders]
    for name in ("learning_rate", "num_tokens", "examples_seen"):
        assert [line[name] for line in logs[0]] == [line[name] for line in logs[1]]
    assert [line["micro_batch_size"] for line in logs[1]] == [2] * 4 + [1] * 4
    ends = [AutoModelForCausalLM.from_pretrained(folder / "last", dtype=torch.float64) for folder in folders]
    for one, other in zip(*(end.parameters() for end in ends), strict=True):
        assert float((one - other).detach().abs().max()) <= 1e-9


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 4}, r"cannot change seed \(None there, 4 now\)"),
        ({"objective": "masked-lm", "model": "tiny"}, "cannot change model .*, objective"),
        ({"context_length": 8}, r"cannot change context_length \(16 there, 8 now\)"),
    ],
)
def test_what_a_run_cannot_change_is_refused(small: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    report, _ = trained(TrainingSettings(**small | {"max_steps": 1}))
    with pytest.raises(ConfigurationError, match=message):
        trained(TrainingSettings(**small | {"max_steps": 1} | changed), Path(report.folder))


def test_other_data_is_refused(small: dict[str, Any]) -> None:
    report, _ = trained(TrainingSettings(**small | {"max_steps": 1}))
    file = Path(small["data"][0])
    text = file.read_text()
    file.write_text(text.replace("number 3 ", "number three "))
    with pytest.raises(ConfigurationError, match="the data is not what it was"):
        trained(TrainingSettings(**small | {"max_steps": 2}), Path(report.folder))
    with pytest.raises(ConfigurationError, match=r"cannot change validation_fraction \(0\.1 there, 0\.2 now\)"):
        trained(TrainingSettings(**small | {"max_steps": 2, "validation_fraction": 0.2}), Path(report.folder))
    file.unlink()
    with pytest.raises(ConfigurationError, match="matches no file"):
        trained(TrainingSettings(**small | {"max_steps": 2}), Path(report.folder))
    file.write_text(text)
    trained(TrainingSettings(**small | {"max_steps": 2}), Path(report.folder))


def test_a_folder_that_holds_a_run_is_not_written_over(small: dict[str, Any]) -> None:
    report, _ = trained(TrainingSettings(**small | {"max_steps": 1}))
    before = (Path(report.folder) / "metrics.jsonl").read_text()
    with pytest.raises(ConfigurationError, match=r"holds a run: go on with it \(--resume"):
        trained(TrainingSettings(**small | {"max_steps": 1}))
    assert (Path(report.folder) / "metrics.jsonl").read_text() == before


def test_two_processes_do_not_train_in_one_folder(small: dict[str, Any]) -> None:
    report, _ = trained(TrainingSettings(**small | {"max_steps": 1}))
    holds = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); input()"
    lock = Path(report.folder, ".lock")
    with subprocess.Popen([sys.executable, "-c", holds, lock], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match="another process is training there"):
            trained(TrainingSettings(**small | {"max_steps": 2}), Path(report.folder))
        other.kill()
    trained(TrainingSettings(**small | {"max_steps": 2}), Path(report.folder))


def test_without_a_folder_the_next_free_one_is_taken(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = TrainingSettings(**small | {"max_steps": 1, "output_dir": None})
    assert [trained(given)[0].folder for _ in range(2)] == ["runs/1", "runs/2"]


def test_adapters_go_on_too(small: dict[str, Any]) -> None:
    first, _ = trained(TrainingSettings(**small | {"max_steps": 2, "lora": 2}))
    report, _ = trained(TrainingSettings(**small | {"max_steps": 4, "lora": 2}), Path(first.folder))
    assert 0 < report.num_trainable < report.num_parameters
    assert report.validation_after["loss"] < first.validation_after["loss"]


def test_weight_decay_and_dropout_can_be_set_anew(small: dict[str, Any], tmp_path: Path) -> None:
    """What the console says was changed was changed: each leads to another model."""
    ends = []
    for number, changed in enumerate(({}, {"weight_decay": 50.0}, {"dropout": 0.9})):
        given = small | {"output_dir": tmp_path / str(number), "max_steps": 2, "seed": 0}
        folder = Path(trained(TrainingSettings(**given))[0].folder)
        _, printed = trained(TrainingSettings(**given | {"max_steps": 4} | changed), folder)
        assert all(f"changed: {name}" in printed for name in changed)
        ends.append(parameters(folder / "last"))
    assert all(float((end - ends[0]).norm()) > 1e-3 for end in ends[1:])


def stopped_after(update: int, settings: TrainingSettings) -> tuple[RunReport, str]:
    """As by Ctrl-C in the middle of that update."""
    updated = loop.Training._update

    def interrupted(training: loop.Training, batch: Any, after: Any) -> None:
        if after.updates == update:
            os.kill(os.getpid(), signal.SIGINT)
        updated(training, batch, after)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop.Training, "_update", interrupted)
        return trained(settings)


def test_a_signal_after_the_end_stops_nothing(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = loop.Training.run

    def late(training: loop.Training, stop: Any) -> None:
        run(training, stop)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop.Training, "run", late)
    report, printed = trained(TrainingSettings(**small | {"max_steps": 2}))
    assert (report.exit_code, report.stopped_by) == (0, None)
    assert "after training: loss" in printed


def test_what_is_reported_after_training_was_measured_then(small: dict[str, Any]) -> None:
    """Of a run that was stopped, nothing was measured at its end; gone on with and complete, it is."""
    first, printed = stopped_after(4, TrainingSettings(**small | {"max_steps": 9}))
    folder = Path(first.folder)
    assert (first.exit_code, first.stopped_by, first.validation_after) == (130, "SIGINT", {})
    assert "stopped by SIGINT after update 4 of 9; a checkpoint, and the model so far (last), are saved" in printed
    stopped = parameters(folder / "last")
    report, printed = trained(TrainingSettings(**small | {"max_steps": 4}), folder)
    assert "nothing is left to train: 4 updates are done" in printed
    validation = lines_of(folder, "validation")
    assert [line["update"] for line in validation] == [0, 4]
    assert report.validation_after["loss"] == validation[-1]["loss"] != report.validation_before["loss"]
    assert torch.equal(parameters(folder / "last"), stopped)
    again, _ = trained(TrainingSettings(**small | {"max_steps": 4}), folder)
    assert again.validation_after == report.validation_after
    assert len(lines_of(folder, "validation")) == 2


def test_the_best_model_is_of_the_course_that_was_kept(small: dict[str, Any]) -> None:
    """Of updates that were left behind, or with its folder gone, it is looked for anew."""
    given = small | {"max_steps": 8, "save_every": 1, "eval_every": 1, "keep_checkpoints": 99, "seed": 2}
    folder = Path(trained(TrainingSettings(**given))[0].folder)
    measured = {line["update"]: line["loss"] for line in lines_of(folder, "validation")}
    as_if_stopped_after(4, folder)
    report, printed = trained(TrainingSettings(**given | {"max_steps": 4}), folder)
    assert "is not of this course" in printed
    assert report.best == (pytest.approx(measured[4]), 4)
    assert torch.equal(parameters(folder / "best"), parameters(folder / "last"))
    shutil.rmtree(folder / "best")
    report, _ = trained(TrainingSettings(**given | {"max_steps": 4}), folder)
    assert (folder / "best" / "model.safetensors").exists()


def test_a_run_made_longer_says_what_becomes_of_the_learning_rate(small: dict[str, Any]) -> None:
    report, _ = trained(TrainingSettings(**small | {"max_steps": 2}))
    _, printed = trained(TrainingSettings(**small | {"max_steps": 6}), Path(report.folder))
    assert "24 examples in all, 8 before: the learning rate follows the new course" in printed


def test_classes_that_were_renamed_are_other_data(small: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"text": f"{n} {animal}", "label": animal} for n in range(40) for animal in ("cat", "dog")]
    file.write_text("\n".join(map(json.dumps, rows)))
    given = small | {"data": (str(file),), "objective": "classify", "model": "tiny", "max_steps": 1}
    report, _ = trained(TrainingSettings(**given))
    file.write_text(file.read_text().replace('"label": "dog"', '"label": "pup"'))
    with pytest.raises(ConfigurationError, match="the data is not what it was"):
        trained(TrainingSettings(**given | {"max_steps": 2}), Path(report.folder))


def test_a_stream_that_was_cut_off_is_other_data(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind the documents that are looked at beforehand."""
    monkeypatch.setattr(data, "_HEAD", 30)
    given = small | {"streaming": True, "max_steps": 2}
    report, _ = trained(TrainingSettings(**given))
    file = Path(small["data"][0])
    file.write_text(file.read_text() + "\none more line")
    with pytest.raises(ConfigurationError, match="the data is not what it was"):
        trained(TrainingSettings(**given | {"max_steps": 3}), Path(report.folder))


def test_a_checkpoint_without_all_its_files_is_named(small: dict[str, Any]) -> None:
    given = small | {"max_steps": 4, "save_every": 2}
    folder = Path(trained(TrainingSettings(**given))[0].folder)
    (folder / "checkpoints" / "update-00000004" / "state.pt").unlink()
    _, printed = trained(TrainingSettings(**given), folder)
    assert "not used, as files are missing: update-00000004\n" in printed
    assert "going on after update 2" in printed


# ---- What goes wrong ----


def test_a_run_that_was_refused_does_not_take_its_folder(small: dict[str, Any]) -> None:
    """With the mistake corrected, and other data, it begins anew, and can be gone on with."""
    with pytest.raises(MemoryBudgetError):
        trained(TrainingSettings(**small | {"memory_budget": "20MiB", "micro_batch_size": "auto", "max_steps": 2}))
    file = Path(small["data"][0])
    file.write_text(file.read_text() + "\nand one more line")
    report, _ = trained(TrainingSettings(**small | {"max_steps": 2}))
    trained(TrainingSettings(**small | {"max_steps": 3}), Path(report.folder))


def test_a_run_without_any_update_is_no_success(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def never_finite(training: loop.Training) -> float:
        return math.nan

    monkeypatch.setattr(loop.Training, "_stepped", never_finite)
    with pytest.raises(TooManySkippedBatchesError, match="none of the 3 batches led to an update"):
        trained(TrainingSettings(**small | {"max_steps": 3}))


def test_a_scaler_that_finds_no_scale_gives_up(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.Training, "_stepped", lambda training: math.nan)
    with pytest.raises(TooManySkippedBatchesError, match="gradient of 40 batches in a row was not finite"):
        trained(TrainingSettings(**small | {"max_steps": 60, "dtype": "float16"}))
    assert len(lines_of(Path(small["output_dir"]))) == 40


def test_a_run_that_is_refused_leaves_no_folder(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="matches no file"):
        trained(TrainingSettings(**small | {"data": ("nowhere.txt",)}))
    assert not Path(small["output_dir"]).exists()


def test_a_run_can_be_gone_on_with_from_anywhere(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = small | {"data": ("lines.txt",), "model": "config.json", "output_dir": Path("run"), "max_steps": 1}
    trained(TrainingSettings(**relative))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recorded = read_toml(Path("../run/run.toml"))
    report, _ = trained(settings_of(recorded, {"max_steps": 2}), Path("../run"))
    assert report.updates.batches == 2


def test_a_warm_up_longer_than_the_run_is_refused(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"warm_up=1000 examples: the whole run has 8"):
        trained(TrainingSettings(**small | {"max_steps": 2, "warm_up": 1000.0}))


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_left_out_is_shown_and_reported(small: dict[str, Any], streaming: bool) -> None:
    folder = Path(small["data"][0]).parent
    (folder / "bad.txt").write_bytes(b"caf\xe9")
    given = small | {"data": (str(folder / "*.txt"),), "streaming": streaming, "max_steps": 2}
    report, printed = trained(TrainingSettings(**given))
    assert "left out: not UTF-8" in printed
    assert [reason for reason in report.left_out if "bad.txt" in reason]


@pytest.mark.parametrize("at", ["last", "report.json", "origin"])
def test_a_disk_that_is_full_at_other_times_is_an_error_in_one_line(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    written, mkdir = Path.write_text, Path.mkdir

    def full(path: Path, *arguments: Any, **named: Any) -> Any:
        if at in str(path.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, *arguments, **named)

    def full_folder(path: Path, *arguments: Any, **named: Any) -> None:
        if path.name.startswith(f".{at}."):
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(path, *arguments, **named)

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(Path, "mkdir", full_folder)
    if at == "report.json":
        _, printed = trained(TrainingSettings(**small | {"max_steps": 2}))
        assert "the report could not be written: No space left on device" in printed
        return
    with pytest.raises(checkpoint.CheckpointError, match=f"{at}' could not be saved: No space left on device"):
        trained(TrainingSettings(**small | {"max_steps": 2}))
    monkeypatch.undo()
    if at == "last":  # the checkpoint is there
        trained(TrainingSettings(**small | {"max_steps": 2}), Path(small["output_dir"]))
        assert (Path(small["output_dir"]) / "last" / "model.safetensors").exists()


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(ConfigurationError, match=r"output_dir=.*taken.*name another folder"):
            train(TrainingSettings(output_dir=folder), Console(file=io.StringIO()))


def test_a_budget_that_one_example_exceeds_is_refused_with_the_figures(small: dict[str, Any]) -> None:
    settings = TrainingSettings(**small | {"memory_budget": "20MiB", "micro_batch_size": "auto", "max_steps": 1})
    with pytest.raises(MemoryBudgetError, match=r"needs .* MiB .*memory_budget is 20 MiB"):
        trained(settings)


def test_a_disk_that_is_full_does_not_end_a_run(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and tries again at the next checkpoint."""
    save, calls = checkpoint.save, []

    def full_once(*arguments: Any) -> Path:
        calls.append(arguments[1])
        if len(calls) == 2:
            raise checkpoint.CheckpointError("checkpoint 'x' could not be written: No space left on device")
        return save(*arguments)

    monkeypatch.setattr(checkpoint, "save", full_once)
    report, printed = trained(TrainingSettings(**small | {"max_steps": 6, "save_every": 2}))
    assert calls == [2, 4, 6]
    assert "No space left on device. The run goes on\n" in printed
    assert "not all could be written: checkpoint" in printed
    assert sum(report.problems.values()) == 1


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_nothing_finite_ten_times_stops_with_the_last_good_state(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """From update 4 on; what is saved is the state after update 3, and it can be gone on with."""
    settings = TrainingSettings(**small | {"max_steps": 60, "save_every": 0})
    stepped = loop.Training._update
    good: list[list[torch.Tensor]] = []

    def spoiled(self: loop.Training, batch: Any, after: Any) -> None:
        if after.updates == 4:
            good.append([parameter.detach().clone() for parameter in self.model.parameters()])
            hook = (lambda module, inputs, output: _spoil(output)) if what == "loss" else None
            if hook is not None:
                self.model.register_forward_hook(hook)
            else:
                next(self.model.parameters()).register_hook(lambda gradient: gradient * math.nan)
        stepped(self, batch, after)

    def _spoil(output: Any) -> Any:
        output.loss = output.loss * math.nan
        return output

    monkeypatch.setattr(loop.Training, "_update", spoiled)
    with pytest.raises(TooManySkippedBatchesError, match=r"stopped after update 3: .*\n.*lower learning rate"):
        trained(settings)
    folder = Path(small["output_dir"])
    newest = checkpoint.newest(folder)
    assert newest is not None
    assert newest.name == "update-00000003"
    lines = lines_of(folder)
    assert [line["skipped"] is None for line in lines[:13]] == [True] * 3 + [False] * (len(lines) - 3)
    monkeypatch.undo()
    report, _ = trained(TrainingSettings(**small | {"max_steps": 6}), folder)
    assert [line["update"] for line in lines_of(folder)] == [1, 2, 3, 4, 5, 6]
    assert report.updates.skipped_batches == 0


def test_a_class_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"classify.*name files"):
        trained(TrainingSettings(objective="classify", output_dir=tmp_path / "run"))
