"""A short training run, from the settings to the saved model."""

import io
import json
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from wholebatch.errors import ConfigurationError, MemoryBudgetError
from wholebatch.training.data import END_OF_TEXT, collate, load_corpus, python_documentation, shuffled
from wholebatch.training.recipe import CONTEXT_LENGTH, VOCABULARY_SIZE, train
from wholebatch.training.run_report import RunReport
from wholebatch.training.settings import TrainingSettings

STEPS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunReport, str]:
    """A run of a few updates: its report, and what it printed."""
    out = io.StringIO()
    folder = tmp_path_factory.mktemp("runs") / "nested" / "first"
    settings = TrainingSettings(max_steps=STEPS, micro_batch_size=16, memory_budget="8GiB", output_dir=folder)
    return train(settings, Console(file=out, width=120)), out.getvalue()


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(python_documentation(), CONTEXT_LENGTH, VOCABULARY_SIZE)


def test_the_validation_loss_falls(run: tuple[RunReport, str]) -> None:
    """It starts near the price of knowing nothing, the logarithm of the vocabulary's size."""
    report, _ = run
    assert report.validation_loss_before == pytest.approx(torch.tensor(VOCABULARY_SIZE).log().item(), abs=0.4)
    assert report.validation_loss_after < report.validation_loss_before - 0.5


def test_what_is_saved_is_what_was_trained(run: tuple[RunReport, str], corpus) -> None:
    """Loaded again and evaluated by one plain pass, the model has the reported loss; the tokenizer reads the same."""
    report, _ = run
    model = AutoModelForCausalLM.from_pretrained(report.settings.output_dir).eval()
    batch = collate(corpus.validation)
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert float(loss) == pytest.approx(report.validation_loss_after, abs=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(report.settings.output_dir)
    text = "The yield statement" + END_OF_TEXT
    assert tokenizer.encode(text) == corpus.tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "The yield statement"


def test_the_totals_are_those_of_the_batches(run: tuple[RunReport, str], corpus) -> None:
    """64 examples per update, in the order that the seed decides; each predicts all its tokens but the first."""
    report, _ = run
    seen = shuffled(corpus.train, 0, 0)[: 64 * STEPS]
    assert report.updates.num_loss_tokens == sum(len(example) - 1 for example in seen)
    assert report.updates.micro_batch_sizes == (16, 16, 16, 16)
    assert (report.updates.batches, report.updates.skipped_batches) == (STEPS, 0)
    assert report.unigram_entropy == corpus.unigram_entropy


def test_the_report_is_complete(run: tuple[RunReport, str]) -> None:
    report, _ = run
    folder = report.settings.output_dir
    figures = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert figures.keys() == {*asdict(report), "within_memory_budget"}
    assert figures["updates"]["gradient_accumulation_steps"] == 4
    assert figures["updates"]["tokens_per_second"] == report.updates.tokens_per_second > 0
    assert figures["settings"] == {name: _plain(value) for name, value in asdict(report.settings).items()}
    assert figures["versions"].keys() == {"python", "wholebatch", "torch", "transformers", "tokenizers"}
    if report.updates.peak_memory_bytes is not None:  # it is None where the system does not tell
        assert 50 * 2**20 < report.updates.peak_memory_bytes < 8 * 2**30
        assert figures["within_memory_budget"] is True
    readable = (folder / "report.md").read_text(encoding="utf-8")
    for figure in (
        "64 examples = 4 micro-batches × 16",
        f"{report.validation_loss_before:.3f} nats",
        f"{report.validation_loss_after:.3f} nats",
        f"{report.unigram_entropy:.3f} nats",
        "memory budget | 8,192 MiB",
    ):
        assert figure in readable


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def test_the_arithmetic_and_the_losses_are_printed(run: tuple[RunReport, str]) -> None:
    report, printed = run
    assert "64 examples = 4 micro-batches × 16\n" in printed
    assert f"validation loss {report.validation_loss_before:.3f} before training" in printed
    assert f"validation loss {report.validation_loss_after:.3f} after training" in printed
    assert f"unigram entropy {report.unigram_entropy:.3f}" in printed
    assert str(report.settings.output_dir) in printed


def test_the_cut_does_not_change_the_training(tmp_path: Path) -> None:
    """Two updates by 24 examples, at micro-batch 7 and in one pass, end in the same model, but for rounding."""
    ends = []
    for size in (7, 24):
        folder = tmp_path / str(size)
        train(
            TrainingSettings(
                global_batch_size=24, max_steps=2, micro_batch_size=size, memory_budget="8GiB", output_dir=folder
            ),
            Console(file=io.StringIO()),
        )
        model = AutoModelForCausalLM.from_pretrained(folder)
        ends.append(torch.cat([parameter.flatten() for parameter in model.parameters()]).detach())
    assert float((ends[0] - ends[1]).norm() / ends[1].norm()) < 1e-5


def test_epochs_follow_each_other_without_a_smaller_batch(corpus) -> None:
    from wholebatch.training.recipe import whole_batches

    settings = TrainingSettings(global_batch_size=1000, seed=3)
    first, second = (batch for batch, _ in zip(whole_batches(corpus.train, settings), range(2), strict=False))
    epochs = [*shuffled(corpus.train, 3, 0), *shuffled(corpus.train, 3, 1)]
    assert [len(first), len(second)] == [1000, 1000]
    assert all(map(torch.equal, chain(first, second), epochs[:2000]))


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(ConfigurationError, match=r"output_dir=.*taken.*name another folder"):
            train(TrainingSettings(output_dir=folder), Console(file=io.StringIO()))


def test_a_budget_that_one_example_exceeds_is_refused_with_the_figures(tmp_path: Path) -> None:
    settings = TrainingSettings(memory_budget="20MiB", output_dir=tmp_path)
    with pytest.raises(MemoryBudgetError, match=r"needs .* MiB .*memory_budget is 20 MiB"):
        train(settings, Console(file=io.StringIO()))
