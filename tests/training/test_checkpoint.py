"""Checkpoints: what is read back, what is kept, and what a kill or a full disk leaves behind."""

import contextlib
import errno
import itertools
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wholebatch.errors import ConfigurationError, WholeBatchError
from wholebatch.training import checkpoint
from wholebatch.training.checkpoint import (
    CheckpointError,
    load,
    load_model,
    load_state,
    newest,
    random_state,
    replaced,
    save,
    set_random_state,
    tidy,
    write_text,
)


class Tied(nn.Module):
    """Shares a parameter under two names, transposes another, and has a buffer of whole numbers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, dtype=dtype)
        self.middle = nn.Linear(3, 4, dtype=dtype)
        self.middle.weight = nn.Parameter(torch.randn(3, 4, dtype=dtype).T)
        self.head = nn.Linear(3, 5, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        loss: torch.Tensor = self.head(hidden).sum() + self.middle(hidden).square().sum()
        return loss


def trained(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Tied, torch.optim.AdamW]:
    model = Tied(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    for tokens in ([0, 1, 2], [3, 1]):
        optimizer.zero_grad()
        model(torch.tensor(tokens)).backward()
        optimizer.step()
    return model, optimizer


def same(one: Any, other: Any) -> bool:
    """In each bit, and in each type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        as_bytes = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def numbers(run: Path) -> list[int]:
    """The updates of which there is something, complete or not."""
    return sorted(int(name.removeprefix("update-")) for name in os.listdir(run / "checkpoints"))


# ---- What is read back ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"amsgrad": True, "foreach": True}])
def test_a_model_and_its_optimizer_come_back_in_each_bit(
    tmp_path: Path, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model, optimizer = trained(dtype, **options)
    with torch.no_grad():
        model.middle.bias[:3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    saved = {"optimizer": optimizer.state_dict(), "position": {"epoch": 1, "examples": 7}}
    folder = save(tmp_path, 2, model, saved, keep=1)
    assert folder == tmp_path / "checkpoints" / "update-00000002"
    other = Tied(dtype)
    state = load(folder, other, "cpu")
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert other.head.weight is other.embedding.weight
    assert other.middle.weight.stride() == (1, 4)
    assert same(state, saved)


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def another_update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randint(5, (4,))).backward()
        optimizer.step()

    model, optimizer = trained(fused=True)
    folder = save(tmp_path, 2, model, {"optimizer": optimizer.state_dict(), "random": random_state("cpu")}, keep=1)
    another_update(model, optimizer)
    resumed = Tied()
    resumed_optimizer = torch.optim.AdamW(resumed.parameters(), lr=1.0, fused=True)
    state = load(folder, resumed, "cpu")
    resumed_optimizer.load_state_dict(state["optimizer"])
    set_random_state(state["random"], "cpu")
    another_update(resumed, resumed_optimizer)
    assert same(dict(resumed.state_dict()), dict(model.state_dict()))


def test_the_state_of_a_gradient_scaler_comes_back(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    model, optimizer = trained()
    scaler.scale(model(torch.tensor([1]))).backward()
    scaler.step(optimizer)
    scaler.update()
    folder = save(tmp_path, 1, model, {"scaler": scaler.state_dict()}, keep=1)
    state = load(folder, Tied(), "cpu")
    assert same(state, {"scaler": scaler.state_dict()})
    assert state["scaler"]["scale"] == 512.0


def test_random_numbers_go_on_after_a_checkpoint(tmp_path: Path) -> None:
    def draws() -> list[Any]:
        return [torch.rand(3), random.random(), random.gauss(), np.random.standard_normal(3).tolist()]

    draws()
    random.gauss()  # leaves a second number of a pair behind, which is part of the state; and so does numpy
    np.random.standard_normal()
    folder = save(tmp_path, 0, Tied(), {"random": random_state("cpu")}, keep=1)
    expected = draws()
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)
    state = load(folder, Tied(), "cpu")["random"]
    set_random_state(state, "cpu")
    assert same(draws(), expected)


def test_without_numpy_its_random_state_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    state = random_state("cpu")
    monkeypatch.delitem(sys.modules, "numpy")
    assert "numpy" not in random_state("cpu")
    monkeypatch.setitem(sys.modules, "numpy", None)  # not installed where the run goes on
    set_random_state(state, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_lay_on_an_accelerator_goes_to_the_device(tmp_path: Path) -> None:
    model, saved = Tied().cuda(), {"there": torch.ones(2, device="cuda"), "here": torch.ones(2)}
    folder = save(tmp_path, 0, model, {**saved, "random": random_state("cuda")}, keep=1)
    expected = torch.rand(2, device="cuda")
    state = load(folder, model, "cuda")
    set_random_state(state["random"], "cuda")
    assert torch.equal(torch.rand(2, device="cuda"), expected)
    assert (state["there"].device.type, state["here"].device.type) == ("cuda", "cpu")
    assert load(folder, Tied(), "cpu")["there"].device.type == "cpu"


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"data": {"file": Path("a")}}, r"state\['data'\]\['file'\] is a PosixPath"),
        ({"losses": [1.0, np.float64(2.0)]}, r"state\['losses'\]\[1\] is a float64"),
        ({"numpy": (np.zeros(2),)}, r"state\['numpy'\]\[0\] is a ndarray"),
        ({Text("a"): 1}, "a key of state is a Text"),
    ],
)
def test_a_state_that_could_not_be_read_back_is_refused(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}: a checkpoint holds .*; convert it$"):
        save(tmp_path, 1, Tied(), state, keep=1)
    assert newest(tmp_path) is None


