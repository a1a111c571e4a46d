"""Device. GLM-4.5 MoE: grouped-query attention that turns half of each head, DeepSeek's router and shared experts."""

import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models import names
from jaxspec.models.base import Family
from jaxspec.models.decoder import DENSE_NAMES, decoder_forward, decoder_specs, head_logits
from jaxspec.weights.names import NameTable, TensorSource


def name_table(config: ModelConfig, source: str) -> NameTable:
    """The layers past the model's own are its multi-token-prediction drafter's."""
    specs = decoder_specs(config, np.float32)
    if source == "gguf":
        norm = {"mlp_norm": TensorSource(("post_attention_norm.weight",))}
        layer = {**names.GGUF_ATTENTION, **names.GGUF_MLP, **names.GGUF_EXPERTS, **norm}
        return NameTable(names.gguf_sources(specs, layer), names.later_layers(config, r"blk\."))
    layer = {**names.HF_ATTENTION, **names.HF_MLP, **names.hf_mlp_experts(config, "mlp.gate")}
    drafter = names.later_layers(config, r"model\.layers\.")
    return NameTable(names.hf_sources(config, specs, layer), (*names.hf_unread(config), *drafter))


FAMILY = Family(decoder_specs, name_table, decoder_forward, head_logits, int8_names=DENSE_NAMES)
