"""The command that times generation, on a model of no size."""

import json

from deltanox.tools import bench_decode

CONFIG = """
[model]
vocab_size = 257
embed_size = 16
num_layers = 2
full_attention_interval = 2
mlp_size = 8
num_key_heads = 1
num_value_heads = 1
key_head_size = 8
value_head_size = 8
num_heads = 1
num_kv_heads = 1
head_size = 8
"""


def test_rates_and_drafts(capsys, tmp_path):
    (tmp_path / "small.toml").write_text(CONFIG)
    options = ["--no-peer", "--batch", "2", "--prompt", "3", "--new", "7", "--rounds", "1", "--drafts", "2", "--json"]
    assert bench_decode.main([str(tmp_path / "small.toml"), *options]) == 0
    record = json.loads(capsys.readouterr().out)
    plain, wrong, right = record["sides"].values()
    assert (record["config"], record["batch"], plain["accepted"], right["accepted"]) == ("small", 2, None, 2.0)
    # a head that always drafts token 0 is right where the text has it
    assert 0 <= wrong["accepted"] < 1
    assert plain["ratio"] is None and all(side["tokens_per_second"] > 0 for side in (plain, wrong, right))
    assert "times as fast as without   2.00 accepted a step" in bench_decode.lines(record)[-1]
