"""Ctrl-C and the signals by which machines end processes: a run stops after its current step and saves it.

A handler does no more than set a flag, which the loop looks at between steps. An exception in its place, such as
Python's `KeyboardInterrupt`, may arise inside a callback of JAX's garbage collection, where it is lost.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_NOTICE = b"\nstopping after this step; once more to stop at once, without what was done since the last checkpoint\n"


class TrainingStopped(KeyboardInterrupt):
    """The run was asked to stop, and saved its current step: resumed, it goes on as if it had not been stopped.

    `signal` is what asked, and `exit_status` what a process ends with in answer (130 for Ctrl-C, 143 for SIGTERM).
    """

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.signal = signal.Signals(number)
        self.exit_status = 128 + number


class StopRequest:
    """Whether the run was asked to stop, and by which signal."""

    signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Signals as requests, while this is open. With the first one the handlers before it come back, so that a second
    signal does what it did without a run. Signals that are ignored (`nohup`) stay so.

    Outside the main thread Python cannot handle signals: there the request is never made.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def handle(number, frame) -> None:
        del frame
        request.signal = number
        restore()
        with contextlib.suppress(OSError):
            os.write(2, _NOTICE)

    for number in _SIGNALS:
        # None: set by something else than Python, which could not put it back
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            before[number] = signal.signal(number, handle)
    try:
        yield request
    finally:
        restore()


def wait_for(arrays: Any) -> None:
    """Wait until the device has computed `arrays` (a PyTree), hearing signals meanwhile: a handler of Python waits for
    compiled code to return, and a step of a large model takes minutes on a CPU."""
    for array in jax.tree.leaves(arrays):
        while not array.is_ready():
            time.sleep(0.001)


@contextlib.contextmanager
def fatal_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once, inside compiled code too, as long as this is open and nothing else handles it.

    Python's own handler waits for compiled code to return, and raises an exception that may be lost.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
