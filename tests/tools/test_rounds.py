"""How the benchmarks compare sides: in turn, by their best rounds."""

import json

from deltanox.tools import bench_peers
from deltanox.tools._rounds import in_turn, spread


def test_sides_take_turns():
    order = []
    sides = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert in_turn(sides, 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert order == list("ababab")


def test_the_spread_is_that_of_the_slowest_round():
    assert spread([2.0, 2.5, 2.1]) == "+25 %" and spread([1.0]) == "+0 %"


def test_a_slow_round_of_a_peer_changes_its_spread_and_no_ratio(monkeypatch, capsys):
    """The ratio is that of the best rounds; a peer that is not there is left out."""
    times = {"deltanox": [1.0, 1.0, 4.0], "transformers": [4.0, 2.0, 2.0]}

    def run(command, **_):
        peer = command[command.index("--only") + 1]
        found = times.get(peer)
        out = "" if found is None else json.dumps({"forward": found[0], "both": 2 * found.pop(0)})
        return type("Done", (), {"returncode": int(found is None), "stdout": out, "stderr": "no jla"})

    monkeypatch.setattr(bench_peers.subprocess, "run", run)
    assert bench_peers.main([]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert lines["deltanox"] == ["1.000", "+300", "%", "1.00", "2.000", "+300", "%", "1.00"]
    assert lines["transformers"] == ["2.000", "+100", "%", "0.50", "4.000", "+100", "%", "0.50"]
    assert lines["jax-linear-attention"] == ["left", "out:", "no", "jla"]
