"""Device. Rejection sampling over flattened drafts: checks the shapes, and picks the body that runs on the mesh."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32, UInt32

from jaxspec import shards
from jaxspec.errors import ConfigError
from jaxspec.pallas_kernels.rejection import gpu, passes, reference, tpu
from jaxspec.pallas_kernels.rejection.penalties import Penalties
from jaxspec.pallas_kernels.rejection.rules import BLOCK

Implementation = Literal["auto", "reference", "pallas"]
Edit = Callable[[jax.Array, jax.Array], jax.Array]  # (f32[X, V], which rows they are, i32[X]) -> f32[X, V]


def _interpreted(*args: Any, **kwargs: Any) -> Any:
    """The TPU's body on CPU, for tests; on a mesh by the interpreter that knows of one."""
    return tpu.run(*args, **kwargs, interpret=pltpu.InterpretParams() if shards.num_shards() > 1 else True)


# Who runs the kernels; JAX calls CUDA "gpu" as well.
_BODIES: dict[str, passes.Run] = {
    "tpu": tpu.run,
    "gpu": gpu.run,
    "cuda": gpu.run,
    "cpu": _interpreted,
}


def pick_implementation(implementation: Implementation, platform: str) -> Literal["reference", "pallas"]:
    """What "auto" means on the mesh's platform ("cpu", "tpu", "gpu", …).

    Raises: ConfigError if the named one cannot run there.
    """
    if implementation == "auto":
        return "pallas" if platform in _BODIES and platform != "cpu" else "reference"
    if implementation == "pallas" and platform not in _BODIES:
        raise ConfigError(
            f"{implementation=} cannot run on {platform=}: the kernels are written for TPU and for CUDA GPUs; "
            "use 'auto' or 'reference'"
        )
    return implementation


def reject(
    logits_RV: Float[Array, "R V"],
    draft_logits_NV: Float[Array, "N V"] | None,
    draft_token_ids_N: Int32[Array, " N"],
    target_rows_N: Int32[Array, " N"],
    draft_rows_N: Int32[Array, " N"],
    bonus_rows_B: Int32[Array, " B"],
    cu_num_draft_tokens_B: Int32[Array, " B"],
    rule_R: Int32[Array, " R"],
    temperature_R: Float[Array, " R"],
    top_k_R: Int32[Array, " R"],
    top_p_R: Float[Array, " R"],
    min_p_R: Float[Array, " R"],
    accept_uniform_R: Float[Array, " R"],
    noise_key_R2: UInt32[Array, "R 2"],
    accept_rate_N: Float[Array, " N"] | None = None,
    penalties: Penalties | None = None,
    edit: Edit | None = None,
    is_plain: jax.Array | None = None,
    *,
    rules: tuple[int, ...],
    implementation: Implementation = "auto",
    platform: str = "cpu",
) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """Which drafts of each request stand, and the token that follows them.

    A request owns a segment of the flattened drafts: [cu_num_draft_tokens[b - 1], cu_num_draft_tokens[b]); whatever
    lies past the last segment is padding and is never read as data. "Row" is a row of logits_RV, one a position.

    Args:
        logits_RV: f32 target logits, read in place through the index arrays.
        draft_logits_NV: the logits the drafts were drawn from (any float dtype); None: the drafts are point masses.
        draft_token_ids_N: an id outside the vocabulary (-1) is a draft that never stands, and nor does what follows.
        target_rows_N: the row that judges draft n, and no other. draft_rows_N: its row of draft_logits_NV.
        bonus_rows_B: the row that gives request b's token when all its drafts stand.
        rule_R: one for all rows of a request. GREEDY: the arg-max of the logits, kept while it equals the draft.
            STANDARD: accept with min(1, p/q), else draw from max(p - q, 0). COUPLED: argmax(log p + noise), kept while
            it equals the draft. BLOCK: drafts are judged as a whole, see `block`; the first id outside the vocabulary
            ends the block. NaN and impossible drafts never stand.
        temperature_R: > 0; 1 in greedy rows. top_k_R, top_p_R, min_p_R: off in greedy rows (`cutoff.row_cutoffs`).
        accept_uniform_R: in (0, 1), for the draft that the row judges.
        noise_key_R2: the key of the noise of the token that the row may emit.
        accept_rate_N: None, or draft n stands if its uniform is below this and its id in the vocabulary, whatever the
            logits say (greedy rows too); what follows the drafts is then drawn as the rule says. Not with BLOCK.
        penalties: None, or what repeats cost the logits before anything else looks at them, in greedy rows too:
            repetition, then frequency, then presence (`penalties.penalised`).
        edit: None, or what changes rows of the logits before anything else looks at them, a pytree that is called with
            them, f32[X, V], and their numbers, i32[X].
        is_plain: bool[], whether edit and penalties would change nothing: they then cost nothing. None: nobody knows.
        rules: the codes that rule_R may hold; what the others need is not even compiled.
    Returns: num_accepted_B, and token_ids_B: the token after them, in [0, V) even if all logits are NaN.
    """
    validate_static(logits_RV, draft_logits_NV)
    if accept_rate_N is not None and BLOCK in rules:
        raise ValueError("accept_rate_N overrules the logits, BLOCK weighs them as a whole; give one of the two")
    arguments = (
        logits_RV, draft_logits_NV, draft_token_ids_N, target_rows_N, draft_rows_N, bonus_rows_B,
        cu_num_draft_tokens_B, rule_R, temperature_R, top_k_R, top_p_R, min_p_R, accept_uniform_R, noise_key_R2,
        accept_rate_N, penalties,
    )  # fmt: skip
    if pick_implementation(implementation, platform) == "reference":
        return _reference(*arguments, edit, is_plain, rules=rules)
    kernels = functools.partial(passes.reject, rules=rules, run=_BODIES[platform])

    def changed() -> tuple[jax.Array, jax.Array]:
        if edit is None:
            return kernels(*arguments)
        edited_RV = _edited(edit, logits_RV, target_rows_N, bonus_rows_B, cu_num_draft_tokens_B)
        return kernels(edited_RV, *arguments[1:])

    return changed() if is_plain is None else lax.cond(is_plain, lambda: kernels(*arguments[:-1]), changed)


