"""Host. A run's checkpoints: everything a step depends on, saved by Orbax, and the recipe that they belong to."""

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import jax

from jaxspec.errors import ConfigError
from jaxspec.train.config import TrainConfig
from jaxspec.train.data.shards import Corpus
from jaxspec.train.step import TrainState

# What may change between a run and its continuation, since no step depends on it.
FREE_KEYS = ("output", "data", "seen", "save_every", "log_every", "eval_every", "engine_eval_prompts", "data_parallel")


class Checkpoints:
    """The last two states of a run."""

    def __init__(self, folder: Path):
        import orbax.checkpoint as ocp

        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, state: TrainState) -> None:
        """Keep a state, whole or not at all; one of the same step is left as it is."""
        if self._manager.latest_step() != int(state.step):
            self._manager.save(int(state.step), args=self._args.StandardSave(state))

    def latest(self, like: TrainState) -> TrainState | None:
        """The last state saved, shaped and placed as `like`; None where there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        return cast(TrainState, self._manager.restore(step, args=self._args.StandardRestore(wanted)))

    def close(self) -> None:
        self._manager.close()


def check_recipe(folder: Path, config: TrainConfig, corpus: Corpus) -> None:
    """Remember what the run is, or see that it is what it was.

    Raises: ConfigError naming each key that differs: the continuation would be another run.
    """
    values: dict[str, Any] = config.model_dump(mode="json", exclude=set(FREE_KEYS))
    values["corpus"] = hashlib.sha256(corpus.token_ids_N.tobytes() + corpus.num_prompts.tobytes()).hexdigest()[:16]
    path = folder / "recipe.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = sorted(key for key in {*before, *values} if before.get(key) != values.get(key))
    if changed:
        told = "; ".join(f"{key} was {before.get(key)!r}, is {values.get(key)!r}" for key in changed)
        raise ConfigError(f"{folder} holds another run ({told}); go on with its own recipe, or give another output")