@pytest.mark.parametrize(("update", "keep"), [(-1, 1), (1, 0)])
def test_an_impossible_number_is_refused(tmp_path: Path, update: int, keep: int) -> None:
    with pytest.raises(ConfigurationError, match=f"update={update}, keep={keep}: use .* keep from 1 up"):
        save(tmp_path, update, Tied(), {}, keep)


# ---- Which there are ----


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    for update in (1, 9, 10, 11):
        save(tmp_path, update, Tied(), {"update": update}, keep=2)
    assert numbers(tmp_path) == [10, 11]
    latest = newest(tmp_path)
    assert latest is not None
    assert load(latest, Tied(), "cpu") == {"update": 11}


def test_a_run_resumed_from_an_older_one_leaves_the_later_ones_behind(tmp_path: Path) -> None:
    """They are of a course that is no longer this run's; counted in, they would push out what was just saved."""
    for update in (1, 2, 3, 4):
        save(tmp_path, update, Tied(), {}, keep=4)
    save(tmp_path, 2, Tied(), {"course": "new"}, keep=2)
    assert numbers(tmp_path) == [1, 2]


def test_the_order_is_that_of_the_numbers(tmp_path: Path) -> None:
    for update in (99_999_999, 100_000_000):
        save(tmp_path, update, Tied(), {}, keep=2)
    assert newest(tmp_path) == tmp_path / "checkpoints" / "update-100000000"


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    tidy(tmp_path)
    tidy(tmp_path / "not there")
    folder = save(tmp_path, 1, Tied(), {}, keep=9)
    for name in ("update-00000002", "update-00000003.bak", "update-x", ".update-00000004.wholebatch-new"):
        (folder.parent / name).mkdir()
    for file in folder.iterdir():  # with a name that is not of the pattern, but whole
        (folder.parent / "update-00000003.bak" / file.name).write_bytes(file.read_bytes())
    (folder.parent / "update-00000002" / "model.safetensors").write_bytes(b"")
    (folder.parent / "update-00000005").write_text("a file")
    assert newest(tmp_path) == folder


def test_tidy_leaves_alone_what_is_not_its_own(tmp_path: Path) -> None:
    save(tmp_path, 1, Tied(), {}, keep=1)
    names = [".venv.old", ".cache", "notes.new", "model"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / "checkpoints" / name).mkdir()
    tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "checkpoints"])
    assert sorted(os.listdir(tmp_path / "checkpoints")) == sorted([*names, "update-00000001"])


def test_saving_an_update_again_replaces_it(tmp_path: Path) -> None:
    for content in ("first", "second"):
        folder = save(tmp_path, 7, Tied(), {"content": content}, keep=1)
    assert load(folder, Tied(), "cpu") == {"content": "second"}
    assert os.listdir(folder.parent) == ["update-00000007"]


