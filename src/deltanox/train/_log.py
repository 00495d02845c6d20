"""The log of a run: one JSON object a line, appended while it runs."""

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deltanox._oserror import naming
from deltanox.train._folder import beside

# Lines that wait for a disk that is full: some hundred bytes each.
_WAITING = 100_000


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The records of a log. Lines that are no records are left out, such as a last one that is cut off (the process
    was killed while writing)."""
    return _read(Path(path))[0]


def _read(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The records, and the numbers of the complete lines that are none."""
    lines = path.read_bytes().split(b"\n")
    records, damaged = [], []
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is not None:
            records.append(record)
        elif line and number < len(lines):
            damaged.append(number)
    return records, damaged


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


class Log:
    """Appends records to the file `path`. On a resumption, what was logged after `step` is cut off first.

    Floats are written so that reading gives the same bits; NaN and infinity as JSON's common extension `NaN`,
    `Infinity`. A line that cannot be written (a full disk) waits for the next one, and does not end the run.

    `say` hears of lines that are damaged or missing at a resumption, and of lines that cannot be written.

    **Raises**: `OSError` where the file cannot be opened.
    """

    def __init__(self, path: str | Path, *, step: int = 0, say: Callable[[str], None] = print):
        self._path, self._say = Path(path), say
        self._waiting: deque[bytes] = deque(maxlen=_WAITING)
        self._failed = False
        with naming(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            records, damaged = _read(self._path) if self._path.exists() else ([], [])
            self.records = [record for record in records if record["step"] <= step]
            _replace(self._path, b"".join(map(_line, self.records)))
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        _say_what_is_missing(self._path, self.records, damaged, step, say)

    def write(self, **record: Any) -> None:
        self._waiting.append(_line(record))
        self._flush()

    def _flush(self) -> None:
        size = None
        try:
            while self._waiting:
                size = os.fstat(self._file.fileno()).st_size
                if self._file.write(self._waiting[0]) != len(self._waiting[0]):
                    raise OSError("a part of a line was written")
                self._waiting.popleft()
            self._failed = False
        except OSError as error:
            self._cut(size)
            if not self._failed:
                reason = error.strerror or "no space left on the device"
                self._say(f"`{self._path}` cannot be written ({reason}); the run goes on, its lines wait for room")
            self._failed = True

    def _cut(self, size: int | None) -> None:
        """Take back the part of a line that was written behind `size` bytes."""
        try:
            if size is not None:
                self._file.truncate(size)
        except OSError:
            # what was written ends as a damaged line, which reading passes over
            if self._waiting[0] != b"\n":
                self._waiting.appendleft(b"\n")

    def close(self) -> None:
        self._flush()
        if self._waiting:
            self._say(f"`{self._path}` lacks its last {len(self._waiting)} lines: free some space on its device")
        self._file.close()


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _replace(path: Path, data: bytes) -> None:
    writing = beside(path)
    try:
        writing.write_bytes(data)
        os.replace(writing, path)
    finally:
        writing.unlink(missing_ok=True)


def _say_what_is_missing(
    path: Path, records: Sequence[dict[str, Any]], damaged: Sequence[int], step: int, say: Callable[[str], None]
) -> None:
    if damaged:
        numbers = ", ".join(map(str, damaged[:5])) + (" ..." if len(damaged) > 5 else "")
        say(f"`{path}`: {len(damaged)} damaged lines (number {numbers}) were left out, the others are there")
    logged = {record["step"] for record in records if "loss" in record}
    if missing := step - len(logged & set(range(1, step + 1))):
        say(f"`{path}` lacks {missing} of the {step} steps before this resumption; the run itself is not affected")
