"""Device. Judges with one known fault each, in place of jaxspec's, for a compiled round: what `jaxspec verify` has to
notice. A fault of None is right."""

import jax
import jax.numpy as jnp

from jaxspec.keys import Purpose, gumbel, token_key, uniform
from jaxspec.types import Verdict
from tests.lossless.faults import Uniforms, accept_or_recover, emit_while_equal


def sampler(fault):
    """Temperature only."""

    def verify(logits_BJV, drafts, table, anchor_B, **_):
        J, V = logits_BJV.shape[1:]
        prob_BJV = jax.nn.softmax(logits_BJV / table.temperature_B[:, None, None], axis=-1)
        q_BKV = None if drafts.logits_BKV is None else jax.nn.softmax(drafts.logits_BKV, axis=-1)

        def key(j, purpose):
            return token_key(table.key_B2, anchor_B, j, purpose)

        def drawn_with(j):
            noise_BV = gumbel(key(j, Purpose.DRAFT), jnp.arange(V, dtype=jnp.int32)[None])
            id_B1 = jnp.maximum(drafts.token_ids_BK[:, j : j + 1], 0)
            return jnp.exp(-jnp.exp(-jnp.take_along_axis(noise_BV, id_B1, axis=1)[:, 0]))

        uniforms = Uniforms(
            *(
                [uniform(key(j, purpose)) for j in range(size)]
                for purpose, size in ((Purpose.ACCEPT, J - 1), (Purpose.RECOVER, J - 1), (Purpose.BONUS, J))
            ),
            [drawn_with(j) for j in range(J - 1)],
        )
        found = accept_or_recover(jnp, fault, prob_BJV, q_BKV, drafts.token_ids_BK, drafts.counts_B, uniforms)
        return Verdict(token_ids_BJ=found[0], num_accepted_B=found[1])

    return verify


def greedy(fault):
    def verify(logits_BJV, drafts, table, anchor_B, **_):
        del table, anchor_B
        found = emit_while_equal(jnp, fault, logits_BJV, drafts.token_ids_BK, drafts.counts_B)
        return Verdict(token_ids_BJ=found[0], num_accepted_B=found[1])

    return verify