# Jitted for those who call it outside of a program.
_reference = jax.jit(reference.reject, static_argnames="rules")


def _edited(edit: Edit, logits_RV, target_rows_N, bonus_rows_B, cu_num_draft_tokens_B) -> jax.Array:
    """For kernels, which read rows where they lie: all rows that judge drafts or give a bonus, edited, a place of every
    request at a time. The other rows are undefined."""
    num_drafts_B = jnp.diff(cu_num_draft_tokens_B, prepend=jnp.int32(0))
    start_B, num_drafts = cu_num_draft_tokens_B - num_drafts_B, target_rows_N.shape[0]

    def edit_place(place: jax.Array, edited_RV: jax.Array) -> jax.Array:
        rows_B = bonus_rows_B
        if num_drafts:
            judging_B = target_rows_N[jnp.clip(start_B + place, 0, num_drafts - 1)]
            rows_B = jnp.where(place < num_drafts_B, judging_B, bonus_rows_B)
        return edited_RV.at[rows_B].set(edit(logits_RV[rows_B], rows_B))

    nothing_RV = shards.split_like(lax.empty(logits_RV.shape, logits_RV.dtype), logits_RV)
    return lax.fori_loop(0, jnp.max(num_drafts_B) + 1, edit_place, nothing_RV)


def validate_static(logits_RV: jax.Array, draft_logits_NV: jax.Array | None) -> None:
    """What the type annotations do not say of the shapes; at trace time, always."""
    if logits_RV.dtype != jnp.float32:
        raise ValueError(f"target logits must be float32, got {logits_RV.dtype}")
    if draft_logits_NV is not None and draft_logits_NV.shape[-1] != logits_RV.shape[-1]:
        raise ValueError(
            f"draft and target logits must share one vocabulary, got {draft_logits_NV.shape=} and {logits_RV.shape=}"
        )
