"""Text by a checkpoint's own tokenizer."""

import json
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import FIXTURES
from deltanox.cli import main
from deltanox.generate import GREEDY, generate
from deltanox.interop import Text, end_token, load

END = 3


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with a tokenizer of bytes, of which the vocabulary of 37 knows a few."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizer.json needs the package tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # `ä` is two bytes: tokens of a part of a character
    known = [chr(x) for x in range(ord("a"), ord("z") + 1)] + ["Ã", "¤"]
    assert set(known) <= set(alphabet)
    words = {"ab": 0, "[PAD]": 1, "[UNK]": 2, "[END]": END} | {letter: 4 + i for i, letter in enumerate(known)}
    model = tokenizers.models.BPE(vocab=words, merges=[("a", "b")], unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    path = tmp_path / "model"
    shutil.copytree(FIXTURES / "qwen3_next", path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_the_text_is_that_of_the_tokens(folder):
    text, (model, _) = Text.of(folder), load(folder, mtp=False)
    prompt = text.tokenizer.encode("abzä").ids
    assert len(prompt) == 4 and prompt[0] == 0
    tokens = generate(model, np.asarray(prompt), max_new_tokens=12)
    pieces = list(text.stream(model, "abzä", max_tokens=12, sampler=GREEDY))
    whole = text.tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)
    assert "".join(pieces) == whole and len(pieces) > 1
    assert model.embedding.dtype == jnp.bfloat16


def test_characters_are_whole(folder):
    text = Text.of(folder)
    first, second = text.tokenizer.encode("ä").ids
    z = text.tokenizer.encode("z").ids[0]
    assert list(text._decode(iter([z, first, second, z]))) == ["z", "ä", "z"]
    assert list(text._decode(iter([z, first]))) == ["z", "\ufffd"]
    assert list(text._replace(stop_tokens=(END,))._decode(iter([z, END, z]))) == ["z"]
    assert list(text._replace(stop_tokens=(END,))._decode(iter([first, END, second]))) == ["\ufffd"]


def test_tokens_that_end_a_text(folder):
    def write(name, **fields):
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | fields))

    def stop_tokens():
        return set(Text.of(folder).stop_tokens)

    assert stop_tokens() == set()
    write("tokenizer_config.json", eos_token="[END]")
    assert stop_tokens() == {END}
    write("config.json", eos_token_id=None, text_config={"eos_token_id": 7})
    assert stop_tokens() == {END, 7}
    write("config.json", eos_token_id=6)
    assert stop_tokens() == {END, 6, 7}
    write("generation_config.json", eos_token_id=[])
    assert stop_tokens() == {END, 6, 7}
    write("generation_config.json", eos_token_id=[4, 5, 6])
    assert stop_tokens() == {END, 4, 5, 6, 7}
    assert len(Text.of(folder).stop_tokens) == 5
    write("tokenizer_config.json", eos_token={"content": "[PAD]", "lstrip": False})
    assert stop_tokens() == {1, 4, 5, 6, 7}
    write("tokenizer_config.json", eos_token=["[PAD]", {"content": "[END]"}, "[not a token of this one]"])
    assert stop_tokens() == {1, END, 4, 5, 6, 7}


@pytest.mark.parametrize("wrong", [True, -1, 1.5, {"id": 3}, [[2.0]]])
def test_wrong_end_tokens(folder, wrong):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(
        ValueError, match=r"generation_config.json: `eos_token_id` must be a token, by id or by name, or"
    ):
        Text.of(folder)


def test_an_end_beyond_the_model_is_never_drawn(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 99]}))
    text, (model, _) = Text.of(folder), load(folder, mtp=False)
    assert text.stop_tokens == (END, 99) and model.vocab_size == 37
    assert "".join(text.stream(model, "ab", max_tokens=2, sampler=GREEDY))


def test_a_tokenizers_own_truncation_padding_and_dropout_are_off(folder):
    """They are for batches of its own training: text is read whole, and the same at each time."""
    plain = Text.of(folder).tokenizer.encode("ab" * 20).ids
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    tokenizer = type(Text.of(folder).tokenizer).from_file(str(path))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    changed = json.loads(path.read_text())
    changed["model"]["dropout"] = 0.5
    path.write_text(json.dumps(changed))
    assert changed["truncation"]["max_length"] == 8 and stored["truncation"] is None
    for _ in range(8):
        assert Text.of(folder).encode("ab" * 20) == plain == [0] * 20


def test_the_token_that_ends_a_document(folder):
    """The config's comes first: where a chat has an end of its own, `generation_config.json` lists that as well."""
    tokenizer = Text.of(folder).tokenizer
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps({k: x for k, x in json.loads(path.read_text()).items() if k != "eos_token_id"}))
    assert end_token(folder, tokenizer) is None
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "[END]"}}))
    assert end_token(folder, tokenizer) == END
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[PAD]"}))
    assert end_token(folder, tokenizer) == 1
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert end_token(folder, tokenizer) == 5
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | {"text_config": {"eos_token_id": 7}}))
    assert end_token(folder, tokenizer) == 7


def test_on_the_command_line(folder, capsys):
    command = ["generate", str(folder), "--prompt", "abzä", "--max-tokens", "5", "--temperature", "0"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("abzä")
    assert "names a token that ends a text (`eos_token_id`), so it goes on for --max-tokens 5\n" in printed.err
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[END]"}))
    assert main([*command, "--drafts", "1", "--max-tokens", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("abzä") and printed.err == ""
    assert main(["generate", str(folder)]) == 2
    assert "generate: give a --prompt of at least one token, such as a word" in capsys.readouterr().err
    assert main(["generate", str(folder), "--prompt", "a\udcff"]) == 2
    assert "the prompt must be text in UTF-8, but there is '\\udcff' at character 1" in capsys.readouterr().err
    (folder / "tokenizer.json").write_text("{}")
    assert main(command) == 2
    assert "tokenizer.json` is no tokenizer: " in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"there is no `tokenizer.json` in `.*qwen3_5`; add the release's"):
        Text.of(FIXTURES / "qwen3_5")
    (folder / "tokenizer.json").unlink()
    assert main(command) == 2
    assert "has no tokenizer.json, and its vocabulary of 37 is not that of bytes (257): add" in capsys.readouterr().err


def test_a_text_only_checkpoint_keeps_its_tokenizer_and_ends(folder, tmp_path, capsys):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[END]"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    assert main(["convert", str(folder), str(tmp_path / "out"), "--text-only"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert set(Text.of(tmp_path / "out").stop_tokens) == set(Text.of(folder).stop_tokens) == {END, 5}


def test_without_the_package(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the package tokenizers: pip install 'deltanox\[hf\]'"):
        Text.of(folder)