# ---- Damaged, or not this model's ----


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
def test_a_truncated_file_is_told_with_the_older_ones(tmp_path: Path, name: str) -> None:
    """Wherever it was cut off."""
    older = save(tmp_path, 1, Tied(), {}, keep=3)
    folder = save(tmp_path, 2, Tied(), {"some": torch.arange(5)}, keep=3)
    save(tmp_path, 3, Tied(), {}, keep=3)
    content = (folder / name).read_bytes()
    for length in range(0, len(content), 1 + len(content) // 200):
        (folder / name).write_bytes(content[:length])
        with pytest.raises(ConfigurationError) as caught:
            load(folder, Tied(), "cpu")
        assert f"checkpoint {str(folder)!r} is damaged: " in str(caught.value)
        assert str(caught.value).endswith(f"; remove it to go on from {older.name}")


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
def test_a_flipped_bit_is_damage(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1, Tied(), {"some": torch.arange(5)}, keep=1)
    content = bytearray((folder / name).read_bytes())
    content[-20 if name == "model.safetensors" else len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"is damaged: {name} does not hold the bytes that were written"):
        load(folder, Tied(), "cpu")


def test_the_state_can_be_read_before_there_is_a_model(tmp_path: Path) -> None:
    saved = Tied()
    folder = save(tmp_path, 2, saved, {"settings": {"seed": 3}}, keep=1)
    assert load_state(folder) == {"settings": {"seed": 3}}
    model = Tied()
    load_model(folder, model)
    assert same(dict(model.state_dict()), dict(saved.state_dict()))


def test_a_device_without_room_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMemory(RuntimeError):
        """As torch's own, which is of a kind of RuntimeError."""

    def no_room(*_: Any, **__: Any) -> None:
        raise NoMemory

    folder = save(tmp_path, 2, Tied(), {}, keep=1)
    monkeypatch.setattr(torch, "load", no_room)
    with pytest.raises(NoMemory):
        load_state(folder)


def test_where_no_older_one_is_left_a_new_run_is_the_way_out(tmp_path: Path) -> None:
    folder = save(tmp_path, 2, Tied(), {}, keep=1)
    (folder / "state.pt").unlink()
    with pytest.raises(
        ConfigurationError, match=r"damaged: No such file.*; remove it to begin anew, since there is no older one$"
    ):
        load(folder, Tied(), "cpu")


def test_a_state_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.mkdir, (str(tmp_path / "run by the file"),)

    folder = save(tmp_path, 1, Tied(), {}, keep=1)
    torch.save({"a": Evil()}, folder / "state.pt")
    with pytest.raises(ConfigurationError, match="damaged"):
        load(folder, Tied(), "cpu")
    assert not (tmp_path / "run by the file").exists()


@pytest.mark.parametrize("model", [nn.Linear(3, 4), nn.Sequential(Tied())])
def test_another_model_is_refused(tmp_path: Path, model: nn.Module) -> None:
    folder = save(tmp_path, 1, Tied(), {}, keep=1)
    with pytest.raises(ConfigurationError, match=r"(?s)update-00000001' is of another model: .* it was saved under"):
        load(folder, model, "cpu")


def test_another_size_of_the_model_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, nn.Linear(3, 4), {}, keep=1)
    with pytest.raises(ConfigurationError, match=r"(?s)another model: .*size mismatch for weight"):
        load(folder, nn.Linear(4, 4), "cpu")


# ---- Killed, or refused by the disk, at every single operation ----

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def at_operation(number: int, act: Callable[[], None]) -> list[str]:
    """Do something before the n-th file operation of this process; it cannot be undone, so only in a child.

    Returns:
        The operations, to which more are added as they come.
    """
    operations: list[str] = []

    def operation(name: str) -> None:
        operations.append(name)
        if len(operations) == number:
            act()

    sys.addaudithook(lambda event, _: operation(event) if event in OPERATIONS else None)
    fsync = os.fsync

    def counted_fsync(fd: Any) -> None:
        operation("os.fsync")
        fsync(fd)

    os.fsync = counted_fsync
    return operations


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


