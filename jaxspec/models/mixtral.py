"""Device. Mixtral: the Llama skeleton with experts in every layer, chosen by softmax and always renormalised."""

import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models import names
from jaxspec.models.base import Family
from jaxspec.models.decoder import DENSE_NAMES, decoder_forward, decoder_specs, head_logits
from jaxspec.models.llama import gguf_attention
from jaxspec.weights.names import NameTable


def name_table(config: ModelConfig, source: str) -> NameTable:
    """w1 is gate, w3 is up, w2 is down. GGUF files are of architecture "llama", with its permuted rows."""
    specs = decoder_specs(config, np.float32)
    if source == "gguf":
        layer = {**gguf_attention(config), **names.GGUF_EXPERTS}
        return NameTable(names.gguf_sources(specs, layer), (r"rope_freqs\.weight",))
    experts = names.hf_experts(config, "block_sparse_moe.gate", "block_sparse_moe.experts.{e}.", "w1", "w3", "w2")
    return NameTable(names.hf_sources(config, specs, {**names.HF_ATTENTION, **experts}), names.hf_unread(config))


FAMILY = Family(decoder_specs, name_table, decoder_forward, head_logits, int8_names=DENSE_NAMES)
