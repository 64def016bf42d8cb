"""Known faults of training loops, each through the command `wholebatch train`."""

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from wholebatch.cli import main
from wholebatch.training import checkpoint, loop
from wholebatch.training.data import is_validation
from wholebatch.training.order import Shuffled, mixed
from wholebatch.training.schedule import Schedule

PEAK = 0.01


class Command:
    """Runs `wholebatch train` on numbered rows, and notes which of them each update saw."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.run = folder, folder / "run"
        self.seen: list[list[int]] = []
        config = LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=16
        )
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        update = loop.Training._update

        def noted(training: loop.Training, batch: Any, after: Any) -> None:
            decoded = [training.corpus.objective.tokenizer.decode(drawn.example.ids[1:-1]) for drawn in batch]
            self.seen.append([int(text.split()[1]) for text in decoded])
            update(training, batch, after)

        monkeypatch.setattr(loop.Training, "_update", noted)

    def rows(self, number: int) -> None:
        """So many rows to train on, numbered from 0, and one that is held out."""
        train = [f"row {n}" for n in range(number)]
        texts = [next(text for k in range(99) if not is_validation(text := row + " x" * k)) for row in train]
        held_out = next(text for k in range(999) if is_validation(text := f"row {k} held out"))
        (self.folder / "rows.txt").write_text("\n".join([*texts, held_out]))

    def __call__(self, *options: str) -> int:
        """The exit code; `--resume` is all that a run needs to go on."""
        if "--resume" not in options:
            options = (
                *("--data", str(self.folder / "rows.txt"), "--documents", "line"),
                *("--model", str(self.folder / "config.json"), "--vocabulary-size", "300", "--context-length", "16"),
                *("--output-dir", str(self.run), "--threads", "1", "--seed", "1", "--keep-checkpoints", "99"),
                *(() if "--learning-rate" in options else ("--learning-rate", str(PEAK))),
                *options,
            )
        with pytest.raises(SystemExit) as ended:
            main(["train", *options])
        return int(ended.value.code or 0)

    def log(self) -> list[dict[str, Any]]:
        """A line for each update."""
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["part"] == "train"]

    def saved(self) -> list[int]:
        """Updates after which there is a checkpoint."""
        return sorted(int(one.name.rpartition("-")[2]) for one in (self.run / "checkpoints").iterdir())

    def as_if_killed_after(self, update: int) -> None:
        """Take later checkpoints away, and forget what was seen."""
        for later in self.saved():
            if later > update:
                shutil.rmtree(self.run / "checkpoints" / f"update-{later:08d}")
        self.seen.clear()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, monkeypatch)


def test_wn7_updates_are_counted_logged_and_saved_by_updates(command: Command) -> None:
    """7 rows in batches of 3, twice: 3, 3, 1 and again, whatever the micro-batch size."""
    command.rows(7)
    assert command("--global-batch-size", "3", "--epochs", "2", "--save-every", "2", "--micro-batch-size", "1") == 0
    assert [line["update"] for line in command.log()] == [1, 2, 3, 4, 5, 6]
    assert [line["num_examples"] for line in command.log()] == [3, 3, 1, 3, 3, 1]
    assert sum(line["gradient_accumulation_steps"] for line in command.log()) == 14
    assert command.saved() == [2, 4, 6]


def test_sc1_the_schedule_moves_once_per_update(command: Command) -> None:
    """1 - k/12: after 3 updates of 4 micro-batches it stands at 0.75, not at 0."""
    command.rows(8)
    course = ("--schedule", "linear", "--warm-up", "0", "--final-learning-rate", "0")
    assert command("--global-batch-size", "4", "--micro-batch-size", "1", "--max-steps", "12", *course) == 0
    rates = [line["learning_rate"] for line in command.log()]
    assert rates == pytest.approx([PEAK * (1 - k / 12) for k in range(12)])
    assert rates[3] == pytest.approx(0.75 * PEAK)


def test_sc3_the_last_batches_of_the_epochs_are_planned(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """10 rows in batches of 4, 3 epochs, cosine to 0: 9 planned, 9 done, and at 9 the rate is 0."""
    command.rows(10)
    course = ("--schedule", "cosine", "--warm-up", "0", "--final-learning-rate", "0")
    assert command("--global-batch-size", "4", "--micro-batch-size", "2", "--epochs", "3", *course) == 0
    assert "9 updates of 4 examples" in capsys.readouterr().out
    assert [line["num_examples"] for line in command.log()] == [4, 4, 2] * 3
    before = [0, 4, 8, 10, 14, 18, 20, 24, 28]
    expected = [PEAK * (1 + math.cos(math.pi * seen / 30)) / 2 for seen in before]
    assert [line["learning_rate"] for line in command.log()] == pytest.approx(expected)
    assert command.log()[-1]["examples_seen"] == 30
    assert Schedule(PEAK, 30, 0, 0, "cosine").learning_rate(30, 34) == 0


def test_rs1_no_row_is_seen_twice_or_never_on_resuming(command: Command) -> None:
    """24 rows in batches of 4, killed after update 3: update 4 sees the rows 12 to 15 of the epoch's order."""
    command.rows(24)
    assert command("--global-batch-size", "4", "--micro-batch-size", "1", "--epochs", "1", "--save-every", "3") == 0
    command.as_if_killed_after(3)
    assert command("--resume", str(command.run)) == 0
    order = Shuffled(range(24), 1).positions(0)
    assert command.seen == [order[12:16], order[16:20], order[20:24]]


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_rs2_the_number_of_updates_is_not_multiplied_again(
    command: Command, capsys: pytest.CaptureFixture[str], micro_batch_size: int
) -> None:
    """Saved at 10 with 4 micro-batches each; gone on with 4 and with 2: from 10 on, to the same 12."""
    command.rows(16)
    assert (
        command("--global-batch-size", "4", "--micro-batch-size", "1", "--max-steps", "12", "--save-every", "10") == 0
    )
    command.as_if_killed_after(10)
    assert command("--resume", str(command.run), "--micro-batch-size", str(micro_batch_size)) == 0
    printed = capsys.readouterr().out
    assert "going on after update 10, 40 examples" in printed
    assert "update 12/12" in printed
    assert [line["update"] for line in command.log()] == list(range(1, 13))
    assert [line["gradient_accumulation_steps"] for line in command.log()][10:] == [4 // micro_batch_size] * 2


@pytest.mark.parametrize("stopped_after", [6, 8], ids=["in epoch 2", "at its end"])
def test_rs4_the_order_is_that_of_its_epoch(command: Command, stopped_after: int) -> None:
    """64 rows in batches of 16: each once an epoch, in the order of a run that was never stopped."""
    command.rows(64)
    assert command("--global-batch-size", "16", "--micro-batch-size", "8", "--epochs", "3", "--save-every", "1") == 0
    whole = list(command.seen)
    epochs = [tuple(itertools.chain(*whole[first : first + 4])) for first in (0, 4, 8)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(64))] * 3
    assert len(set(epochs)) == 3
    command.as_if_killed_after(stopped_after)
    assert command("--resume", str(command.run)) == 0
    assert command.seen == whole[stopped_after:]
    assert mixed(1, 1) != mixed(2, 0)  # not another epoch of another seed


def test_rs5_data_without_a_length_comes_again(command: Command) -> None:
    """10 rows in batches of 4, 6 updates: 4, 4, 2 and again; gone on with after update 4, the last two are the same."""
    command.rows(10)
    given = ("--streaming", "--global-batch-size", "4", "--micro-batch-size", "2", "--max-steps", "6")
    assert command(*given, "--save-every", "4") == 0
    whole = list(command.seen)
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
    command.as_if_killed_after(4)
    assert command("--resume", str(command.run)) == 0
    assert command.seen == whole[4:]


def test_zt5_a_run_without_updates_is_no_success(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate that blows it up at once: exit code 2, and the last good state is kept."""
    command.rows(16)
    blown_up = ("--learning-rate", "1e30", "--clip-norm", "0", "--warm-up", "0")
    assert command("--global-batch-size", "4", "--micro-batch-size", "2", "--max-steps", "50", *blown_up) == 2
    assert "Try a lower learning rate" in capsys.readouterr().err
    good = [line["update"] for line in command.log() if line["skipped"] is None]
    assert command.saved() == [good[-1]]
    assert len(command.log()) == good[-1] + 10
    assert checkpoint.newest(command.run) is not None
