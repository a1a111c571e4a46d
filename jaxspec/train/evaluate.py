"""Host. The finished drafter in the real engine: held-out prompts, greedy, and what a round yields."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.sampling.params import SamplingParams
from jaxspec.train.config import TrainConfig
from jaxspec.train.data.shards import Corpus
from jaxspec.train.trainers.base import Trainer

_MAX_TOKENS = 96


def evaluate(
    config: TrainConfig, trainer: Trainer, drafter: Path, corpus: Corpus, records: np.ndarray
) -> dict[str, Any]:
    """Acceptance over the prompts of these records, all together and by kind: `AcceptanceStats.as_dict`, and
    tokens_per_round."""
    chosen = [corpus[int(index)] for index in records]
    engine = Engine(
        config.model,
        speculative_config={
            "method": trainer.method,
            "model": str(drafter),
            "num_speculative_tokens": trainer.num_drafts,
        },
        dtype=config.dtype,
        max_num_seqs=1,
        max_model_len=max(record.num_prompt for record in chosen) + _MAX_TOKENS + trainer.num_drafts + 1,
        enable_structured_outputs=False,
        use_tqdm=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, detokenize=False)
    prompts: Any = [{"prompt_token_ids": record.token_ids[: record.num_prompt].tolist()} for record in chosen]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    stats = {"all": AcceptanceStats(trainer.num_drafts)}
    for record, output in zip(chosen, outputs, strict=True):
        assert output.metrics is not None
        one = AcceptanceStats.from_dict(output.metrics.speculative_decoding)
        stats["all"].merge(one)
        stats.setdefault(record.kind, AcceptanceStats(trainer.num_drafts)).merge(one)
    return {kind: one.as_dict() | {"tokens_per_round": round(one.tokens_per_round, 3)} for kind, one in stats.items()}
