"""`config.json` to the config of a model, and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._read import field, member, read_json_file
from ..models import Qwen3_5Config, Qwen3NextConfig
from ..ops._validate import require

CONFIG = "config.json"

# our name: Hugging Face's
_SIZES = {
    "vocab_size": "vocab_size", "embed_size": "hidden_size", "num_layers": "num_hidden_layers", "eps": "rms_norm_eps",
    "num_key_heads": "linear_num_key_heads", "num_value_heads": "linear_num_value_heads",
    "key_head_size": "linear_key_head_dim", "value_head_size": "linear_value_head_dim",
    "conv_size": "linear_conv_kernel_dim", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
}  # fmt: skip
_DENSE = {"mlp_size": "intermediate_size"}
_SPARSE = {
    "num_experts": "num_experts", "top_k": "num_experts_per_tok", "expert_size": "moe_intermediate_size",
    "shared_size": "shared_expert_intermediate_size",
}  # fmt: skip
_NEXT = {"norm_topk_prob": "norm_topk_prob"}

_KIND_OF = {"eps": float, "norm_topk_prob": bool}  # of the others: int
_REMEDY = f"add it, or take the {CONFIG} that was released with the weights"
_CORRECT = f"correct it, or take the {CONFIG} that was released with the weights"

_DENSE_TYPES = ("qwen3_5", "qwen3_5_text")
_SPARSE_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
_TYPES = (*_DENSE_TYPES, *_SPARSE_TYPES, "qwen3_next")

# what the models compute in one way only: the values that a config may give
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "attention_bias": (False, None), "attn_output_gate": (True,),
    "mlp_only_layers": ([], None), "decoder_sparse_step": (1,), "mtp_use_dedicated_embeddings": (False, None),
    "quantization_config": (None,), "use_sliding_window": (False, None),
}  # fmt: skip


def read_json(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """The folder's `config.json`, or another JSON file of it.

    **Raises:** `ValueError` where there is none, or it is no JSON object.
    """
    path = member(folder, name)
    require(
        path.is_file(),
        f"{name}: there is no file `{path}`; give the folder of a Hugging Face checkpoint, with {CONFIG} and "
        "safetensors",
    )
    return read_json_file(path, "fetch it again")


def config_from_hf(raw: Mapping[str, Any], *, mtp_head: bool = False) -> Qwen3_5Config:
    """The config of the model that a `config.json` describes.

    **Arguments:** `raw`: its contents, of a text model or of one with images (`text_config`), as transformers 4 or 5
    writes them; `mtp_head`: whether there is a head for one token further, which the tensors tell and not the file.

    **Returns:** a `Qwen3NextConfig` for `qwen3_next`, else a `Qwen3_5Config`.

    **Raises:** `ValueError` for another `model_type`, a field that is missing, and what the models don't compute.
    """
    kind = _get(raw, "model_type", str)
    require(kind in _TYPES, f"{CONFIG}: `model_type` must be one of {', '.join(map(repr, _TYPES))}, but it is {kind!r}")
    text = _get(raw, "text_config", dict) if kind in ("qwen3_5", "qwen3_5_moe") else raw
    for name, allowed in _FIXED.items():
        for table in (raw, text):
            value = table.get(name, allowed[0])
            require(
                value in allowed,
                f"{CONFIG}: `{name}` must be {allowed[0]!r}, the only way that these models compute, but it is "
                f"{str(value)[:60]}",
            )
    names = _SIZES | (_DENSE if kind in _DENSE_TYPES else _SPARSE) | (_NEXT if kind == "qwen3_next" else {})
    values = {ours: _get(text, theirs, _KIND_OF.get(ours, int)) for ours, theirs in names.items()}
    # the model with images asks the outer table, that of text alone its own: transformers has a class for either
    values["tied_head"] = _get(raw if "tie_word_embeddings" in raw else text, "tie_word_embeddings", bool)
    gate = _get(text, "output_gate_type", str, default="silu")
    values["output_gate"] = "silu" if gate == "swish" else gate
    values["full_attention_interval"] = _interval(text)
    values |= _rotary(text, images=kind != "qwen3_next")
    make = Qwen3NextConfig if kind == "qwen3_next" else Qwen3_5Config
    return make(**values, mtp_head=mtp_head)


def _get(table: Mapping[str, Any], name: str, kind: Any, **default: Any) -> Any:
    return field(CONFIG, table, name, kind, remedy=_CORRECT if name in table else _REMEDY, **default)


def _interval(text: Mapping[str, Any]) -> int:
    kinds, depth = _get(text, "layer_types", list[str] | None, default=None), _get(text, "num_hidden_layers", int)
    if kinds is None:
        return _get(text, "full_attention_interval", int)
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    periodic = ["linear_attention" if interval and (i + 1) % interval else "full_attention" for i in range(len(kinds))]
    require(
        interval > 0 and kinds == periodic and len(kinds) == depth and depth % interval == 0,
        f"{CONFIG}: `layer_types` must name num_hidden_layers = {depth} layers in equal periods of linear_attention "
        f"that end with full_attention, but it is {kinds}",
    )
    return interval


def _rotary(text: Mapping[str, Any], *, images: bool) -> dict[str, Any]:
    # as transformers 5 reads it: `rope_scaling`, the name in transformers 4, comes before `rope_parameters`; theta and
    # fraction are taken from beside the table where the table has none
    tables = (_get(text, name, dict | None, default=None) for name in ("rope_scaling", "rope_parameters"))
    rope = next(filter(None, tables), {})
    layers = [name for name in ("linear_attention", "full_attention") if name in rope]
    require(
        not layers,
        f"{CONFIG}: the rotary positions must be one table for all layers, but there is one of {', '.join(layers)}: "
        "write what it holds in `rope_parameters` itself",
    )
    kind = _get(rope, "rope_type" if "rope_type" in rope else "type", str, default="default")
    require(
        kind in ("default", "mrope"),
        f"{CONFIG}: the rotary positions must be of type 'default', but `rope_type` is {kind!r}: scaled positions are "
        "not there yet; remove the scaling to use the model within its trained length",
    )
    theta, fraction = (
        _get(rope if name in rope else text, name, float) for name in ("rope_theta", "partial_rotary_factor")
    )
    sections = _get(rope, "mrope_section", list[int] | None, default=None) if images else None
    require(
        sections is None or rope.get("mrope_interleaved", True) is True,
        f"{CONFIG}: `mrope_interleaved` must be true, but it is {rope.get('mrope_interleaved')!r}",
    )
    return {
        "rope_theta": theta,
        "rotary_fraction": fraction,
        "mrope_sections": None if sections is None else tuple(sections),
    }


def config_to_hf(config: Qwen3_5Config, *, dtype: str) -> dict[str, Any]:
    """The contents of the `config.json` of a text model, as transformers 5 reads them.

    **Arguments:** `config`; `dtype`: name of the weights' dtype, "bfloat16".
    """
    if isinstance(config, Qwen3NextConfig):
        kind, architecture, names = "qwen3_next", "Qwen3NextForCausalLM", _SIZES | _SPARSE | _NEXT
    elif config.num_experts:
        kind, architecture, names = "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _SIZES | _SPARSE
    else:
        kind, architecture, names = "qwen3_5_text", "Qwen3_5ForCausalLM", _SIZES | _DENSE
    interval = config.full_attention_interval
    rope: dict[str, Any] = {
        "rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": config.rotary_fraction
    }  # fmt: skip
    if config.mrope_sections is not None:
        rope |= {"mrope_section": list(config.mrope_sections), "mrope_interleaved": True}
    written: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "dtype": dtype,
        **{theirs: getattr(config, ours) for ours, theirs in names.items()},
        "tie_word_embeddings": config.tied_head,
        "layer_types": [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(config.num_layers)
        ],
        "full_attention_interval": interval,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "mtp_num_hidden_layers": int(config.mtp_head),
    }
    if config.output_gate != "silu":
        written["output_gate_type"] = config.output_gate
    return written
