"""Device. The Llama skeleton: Llama 1 to 3.1, Mistral, Qwen2, Qwen3 and MiMo, told apart by their config alone."""

import dataclasses

import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models import names
from jaxspec.models.base import Family
from jaxspec.models.decoder import DENSE_NAMES, decoder_forward, decoder_specs, head_logits
from jaxspec.weights.names import NameTable

# Of no use to the model itself: multi-token-prediction modules (drafters) that Qwen's and MiMo's checkpoints carry.
_DRAFTER = r"mtp\..*|model\.mtp_layers\..*"


def name_table(config: ModelConfig, source: str) -> NameTable:
    """Where each parameter lies in a Hugging Face folder ("hf") or a GGUF file ("gguf")."""
    specs = decoder_specs(config, np.float32)
    if source == "gguf":
        layer = {**gguf_attention(config), **names.GGUF_MLP}
        # The frequencies are read with the config (RopeConfig.divisors), not as a weight.
        return NameTable(names.gguf_sources(specs, layer), (r"rope_freqs\.weight",))
    layer = {**names.HF_ATTENTION, **names.HF_MLP}
    return NameTable(names.hf_sources(config, specs, layer), (*names.hf_unread(config), _DRAFTER))


def gguf_attention(config: ModelConfig) -> dict[str, names.TensorSource]:
    """llama.cpp permutes q and k rows of architecture "llama" (Llama, Mistral, Mixtral) into interleaved pairs."""
    table = dict(names.GGUF_ATTENTION)
    if config.rope is not None and config.rope.is_interleaved:
        transforms = (names.halves_of_pairs(config.num_heads), names.halves_of_pairs(config.num_kv_heads), None)
        for path in ("qkv", "qkv_bias"):
            table[path] = dataclasses.replace(table[path], transforms=transforms)
    return table


FAMILY = Family(decoder_specs, name_table, decoder_forward, head_logits, int8_names=DENSE_NAMES)
