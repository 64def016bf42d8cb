"""A run that is killed and gone on with ends bitwise as one that was never stopped."""

import io
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from wholebatch.training import checkpoint
from wholebatch.training.recipe import train
from wholebatch.training.settings import TrainingSettings, read_toml, settings_of

UPDATES = 9
KILLS = 15
"""Of each kind: at a random moment, and at a random file operation inside a save."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs are forked, to spare the imports")

NEW_EACH_TIME = {"seconds", "peak_memory_bytes"}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TrainingSettings:
    """A Llama of a few thousand parameters in float64, with dropout, on 40 lines of text; a checkpoint each update."""
    folder = tmp_path_factory.mktemp("killed")
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        attention_dropout=0.2,
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    lines = [f"The statement number {number} binds {number % 7} names" for number in range(40)]
    (folder / "lines.txt").write_text("\n".join(lines))
    return TrainingSettings(
        data=(str(folder / "lines.txt"),),
        documents="line",
        model=str(folder / "config.json"),
        context_length=16,
        vocabulary_size=300,
        dtype="float64",
        global_batch_size=7,
        micro_batch_size=3,
        max_steps=UPDATES,
        learning_rate=1e-2,
        eval_every=4,
        save_every=1,
        keep_checkpoints=2,
        seed=3,
        threads=1,
    )


def in_a_fork(work: Callable[[], Any]) -> int:
    """Start `work` in a process of its own, which needs no time to import; its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if (child := os.fork()) != 0:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001  a forked test runner must not go on
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a process: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start(settings: TrainingSettings, folder: Path) -> int:
    given = settings_of(settings.given() | {"data": settings.data, "track": (), "output_dir": folder})
    return in_a_fork(lambda: train(given, Console(file=io.StringIO())))


def go_on(folder: Path, **changed: Any) -> int:
    recorded = read_toml(folder / "run.toml")
    given = settings_of(recorded, changed)
    return in_a_fork(lambda: train(given, Console(file=io.StringIO()), folder))


def outcome(folder: Path) -> tuple[Any, ...]:
    """All of a run that does not depend on the time it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    log = [{name: value for name, value in line.items() if name not in NEW_EACH_TIME} for line in lines]
    newest = checkpoint.newest(folder)
    assert newest is not None
    state = torch.load(newest / "state.pt", weights_only=True)
    moments = [value for one in state["optimizer"]["state"].values() for value in one.values()]
    return (
        (folder / "last" / "model.safetensors").read_bytes(),
        (folder / "best" / "model.safetensors").read_bytes(),
        (newest / "model.safetensors").read_bytes(),
        [moment.tolist() for moment in moments],
        state["position"],
        state["best"],
        state["random"]["torch"].tolist(),
        log,
    )


@pytest.fixture(scope="module")
def undisturbed(settings: TrainingSettings, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Any, ...], float]:
    """The outcome of a run that is never stopped, and the seconds it took after it had begun."""
    folder = tmp_path_factory.mktemp("never") / "run"
    child = start(settings, folder)
    wait_for(folder / "run.toml")
    began = time.monotonic()
    assert ended(child) == 0
    return outcome(folder), time.monotonic() - began


def test_a_run_is_the_same_each_time(
    settings: TrainingSettings, undisturbed: tuple[tuple[Any, ...], float], tmp_path: Path
) -> None:
    assert ended(start(settings, tmp_path / "run")) == 0
    assert outcome(tmp_path / "run") == undisturbed[0]


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.002)


def finished(folder: Path) -> None:
    """Go on until the run is complete."""
    assert ended(go_on(folder)) == 0


@pytest.mark.parametrize("point", range(KILLS))
def test_killed_at_any_moment(
    settings: TrainingSettings, undisturbed: tuple[tuple[Any, ...], float], tmp_path: Path, point: int
) -> None:
    expected, seconds = undisturbed
    folder = tmp_path / "run"
    child = start(settings, folder)
    wait_for(folder / "run.toml")  # before it, there is nothing to go on with
    time.sleep(random.Random(point).uniform(0.0, seconds))
    os.kill(child, signal.SIGKILL)
    ended(child)
    finished(folder)
    assert outcome(folder) == expected


class KillInSave:
    """Kills its process at the n-th file operation inside a save, counted from the first save of the run."""

    def __init__(self, number: int) -> None:
        self.left, self.saving = number, False
        save = checkpoint.save

        def noted(*arguments: Any) -> Path:
            self.saving = True
            try:
                return save(*arguments)
            finally:
                self.saving = False

        checkpoint.save = noted
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.saving and event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("point", range(KILLS))
def test_killed_while_saving(
    settings: TrainingSettings, undisturbed: tuple[tuple[Any, ...], float], tmp_path: Path, point: int
) -> None:
    folder = tmp_path / "run"
    given = settings_of(settings.given() | {"data": settings.data, "track": (), "output_dir": folder})
    number = random.Random(100 + point).randint(1, 8 * UPDATES)

    def run() -> None:
        KillInSave(number)
        train(given, Console(file=io.StringIO()))

    assert ended(in_a_fork(run)) == -signal.SIGKILL
    finished(folder)
    assert outcome(folder) == undisturbed[0]


def test_killed_again_and_again(
    settings: TrainingSettings, undisturbed: tuple[tuple[Any, ...], float], tmp_path: Path
) -> None:
    expected, seconds = undisturbed
    folder, generator = tmp_path / "run", random.Random(7)
    child = start(settings, folder)
    wait_for(folder / "run.toml")
    for _ in range(5):
        time.sleep(generator.uniform(0.3, 0.8) * seconds)
        os.kill(child, signal.SIGKILL)
        ended(child)
        child = go_on(folder)
    ended(child)
    finished(folder)
    assert outcome(folder) == expected


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_stop_it_finishes_the_update_and_saves(
    settings: TrainingSettings,
    undisturbed: tuple[tuple[Any, ...], float],
    tmp_path: Path,
    sent: signal.Signals,
    code: int,
) -> None:
    folder = tmp_path / "run"
    given = settings_of(settings.given() | {"data": settings.data, "track": (), "output_dir": folder, "save_every": 0})
    child = in_a_fork(lambda: os._exit(train(given, Console(file=io.StringIO())).exit_code))
    while not (folder / "metrics.jsonl").exists() or '"part": "train"' not in (folder / "metrics.jsonl").read_text():
        time.sleep(0.005)
    os.kill(child, sent)
    assert ended(child) == code
    newest = checkpoint.newest(folder)
    assert newest is not None
    updates = int(newest.name.rpartition("-")[2])
    assert 1 <= updates < UPDATES
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["update"] == updates
    assert ended(go_on(folder, save_every=1)) == 0
    assert outcome(folder)[0] == undisturbed[0][0]
    assert outcome(folder)[-1] == undisturbed[0][-1]
