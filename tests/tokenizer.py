"""A small tokenizer.json: bytes of the alphabet and of the space, and one merge; 30 tokens."""

import json

import pytest

END = "[END]"


def write_tokenizer(folder, **beside):
    """Into a folder, with a tokenizer_config.json of the fields `beside`."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizer.json needs the package tokenizers")
    known = ["Ġ", *(chr(x) for x in range(ord("a"), ord("z") + 1))]  # Ġ: a space
    words = {"ab": 0, END: 1, "[UNK]": 2} | {letter: 3 + i for i, letter in enumerate(known)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[("a", "b")], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if beside:
        (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    return folder / "tokenizer.json"
