"""What the machine refuses, as one sentence of the command line."""

import errno
import os
import sys

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from deltanox import cli
from deltanox._oserror import naming, safetensors_errors, sentence
from deltanox.train._terminal import _Unbreakable, unbreakable


@pytest.mark.parametrize(
    "number, words",
    [
        (errno.EACCES, "there is no permission for `a/b`: give a path"),
        (errno.EROFS, "`a/b` is on a read-only file system: give a path on another one"),
        (errno.ENOSPC, "no space left on the device of `a/b`: free some"),
        (errno.EFBIG, "`a/b` would be larger than this process or file system allows: raise"),
        (errno.ENAMETOOLONG, "the name `a/b` is too long for this file system: give a shorter one"),
        (errno.ENOTDIR, "a part of `a/b` is a file where a folder must be"),
        (errno.EIO, "`a/b` could not be read or written (Input/output error): check the disk"),
    ],
)
def test_each_refusal_has_its_remedy(number, words):
    assert sentence(OSError(number, os.strerror(number), "a/b")).startswith(words)


def test_what_safetensors_cannot_write_is_an_error_of_the_machine(tmp_path):
    with pytest.raises(FileNotFoundError) as error, safetensors_errors(tmp_path / "a"):
        save_file({"x": np.ones(1)}, tmp_path / "none" / "x")
    assert error.value.filename == str(tmp_path / "a")
    with pytest.raises(safetensors.SafetensorError), safetensors_errors(tmp_path):
        safetensors.deserialize(b"no safetensors")


def test_a_path_is_given_where_there_is_none_and_shortened_where_it_is_long():
    with pytest.raises(OSError, match="x") as error, naming("a/b"):
        raise OSError(errno.ENOSPC, "x")
    assert "of `a/b`: " in sentence(error.value)
    long = sentence(OSError(errno.ENAMETOOLONG, "x", "\n" + "y" * 9000))
    assert len(long) < 300 and "\n" not in long
    assert sentence(OSError("of an own kind")).startswith("the output could not be read or written (of an own kind)")


def run_command(monkeypatch, function):
    monkeypatch.setattr(cli, "_convert", function)
    return cli.main(["convert", "a", "b"])


def test_a_name_that_is_too_long_and_a_folder_without_permission(tmp_path, monkeypatch, capsys):
    assert run_command(monkeypatch, lambda _: (tmp_path / ("x" * 300)).mkdir()) == 1
    assert "is too long for this file system" in capsys.readouterr().err
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)

    def write(_):
        root = os.geteuid() == 0  # who may write anywhere
        if root:
            tmp_path.chmod(0o755)
            os.seteuid(65534)
        try:
            (closed / "run").mkdir()
        finally:
            if root:
                os.seteuid(0)

    assert run_command(monkeypatch, write) == 1
    error = capsys.readouterr().err
    assert error.startswith("deltanox: there is no permission for `") and error.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_an_output_that_is_full_or_closed(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run_command(monkeypatch, lambda _: print("text", end="", flush=True)) == 1
        assert capsys.readouterr().err == (
            "deltanox: no space left on the device of the output: free some, or give a path on another one\n"
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run_command(monkeypatch, lambda _: print("text", flush=True)) == 141
        assert capsys.readouterr().err == ""


def test_a_run_outlives_its_terminal():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as pipe:
        unbreakable(lambda text: print(text, file=pipe))("text")
        file = _Unbreakable(pipe)
        file.write("text\n")
        file.flush()
        assert file.fileno() == pipe.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())
