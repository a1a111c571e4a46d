"""Device. Ernie 4.5 MoE: the Llama skeleton, experts chosen by softmax plus a correction bias, shared experts."""

import dataclasses

import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models import names
from jaxspec.models.base import Family
from jaxspec.models.decoder import DENSE_NAMES, decoder_forward, decoder_specs, head_logits
from jaxspec.weights.names import NameTable, TensorSource
from jaxspec.weights.transforms import Flat


def name_table(config: ModelConfig, source: str) -> NameTable:
    """Heads turn interleaved pairs in the file; model.mtp_* is the multi-token-prediction drafter's."""
    specs = decoder_specs(config, np.float32)
    in_halves = (names.halves_of_pairs(config.num_heads), names.halves_of_pairs(config.num_kv_heads), None)
    if source == "gguf":
        table = {**names.GGUF_ATTENTION, **names.GGUF_MLP, **names.GGUF_EXPERTS}
    else:
        table = {**names.HF_ATTENTION, **names.HF_MLP}
        if config.moe is not None:
            bias = TensorSource(("mlp.moe_statics.e_score_correction_bias",), (Flat(),))
            table |= {**names.hf_mlp_experts(config, "mlp.gate"), "router_bias": bias}
    for path in ("qkv", "qkv_bias"):
        table[path] = dataclasses.replace(table[path], transforms=in_halves)
    if source == "gguf":
        return NameTable(names.gguf_sources(specs, table))
    return NameTable(names.hf_sources(config, specs, table), (*names.hf_unread(config), r"model\.mtp_.*"))


FAMILY = Family(decoder_specs, name_table, decoder_forward, head_logits, int8_names=DENSE_NAMES)
