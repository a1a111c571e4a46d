"""Host. What a model is, as data: the one description that readers, models and planners share."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RopeConfig(_Part):
    """Rotary embedding: inverse frequencies by `kind`, then divided by `divisors`; cos and sin times attention_factor.

    kind: "default" uses theta alone; "linear" divides by factor; "llama3" is Llama 3.1's rule, "yarn" YaRN's;
    "proportional" takes its frequencies from the whole head and turns the first share of them.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn", "proportional"] = "default"
    factor: float = 1.0
    partial_factor: float = 1.0  # share of a head's features that turn, the first ones; the others pass through
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    divisors: tuple[float, ...] | None = None  # one a frequency: GGUF's rope_freqs.weight, longrope's long factors
    short_divisors: tuple[float, ...] | None = None  # longrope: in runs that stay within the original length
    is_interleaved: bool = False  # the file pairs (2j, 2j+1): loading reorders rows, for what runs pairs (j, j + d/2)


class MoeConfig(_Part):
    """Routed experts, and those every token shares.

    layers: one flag a layer, whether it has experts (else its MLP is dense).
    score: how router logits become scores. The experts are chosen by score (plus the correction bias, if there is one)
    among the best `num_kept_groups` of `num_groups`; their weights are the scores, divided by their sum (but at least
    min_weight_sum) if `renormalize`, times `scale`.
    """

    layers: tuple[bool, ...]
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    shared_intermediate_size: int = 0  # of all shared experts together; 0 = none
    shared_bias: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    has_correction_bias: bool = False
    num_groups: int = 1
    num_kept_groups: int = 1
    renormalize: bool = True
    min_weight_sum: float = 1e-20
    scale: float = 1.0


class MlaConfig(_Part):
    """Multi-head latent attention: what is cached is one latent and one rotary key a token, shared by all heads."""

    q_lora_rank: int | None  # None: queries come straight from the hidden state
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int


class ModelConfig(_Part):
    """Shape and options of a decoder-only transformer, whichever file described it.

    family is the forward that runs it (a module of jaxspec.models); model_type is the name its files use.
    sliding_window_layers holds one entry a layer: the window in tokens (a key is visible iff
    0 <= query - key < window), or None for full attention.
    """

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
    norm_eps: float
    rope: RopeConfig | None  # None: positions are learned
    local_rope: RopeConfig | None = None  # of the sliding layers, where it differs
    sliding_window_layers: tuple[int | None, ...]
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    attention_softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    logit_softcap: float | None = None
    scale_by_inverse_layer: bool = False  # layer i divides its scores by i + 1
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    num_mtp_layers: int = 0  # multi-token-prediction modules the checkpoint may hold beside the model
    tensor_prefix: str = "model."  # of the model's own tensors in a Hugging Face checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "float32"  # what the checkpoint holds: float32, float16 or bfloat16

    @property
    def cache_heads(self) -> tuple[int, int]:
        """(entries, values an entry) that one token has in the cache of one layer."""
        if self.mla is not None:
            return 1, self.mla.kv_lora_rank + self.mla.rope_head_dim
        return 2 * self.num_kv_heads, self.head_dim

    @property
    def turning_size(self) -> int:
        """Features of a head that its rotation may turn."""
        return self.mla.rope_head_dim if self.mla is not None else self.head_dim

    def for_run(self, max_model_len: int) -> "ModelConfig":
        """This model in a run whose rows never hold more than `max_model_len` tokens.

        Longrope has one set of factors for texts within the original length and one for longer texts. Which it is
        holds for a whole run: a change halfway would leave cached keys turned by the other set.
        """
        rope = self.rope
        if rope is None or rope.short_divisors is None or max_model_len > rope.original_max_position_embeddings:
            return self
        return self.model_copy(update={"rope": rope.model_copy(update={"divisors": rope.short_divisors})})
