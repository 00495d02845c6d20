"""Tokens to text as they come: what the tokenizer decodes at once, for tokenizers of every kind."""

from types import SimpleNamespace

import numpy as np
import pytest
from jaxtyping import config as checker

from deltanox.generate import GREEDY
from deltanox.interop import Text, _text
from deltanox.interop._decoder import StreamDecoder

tokenizers = pytest.importorskip("tokenizers", reason="tokenizer.json needs the package tokenizers")
normalizers, pre_tokenizers, decoders = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.decoders


def fallback():
    """Words with `▁` for a space and, for every other character, its bytes, as SentencePiece has them."""
    words = {"[UNK]": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    words |= {word: 257 + i for i, word in enumerate(["▁", "a", "b", "▁a", "▁b"])}
    model = tokenizers.models.BPE(
        vocab=words, merges=[("▁", "a"), ("▁", "b")], unk_token="[UNK]", byte_fallback=True, fuse_unk=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def of_bytes(*, prefix=False, normalizer=None):
    """One token for each byte, a merge, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate(alphabet)} | {"ab": 256}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<word>"])
    return tokenizer


def metaspace():
    words = [("[UNK]", 0.0)] + [(letter, -2.0) for letter in "▁abä\n"] + [("▁a", -1.0), ("▁ab", -1.0)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(words, 0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def words():
    vocabulary = {"[UNK]": 0, "a": 1, "##b": 2, "b": 3, "ä": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return tokenizer


KINDS = {
    "byte fallback": fallback,
    "bytes": of_bytes,
    "bytes, prefix space": lambda: of_bytes(prefix=True),
    "bytes, NFC": lambda: of_bytes(normalizer=normalizers.NFC()),
    "metaspace": metaspace,
    "words": words,
}


def streamed(tokenizer, tokens, context=()):
    decoder = StreamDecoder(tokenizer, context)
    return [*map(decoder.step, tokens), decoder.finish()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["ab ba", "ä a\u0308 b", " a  b\nab", "a<|end|> b<word>a", "𝄞 a𝄞", "\ufffda", ""])
def test_pieces_of_a_text_are_the_text(kind, text):
    tokenizer = KINDS[kind]()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_as_the_whole_would(kind):
    """The space before the first new word is there, if the prompt is more than its beginning."""
    tokenizer = KINDS[kind]()
    tokens = tokenizer.encode("a ab b\na ab").ids
    whole = tokenizer.decode(tokens, skip_special_tokens=False)
    for cut in range(1, len(tokens)):
        prompt = tokenizer.decode(tokens[:cut], skip_special_tokens=False)
        assert prompt + "".join(streamed(tokenizer, tokens[cut:], tokens[:cut])) == whole


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("byte")])
def test_any_tokens_are_text(kind):
    """Noise is no error, and never undoes what was shown: bytes that are no character are replaced, others stay."""
    tokenizer = KINDS[kind]()
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 40, 400):
        tokens = rng.integers(0, tokenizer.get_vocab_size() + 2, size).tolist()
        pieces = streamed(tokenizer, tokens)
        if kind == "byte fallback":  # the package replaces whole runs of bytes: by hand instead
            data = b""
            for token in tokens:
                known = tokenizer.id_to_token(token) or ""
                data += bytes([token - 1]) if 1 <= token <= 256 else known.replace("▁", " ").encode()
            want = data.decode(errors="replace")
            want = want[1:] if tokens[0] > 257 else want
        else:
            want = tokenizer.decode(tokens, skip_special_tokens=False)
        assert "".join(pieces) == want
        # nothing waits for long: a character has four bytes at most
        assert len("".join(pieces[:-1]).encode()) >= len(want.encode()) - 3 * 4


def test_a_wrong_byte_leaves_the_characters_before_it():
    tokenizer = fallback()
    a, first, second, word = (tokenizer.token_to_id(name) for name in ("<0x61>", "<0xC3>", "<0xA4>", "▁b"))
    assert tokenizer.decode([a, first, word]) == "\ufffd\ufffd b"
    assert streamed(tokenizer, [a, first, word]) == ["a", "", "\ufffd b", ""]
    assert streamed(tokenizer, [a, first, second, word]) == ["a", "", "ä", " b", ""]
    assert streamed(tokenizer, [word, first]) == ["b", "", "\ufffd"]


def test_the_space_after_a_prompt_is_shown(monkeypatch):
    """A text that goes on with a word is no text that begins with one."""
    tokenizer = metaspace()
    monkeypatch.setattr(_text, "stream", lambda *_, **__: iter(tokenizer.encode("ab", add_special_tokens=False).ids))
    checker.update("jaxtyping_disable", True)  # the model is none
    try:
        for prompt, shown in (("a", " ab"), ("", "ab")):
            pieces = Text(tokenizer).stream(SimpleNamespace(vocab_size=99), prompt, max_tokens=9, sampler=GREEDY)
            assert "".join(pieces) == shown
    finally:
        checker.update("jaxtyping_disable", False)


def test_the_name_of_a_byte_can_be_a_word():
    tokenizer = of_bytes()
    tokenizer.add_tokens(["<0x61>"])
    assert "".join(streamed(tokenizer, tokenizer.encode("b<0x61>b").ids)) == "b<0x61>b"
