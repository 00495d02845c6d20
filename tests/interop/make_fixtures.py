"""Writes the checkpoints under `fixtures`: `python tests/interop/make_fixtures.py` with torch and transformers 5.24.

Each folder is what transformers' `save_pretrained` writes for a small random model in bfloat16, plus `expected.safetensors`:
tokens, masks, positions, and transformers' logits in float32. Beyond that:

- `qwen3_5`: a tied model with a vision tower (`model.language_model.` before its names); A_log and the gated norm are
  float32 as in the release, and there are `mtp.*` tensors.
- `qwen3_5_moe`: untied, in shards, experts packed as in the release.
- `qwen3_next`: untied, fused projections, experts each by themselves; `mtp.*` tensors.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from hf_models import (
    EXPERTS,
    LAYERS,
    hf_class,
    hf_config,
    hf_model,
    mtp_logits,
    pack_experts,
    randomise,
)

FIXTURES = Path(__file__).parent / "fixtures"
SMALL = dict(vocab_size=37, hidden_size=16)
LENGTH = 13
KEPT = ("A_log", "linear_attn.norm.weight")
LENGTHS = (13, 8, 1)  # of the rows that are padded on the left


def with_images(family: str, **options):
    text = hf_config(family, **options)
    vision = dict(
        depth=1, hidden_size=4, num_heads=2, intermediate_size=4, out_hidden_size=16, num_position_embeddings=4,
        patch_size=2,
    )  # fmt: skip
    config = hf_class(family, "Qwen3_5Config")(
        text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=text.tie_word_embeddings
    )
    config._attn_implementation = "eager"
    return randomise(hf_class(family, "Qwen3_5ForConditionalGeneration")(config))


def mtp_tensors(tensors: dict, layer: str, separate: bool) -> dict:
    """The head for one token further: a copy of an attention layer with other values, and what is around it."""
    generator = torch.Generator().manual_seed(7)
    shapes = {
        f"mtp.layers.0.{name.removeprefix(layer)}": x.shape for name, x in tensors.items() if name.startswith(layer)
    }
    width = next(x.shape[0] for name, x in tensors.items() if name.endswith("input_layernorm.weight"))
    shapes |= {f"mtp.{name}.weight": (width,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes["mtp.fc.weight"] = (width, 2 * width)
    assert any(".experts.0." in name for name in shapes) == separate
    return {name: (0.2 * torch.randn(shape, generator=generator)).bfloat16() for name, shape in shapes.items()}


def pack(tensors: dict) -> dict:
    """Experts as Qwen3.5's release has them."""
    for layer in range(LAYERS):
        tensors = pack_experts(tensors, f"model.layers.{layer}.mlp.experts.", EXPERTS)
    return tensors


def expected(family: str, model, tensors: dict, images: bool) -> dict:
    rng = np.random.default_rng(1)
    tokens = torch.tensor(rng.integers(0, SMALL["vocab_size"], (3, LENGTH)))
    mask = torch.arange(LENGTH)[None] >= LENGTH - torch.tensor(LENGTHS)[:, None]
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    axes = torch.tensor(np.cumsum(rng.integers(0, 3, (3, 1, LENGTH)), axis=-1)).expand(3, 3, LENGTH)
    kind = torch.int32
    with torch.no_grad():
        found = {
            "tokens": tokens.to(kind), "mask": mask, "axes": axes.to(kind).contiguous(),
            "logits": model(tokens).logits,
            "padded_logits": model(tokens, attention_mask=mask.long(), position_ids=positions).logits,
        }  # fmt: skip
        if images:
            found["axes_logits"] = model(tokens, position_ids=axes).logits
        if "mtp.fc.weight" in tensors:
            text = model.model.language_model if hasattr(model.model, "language_model") else model.model
            hidden, embedding = text(tokens[:1]).last_hidden_state, text.embed_tokens.weight
            found["mtp_logits"] = mtp_logits(
                family, text.config, tensors, hidden[:, :-1], tokens[:1, 1:], embedding, model.lm_head.weight
            )
    return found


def write(
    name: str, model, *, change=lambda tensors: tensors, shard: int | None = None, images: bool, keep: bool = False
) -> None:
    folder = FIXTURES / name
    exact = {n: x.detach().clone() for n, x in model.named_parameters() if n.endswith(KEPT)}
    shutil.rmtree(folder, ignore_errors=True)
    model.bfloat16().save_pretrained(folder)
    tensors = change(load_file(folder / "model.safetensors"))
    if keep:
        tensors |= exact
    if shard is None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {"model-00001-of-00002.safetensors": names[:shard], "model-00002-of-00002.safetensors": names[shard:]}
        for file, members in files.items():
            save_file({n: tensors[n] for n in members}, folder / file, metadata={"format": "pt"})
        total = sum(x.numel() * x.element_size() for x in tensors.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: file for file, members in files.items() for n in members},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    # read again: `model.float()` would keep rotary frequencies that were rounded to bfloat16
    model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    save_file(expected(name, model, tensors, images), folder / "expected.safetensors")
    print(name, sum(path.stat().st_size for path in folder.iterdir()), "bytes")


def main() -> None:
    def dense(tensors):
        return tensors | mtp_tensors(tensors, f"model.language_model.layers.{LAYERS - 1}.", separate=False)

    def following(tensors):
        return tensors | mtp_tensors(tensors, f"model.layers.{LAYERS - 1}.", separate=True)

    write("qwen3_5", with_images("qwen3_5", ratio=1, tied=True, **SMALL), change=dense, images=True, keep=True)
    write("qwen3_5_moe", hf_model("qwen3_5_moe", ratio=2, **SMALL), change=pack, shard=30, images=True)
    write("qwen3_next", hf_model("qwen3_next", ratio=4, **SMALL), change=following, images=False)


if __name__ == "__main__":
    main()
