"""Host. The count that "nothing compiles after ready" rests on."""

import jax
import jax.numpy as jnp

from jaxspec.step.compiles import compile_count


def test_what_compiles_is_counted_and_what_does_not_is_not():
    def function(x):
        return x * 3 + 1

    jitted = jax.jit(function)
    x, y = jnp.zeros(7), jnp.zeros(8)
    before = compile_count()
    jitted(x)
    assert compile_count() - before == 1
    jitted(x)
    assert compile_count() - before == 1
    jitted(y)  # another shape
    assert compile_count() - before == 2
    (x[:3] + 1).block_until_ready()  # eager operations too
    assert compile_count() - before > 2
