"""Host. The shapes that rejection's tests, benches and ahead-of-time compiles share: one list."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.pallas_kernels.rejection.penalties import Penalties


@dataclass(frozen=True)
class RejectionSpec:
    """One call of `api.reject`: B requests of at most K drafts over a vocabulary of V, all J = K + 1 rows each."""

    name: str
    num_requests: int  # B
    num_drafts: int  # K
    vocab_size: int  # V
    has_draft_logits: bool
    draft_dtype: str = "float32"
    has_penalties: bool = False
    has_rates: bool = False
    tags: frozenset[str] = frozenset()  # "test": small enough to interpret; "device": worth compiling and timing

    def arguments(self) -> dict[str, Any]:
        """`api.reject`'s arguments by name, without values."""
        B, V = self.num_requests, self.vocab_size
        R, N = B * (self.num_drafts + 1), B * self.num_drafts

        def shape(dtype: str, *sizes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

        arguments: dict[str, Any] = {
            "logits_RV": shape("float32", R, V),
            "draft_logits_NV": shape(self.draft_dtype, N, V) if self.has_draft_logits else None,
            **{name: shape("int32", N) for name in ("draft_token_ids_N", "target_rows_N", "draft_rows_N")},
            **{name: shape("int32", B) for name in ("bonus_rows_B", "cu_num_draft_tokens_B")},
            **{name: shape("int32", R) for name in ("rule_R", "top_k_R")},
            **{name: shape("float32", R) for name in ("temperature_R", "top_p_R", "min_p_R", "accept_uniform_R")},
            "noise_key_R2": shape("uint32", R, 2),
        }
        if self.has_rates:
            arguments["accept_rate_N"] = shape("float32", N)
        if self.has_penalties:
            arguments["penalties"] = Penalties(
                counts_BV=shape("int32", B, V),  # pyright: ignore[reportArgumentType]
                request_R=shape("int32", R),  # pyright: ignore[reportArgumentType]
                offset_R=shape("int32", R),  # pyright: ignore[reportArgumentType]
                presence_B=shape("float32", B),  # pyright: ignore[reportArgumentType]
                frequency_B=shape("float32", B),  # pyright: ignore[reportArgumentType]
                repetition_B=shape("float32", B),  # pyright: ignore[reportArgumentType]
            )
        return arguments


_TEST, _DEVICE = frozenset({"test"}), frozenset({"device"})

REJECTION_SPECS = (
    RejectionSpec("one_row", 1, 3, 8, False, tags=_TEST),
    RejectionSpec("no_drafts", 4, 0, 100, False, has_penalties=True, tags=_TEST),
    RejectionSpec("ragged", 5, 4, 100, False, tags=_TEST),
    RejectionSpec("ragged_with_q", 5, 4, 100, True, tags=_TEST),
    RejectionSpec("penalised", 5, 4, 100, False, has_penalties=True, tags=_TEST),
    RejectionSpec("penalised_bf16_q", 3, 3, 130, True, "bfloat16", has_penalties=True, tags=_TEST),
    RejectionSpec("two_tiles", 3, 2, 8193, True, tags=_TEST),
    RejectionSpec("four_shards", 2, 1, 50257, False, tags=_TEST),
    RejectionSpec("rates", 5, 4, 100, False, has_rates=True, has_penalties=True, tags=_TEST),
    RejectionSpec("rates_with_q", 3, 2, 130, True, has_rates=True, tags=_TEST),
    RejectionSpec("v100", 1, 1, 100, True, tags=_DEVICE),
    RejectionSpec("v8193", 7, 3, 8193, True, "bfloat16", has_penalties=True, tags=_DEVICE),
    RejectionSpec("llama2_large_batch", 256, 16, 32000, False, tags=_DEVICE),
    RejectionSpec("smollm2", 8, 4, 49152, False, tags=_DEVICE),
    RejectionSpec("gpt2_with_q", 16, 4, 50257, True, tags=_DEVICE),
    RejectionSpec("llama3", 64, 5, 128256, False, tags=_DEVICE),
    RejectionSpec("llama3_penalised", 64, 5, 128256, False, has_penalties=True, tags=_DEVICE),
    RejectionSpec("llama3_with_q", 64, 5, 128256, True, "bfloat16", tags=_DEVICE),
    RejectionSpec("qwen_rates", 8, 8, 151936, True, "bfloat16", has_rates=True, tags=_DEVICE),
    RejectionSpec("gemma_large_batch", 256, 16, 262144, True, "bfloat16", has_penalties=True, tags=_DEVICE),
)
