"""Device. Qwen3 MoE: Qwen3's attention, experts chosen by softmax in most layers, a dense MLP in the others."""

import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models import names
from jaxspec.models.base import Family
from jaxspec.models.decoder import DENSE_NAMES, decoder_forward, decoder_specs, head_logits
from jaxspec.weights.names import NameTable


def name_table(config: ModelConfig, source: str) -> NameTable:
    """Where each parameter lies; experts are stored one by one, in GGUF files stacked."""
    specs = decoder_specs(config, np.float32)
    if source == "gguf":
        layer = {**names.GGUF_ATTENTION, **names.GGUF_MLP, **names.GGUF_EXPERTS}
        return NameTable(names.gguf_sources(specs, layer))
    experts = names.hf_mlp_experts(config, "mlp.gate")
    layer = {**names.HF_ATTENTION, **names.HF_MLP, **experts}
    return NameTable(names.hf_sources(config, specs, layer), names.hf_unread(config))


FAMILY = Family(decoder_specs, name_table, decoder_forward, head_logits, int8_names=DENSE_NAMES)
