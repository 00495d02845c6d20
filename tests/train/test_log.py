"""The log of a run: whole lines survive whatever is beside them, and a full disk."""

import json
import os

import pytest

from deltanox.train import read_log
from deltanox.train._log import Log


def write_log(path, count):
    path.write_text("".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in range(1, count + 1)))


def test_damage_in_the_middle_drops_no_other_line_and_is_said(tmp_path):
    path = tmp_path / "log.jsonl"
    write_log(path, 6)
    lines = path.read_bytes().split(b"\n")
    lines[1] = b"\xff\x00 garbage"
    lines[2] = b"[1, 2]"
    lines[3] = b'{"loss": 0.5}'
    path.write_bytes(b"\n".join(lines))
    assert [record["step"] for record in read_log(path)] == [1, 5, 6]
    said = []
    Log(path, step=5, say=said.append).close()
    assert [record["step"] for record in read_log(path)] == [1, 5]
    assert "3 damaged lines (number 2, 3, 4) were left out" in said[0]
    assert "lacks 3 of the 5 steps before this resumption" in said[1]


def test_a_removed_log_is_said_and_a_cut_last_line_is_not(tmp_path):
    said = []
    Log(tmp_path / "gone.jsonl", step=7, say=said.append).close()
    assert len(said) == 1 and "lacks 7 of the 7 steps before this resumption" in said[0]
    write_log(tmp_path / "log.jsonl", 7)
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 8, "lo')
    Log(tmp_path / "log.jsonl", step=7, say=said.append).close()
    Log(tmp_path / "new.jsonl", say=said.append).close()
    assert len(said) == 1


def test_lines_that_cannot_be_written_wait_for_room(tmp_path):
    """By the limit on the size of files, which stands for a full disk."""
    resource = pytest.importorskip("resource")
    path, said = tmp_path / "log.jsonl", []
    log = Log(path, say=said.append)
    log.write(step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        log.write(step=2)
        log.write(step=3)
        assert [record["step"] for record in read_log(path)] == [1]
        assert path.read_bytes().endswith(b"\n")  # the part of a line that had room was taken back
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write(step=4)
    log.close()
    assert [record["step"] for record in read_log(path)] == [1, 2, 3, 4]
    assert len(said) == 1 and f"`{path}` cannot be written" in said[0] and "the run goes on" in said[0]


def test_lines_lost_for_good_are_said(tmp_path):
    log = Log(tmp_path / "log.jsonl", say=(said := []).append)
    os.close(log._file.fileno())
    log.write(step=1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.close()
    assert "cannot be written" in said[0] and "lacks its last 1 lines" in said[1]
