"""What a run writes while it goes, and that nothing of it can stop the run."""

import errno
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboardX.record_writer import masked_crc32c  # type: ignore[import-untyped]

from wholebatch.errors import ConfigurationError
from wholebatch.training import run_log
from wholebatch.training.run_log import RunLog


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events(run: Path) -> list[Any]:
    """The events in the order in which TensorBoard reads them; each checksum is checked."""
    read = []
    for file in sorted((run / "tensorboard").iterdir()):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            assert struct.unpack("<I", content[8:12]) == (masked_crc32c(content[:8]),)
            data, content = content[12 : 12 + length], content[12 + length :]
            assert struct.unpack("<I", content[:4]) == (masked_crc32c(data),)
            read.append(Event.FromString(data))
            content = content[4:]
    return read


def scalars(run: Path) -> list[tuple[int, str, float]]:
    return [(event.step, value.tag, value.simple_value) for event in events(run) for value in event.summary.value]


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- metrics.jsonl ----


def test_each_update_is_a_line(tmp_path: Path) -> None:
    with RunLog(tmp_path / "runs" / "1", {}) as log:
        log.write(0, {"loss": 3.5}, part="validation")
        log.write(1, {"loss": 0.1, "examples": 64, "cut": "4 × 16", "norm": None})
        assert lines(tmp_path / "runs" / "1") == [  # before it is closed
            {"update": 0, "part": "validation", "loss": 3.5},
            {"update": 1, "part": "train", "loss": 0.1, "examples": 64, "cut": "4 × 16", "norm": None},
        ]
    assert not log.problems
    assert sorted(os.listdir(tmp_path / "runs" / "1")) == ["metrics.jsonl", "tensorboard"]


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}) as log:
        log.write(1, {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1e308})
    assert lines(tmp_path) == [{"update": 1, "part": "train", "a": None, "b": None, "c": None, "d": 1e308}]


def test_a_resumed_run_has_each_update_once(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}) as log:
        for update in range(1, 6):
            log.write(update, {"loss": update, "course": "first"})
        log.write(3, {"loss": 0.5}, part="validation")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'not json\n[1]\n{"loss": 1}\n{"update": 2, "half')
    with RunLog(tmp_path, {}, resumed_at=3) as log:
        assert [line["update"] for line in lines(tmp_path)] == [1, 2, 3, 3]
        for update in (4, 5):
            log.write(update, {"loss": update, "course": "second"})
    assert [(line["update"], line.get("course")) for line in lines(tmp_path)] == [
        *[(update, "first") for update in (1, 2, 3)],
        (3, None),
        *[(update, "second") for update in (4, 5)],
    ]


def test_a_line_cut_off_before_its_end_is_dropped(tmp_path: Path) -> None:
    """Even where it reads as JSON: the next line would be glued to it."""
    (tmp_path / "metrics.jsonl").write_text('{"update": 1}\n{"update": 2}')
    RunLog(tmp_path, {}, resumed_at=2).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"update": 1}\n'


def test_a_run_resumed_without_a_log_begins_one(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}, resumed_at=3) as log:
        log.write(4, {"loss": 1})
    assert [line["update"] for line in lines(tmp_path)] == [4]


def test_a_new_run_in_the_same_folder_begins_anew(tmp_path: Path) -> None:
    for course in (1, 2):
        with RunLog(tmp_path, {}) as log:
            log.write(1, {"course": course})
    assert [line["course"] for line in lines(tmp_path)] == [2]
    assert scalars(tmp_path) == [(1, "train/course", 2.0)]


def test_a_log_being_rewritten_is_never_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLog(tmp_path, {}) as log:
        log.write(1, {"loss": 1})

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            RunLog(tmp_path, {}, resumed_at=1)
    assert len(lines(tmp_path)) == 1
    RunLog(tmp_path, {}, resumed_at=1).close()
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "tensorboard"]


