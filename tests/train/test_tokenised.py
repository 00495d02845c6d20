"""Text as the tokens of a tokenizer.json: what a run reads, keeps and says."""

import json
import math
import shutil

import equinox as eqx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import FIXTURES, same
from deltanox.cli import main
from deltanox.interop import Text, load
from deltanox.train import (
    Corpus,
    Document,
    _vocabulary as vocabularies,
    config_from_dict,
    find_checkpoint,
    next_token_loss,
    read_config,
    read_log,
    read_vocabulary,
    train,
    validation_batches,
)
from deltanox.train._from import start_from
from deltanox.train._sample import load_parameters, load_vocabulary
from tiny_model import TinyConfig, make_tiny
from tokenizer import END, write_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="tokenizer.json needs the package tokenizers")
WORDS = ["ab ", "cat ", "sat ", "on ", "a ", "mat "]


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text("".join(rng.choice(WORDS, rng.integers(20, 80))))
    return tmp_path / "text"


def tokenised(directory, tokenizer, **tables):
    tables = {"model": {"width": 16, "vocab_size": 30}} | tables
    return config_from_dict(
        tables
        | {
            "data": {"row_length": 16, "batch_size": 2, "validation_fraction": 0.2, "tokenizer": str(tokenizer)},
            "optimiser": {"learning_rate": 3e-2, "warmup_steps": 5},
            "train": {"steps": 24, "checkpoint_every": 8, "directory": str(directory), "sample_tokens": 0},
        },
        model_type=TinyConfig if "family" not in tables else None,
    )


def run(config, text, **kwargs):
    return train(config, text=[text], make_model=make_tiny, say=lambda _: None, progress=False, **kwargs)


