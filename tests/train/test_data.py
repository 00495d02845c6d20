"""Documents, their split, packing and order."""

import hashlib
import itertools
import os

import numpy as np
import pytest

from deltanox.train import (
    BOUNDARY,
    DataPosition,
    Document,
    TrainingData,
    encode,
    read_documents,
    split_documents,
    standard_library,
    validation_batches,
)
from deltanox.train._documents import describe_split


def documents(*sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [Document(f"{i}.txt", rng.integers(0, 256, size, np.uint8).tobytes()) for i, size in enumerate(sizes)]


def pairs(document):
    """All (input, label) of a document, by definition."""
    tokens = [BOUNDARY, *document.data, BOUNDARY]
    return list(itertools.pairwise(tokens))


def segments(batch):
    """The real (input, label) pairs of each run of equal segment ids, row by row."""
    for row in range(batch.tokens.shape[0]):
        real = np.ones(batch.tokens.shape[1], bool) if batch.mask is None else batch.mask[row]
        ids = batch.segment_ids[row]
        for segment in np.unique(ids[real]):
            here = (ids == segment) & real
            places = np.flatnonzero(here)
            assert np.all(np.diff(places) == 1)  # one run of neighbours
            yield list(zip(batch.tokens[row][here].tolist(), batch.labels[row][here].tolist()))


def test_a_document_is_its_bytes_between_two_boundaries():
    (batch,) = validation_batches([Document("a", b"ab"), Document("b", b"c")], 6, 1)
    assert batch.tokens.tolist() == [[256, 97, 98, 256, 99, 256]]
    assert batch.labels.tolist() == [[97, 98, 256, 99, 256, 256]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1, 1, 1]] or batch.segment_ids.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert batch.mask.tolist() == [[True] * 5 + [False]]


@pytest.mark.parametrize("row_length", [2, 5, 16, 64])
def test_every_pair_once_and_no_label_of_another_document(row_length):
    docs = documents(37, 1, 51, 40, 3)
    found = [segment for batch in validation_batches(docs, row_length, 3) for segment in segments(batch)]
    # Each segment is a piece of one document; together they are all documents in order.
    wanted = [pairs(document) for document in docs]
    for piece in found:
        assert wanted[0][: len(piece)] == piece
        wanted[0] = wanted[0][len(piece) :]
        if not wanted[0]:
            wanted.pop(0)
    assert not wanted


def test_a_training_epoch_holds_each_full_row_once():
    docs = documents(300, 100, 77, 5)
    data = TrainingData(docs, 16, 3, seed=1)
    allowed = {pair for document in docs for pair in pairs(document)}
    position, rows = DataPosition(), []
    for _ in range(data.batches_per_epoch):
        batch, position = data(position)
        assert batch.mask is None and batch.tokens.shape == batch.labels.shape == batch.segment_ids.shape == (3, 16)
        assert batch.tokens.dtype == batch.labels.dtype == batch.segment_ids.dtype == np.int32
        assert set(zip(batch.tokens.ravel().tolist(), batch.labels.ravel().tolist())) <= allowed
        rows += batch.tokens.tolist()
    assert position == DataPosition(1, 0)
    assert len({tuple(row) for row in rows}) == len(rows) == 486 // 16 // 3 * 3


def test_order_depends_on_seed_epoch_and_position_only():
    docs = documents(300, 100, 77, 5)

    def rows(seed, position):
        return TrainingData(docs, 16, 3, seed=seed)(position)[0].tokens.tolist()

    data = TrainingData(docs, 16, 3, seed=1)
    position, straight = DataPosition(), []
    for _ in range(2 * data.batches_per_epoch):
        batch, after = data(position)
        straight.append(batch.tokens.tolist())
        assert rows(1, position) == straight[-1]  # as if started here
        position = after
    assert rows(2, DataPosition()) != straight[0]
    assert straight[: data.batches_per_epoch] != straight[data.batches_per_epoch :]
    # A fixed value: the order must not change with a version of NumPy, or old checkpoints would read other data.
    digest = hashlib.sha256(np.asarray(straight, np.int32).tobytes()).hexdigest()
    assert digest.startswith("df383a2dbc2939fb")


def test_too_little_text_for_a_batch():
    with pytest.raises(ValueError, match=r"3 rows of 16 tokens; it has 12 tokens: give more text"):
        TrainingData(documents(11), 16, 3, seed=0)


def test_the_split_goes_by_name_and_keeps_to_the_size():
    docs = [Document(f"{i}.py", b"x" * (1 + i)) for i in range(200)]
    training, validation = split_documents(docs, 0.25)
    assert set(training) | set(validation) == set(docs) and not set(training) & set(validation)
    assert 25 < len(validation) < 75
    fewer, held = split_documents(docs[::-1][:150], 0.25)
    assert set(held) <= set(validation) and set(fewer) <= set(training)
    same, small = split_documents(docs, 0.25, 500)
    assert same == training and set(small) < set(validation) and sum(len(d.data) for d in small) <= 500
    assert describe_split(docs, training, validation).endswith("files held out whole")
    assert "held out and not evaluated (data.validation_bytes)" in describe_split(docs, same, small)


LINES = "".join(f"{i} ä line of text\n" for i in range(4000)).encode()  # 80 kB
UNEVEN = {
    "one file": [Document("a.txt", LINES)],
    "one huge file beside small ones": [
        Document("a.txt", 4 * LINES),
        *(Document(f"{i}.txt", b"small\n" * i) for i in range(1, 19)),
    ],
    "no line ends": [Document("a.txt", LINES.replace(b"\n", b""))],
    "two files": [Document("a.txt", LINES), Document("b.txt", LINES)],
}


