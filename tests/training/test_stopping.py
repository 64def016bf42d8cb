"""Ctrl-C and SIGTERM."""

import os
import signal
import threading

import pytest

from wholebatch.training.stopping import SIGNALS, StopRequest


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_noted_and_answered_at_once(
    capfd: pytest.CaptureFixture[str], sent: signal.Signals, code: int
) -> None:
    with StopRequest() as stop:
        assert (stop.signal, stop.exit_code) == (None, 0)
        os.kill(os.getpid(), sent)
        assert (stop.signal, stop.exit_code) == (sent, code)
    assert "what is under way is finished, then a checkpoint saved" in capfd.readouterr().err


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_the_second_leaves_at_once(first: signal.Signals, second: signal.Signals) -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), first)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)
    assert stop.signal is first


def test_afterwards_signals_do_what_they_did() -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with StopRequest():
        assert [signal.getsignal(one) for one in SIGNALS] != before
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_in_another_thread_there_is_nothing_to_listen_to() -> None:
    found: list[StopRequest] = []

    def work() -> None:
        with StopRequest() as stop:
            found.append(stop)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].signal is None
