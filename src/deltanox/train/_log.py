"""The log of a run: one JSON object a line, appended while it runs."""

import json
import os
from pathlib import Path
from typing import Any


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The records of a log. A last line that is cut off (the process was killed while writing) is left out."""
    records = []
    for line in Path(path).read_text("utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class Log:
    """Appends records to the file `path`. On a resumption, what was logged after `step` is cut off first.

    Floats are written so that reading gives the same bits; NaN and infinity as JSON's common extension `NaN`,
    `Infinity`.
    """

    def __init__(self, path: str | Path, *, step: int = 0):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_log(path) if record["step"] <= step] if path.exists() else []
        writing = path.with_name(path.name + ".writing")
        writing.write_text("".join(json.dumps(record) + "\n" for record in kept), "utf-8")
        os.replace(writing, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)

    def write(self, **record: Any) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
