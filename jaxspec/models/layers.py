"""Device. The layers that families share: norms, linear maps, embeddings, gated MLPs and the head."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import shards
from jaxspec.types import ArraySpec, Int8Weight

NORM_DTYPE = np.float32  # tiny, and read in float32
INT8_BLOCK = 64  # output channels of an int8 weight that CPU converts at a time, at most


def rms_norm(x_ND: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32. Source: Zhang & Sennrich 2019, eq. 4."""
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x_ND), axis=-1, keepdims=True) + eps)
    return x_ND * scale * weight_D.reshape((1,) * (x_ND.ndim - 1) + weight_D.shape)


def layer_norm(x_ND: jax.Array, weight_D: jax.Array, bias_D: jax.Array, eps: float) -> jax.Array:
    """Mean and variance norm over the last axis, in float32. Source: Ba et al. 2016."""
    x_ND = x_ND - jnp.mean(x_ND, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x_ND), axis=-1, keepdims=True) + eps)
    shape = (1,) * (x_ND.ndim - 1) + weight_D.shape
    return x_ND * scale * weight_D.reshape(shape) + bias_D.reshape(shape)


def linear(x_Ni: jax.Array, weight_oi: jax.Array | Int8Weight, bias_o: jax.Array | None = None) -> jax.Array:
    """x @ weight.T (+ bias) with float32 accumulation and result; x is rounded to the weight's dtype.

    An int8 weight's scales are applied to the sums, since they are constant along the axis summed over.
    """
    if isinstance(weight_oi, Int8Weight):
        out_No = jax.lax.platform_dependent(x_Ni, weight_oi, cpu=_in_blocks, default=_at_once)
        out_No = out_No * weight_oi.scale_o[None, :]
        return out_No if bias_o is None else out_No + bias_o.astype(jnp.float32)[None, :]
    x_Ni = x_Ni.astype(weight_oi.dtype)
    if x_Ni.shape[0] == 1 and weight_oi.dtype == jnp.bfloat16:
        out_No = jax.lax.platform_dependent(x_Ni, weight_oi, cpu=_one_row, default=_product)
    else:
        out_No = _product(x_Ni, weight_oi)
    return out_No if bias_o is None else out_No + bias_o.astype(jnp.float32)[None, :]


@jax.custom_vjp
def _product(x_Ni: jax.Array, weight_oi: jax.Array) -> jax.Array:
    return _dot(x_Ni, weight_oi, 1, 1)


def _product_forward(x_Ni: jax.Array, weight_oi: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x_Ni, weight_oi), (x_Ni, weight_oi)


