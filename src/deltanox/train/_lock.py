"""One process at a time writes to a run's folder."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from deltanox._oserror import naming

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".lock"


class RunIsOpen(ValueError):
    """Another process writes to the run."""


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Hold the lock of a run's folder. It ends with the process, however that ends; the file `.lock` stays, and says
    who holds it. On a platform or a file system without locks nothing is held.

    **Raises**: `RunIsOpen` where another process holds it.
    """
    path = directory / LOCK
    with naming(path):
        # not "w": the holder's name must stay until the lock is ours
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with open(descriptor, "r+", encoding="utf-8", errors="replace") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunIsOpen(
                    f"train.directory: `{directory}` must be open in one process only, but "
                    f"{file.read(200).strip() or 'another process'} writes to it: wait for its end or stop it, or give "
                    "another folder"
                ) from None
            except OSError:  # a file system without locks
                pass
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