def test_documents_are_their_tokens_and_an_end(tmp_path):
    vocabulary = read_vocabulary(write_tokenizer(tmp_path, eos_token={"content": END}))
    assert (vocabulary.end, vocabulary.size) == (1, 30)
    (batch,) = validation_batches(Corpus([Document("1", b"abc"), Document("2", b"a ab")], vocabulary), 4, 2)
    a, c, space = (vocabulary.text.tokenizer.token_to_id(x) for x in "acĠ")
    assert batch.tokens.tolist() == [[1, 0, c, 1], [a, space, 0, 1]]
    assert batch.labels.tolist() == [[0, c, 1, a], [space, 0, 1, 1]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert batch.mask.tolist() == [[True] * 4, [True] * 3 + [False]]


def test_a_corpus_holds_the_tokens_alone(tmp_path):
    """Documents come one after the other, long ones in pieces that give the same tokens."""
    vocabulary = read_vocabulary(write_tokenizer(tmp_path), name=END)
    alive = []

    def documents():
        for i in range(3):
            alive.append(i)
            yield Document(str(i), b"ab c\n" * (i + 1))

    stream = documents()
    corpus = Corpus(stream, vocabulary)
    assert alive == [0, 1, 2] and corpus.tokens.dtype == np.uint16
    assert (corpus.num_bytes, corpus.num_tokens) == (30, 6 * 4 + 3) and corpus.sizes.tolist() == [5, 9, 13]


def test_pieces(tmp_path, monkeypatch):
    """Long documents are cut at lines, short ones gathered: the tokens are those of each document as a whole."""
    vocabulary = read_vocabulary(write_tokenizer(tmp_path), name=END)
    texts = [b"ab cab\n\n  abc\nab" * 50, b"", b"ab", b"c\n", b"no line ends here " * 20, b"abc\nd"]
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    whole = [vocabulary.text.tokenizer.encode(text.decode(), add_special_tokens=False).ids for text in texts]
    assert len(whole[0]) > 500 and whole[1] == []
    for piece in (1, 7, 40, 2**20):
        monkeypatch.setattr(vocabularies, "_PIECE", piece)
        pieces = list(vocabularies._pieces(texts[0].decode()))
        assert "".join(pieces).encode() == texts[0] and (len(pieces) > 10 or piece > 40)
        found = list(vocabulary.encode(iter(documents)))
        assert [size for size, _ in found] == [len(text) for text in texts]
        assert [ids.tolist() for _, ids in found] == whole


def test_a_run_keeps_its_tokenizer_and_resumes_bit_equal(tmp_path, text):
    source = write_tokenizer(tmp_path / "source", eos_token=END)
    straight = run(tokenised(tmp_path / "straight", source), text)
    config = tokenised(tmp_path / "resumed", source)
    run(config, text)
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_00000024")
    shutil.rmtree(tmp_path / "source")  # the run has its own
    resumed = run(config, text, resume=tmp_path / "resumed")
    a, b = ([r for r in read_log(x.directory / "log.jsonl") if "loss" in r] for x in (straight, resumed))
    assert [r["loss"] for r in a] == [r["loss"] for r in b] and len(a) == 24
    assert resumed.validation == straight.validation
    arrays = [find_checkpoint(x.directory).folder / "arrays.safetensors" for x in (straight, resumed)]
    assert arrays[0].read_bytes() == arrays[1].read_bytes()
    assert a[-1]["loss"] < 0.7 * a[0]["loss"]


def test_bits_are_those_of_all_tokens_by_the_bytes(tmp_path, text):
    source = write_tokenizer(tmp_path / "source", eos_token=END)
    result = run(tokenised(tmp_path / "run", source), text)
    vocabulary = read_vocabulary(source)
    from deltanox.train import read_documents, split_documents

    training, validation = split_documents(read_documents([text]), 0.2, 200_000)
    nats = sum(
        float(eqx.filter_jit(next_token_loss)(result.model, batch).nats)
        for batch in validation_batches(Corpus(validation, vocabulary), 16, 2)
    )
    want = nats / math.log(2) / sum(len(document.data) for document in validation)
    assert result.validation == pytest.approx(want, rel=1e-5)
    record = next(r for r in read_log(result.directory / "log.jsonl") if "loss" in r)
    corpus = Corpus(training, vocabulary)
    rate = corpus.num_tokens / corpus.num_bytes / math.log(2)
    assert record["bits_per_byte"] == pytest.approx(record["loss"] * rate, rel=1e-5)


@pytest.mark.parametrize(
    "named", [{}, {"eos_token": END}, {"eos_token": {"__type": "AddedToken", "content": END}, "add_bos_token": False}]
)
def test_a_prompt_of_a_converted_run_begins_as_its_documents_do(tmp_path, named):
    """The tokenizer that `export` writes adds the end token in front; converted again it adds no second one."""
    transformers = pytest.importorskip("transformers", reason="compared with transformers")
    source = write_tokenizer(tmp_path / "source", **named)
    tokenizer = Text.read(source).tokenizer
    # what the source's own post-processor adds, the run never read
    tokenizer.post_processor = tokenizers.processors.Sequence(
        [
            tokenizers.processors.ByteLevel(trim_offsets=False),
            tokenizers.processors.TemplateProcessing(
                single="[UNK] $A [UNK]", special_tokens=[("[UNK]", tokenizer.token_to_id("[UNK]"))]
            ),
        ]
    )
    tokenizer.save(str(source))
    source.chmod(0o444)
    vocabulary = read_vocabulary(source, name=END)
    vocabulary.export(tmp_path / "out")
    read_vocabulary(tmp_path / "out", name=END).export(tmp_path / "again")
    for prompt in ("ab c", ""):
        want = vocabulary.text.encode(prompt)
        assert want[0] == vocabulary.end and len(want) == 1 + len(prompt) - prompt.count("ab")
        for folder in (tmp_path / "out", tmp_path / "again"):
            assert Text.of(folder).encode(prompt) == want
            loaded = transformers.Qwen2Tokenizer.from_pretrained(folder)
            assert loaded(prompt).input_ids == want
    processors = json.loads((tmp_path / "again" / "tokenizer.json").read_text())["post_processor"]["processors"]
    assert [part["type"] for part in processors] == ["ByteLevel", "TemplateProcessing"]
    assert source.read_bytes() != (tmp_path / "out" / "tokenizer.json").read_bytes()
    if named:
        told = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
        assert (told["bos_token"], told["add_bos_token"]) == (END, True)


def test_a_runs_text_ends_where_that_of_its_checkpoint_does(tmp_path):
    source = write_tokenizer(tmp_path / "source", eos_token="[UNK]")
    (tmp_path / "source" / "generation_config.json").write_text('{"eos_token_id": [5, 1]}')
    vocabulary = read_vocabulary(source, name=END)
    assert vocabulary.end == 1 and set(vocabulary.text.stop_tokens) == {1, 2, 5}
    vocabulary.export(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text('{"eos_token_id": 1}')
    assert set(Text.of(tmp_path / "out").stop_tokens) == {1, 2, 5}


def test_a_tokenizer_of_any_name_is_kept_as_tokenizer_json(tmp_path):
    source = write_tokenizer(tmp_path / "source").rename(tmp_path / "source" / "words.json")
    read_vocabulary(source, name=END).keep(tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == source.read_bytes()


def test_documents_are_read_whole_whatever_the_tokenizer_stores(tmp_path):
    """A tokenizer's own truncation, padding and dropout are not those of training."""
    source = write_tokenizer(tmp_path / "source")
    plain = list(read_vocabulary(source, name=END).encode([Document("1", b"ab cab " * 9)]))
    tokenizer = tokenizers.Tokenizer.from_file(str(source))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=99)
    tokenizer.model.dropout = 0.5
    tokenizer.save(str(source))
    for _ in range(4):
        (size, tokens), *_ = read_vocabulary(source, name=END).encode([Document("1", b"ab cab " * 9)])
        assert (size, tokens.tolist()) == (plain[0][0], plain[0][1].tolist()) and len(tokens) == 45


def test_wrong_tokenizers(tmp_path, text):
    source = write_tokenizer(tmp_path / "source")
    small = tokenised(tmp_path / "run", source, model={"width": 16, "vocab_size": 20})
    with pytest.raises(ValueError, match=r"data.end_token: give the token that ends a document.*beside `.*json` names"):
        run(small, text)
    with pytest.raises(ValueError, match=r"data.end_token: `.*json` has no token '<end>'; give one of its own"):
        read_vocabulary(source, name="<end>")
    (tmp_path / "source" / "generation_config.json").write_text('{"eos_token_id": 99}')
    with pytest.raises(
        ValueError, match=r"files beside `.*json` name token 99, which the tokenizer doesn't have; give"
    ):
        read_vocabulary(source)
    (tmp_path / "source" / "generation_config.json").unlink()
    write_tokenizer(tmp_path / "source", eos_token=END)
    with pytest.raises(ValueError, match=r"has tokens up to 29, but model.vocab_size is 20: give the model's own"):
        run(small, text)
    with pytest.raises(ValueError, match=r"tokenizer: there is no `none.json` in `.*source`"):
        run(tokenised(tmp_path / "run", source.with_name("none.json")), text)
    with pytest.raises(ValueError, match=r"data.end_token must be empty without data.tokenizer, but it is 'x'"):
        config_from_dict({"model": {}, "data": {"end_token": "x"}}, model_type=TinyConfig)
    config = tokenised(tmp_path / "run", source)
    run(config, text)
    kept = tmp_path / "run" / "tokenizer" / "tokenizer.json"
    kept.write_text(kept.read_text().replace('"ab": 0', '"ab" : 0') + "\n")
    with pytest.raises(ValueError, match=r"the tokenizer in `.*tokenizer` is not the one that .* put that back"):
        run(config, text, resume=tmp_path / "run")


CONFIG = """
[model]
vocab_size = 257
embed_size = 16
num_layers = 4
mlp_size = 16
num_key_heads = 1
num_value_heads = 2
num_heads = 2
num_kv_heads = 1
[data]
row_length = 32
batch_size = 2
validation_fraction = 0.3
[optimiser]
warmup_steps = 1
learning_rate = 0.02
[train]
steps = 8
checkpoint_every = 4
sample_prompt = "ab"
sample_tokens = 5
directory = "run"
"""


@pytest.fixture
def checkpoint(tmp_path, text, monkeypatch):
    """A checkpoint of 37 tokens with a tokenizer, a config and text."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / "qwen3_next", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 1}))
    (tmp_path / "small.toml").write_text(CONFIG)
    return tmp_path / "model"


def test_a_checkpoint_without_tokenizer_is_refused(checkpoint, capsys):
    (checkpoint / "tokenizer.json").unlink()
    assert main(["train", "small.toml", "--from", "model"]) == 2
    assert (
        "deltanox: tokenizer: `model` has no tokenizer.json, and its vocabulary of 37 is not that of bytes (257): add the "
        "release's tokenizer.json, or set data.tokenizer" in capsys.readouterr().err
    )


def test_the_head_for_one_token_further_comes_from_the_checkpoint(checkpoint, capsys):
    """With `train.further_weight` the checkpoint's head is loaded, to be trained; without, or without one, said."""
    command = ["train", "small.toml", "--from", "model", "--text", "text", "--set", "train.further_weight=0.1"]
    assert main(command) == 2
    assert "set model.mtp_head = true (with --from too" in capsys.readouterr().err
    changes = ["train.further_weight=0.1", "model.mtp_head=true"]
    config, make_model = start_from(checkpoint, read_config("small.toml", changes))
    assert config.model.mtp_head and config.train.further_weight == 0.1
    same(make_model(config, jax.random.key(0)), load(checkpoint, mtp=True, dtype="float32")[0])
    config, make_model = start_from(checkpoint, read_config("small.toml", []))
    assert not config.model.mtp_head and make_model(config, jax.random.key(0)).mtp is None
    path = checkpoint / "model.safetensors"
    save_file({name: x for name, x in load_file(path).items() if not name.startswith("mtp.")}, path)
    assert main([*command, "--set", "model.mtp_head=true"]) == 2
    error = capsys.readouterr().err
    assert "`model` must have a head for one token further (tensors `mtp.*`)" in error
    assert "set train.further_weight = 0, or give a checkpoint with the head" in error


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_fine_tune_resume_generate_convert(checkpoint, capsys, lora):
    """From a checkpoint to a run, on from its middle, to text, and back to a checkpoint that generates the same."""
    change = ["--set", "lora.rank=4", "--set", "precision.parameter=bfloat16"] if lora else []
    command = ["train", "small.toml", "--from", "model", "--text", "text", *change]
    assert main(command) == 0
    assert "sample after 'ab':\nab" in capsys.readouterr().out
    losses = [r["loss"] for r in read_log("run/log.jsonl") if "loss" in r]
    assert len(losses) == 8 and losses[-1] < losses[0]
    shutil.rmtree(checkpoint)
    trained, run_config = load_parameters("run")
    assert run_config.model.vocab_size == 37 and load_vocabulary("run").end == 1
    shutil.rmtree("run/checkpoints/step_00000008")
    assert main(["train", "--resume", "run"]) == 0
    assert [r["loss"] for r in read_log("run/log.jsonl") if "loss" in r] == losses
    same(load_parameters("run")[0], trained)
    capsys.readouterr()

    assert main(["convert", "run", "out"]) == 0
    capsys.readouterr()
    model, config = load("out")
    assert config == run_config.model
    same(model, trained)
    assert Text.of("out").stop_tokens == (1,)
    for prompt in ("ab c", ""):  # documents begin with their end token: nothing is a prompt too
        texts = []
        for folder in ("run", "out"):
            assert main(["generate", folder, "--prompt", prompt, "--max-tokens", "8", "--temperature", "0"]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] and texts[0].startswith(prompt) and len(texts[0]) > len(prompt) + 2
