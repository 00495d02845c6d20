"""What the machine refuses (`OSError`), as one sentence with the path and a remedy."""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_REMEDIES = {
    errno.EACCES: "there is no permission for {path}: give a path that this user may use, or change its permissions",
    errno.EPERM: "there is no permission for {path}: give a path that this user may use, or change its permissions",
    errno.EROFS: "{path} is on a read-only file system: give a path on another one",
    errno.ENOSPC: "no space left on the device of {path}: free some, or give a path on another one",
    errno.EDQUOT: "the disk quota at {path} is used up: free some space, or give a path elsewhere",
    errno.EFBIG: "{path} would be larger than this process or file system allows: raise the limit (`ulimit -f`), or "
    "give a path on another file system",
    errno.ENAMETOOLONG: "the name {path} is too long for this file system: give a shorter one",
    errno.ENOENT: "there is no {path}: check the path",
    errno.ENOTDIR: "a part of {path} is a file where a folder must be: give another path",
    errno.EISDIR: "{path} is a folder where a file must be: give a file",
    errno.EEXIST: "{path} exists already: give another path, or move it away",
    errno.ELOOP: "{path} is a link that leads to itself: repair the link, or give another path",
    errno.EMFILE: "this process may not open more files, such as {path}: raise the limit (`ulimit -n`)",
    errno.EPIPE: "{path} was closed by its reader before all was written: keep the reader open",
}


def sentence(error: OSError) -> str:
    """What went wrong, where, and what to do about it, in one line."""
    # of a copy or a renaming: what is written, unless the source cannot be read
    first = error.filename2 is None or error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM)
    path = error.filename if first else error.filename2
    name = "the output" if path is None else f"`{_short(os.fsdecode(path) if isinstance(path, bytes) else str(path))}`"
    if error.errno in _REMEDIES:
        return _REMEDIES[error.errno].format(path=name)
    reason = error.strerror or str(error) or type(error).__name__
    return f"{name} could not be read or written ({reason}): check the disk and the path, then try again"


def _short(path: str, most: int = 200) -> str:
    path = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in path)
    return path if len(path) <= most else f"{path[: most // 2]}...{path[-most // 2 :]}"


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Give an `OSError` from inside a path where it has none, as that of a full disk, which comes from `write`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def safetensors_errors(path: str | Path) -> Iterator[None]:
    """What the machine refuses inside safetensors, which has an error of its own for it, as an `OSError` of `path`."""
    import safetensors

    try:
        yield
    except safetensors.SafetensorError as error:
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from None


def discard_output() -> None:
    """Send what is still printed into nothing: Python flushes its output once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def expand_home(path: str | Path) -> Path:
    """`path`, with the home folder in place of a leading `~`.

    **Raises**: `ValueError` for `~` of a user that does not exist.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"`{path}` must begin with the home folder of a user, but that user is unknown: write the whole path"
        ) from None
