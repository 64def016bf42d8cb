"""Ctrl-C and SIGTERM: the update under way is finished, a checkpoint saved; a second Ctrl-C leaves at once."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Notes that the run is asked to stop. A context manager; outside it, signals do what they did before."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """Which signal asked for it; None as long as none has."""

        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Listen; Python delivers signals to the main thread only."""
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._asked) for one in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the handlers back that were there."""
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._before = {}

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        os.write(2, b"\nstopping: what is under way is finished, then a checkpoint saved; Ctrl-C leaves at once\n")

    @property
    def exit_code(self) -> int:
        """As shells have it for a program that a signal ended: 130 for Ctrl-C, 143 for SIGTERM; 0 if none came."""
        return 0 if self.signal is None else 128 + self.signal
