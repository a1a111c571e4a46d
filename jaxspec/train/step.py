"""Device. One optimiser step, whoever is trained: gradients averaged over micro-batches, AdamW, rows over devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import ConfigError
from jaxspec.train.batches import Batch
from jaxspec.train.config import TrainConfig
from jaxspec.train.trainers.base import Metrics, Trainer


@struct.dataclass
class TrainState:
    """All that a run has learned. The data's order follows from `step`."""

    step: jax.Array  # i32[], optimiser steps done
    params: Any  # f32
    opt_state: Any


@struct.dataclass
class StepOutput:
    """Of one step. Metrics are sums over all its rows."""

    loss: jax.Array  # f32[], what was differentiated, averaged over micro-batches
    grad_norm: jax.Array  # f32[], before clipping
    metrics: Metrics


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW under a warm-up and a cosine to a tenth, gradients clipped by their norm."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.num_steps, config.warmup_steps + 1),
        end_value=config.learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, b1=0.9, b2=config.beta2, weight_decay=config.weight_decay),
    )


def initial_state(trainer: Trainer, optimizer: optax.GradientTransformation, sample: Batch) -> TrainState:
    """Before the first step; sample as `Trainer.init` takes it."""
    params = trainer.init(sample)
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))


def make_step(
    trainer: Trainer, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, StepOutput]]:
    """(state, frozen, batch with axes [A, B, T]) -> (state, output), jitted; the state is donated."""
    gradient = jax.value_and_grad(trainer.loss, has_aux=True)

    def step(state: TrainState, frozen, batch: Batch) -> tuple[TrainState, StepOutput]:
        def add(sums, micro):
            (loss, metrics), grads = gradient(state.params, frozen, micro)
            return jax.tree.map(jnp.add, sums, (loss, metrics, grads)), None

        A = batch.len_B.shape[0]
        first = jax.tree.map(lambda x: x[0], batch)
        (loss, metrics), grads = gradient(state.params, frozen, first)
        if A > 1:
            rest = jax.tree.map(lambda x: x[1:], batch)
            (loss, metrics, grads), _ = jax.lax.scan(add, (loss, metrics, grads), rest)
            loss, grads = loss / A, jax.tree.map(lambda g: g / A, grads)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        output = StepOutput(loss=loss, grad_norm=optax.tree.norm(grads), metrics=metrics)
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), output

    return jax.jit(step, donate_argnums=0)


def make_eval(trainer: Trainer) -> Callable[[Any, Any, Batch], Metrics]:
    """(params, frozen, batch with axes [B, T]) -> Metrics, jitted."""
    return jax.jit(lambda params, frozen, batch: trainer.loss(params, frozen, batch)[1])


class Placement:
    """Where arrays of a run live: batches split by rows over devices, everything else on each of them."""

    def __init__(self, num_devices: int):
        """Raises: ConfigError when there are fewer devices."""
        devices = jax.devices()
        if len(devices) < num_devices:
            raise ConfigError(f"data_parallel={num_devices} must not exceed the {len(devices)} devices here; lower it")
        self._mesh = Mesh(devices[:num_devices], ("data",))

    def everywhere(self, tree: Any) -> Any:
        """A copy on every device."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def rows(self, batch: Batch, axis: int) -> Batch:
        """A batch whose rows, along that axis, are split."""
        return jax.device_put(batch, NamedSharding(self._mesh, PartitionSpec(*[None] * axis, "data")))
