"""The command that prints what policies of names cost, without compiling."""

import json

import pytest

from deltanox import remat
from deltanox.tools import bench_remat

SMALL = ["--length", "256", "--heads", "1/2", "--size", "8", "--hidden", "16", "--mlp", "24"]


def test_bytes_and_products_of_policies(capsys, tmp_path):
    policies = ["--policy", "nothing", "--policy", "gdn=device", "mlp=offload"]
    assert bench_remat.main([*SMALL, *policies, "--json", "--plot", str(tmp_path / "trade.png")]) == 0
    nothing, saved = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    sizes = dict(B=1, T=256, H=2, K=8, V=8, D=16, F=24, s=128)

    def size(*names):
        return sum(remat.NAMES[name].bytes(2, **sizes) for name in names)

    assert (nothing["device_bytes"], nothing["host_bytes"]) == (size("layer_input"), 0)
    assert saved["device_bytes"] == size("layer_input", "gdn_out", "gdn_states")
    assert saved["host_bytes"] == size("mlp_gate", "mlp_up")
    assert nothing["computed_again"] > saved["computed_again"] > 0
    assert (tmp_path / "trade.png").read_bytes().startswith(b"\x89PNG")
    assert "0.00 GB on the host" in bench_remat.line(nothing) and "computed again" in bench_remat.line(saved)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--heads", "16"], "bench remat: --heads must be KEY/VALUE, such as 16/64, but it is 16"),
        ([*SMALL, "--policy", "gdm=device"], "remat: there is no residual and no group `gdm`; did you mean `gdn`"),
        ([*SMALL, "--policy", "moe=device"], "remat: moe = 'device' would save nothing"),
    ],
)
def test_wrong_use(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        bench_remat.main(arguments)