def _product_backward(operands: tuple[jax.Array, jax.Array], gradient_No: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient too is rounded to the operands' dtype: a product of float32 and bfloat16 runs as one of float32."""
    x_Ni, weight_oi = operands
    gradient_No = gradient_No.astype(weight_oi.dtype)
    if weight_oi.dtype == jnp.bfloat16:
        to_weight_oi = jax.lax.platform_dependent(x_Ni, gradient_No, cpu=_over_rows_on_cpu, default=_over_rows)
    else:
        to_weight_oi = _over_rows(x_Ni, gradient_No)
    return _dot(gradient_No, weight_oi, 1, 0).astype(x_Ni.dtype), to_weight_oi.astype(weight_oi.dtype)


def _over_rows(x_Ni: jax.Array, gradient_No: jax.Array) -> jax.Array:
    return _dot(gradient_No, x_Ni, 0, 0)


def _over_rows_on_cpu(x_Ni: jax.Array, gradient_No: jax.Array) -> jax.Array:
    """The same four times as fast (docs/log.md): XLA's CPU backend has no bfloat16 kernel for a sum over the first axis
    of both."""
    return _in_order(_dot(_in_order(x_Ni.T), gradient_No, 1, 0)).T


def _in_order(x_ab: jax.Array) -> jax.Array:
    """Written out row by row: behind the barrier no transposed layout, for which there is no kernel, can be chosen."""
    return jax.lax.optimization_barrier(x_ab.reshape(-1)).reshape(x_ab.shape)


_product.defvjp(_product_forward, _product_backward)


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    return jax.lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _one_row(x_1i: jax.Array, weight_oi: jax.Array) -> jax.Array:
    """The same for a lone bfloat16 row on CPU, where XLA would convert the weights in memory, ten times slower; what is
    summed is converted on its way in (docs/log.md)."""
    # The barrier keeps a conversion from being shared, or from being made ahead of a loop, such as a drafter's steps.
    weight_oi, x_1i = jax.lax.optimization_barrier((weight_oi, x_1i))
    return jnp.sum(weight_oi.astype(jnp.float32) * x_1i.astype(jnp.float32), axis=1)[None]


def _at_once(x_Ni: jax.Array, weight_oi: Int8Weight) -> jax.Array:
    """x @ values.T, where integers are converted on their way in."""
    return _product(x_Ni.astype(weight_oi.dtype), weight_oi.values_oi.astype(weight_oi.dtype))


def _in_blocks(x_Ni: jax.Array, weight_oi: Int8Weight) -> jax.Array:
    """The same on CPU, where XLA converts what it multiplies in memory: a block that stays in the cache, into float32,
    which costs a fraction of bfloat16 (docs/log.md). Products are the same: those of two bfloat16 are exact in it."""
    values_oi = weight_oi.values_oi
    num_out = values_oi.shape[0]
    size = next(size for size in range(min(INT8_BLOCK, num_out), 0, -1) if num_out % size == 0)
    if num_out // size == 1 or size < INT8_BLOCK // 8:
        return _at_once(x_Ni, weight_oi)
    x_Ni = x_Ni.astype(weight_oi.dtype).astype(jnp.float32)

    def block(values_bi: jax.Array) -> jax.Array:
        values_bi = jax.lax.optimization_barrier(values_bi.astype(jnp.float32))
        return jax.lax.dot_general(values_bi, x_Ni, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    out_nbN = jax.lax.map(block, values_oi.reshape(num_out // size, size, -1))
    return out_nbN.reshape(num_out, -1).T


def joining(x_Ni: jax.Array, weight_oi: jax.Array | Int8Weight, bias_o: jax.Array | None = None) -> jax.Array:
    """`linear` of what may be split over devices along the axis that is summed: their parts are added."""
    out_No = shards.summed(linear(x_Ni, weight_oi))
    return out_No if bias_o is None else out_No + bias_o.astype(jnp.float32)[None, :]


def embed(table_VD: jax.Array, token_ids_BT: jax.Array) -> jax.Array:
    """Rows of a table, f32[B, T, D], whichever device holds them."""
    # The barrier ties the table to the ids: XLA on CPU looks bfloat16 rows up in a converted table, and would convert
    # the whole of it ahead of any loop that it does not vary in, such as a drafter's steps.
    table_VD, token_ids_BT = jax.lax.optimization_barrier((table_VD, token_ids_BT))
    if not shards.is_split(table_VD):
        return table_VD[token_ids_BT].astype(jnp.float32)
    num_rows = table_VD.shape[0]
    own_BT = token_ids_BT - jax.lax.axis_index(shards.TENSOR) * num_rows
    is_own_BT = (own_BT >= 0) & (own_BT < num_rows)
    found_BTD = table_VD[jnp.where(is_own_BT, own_BT, 0)].astype(jnp.float32)
    return shards.summed(jnp.where(is_own_BT[:, :, None], found_BTD, 0.0))


def mlp_specs(hidden_size: int, intermediate_size: int, dtype: Any, *, with_bias: bool) -> dict[str, ArraySpec]:
    """A gated MLP; gate and up are fused along out."""
    D, F = hidden_size, intermediate_size
    tree = {
        "gate_up": ArraySpec((2 * F, D), dtype, ("ffn", "embed"), parts=(("ffn", F), ("ffn", F))),
        "down": ArraySpec((D, F), dtype, ("embed", "ffn")),
    }
    if with_bias:
        tree["gate_up_bias"] = ArraySpec((2 * F,), dtype, ("ffn",), parts=(("ffn", F), ("ffn", F)))
        tree["down_bias"] = ArraySpec((D,), dtype, ("embed",))
    return tree


def gated_mlp(
    w: Mapping[str, jax.Array], x_ND: jax.Array, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
) -> jax.Array:
    """down(activation(gate x) * up x)."""
    gate_up = linear(x_ND, w["gate_up"], w.get("gate_up_bias"))
    F = gate_up.shape[1] // 2
    return joining(activation(gate_up[:, :F]) * gate_up[:, F:], w["down"], w.get("down_bias"))


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU in its tanh form."""
    return jax.nn.gelu(x, approximate=True)
