"""Host. What a model is, as data: the one description that readers, models and planners share."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class RopeConfig(BaseModel):
    """Rotary embedding. `kind` "default" uses theta alone; "linear" divides by factor; "llama3" is Llama 3.1's rule."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    divisors: tuple[float, ...] | None = None  # GGUF's rope_freqs.weight [head_dim/2]: inv_freq / divisors


class ModelConfig(BaseModel):
    """Shape and options of a decoder-only transformer, whichever file described it.

    family is the forward that runs it (a module of jaxspec.models); model_type is the name its files use.
    sliding_window_layers holds one entry a layer: the window in tokens (a key is visible iff
    0 <= query - key < window), or None for full attention.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_window_layers: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "float32"  # what the checkpoint holds: float32, float16 or bfloat16
