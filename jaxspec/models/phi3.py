"""Device. Phi-3, 3.5 and 4-mini: the Llama skeleton with its matrices fused in the file, partial rotation, longrope."""

import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models import names
from jaxspec.models.base import Family
from jaxspec.models.decoder import DENSE_NAMES, decoder_forward, decoder_specs, head_logits
from jaxspec.weights.names import NameTable, TensorSource


def name_table(config: ModelConfig, source: str) -> NameTable:
    """q, k, v and gate, up are stored as this model keeps them: one above the other."""
    specs = decoder_specs(config, np.float32)
    if source == "gguf":
        fused = {"qkv": TensorSource(("attn_qkv.weight",)), "gate_up": TensorSource(("ffn_up.weight",))}
        # Longrope's factors are read with the config.
        unread = (r"rope_factors_(long|short)\.weight",)
        return NameTable(names.gguf_sources(specs, {**names.GGUF_ATTENTION, **names.GGUF_MLP, **fused}), unread)
    fused = {
        "qkv": TensorSource(("self_attn.qkv_proj.weight",)),
        "gate_up": TensorSource(("mlp.gate_up_proj.weight",)),
    }
    layer = {**names.HF_ATTENTION, **names.HF_MLP, **fused}
    return NameTable(names.hf_sources(config, specs, layer), names.hf_unread(config))


FAMILY = Family(decoder_specs, name_table, decoder_forward, head_logits, int8_names=DENSE_NAMES)
