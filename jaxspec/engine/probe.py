"""Host. Does drafting pay? A few greedy answers by the programs that are there, and what became of their drafts."""

import dataclasses
import logging
from collections.abc import Sequence

from jaxspec.config.methods import METHODS
from jaxspec.engine.core import EngineCore
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.sampling.params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Kept first drafts, of all rounds that drafted, below which drafting costs more than it gives on any machine.
USELESS_RATE = 0.1
LEAST_STEPS = 20  # rounds with drafts; fewer say nothing
STARTUP_TEXTS = (
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that adds two numbers.",
    "Name five fruits and the colour of each.",
)


def answer_greedily(
    core: EngineCore, prompts: Sequence[list[int]], max_tokens: int
) -> tuple[list[list[int]], AcceptanceStats]:
    """(answers, what became of their drafts). The engine's metrics and seeds do not notice.

    Args:
        core: idle; it lends its state and gets it back.

    Raises: RequestError, CapacityError where a prompt does not fit.
    """
    borrower = EngineCore(dataclasses.replace(core.parts, state=core.state))
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    stats = AcceptanceStats(core.config.num_speculative_tokens)
    try:
        requests = [
            borrower.add_request(str(number), {"prompt_token_ids": prompt}, params)
            for number, prompt in enumerate(prompts)
        ]
        while borrower.has_work:
            borrower.step()
    finally:
        core.take_back(borrower.state)
    for request in requests:
        stats.merge(request.sequences[0].stats)
    return [list(request.sequences[0].progress.token_ids) for request in requests], stats


def is_useless(stats: AcceptanceStats) -> bool:
    """Whether hardly a first draft was kept, in enough rounds to say so."""
    return stats.num_drafts >= LEAST_STEPS and stats.acceptance_per_position[0] < USELESS_RATE


def probe_at_start(core: EngineCore, max_tokens: int) -> None:
    """Log one line about the drafter of an engine that is about to be ready, or warn that drafting is useless.

    It answers a few short texts, through programs that are compiled already, and leaves no trace in the metrics.
    """
    speculative, tokenizer = core.config.speculative_config, core.parts.tokenizer
    if speculative is None:
        return
    if METHODS[speculative.method].needs == "context":
        logger.info("start-up probe: none, since what method %r finds depends on the text alone", speculative.method)
        return
    if core.parts.host_proposer is not None:
        logger.info("start-up probe: none, since method %r keeps what it sees", speculative.method)
        return
    if speculative.rejection_sample_method == "synthetic":
        logger.info("start-up probe: none, since rule 'synthetic' keeps drafts whatever they are")
        return
    prompts = [] if tokenizer is None else _fitting(core, tokenizer, max_tokens)
    if not prompts:
        because = "no tokenizer" if tokenizer is None else f"max_model_len={core.config.max_model_len} is too short"
        logger.info("start-up probe: none (%s)", because)
        return
    _, stats = answer_greedily(core, prompts, max_tokens)
    rates = ", ".join(f"{rate:.2f}" for rate in stats.acceptance_per_position)
    said = f"method {speculative.method!r} keeps {rates} of its drafts by position, over {stats.num_drafts} rounds"
    if is_useless(stats):
        logger.warning(
            "start-up probe: %s: drafting is useless and slows answers down; `jaxspec doctor` with the same model and "
            "speculative_config looks for the reason",
            said,
        )
    else:
        logger.info(
            "start-up probe: %s, mean acceptance length %.2f on short prompts", said, stats.mean_acceptance_length
        )


def _fitting(core: EngineCore, tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """The start-up texts as prompts, by the model's chat template if it has one; those that leave room to answer."""
    prompts = []
    for text in STARTUP_TEXTS:
        if tokenizer.chat_template is None:
            ids = tokenizer.encode(text)
        else:
            words = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
            ids = tokenizer.encode(words, add_special_tokens=False)
        if (
            ids
            and len(ids) + max_tokens <= core.config.max_model_len
            and max(ids) < core.parts.target.config.vocab_size
        ):
            prompts.append(ids)
    return prompts
