"""Device. Validates and picks an implementation of paged attention."""

from typing import Literal

from jaxtyping import Array, Float, Int, Num

from jaxspec.pallas_kernels.paged_attention.reference import paged_attention_reference

Implementation = Literal["auto", "reference", "pallas"]


def paged_attention(
    q_BTQH: Float[Array, "B T Q H"],
    pool_PGSH: Num[Array, "P heads S H"],
    pages_BM: Int[Array, "B M"],
    positions_BT: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    value_size: int | None = None,
    scale_PGS: Float[Array, "P heads S"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B T Q U"]:
    """Causal attention of each query over the keys of its own row.

    Args:
        q_BTQH: queries, rotary embedding applied.
        pool_PGSH: the page pool holding keys (heads [0, G)) and values (heads [G, 2G)) of every row, the queries'
            own tokens included; or, where value_size is given, G heads that are both. Query head q reads key head
            q // (Q / G). Products are in the pool's dtype with float32 sums; in float32 where the pool holds integers,
            which are multiplied by scale_PGS, or uint16, the bits of bfloat16s.
        pages_BM: i32, page ids of each row in order of position; negative where the row has no page.
        positions_BT: i32, absolute position of each query, -1 for padding (its output is finite and meaningless).
        scale: multiplies the scores.
        window: a key is visible iff 0 <= query - key < window; None means every earlier key.
        softcap: scaled scores become softcap * tanh(score / softcap); None leaves them.
        value_size: of a latent cache, whose keys' first value_size features are its values.
        scale_PGS: of a pool of integers, what each entry is to be multiplied by.
        implementation: "auto" runs the blockwise form as suits the platform that it is compiled for, "reference" all
            rows at once; there is no Pallas body yet.

    Returns:
        f32[B, T, Q, H], of a latent cache f32[B, T, Q, value_size].
    """
    _, _, num_query_heads, head_size = q_BTQH.shape
    num_kv_heads = pool_PGSH.shape[1] // (2 if value_size is None else 1)
    if pool_PGSH.shape[3] != head_size or num_query_heads % num_kv_heads or (value_size or 1) > head_size:
        raise ValueError(f"paged_attention: {q_BTQH.shape=} does not fit {pool_PGSH.shape=} with {value_size=}")
    if implementation == "pallas":
        raise NotImplementedError("paged_attention has no Pallas body yet; use implementation='auto'")
    return paged_attention_reference(
        q_BTQH,
        pool_PGSH,
        pages_BM,
        positions_BT,
        scale=scale,
        window=window,
        softcap=softcap,
        value_size=value_size,
        scale_PGS=scale_PGS,
        at_once=implementation == "reference",
    )