@pytest.mark.parametrize("docs", UNEVEN.values(), ids=UNEVEN.keys())
@pytest.mark.parametrize("size", [None, 6000, 500])
def test_pieces_are_held_out_where_files_are_few_or_uneven(docs, size):
    """All text is used, once; pieces have the size asked for, and are cut between characters, at lines if there are."""
    total = sum(len(document.data) for document in docs)
    wanted = min(int(0.05 * total), size or total)
    training, validation = split_documents(docs, 0.05, size)
    assert wanted / 2 < sum(len(document.data) for document in validation) <= wanted
    assert (training, validation) == split_documents(docs[::-1], 0.05, size)  # whatever the order
    spans = {document.name: [] for document in docs}
    data = {document.name: document.data for document in docs}
    for document in (*training, *validation):
        document.data.decode("utf-8")
        name, _, span = document.name.partition("[")
        first, last = map(int, span.rstrip("]").split(":")) if span else (0, len(data[name]))
        assert document.data == data[name][first:last]
        spans[name].append((first, last))
        if b"\n" in data[name]:
            assert document.data.endswith(b"\n")
    for name, found in spans.items():  # nothing twice, nothing left out
        ends = [0, *(last for _, last in sorted(found))]
        assert [first for first, _ in sorted(found)] == ends[:-1] and ends[-1] == len(data[name])
    pieces = len(validation)
    assert f"{pieces} piece{'s' if pieces > 1 else ''} cut out of the files" in describe_split(
        docs, training, validation
    )


def test_no_label_crosses_the_border_of_a_piece_held_out():
    """Training rows have no pair of input and label with a byte of the piece: a character that is only there is never
    seen, as an input or as a label."""
    docs = [Document("a.txt", b"a" * 3000)]
    _, validation = split_documents(docs, 0.05)
    (first, last) = (int(x) for x in validation[0].name.partition("[")[2].rstrip("]").split(":"))
    docs = [Document("a.txt", b"a" * first + b"b" * (last - first) + b"a" * (3000 - last))]
    training, validation = split_documents(docs, 0.05)
    assert set(validation[0].data) == {ord("b")} and len(training) == 2
    data = TrainingData(training, 8, 2, seed=0)
    batch, _ = data(DataPosition())
    assert {*batch.tokens.ravel().tolist(), *batch.labels.ravel().tolist()} <= {ord("a"), BOUNDARY}


def test_text_that_is_too_short_to_split_is_refused():
    with pytest.raises(ValueError, match=r"no text is left for training: 1 documents of 1 bytes.*give more text"):
        split_documents([Document("a", b"x")], 0.02)


def test_the_standard_library_without_tests():
    docs = standard_library()
    names = {document.name for document in docs}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any(
        part in ("test", "tests", "idle_test", "site-packages") for name in names for part in name.split("/")
    )
    assert sorted(docs) == docs and all(document.data for document in docs)
    assert sum(len(document.data) for document in docs) > 5_000_000


def test_own_text(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tests").mkdir()
    (tmp_path / "a" / "tests" / "x.txt").write_text("ä")
    (tmp_path / "a" / ".hidden").write_text("no")
    (tmp_path / "b.md").write_text("b")
    assert read_documents([tmp_path / "a", tmp_path / "b.md"]) == [
        Document("b.md", b"b"),
        Document("tests/x.txt", "ä".encode()),
    ]
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        read_documents([tmp_path / "c"])
    (tmp_path / "a" / "bad").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"`bad` is not UTF-8 .* at byte 0"):
        read_documents([tmp_path / "a"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no text under"):
        read_documents([tmp_path / "empty"])


def test_what_is_no_text_is_refused_in_a_sentence(tmp_path):
    """A FIFO is never opened, which would wait for ever; a broken link, binary files and UTF-16 are named."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "good.txt").write_text("good")
    (folder / "empty.txt").write_text("")
    assert [document.name for document in read_documents([folder])] == ["good.txt"]
    bad = folder / "bad"

    def refused(sentence):
        for path in (folder, bad):
            with pytest.raises(ValueError, match=sentence):
                read_documents([path])
        bad.unlink()

    os.mkfifo(bad)
    refused("bad` is neither a file nor a folder; give regular files")
    bad.symlink_to("nowhere")
    refused("bad` is a broken link to `nowhere`; mend it or remove it")
    bad.write_bytes("UTF-16".encode("utf-16-le"))
    refused("`bad` must be text, but it has a zero at byte 1, as binary files and UTF-16 have; convert it")
    bad.write_bytes(b"\x89PNG\r\n\x1a\n")
    refused(r"`bad` is not UTF-8 .* at byte 0")
    bad.symlink_to(bad)
    refused("bad` must be readable, but it is not")


def test_links_are_followed_and_a_file_is_read_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
    (tmp_path / "a" / "to_b").symlink_to(tmp_path / "b")
    (tmp_path / "a" / "again.txt").symlink_to("a.txt")
    (tmp_path / "b" / "back").symlink_to(tmp_path / "a")  # a circle
    found = read_documents([tmp_path / "a", tmp_path / "a" / "a.txt", tmp_path / "b"])
    assert sorted(document.data for document in found) == [b"a", b"b"]


def test_encode():
    assert encode("ä").tolist() == [256, 0xC3, 0xA4] and encode(b"").tolist() == [256]