def test_a_kill_leaves_every_line_that_was_written(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        log = RunLog(tmp_path, {})
        for update in range(50):
            log.write(update, {"loss": 1.0})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [line["update"] for line in lines(tmp_path)] == list(range(50))
    assert [step for step, _, _ in scalars(tmp_path)] == list(range(50))


# ---- TensorBoard ----


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}) as log:
        log.write(7, {"loss": 0.5, "examples": 64, "cut": "4 × 16", "norm": None, "rate": float("inf")})
        log.write(8, {"cut": "4 × 16"})
        log.write(8, {"loss": 0.25}, part="validation")
        assert scalars(tmp_path) == [
            (7, "train/loss", 0.5),
            (7, "train/examples", 64.0),
            (7, "train/rate", float("inf")),
            (8, "validation/loss", 0.25),
        ]
    first, second, *_ = events(tmp_path)
    assert first.file_version == "brain.Event:2"
    assert 0 <= second.wall_time - first.wall_time < 60
    assert not log.problems


@pytest.mark.parametrize("clock", [0, 10_000_000_000 - 1])
def test_after_resuming_tensorboard_is_told_what_is_not_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: float
) -> None:
    """In a file that it reads after the earlier ones, whatever the clock of the machine says."""
    with RunLog(tmp_path, {}) as log:
        for update in (1, 2, 3):
            log.write(update, {"loss": 1})
    monkeypatch.setattr(time, "time", lambda: clock)
    with RunLog(tmp_path, {}, resumed_at=2) as log:
        log.write(3, {"loss": 2})
    start, last = events(tmp_path)[-2:]
    assert (start.step, start.session_log.status) == (3, start.session_log.START)
    assert (last.step, last.summary.value[0].simple_value) == (3, 2.0)
    assert len(os.listdir(tmp_path / "tensorboard")) == 2


def test_without_tensorboardx_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX.proto.event_pb2", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with RunLog(tmp_path, {}) as log:
        log.write(1, {"loss": 1})
    assert list(log.problems.values()) == [1]
    assert "is not installed; pip install tensorboardX" in next(iter(log.problems))
    assert len(lines(tmp_path)) == 1


def test_a_tensorboardx_that_does_not_go_with_protobuf_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unfit:
        def __getattr__(self, name: str) -> Any:
            raise TypeError("Descriptors cannot be created directly.\nRegenerate them.")

    monkeypatch.setitem(sys.modules, "tensorboardX.proto.event_pb2", Unfit())
    with RunLog(tmp_path, {}) as log:
        log.write(1, {"loss": 1})
    assert log.problems == {"tensorboard: Descriptors cannot be created directly.": 1}
    assert len(lines(tmp_path)) == 1


def test_tensorboardx_is_imported_when_a_log_is_made_and_brings_nothing_heavy() -> None:
    script = (
        "import sys, tempfile, pathlib; from wholebatch.training.run_log import RunLog;"
        "assert 'tensorboardX' not in sys.modules; log = RunLog(pathlib.Path(tempfile.mkdtemp()), {});"
        "print(log.problems, 'tensorboardX' in sys.modules, {'tensorflow', 'tensorboard'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False, env=environment
    )
    assert (result.stdout, result.stderr) == ("Counter() True set()\n", "")


# ---- A disk that takes nothing ----


def test_what_a_full_disk_refused_is_written_when_there_is_room_again(tmp_path: Path) -> None:
    """For real: no file may grow beyond 120 bytes, so that a line is cut in its middle."""
    with RunLog(tmp_path, {}) as log:
        with no_file_longer_than(120):
            for update in range(1, 6):
                log.write(update, {"loss": 0.25})
            cut_short = (tmp_path / "metrics.jsonl").read_bytes()
            assert [line["update"] for line in lines(tmp_path)] == [1, 2]
            assert cut_short.endswith(b"\n")
            assert log.problems["metrics.jsonl: File too large"] == 3
            assert log.problems["tensorboard: File too large"] >= 3
            assert len(log.problems) == 2
            assert 0 < len(scalars(tmp_path)) < 5
        log.write(6, {"loss": 0.25})
    assert [line["update"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _, _ in scalars(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_what_is_still_held_is_written_at_the_end(tmp_path: Path) -> None:
    log = RunLog(tmp_path, {})
    with no_file_longer_than(0):
        log.write(1, {"loss": 0.25})
    assert lines(tmp_path) == []
    log.close()
    log.close()
    assert len(lines(tmp_path)) == len(scalars(tmp_path)) == 1


def test_what_is_held_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "_MOST_WAITING", 100)
    with RunLog(tmp_path, {}) as log:
        with no_file_longer_than(0):
            for update in range(1, 6):
                log.write(update, {"loss": 0.25})
        log.write(6, {"loss": 0.25})
    assert [line["update"] for line in lines(tmp_path)] == [1, 2, 6]
    assert log.problems["metrics.jsonl: File too large"] == 5


def test_a_disk_that_is_full_from_the_start_refuses_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigurationError, match="cannot be written to: No space left on device; choose another"):
        RunLog(tmp_path, {})


@pytest.mark.parametrize("blocked", ["run", "run/tensorboard"])
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, blocked: str) -> None:
    (tmp_path / blocked).parent.mkdir(exist_ok=True)
    (tmp_path / blocked).write_text("a file where a folder has to be")
    with pytest.raises(ConfigurationError, match=r"folder '.*run' of the run cannot be written to: File exists"):
        RunLog(tmp_path / "run", {})


