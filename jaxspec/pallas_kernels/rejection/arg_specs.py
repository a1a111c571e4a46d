"""Host. The shapes that rejection's tests, benches and ahead-of-time compiles share: one list."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class RejectionSpec:
    """One call of `api.reject`: B requests of at most K drafts over a vocabulary of V, all J = K + 1 rows each."""

    name: str
    num_requests: int  # B
    num_drafts: int  # K
    vocab_size: int  # V
    has_draft_logits: bool
    draft_dtype: str = "float32"
    tags: frozenset[str] = frozenset()  # "test": small enough to interpret; "device": worth compiling and timing

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct | None]:
        """`api.reject`'s arguments by name, without values."""
        R, N = self.num_requests * (self.num_drafts + 1), self.num_requests * self.num_drafts
        shapes = {
            "logits_RV": ((R, self.vocab_size), jnp.float32),
            "draft_logits_NV": ((N, self.vocab_size), jnp.dtype(self.draft_dtype)),
            "draft_token_ids_N": ((N,), jnp.int32),
            "target_rows_N": ((N,), jnp.int32),
            "draft_rows_N": ((N,), jnp.int32),
            "bonus_rows_B": ((self.num_requests,), jnp.int32),
            "cu_num_draft_tokens_B": ((self.num_requests,), jnp.int32),
            "rule_R": ((R,), jnp.int32),
            "temperature_R": ((R,), jnp.float32),
            "top_k_R": ((R,), jnp.int32),
            "top_p_R": ((R,), jnp.float32),
            "min_p_R": ((R,), jnp.float32),
            "accept_uniform_R": ((R,), jnp.float32),
            "noise_key_R2": ((R, 2), jnp.uint32),
        }
        arguments: dict[str, jax.ShapeDtypeStruct | None] = {
            name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()
        }
        if not self.has_draft_logits:
            arguments["draft_logits_NV"] = None
        return arguments


_TEST, _DEVICE = frozenset({"test"}), frozenset({"device"})

REJECTION_SPECS = (
    RejectionSpec("one_row", 1, 3, 8, False, tags=_TEST),
    RejectionSpec("no_drafts", 4, 0, 100, False, tags=_TEST),
    RejectionSpec("ragged", 5, 4, 100, False, tags=_TEST),
    RejectionSpec("ragged_with_q", 5, 4, 100, True, tags=_TEST),
    RejectionSpec("bf16_q", 3, 2, 130, True, "bfloat16", tags=_TEST),
    RejectionSpec("two_tiles", 3, 2, 8193, True, tags=_TEST),
    RejectionSpec("odd_tiles", 2, 1, 50257, False, tags=_TEST),
    RejectionSpec("smollm2", 8, 4, 49152, False, tags=_DEVICE),
    RejectionSpec("smollm2_with_q", 8, 4, 49152, True, "bfloat16", tags=_DEVICE),
    RejectionSpec("llama3", 64, 5, 128256, False, tags=_DEVICE),
    RejectionSpec("llama3_with_q", 64, 5, 128256, True, "bfloat16", tags=_DEVICE),
)
