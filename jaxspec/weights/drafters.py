"""Host. What kind of drafter a folder holds, told by its config and its tensors, never by its name."""

import re
from collections.abc import Mapping
from typing import Any

from jaxspec.weights.reader import TensorInfo

Tensors = Mapping[str, TensorInfo]

_BY_MODEL_TYPE = {"medusa": "medusa", "mlp_speculator": "mlp_speculator", "eagle": "eagle"}
_BY_ARCHITECTURE = (
    ("DFlash", "dflash"),
    ("Qwen3DSpark", "dspark"),
    ("PEagle", "p_eagle"),
    ("Peagle", "p_eagle"),
    ("LlamaForCausalLMEagle3", "eagle3"),
    ("Eagle3", "eagle3"),
    ("LlamaForCausalLMEagle", "eagle"),
    ("MLPSpeculator", "mlp_speculator"),
    ("MedusaModel", "medusa"),
)
_MEDUSA = re.compile(r"(medusa_head(s)?\.)?\d+\.\d+\.(linear\.)?(weight|bias)")
# Multi-token-prediction modules inside a target: how their tensors are named, past the target's own layers.
_MTP = re.compile(
    r"(model\.(language_model\.)?)?(mtp(_layers|_block|_linear_proj)?\.|layers\.\d+\.(eh_proj|enorm)\.).*"
    r"|blk\.\d+\.nextn\..*"
)


def drafter_kind(config: Mapping[str, Any], tensors: Tensors) -> str | None:
    """The method that drafts with this checkpoint, or None where it is a whole model.

    The config's own word goes first; published EAGLE files say nothing there and are known by their tensors.
    """
    if isinstance(stated := config.get("speculators_model_type"), str):
        return {"peagle": "p_eagle"}.get(stated, stated)
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    if isinstance(model_type, str) and model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    if "medusa_num_heads" in config:
        return "medusa"
    for name in architectures if isinstance(architectures, list) else []:
        for start, kind in _BY_ARCHITECTURE:
            if isinstance(name, str) and name.startswith(start):
                return kind
    return _kind_by_tensors(tensors)


def has_mtp_modules(tensors: Tensors) -> bool:
    """Whether a target's checkpoint holds multi-token-prediction modules beside the model."""
    return any(_MTP.fullmatch(name) for name in tensors)


def _kind_by_tensors(tensors: Tensors) -> str | None:
    names = {name.removeprefix("model."): info.shape for name, info in tensors.items()}
    if "mask_hidden" in names:
        return "p_eagle"
    if "d2t" in names or any(name.startswith("midlayer.") for name in names):
        return "eagle3"
    if any(name.startswith("markov_head.") for name in names):
        return "dspark"
    if "hidden_norm.weight" in names and "layers.0.self_attn.q_norm.weight" in names:
        return "dflash"
    fc = names.get("fc.weight", ())
    if len(fc) == 2:
        return "eagle" if fc[1] == 2 * fc[0] and "layers.0.input_layernorm.weight" not in names else "eagle3"
    if "speculator.emb.0.weight" in names:
        return "mlp_speculator"
    if names and all(_MEDUSA.fullmatch(name) for name in names):
        return "medusa"
    return None