def test_a_folder_that_is_deleted_does_not_stop_the_run(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run", {}) as log:
        (tmp_path / "run" / "metrics.jsonl").unlink()
        log.write(1, {"loss": 1})
    assert log.problems == {"metrics.jsonl: No such file or directory": 2}


# ---- Trackers ----


class FakeTracker:
    """Stands in for wandb and trackio, whose calls are these."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def init(self, **options: Any) -> SimpleNamespace:
        self.calls.append(("init", options))
        return SimpleNamespace()

    def log(self, figures: dict[str, Any], step: int) -> None:
        self.calls.append(("log", figures, step))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeTracker]:
    fakes = {name: FakeTracker() for name in ("wandb", "trackio")}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return fakes


def test_trackers_get_the_same_figures(tmp_path: Path, trackers: dict[str, FakeTracker]) -> None:
    with RunLog(tmp_path / "17", {"seed": 3}, trackers=("wandb", "trackio")) as log:
        log.write(5, {"loss": 0.5, "cut": "4 × 16", "norm": None})
        log.write(5, {"loss": 0.75}, part="validation")
    for fake in trackers.values():
        assert fake.calls == [
            ("init", {"project": "wholebatch", "name": "17", "config": {"seed": 3}}),
            ("log", {"train/loss": 0.5, "train/cut": "4 × 16"}, 5),
            ("log", {"validation/loss": 0.75}, 5),
            ("finish",),
        ]


def test_only_the_trackers_asked_for_are_used(tmp_path: Path, trackers: dict[str, FakeTracker]) -> None:
    with RunLog(tmp_path, {}, trackers=["trackio"]) as log:
        log.write(1, {"loss": 0.5})
    assert (len(trackers["wandb"].calls), len(trackers["trackio"].calls)) == (0, 3)


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigurationError, match=r"^wandb is not installed; pip install wandb, or leave it out of track$"
    ):
        RunLog(tmp_path / "run", {}, trackers=("wandb",))
    assert not (tmp_path / "run").exists()


def test_a_tracker_whose_own_needs_are_missing_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio.py").write_text("import no_such_module_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(
        ConfigurationError, match=r"trackio cannot be imported: .*; pip install no_such_module_anywhere"
    ):
        RunLog(tmp_path / "run", {}, trackers=("trackio",))


def test_a_tracker_that_does_not_start_is_told_and_the_others_are_ended(
    tmp_path: Path, trackers: dict[str, FakeTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_key(**_: Any) -> None:
        raise RuntimeError("api_key not configured\n(no-tty)")

    monkeypatch.setattr(trackers["trackio"], "init", no_key)
    with pytest.raises(
        ConfigurationError, match=r"^trackio does not start: api_key not configured; leave it out of track$"
    ):
        RunLog(tmp_path, {}, trackers=("wandb", "trackio"))
    assert trackers["wandb"].calls[-1] == ("finish",)


def test_a_tracker_that_fails_later_does_not_stop_the_run(
    tmp_path: Path, trackers: dict[str, FakeTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise ConnectionError("connection lost")

    for method in ("log", "finish"):
        monkeypatch.setattr(trackers["wandb"], method, lost)
    with RunLog(tmp_path, {}, trackers=("wandb", "trackio")) as log:
        for update in (1, 2):
            log.write(update, {"loss": 0.5})
    assert log.problems == {"wandb: connection lost": 3}
    assert len(trackers["trackio"].calls) == 4
    assert len(lines(tmp_path)) == 2