Report: TypeAlias = Callable[[int], None]


def in_child(work: Callable[[Report], None]) -> tuple[int, list[int]]:
    """How a child that did the work ended, and the numbers below 256 that it reported."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        code = 99

        def report(number: int) -> None:
            os.write(writing, bytes([number]))

        with contextlib.suppress(BaseException):
            work(report)
            code = 0
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        reported = list(pipe.read())
    return os.waitpid(child, 0)[1], reported


NO_MORE = 255


def at_every_operation(
    folder: Path, act: Callable[[], None], work: Callable[[Path, Report], None]
) -> Iterator[tuple[Path, int, list[int]]]:
    """Each time in a new folder; ends when there was no such operation any more."""
    for number in itertools.count(1):
        place = folder / str(number)
        place.mkdir()

        def all_of_it(report: Report, place: Path = place, number: int = number) -> None:
            operations = at_operation(number, act)
            work(place, report)
            if len(operations) < number:
                report(NO_MORE)

        status, reported = in_child(all_of_it)
        if NO_MORE in reported:
            return
        yield place, status, reported


SAVES = (1, 2, 2, 3)


def save_in_a_row(run: Path, report: Report) -> None:
    for number, update in enumerate(SAVES):
        model = Tied()
        nn.init.constant_(model.middle.bias, number)
        save(run, update, model, {"number": number}, keep=2)
        report(number)


def read_number(folder: Path) -> int:
    """What was saved in it, where the model and the state agree."""
    model = Tied()
    state = load(folder, model, "cpu")
    assert model.middle.bias.tolist() == [state["number"]] * 4
    return int(state["number"])


def test_a_kill_at_any_moment_of_saving_loses_at_most_what_was_being_saved(tmp_path: Path) -> None:
    save_in_a_row(tmp_path / "warm up", lambda _: None)
    kills = 0
    for run, status, reported in at_every_operation(tmp_path, kill, save_in_a_row):
        kills += 1
        assert os.WTERMSIG(status) == signal.SIGKILL
        tidy(run)
        finished = max(reported, default=-1)
        latest = newest(run)
        assert (read_number(latest) if latest else -1) in (finished, finished + 1)
        left = sorted((run / "checkpoints").iterdir()) if (run / "checkpoints").exists() else []
        found = [read_number(folder) for folder in left]
        assert len(found) <= 3  # one more than are kept, as it was cut short before they were removed
        assert len(found) >= min(len({SAVES[number] for number in range(finished + 1)}), 2)
        save(run, 9, Tied(), {}, keep=1)  # and the run can go on
        assert os.listdir(run / "checkpoints") == ["update-00000009"]
    assert kills > 50


def test_a_kill_before_tidying_is_tidied_too(tmp_path: Path) -> None:
    """Killed in the middle of a replacement, and then again at every operation of putting that in order."""

    def leave_a_mess(place: Path) -> None:
        save(place, 1, Tied(), {"number": 0}, keep=2)
        checkpoints = place / "checkpoints"
        os.rename(checkpoints / "update-00000001", checkpoints / ".update-00000001.wholebatch-old")
        save(place / "aside", 1, Tied(), {"number": 1}, keep=2)
        os.rename(place / "aside" / "checkpoints" / "update-00000001", checkpoints / ".update-00000001.wholebatch-new")
        (checkpoints / ".update-00000002.wholebatch-new").mkdir()
        (checkpoints / ".update-00000002.wholebatch-new" / "model.safetensors").write_bytes(b"half")

    for number in itertools.count(1):
        place = tmp_path / str(number)
        leave_a_mess(place / "mess")

        def killed_while_tidying(_: Report, place: Path = place, number: int = number) -> None:
            at_operation(number, kill)
            tidy(place / "mess")

        status, _ = in_child(killed_while_tidying)
        tidy(place / "mess")
        assert os.listdir(place / "mess" / "checkpoints") == ["update-00000001"]
        assert load(place / "mess" / "checkpoints" / "update-00000001", Tied(), "cpu") == {"number": 1}
        if status == 0:
            assert number > 5
            return


def replace_again_and_again(place: Path, report: Report) -> None:
    for number in range(3):
        with replaced(place / "model") as new:
            (new / "part").mkdir()
            for name in ("config.json", "part/weights"):
                (new / name).write_text(str(number))
        report(number)


def replaced_number(place: Path) -> int:
    """What was put there last, whole; -1 if nothing was."""
    if not os.listdir(place):
        return -1
    assert os.listdir(place) == ["model"]
    contents = {file.read_text() for file in (place / "model").rglob("*") if file.is_file()}
    assert sorted(file.name for file in (place / "model").rglob("*")) == ["config.json", "part", "weights"]
    assert len(contents) == 1
    return int(contents.pop())


def test_a_kill_at_any_moment_of_replacing_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    kills = 0
    for place, status, reported in at_every_operation(tmp_path, kill, replace_again_and_again):
        kills += 1
        assert os.WTERMSIG(status) == signal.SIGKILL
        tidy(place)
        finished = max(reported, default=-1)
        assert replaced_number(place) in (finished, finished + 1)
    assert kills > 30


def test_a_full_disk_at_any_moment_leaves_the_checkpoints_before(tmp_path: Path) -> None:
    """The save that it hits fails and leaves nothing, or it had its checkpoint in place and only could not clear up."""
    saving: list[int] = []

    def fill_disk() -> None:
        if saving:  # else the test itself is reading
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_or_fail(run: Path, update: int, number: int) -> str:
        model = Tied()
        nn.init.constant_(model.middle.bias, number)
        saving.append(number)
        try:
            save(run, update, model, {"number": number}, keep=1)
        except CheckpointError as error:
            return str(error)
        finally:
            saving.clear()
        return ""

    def save_three(run: Path, report: Report) -> None:
        for number, update in enumerate((1, 2, 2)):
            folder = run / "checkpoints" / f"update-{update:08d}"
            if failure := save_or_fail(run, update, number):
                assert f"{str(folder)!r} could not be written: No space left on device" in failure
                left = [read_number(folder) for folder in (run / "checkpoints").glob("*")]
                assert left == [number - 1] * (number > 0)
                report(10 + number)
            else:
                assert read_number(folder) == number
                report(number)

    failed = []
    for run, status, reported in at_every_operation(tmp_path, fill_disk, save_three):
        assert status == 0, f"{run.name}: another error than CheckpointError, or something left over"
        assert len(reported) == 3
        failed += [number for number in reported if number >= 10]
        tidy(run)
        assert numbers(run) in ([1], [2])
    assert set(failed) == {10, 11, 12}
    assert len(failed) > 20


@pytest.mark.parametrize("numbers_in_model", [10, 100_000])
def test_a_file_that_the_system_cuts_short_is_an_error(tmp_path: Path, numbers_in_model: int) -> None:
    """For real: no file may be longer than 100,000 bytes. The model's is cut, or the state's."""
    save(tmp_path, 1, nn.Linear(1, 1), {"number": 0}, keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, 2, nn.Linear(numbers_in_model, 1), {"large": torch.zeros(100_000)}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    folder = tmp_path / "checkpoints" / "update-00000002"
    assert f"checkpoint {str(folder)!r} could not be written: " in str(caught.value)
    assert "File too large" in str(caught.value)
    assert "the checkpoints before it are as they were. Make room there" in str(caught.value)
    assert os.listdir(tmp_path / "checkpoints") == ["update-00000001"]


def test_a_folder_that_became_read_only_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, Tied(), {}, keep=1)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", read_only)
        with pytest.raises(WholeBatchError, match="Read-only file system; the checkpoints before"):
            save(tmp_path, 2, Tied(), {}, keep=1)
    assert os.listdir(tmp_path / "checkpoints") == ["update-00000001"]
    (tmp_path / ".model.wholebatch-new").mkdir()
    monkeypatch.setattr(os, "rmdir", read_only)
    with pytest.raises(CheckpointError, match=r"cleared away: Read-only file system; make the folder writable"):
        tidy(tmp_path)


# ---- replaced, and small files ----


@pytest.mark.parametrize("by", ["safetensors", "torch", "python"])
def test_a_full_disk_is_an_os_error_whoever_meets_it(tmp_path: Path, by: str) -> None:
    def write() -> None:
        with replaced(tmp_path / "model") as new, (new / "file").open("wb") as file:
            if by == "safetensors":
                save_file({"a": torch.zeros(1000)}, new / "weights")
            elif by == "torch":
                torch.save(torch.zeros(1000), file)
            else:
                file.write(b"a" * 4000)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []


def test_another_error_in_the_block_stays_what_it_is(tmp_path: Path) -> None:
    def write() -> None:
        with replaced(tmp_path / "model"):
            try:
                (tmp_path / "not there").read_text()
            except OSError as error:
                raise ConfigurationError("no such thing") from error

    with pytest.raises(ConfigurationError, match="no such thing"):
        write()


def test_a_kill_at_any_moment_of_writing_a_small_file_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    def write_again_and_again(place: Path, report: Report) -> None:
        for number in range(3):
            write_text(place / "settings.toml", f"seed = {number}")
            report(number)

    kills = 0
    for place, _, reported in at_every_operation(tmp_path, kill, write_again_and_again):
        kills += 1
        tidy(place)
        finished = max(reported, default=-1)
        assert {file.name for file in place.iterdir()} <= {"settings.toml"}
        contents = [file.read_text() for file in place.iterdir()] or ["seed = -1"]
        assert contents[0] in (f"seed = {finished}", f"seed = {finished + 1}")
    assert kills > 10


def test_a_small_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_text(tmp_path / "settings.toml", "× old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"settings\.toml' could not be written: No space left on device"):
        write_text(tmp_path / "settings.toml", "new")
    assert (tmp_path / "settings.toml").read_text(encoding="utf-8") == "× old"
    assert os.listdir(tmp_path) == ["settings.toml"]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_one(tmp_path: Path, there: bool, error: type[BaseException]) -> None:
    folder = tmp_path / "model"
    if there:
        folder.mkdir()
        (folder / "weights").write_text("old")

    def fail_in_the_middle() -> None:
        with replaced(folder) as new:
            (new / "weights").write_text("new")
            raise error

    with pytest.raises(error):
        fail_in_the_middle()
    assert os.listdir(tmp_path) == ["model"] * there
    assert not there or (folder / "weights").read_text() == "old"


@pytest.mark.parametrize("fails", [True, False])
def test_the_old_one_stays_if_the_new_one_is_taken_away(tmp_path: Path, fails: bool) -> None:
    def take_away() -> None:
        with replaced(tmp_path / "model") as new:
            new.rmdir()
            if fails:
                raise FileNotFoundError

    with replaced(tmp_path / "model") as new:
        (new / "weights").write_text("old")
    with pytest.raises(FileNotFoundError):
        take_away()
    assert (tmp_path / "model" / "weights").read_text() == "old"
    assert os.listdir(tmp_path) == ["model"]


def test_what_a_kill_has_left_does_not_hinder_the_next_replacement(tmp_path: Path) -> None:
    for left in ("new", "gone"):
        (tmp_path / f".model.wholebatch-{left}").mkdir()
        (tmp_path / f".model.wholebatch-{left}" / "weights").write_text("left")
    with replaced(tmp_path / "model") as new:
        assert os.listdir(new) == []
        (new / "weights").write_text("new")
    assert os.listdir(tmp_path) == ["model"]


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure could leave a complete name with nothing in it."""
    order: list[str] = []
    rename = os.rename

    def renamed(one: Path, other: Path) -> None:
        order.append(f"{one.name} -> {other.name}")
        rename(one, other)

    monkeypatch.setattr(checkpoint, "_to_disk", lambda path: order.append(path.name))
    monkeypatch.setattr(os, "rename", renamed)
    save(tmp_path / "run", 1, Tied(), {}, keep=1)
    assert sorted(order[1:4]) == ["checksums.json", "model.safetensors", "state.pt"]
    name = ".update-00000001.wholebatch-new"
    assert [order[0], *order[4:]] == ["run", name, f"{name} -> update-00000001", "checkpoints"]
