"""The baselines against a program that counts with dictionaries."""

import gzip
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from deltanox.train import Document, gzip_bits_per_byte, markov_bits_per_byte


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
