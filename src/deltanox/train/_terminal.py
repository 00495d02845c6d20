"""Where a run speaks: a terminal or a pipe, which may go away while the run must not."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm


def unbreakable(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say`, whose sentences are lost where the reader of the output has gone or its disk is full."""

    def say_or_not(sentence: str) -> None:
        with contextlib.suppress(OSError):
            say(sentence)

    return say_or_not


class _Unbreakable:
    """A text file that loses what cannot be written."""

    def __init__(self, file: Any):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


def progress_bar(steps: int, first_step: int, shown: bool) -> tqdm:
    return tqdm(
        total=steps,
        initial=first_step,
        unit="step",
        disable=not shown,
        dynamic_ncols=True,
        file=_Unbreakable(sys.stderr),
    )
