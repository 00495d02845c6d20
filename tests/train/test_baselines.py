"""The baselines against a program that counts with dictionaries."""

import gzip
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from deltanox.train import Document, _loop as loop, gzip_bits_per_byte, markov_bits_per_byte
from deltanox.train._baselines import archive_bits_per_byte
from deltanox.train._plot import plot_losses, validations


def by_hand(training, validation, order):
    counts = [defaultdict(Counter) for _ in range(order + 1)]
    for document in training:
        symbols = [256] * order + [*document.data, 256]
        for i in range(order, len(symbols)):
            for length in range(order + 1):
                counts[length][tuple(symbols[i - length : i])][symbols[i]] += 1

    def probability(context, symbol):
        lower = probability(context[1:], symbol) if context else 1 / 257
        seen = counts[len(context)][tuple(context)]
        if not seen:
            return lower
        return (seen[symbol] + len(seen) * lower) / (sum(seen.values()) + len(seen))

    bits, size = 0.0, 0
    for document in validation:
        symbols = [256] * order + [*document.data, 256]
        size += len(document.data)
        for i in range(order, len(symbols)):
            bits -= math.log2(probability(symbols[i - order : i], symbols[i]))
    # Every context's probabilities add up to one.
    assert sum(probability(symbols[:order], s) for s in range(257)) == pytest.approx(1)
    return bits / size


@pytest.mark.parametrize("order", [0, 1, 2])
def test_markov(order):
    rng = np.random.default_rng(3)
    texts = ["".join(rng.choice(list("abcä \n"), size)) for size in (200, 80, 1, 60)]
    docs = [Document(str(i), text.encode()) for i, text in enumerate(texts)]
    assert markov_bits_per_byte(docs[:2], docs[2:], order) == pytest.approx(
        by_hand(docs[:2], docs[2:], order), rel=1e-12
    )


def test_gzip_goes_file_by_file():
    docs = [Document("a", b"abc" * 100), Document("b", b"abc" * 100)]
    assert gzip_bits_per_byte(docs) == 8 * len(gzip.compress(docs[0].data, 9)) / 300


def test_one_archive_profits_from_what_documents_share():
    rng = np.random.default_rng(0)
    text = rng.integers(32, 127, 400, np.uint8).tobytes()
    docs = [Document("a", text), Document("b", text)]
    in_gzip, in_xz = archive_bits_per_byte(docs)
    assert in_gzip == 8 * len(gzip.compress(text + text, 9)) / 800
    assert in_gzip < 0.6 * gzip_bits_per_byte(docs) and in_xz < 0.7 * gzip_bits_per_byte(docs)


def test_the_markov_model_counts_the_beginning_of_one_huge_document(monkeypatch):
    monkeypatch.setattr(loop, "_MARKOV_BYTES", 10)
    docs = [Document("a", b"x" * 25), Document("b", b"y")]
    assert loop._beginning(docs) == [Document("a", b"x" * 10)]
    assert loop._beginning(docs[::-1]) == [Document("b", b"y")]


def test_a_line_of_the_picture_is_one_measure(tmp_path, monkeypatch):
    """Short validations end in the last step's value on the same batches; the whole text is a mark of its own."""
    from matplotlib.axes import Axes

    records = [
        {"step": 1, "bits_per_byte": 8.0},
        {"step": 10, "validation_bits_per_byte": 3.0},
        {"step": 20, "validation_bits_per_byte": 1.9, "baselines": {}, "first_batches_bits_per_byte": 2.5},
    ]
    assert validations(records) == ([(10, 3.0), (20, 2.5)], [(20, 1.9)])
    assert validations(records[:2]) == ([(10, 3.0)], [])
    drawn, plot = {}, Axes.plot

    def recording(self, *args, **kwargs):
        drawn[kwargs.get("label", "")] = args
        return plot(self, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", recording)
    plot_losses(records, {"gzip -9, file by file": 2.3}, tmp_path / "loss.png")
    assert drawn["validation, first batches only"][:2] == ((10, 20), (3.0, 2.5))
    assert drawn["validation, whole text (1.900)"][:2] == ((20,), (1.9,))
