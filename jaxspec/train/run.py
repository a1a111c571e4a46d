"""Host. One training run: data, trainer, steps, checkpoints, log, evaluation, export."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.train.batches import pack, split, training_batch
from jaxspec.train.checkpoints import Checkpoints, check_recipe
from jaxspec.train.config import TrainConfig
from jaxspec.train.data.shards import Corpus, read_corpus
from jaxspec.train.evaluate import evaluate
from jaxspec.train.report import Log, plot, summary
from jaxspec.train.seen import Seen, see_corpus
from jaxspec.train.step import Placement, TrainState, initial_state, make_eval, make_optimizer, make_step
from jaxspec.train.target import FrozenTarget, open_target
from jaxspec.train.trainers.base import Trainer
from jaxspec.train.trainers.dflash import dflash
from jaxspec.train.trainers.draft_model import draft_model
from jaxspec.train.trainers.eagle import eagle
from jaxspec.train.trainers.eagle3 import eagle3
from jaxspec.train.trainers.medusa import medusa
from jaxspec.train.trainers.mlp_speculator import mlp_speculator
from jaxspec.train.vocabulary import commonest_tokens, coverage, drafted_tokens

logger = logging.getLogger(__name__)

_WHOLE_VOCABULARY = {"draft_model": draft_model, "eagle": eagle, "mlp_speculator": mlp_speculator}
_NUM_FITTED = 64  # conversations that a drafter may be fitted to before its first step
EXPORTED = "drafter"  # the folder inside a run's that holds the finished drafter


def make_trainer(
    config: TrainConfig, target: FrozenTarget, target_weights: Any, corpus: Corpus, records: np.ndarray
) -> Trainer:
    """The method's trainer; a reduced vocabulary is counted over these records' answers."""
    head: Any = config.head_config()
    if config.method in _WHOLE_VOCABULARY:
        make = _WHOLE_VOCABULARY[config.method]
        return make(head, target, target_weights, dtype=config.dtype, seed=config.seed)
    size = head.loss_vocab_size if config.method == "medusa" else head.draft_vocab_size
    vocab_size = target.config.vocab_size
    target_ids = None
    if config.method == "eagle3" and head.start not in ("fit", "random"):
        target_ids = drafted_tokens(Path(head.start))
    elif size is not None and size < vocab_size:
        target_ids = commonest_tokens(corpus, records, size, vocab_size)
        share = coverage(corpus, records, target_ids, vocab_size)
        logger.info("%d of %d tokens, %.2f%% of the answers' text", size, vocab_size, 100 * share)
    if config.method == "medusa":
        return medusa(head, target, target_weights, target_ids, dtype=config.dtype)
    trainer = dflash if config.method == "dflash" else eagle3
    return trainer(head, target, target_weights, target_ids, dtype=config.dtype, seed=config.seed)


def train(config: TrainConfig, *, show_progress: bool = True, stop_after: int | None = None) -> dict[str, Any]:
    """Train, or go on where the output folder's last checkpoint is, then export and evaluate.

    Args:
        stop_after: end at this step with a checkpoint, as an interruption would, and export nothing.

    Returns:
        The report, which `report.json` in the output folder holds too.

    Raises: ConfigError, WeightsError.
    """
    folder = Path(config.output)
    placement = Placement(config.data_parallel)
    target, target_weights = open_target(config.model, config.dtype)
    corpus = read_corpus(Path(config.data), target.config.vocab_size)
    parts = split(corpus, config.held_out, config.max_records, config.max_length)
    check_recipe(folder, config, corpus)
    trainer = make_trainer(config, target, placement.everywhere(target_weights), corpus, parts.train)
    trainer = trainer._replace(frozen=placement.everywhere(trainer.frozen))
    seen = see_corpus(Path(config.seen or folder / "seen"), target, target_weights, corpus, trainer.aux_streams,
                      show_progress=show_progress)  # fmt: skip
    optimizer = make_optimizer(config)
    sample = pack(corpus, seen, parts.train[:_NUM_FITTED], (1, min(len(parts.train), _NUM_FITTED), config.max_length))
    state = placement.everywhere(initial_state(trainer, optimizer, jax.tree.map(lambda x: x[0], sample)))
    evaluated = make_eval(trainer)

    def held_out(state: TrainState) -> dict[str, Any]:
        return _held_out(config, evaluated, trainer, placement, corpus, seen, parts.held_out, state)

    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        state = checkpoints.latest(state) or state
        state = _steps(config, trainer, make_step(trainer, optimizer), placement, corpus, seen, parts.train, state,
                       checkpoints, held_out, stop_after, show_progress)  # fmt: skip
    finally:
        checkpoints.close()
    plot(folder)
    done = int(state.step)
    report: dict[str, Any] = {"method": config.method, "step": done, "corpus_tokens": corpus.num_tokens}
    if done < config.num_steps:
        return report
    trainer.export(jax.device_get(state.params), folder / EXPORTED)
    report["held_out"] = held_out(state)
    if config.engine_eval_prompts:
        chosen = parts.held_out[: config.engine_eval_prompts]
        report["engine"] = evaluate(config, trainer, folder / EXPORTED, corpus, chosen)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _steps(
    config: TrainConfig, trainer: Trainer, step, placement: Placement, corpus: Corpus, seen: Seen,
    records: np.ndarray, state: TrainState, checkpoints: Checkpoints, held_out: Callable[[TrainState], dict[str, Any]],
    stop_after: int | None, show_progress: bool,
) -> TrainState:  # fmt: skip
    first, last = int(state.step), min(config.num_steps, stop_after or config.num_steps)
    log = Log(Path(config.output), first)
    shape = (config.accumulate, config.batch_size, config.max_length)
    started, tokens = time.perf_counter(), 0
    with tqdm(total=config.num_steps, initial=first, desc=config.method, disable=not show_progress) as bar:
        for index in range(first, last):
            batch = training_batch(corpus, seen, records, index, config.seed, shape, config.loss_on == "all")
            state, output = step(state, trainer.frozen, placement.rows(batch, axis=1))
            tokens += int(batch.len_B.sum())
            if (index + 1) % config.log_every == 0 or index + 1 == last:
                line = {"step": index + 1, "loss": round(float(output.loss), 5)}
                line |= {"grad_norm": round(float(output.grad_norm), 4)} | summary(output.metrics)
                line["tokens_per_s"] = round(tokens / (time.perf_counter() - started), 1)
                log.write(line)
                bar.set_postfix(loss=line["loss"], kept=line["kept"][0])
                started, tokens = time.perf_counter(), 0
            if (index + 1) % config.eval_every == 0 or index + 1 == last:
                found = held_out(state)
                log.write({"step": index + 1, "held_out": found})
                logger.info("step %d: held out: %s", index + 1, found)
                started, tokens = time.perf_counter(), 0
            if (index + 1) % config.save_every == 0 or index + 1 == last:
                checkpoints.save(state)
            bar.update()
    return state


def _held_out(
    config: TrainConfig, evaluated, trainer: Trainer, placement: Placement, corpus: Corpus, seen: Seen,
    records: np.ndarray, state: TrainState,
) -> dict[str, Any]:  # fmt: skip
    """Teacher-forced acceptance over the held-out conversations."""
    sums = None
    for start in range(0, len(records), config.batch_size):
        chosen = records[start : start + config.batch_size]
        batch = pack(corpus, seen, chosen, (1, config.batch_size, config.max_length))
        batch = jax.tree.map(lambda x: x[0], batch)
        metrics = evaluated(state.params, trainer.frozen, placement.rows(batch, axis=0))
        sums = metrics if sums is None else jax.tree.map(jnp.add, sums, metrics)
    assert sums is not None
    return summary(jax.device_get(sums))
