"""Host. What `speculative_config` names, found: a draft's files, their method, and how its vocabulary reads."""

import logging
from pathlib import Path
from typing import NamedTuple

from jaxspec.config.detect import DraftTokens, check_mtp, detect, draft_tokens_of, mask_token_of, settle_method
from jaxspec.config.methods import METHODS, PARALLEL, drafter_of
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.config.support import check_built
from jaxspec.errors import ConfigError
from jaxspec.text.tokenizer import Tokenizer, load_tokenizer
from jaxspec.text.vocab_mapping import VocabMapping, align_copies, map_vocabularies, vocabulary_of
from jaxspec.weights.aliases import resolve_model
from jaxspec.weights.checkpoint import Checkpoint, describe_checkpoint

logger = logging.getLogger(__name__)


class FoundDraft(NamedTuple):
    """The settled method, where the draft's files are, how many drafts a row they speak of, and the mask token of a
    whole model that fills masks; None: no such thing."""

    method: str | None = None
    path: Path | None = None
    num_tokens: DraftTokens | None = None
    mask_token_id: int | None = None

    @property
    def drafter(self) -> str | None:
        """The method, without the lookup before it."""
        return None if self.method is None else drafter_of(self.method)


def find_draft(speculative: SpeculativeConfig | None, target: Checkpoint) -> FoundDraft:
    """Look at the draft's files, without loading them.

    Raises: ConfigError where they are not what was asked for, or nothing that can be drafted with yet.
    """
    if speculative is None:
        return FoundDraft()
    method = speculative.method
    if method is not None and drafter_of(method) == "mtp":
        # vLLM's configs name the target once more; another copy may hold the modules that this one has lost.
        path = target.path if speculative.model is None else Path(resolve_model(speculative.model))
        config, shapes = describe_checkpoint(path)
        check_mtp(shapes, str(path))
        is_target = path.resolve() == target.path.resolve()
        return FoundDraft(method, None if is_target else path, draft_tokens_of("mtp", config, shapes))
    if method is not None and METHODS[method].needs not in ("model", "head"):
        return FoundDraft(method)
    assert speculative.model is not None  # the config saw to it
    path = Path(resolve_model(speculative.model))
    config, shapes = describe_checkpoint(path)
    method = settle_method(method, speculative.model, detect(config, shapes), is_parallel=speculative.parallel_drafting)
    check_built(method)
    mask_token_id = speculative.mask_token_id
    if mask_token_id is not None and method not in PARALLEL.values():
        raise ConfigError(
            f"mask_token_id says nothing to method {method!r}, which fills no masks; leave it out, or set "
            "parallel_drafting for a draft trained for it"
        )
    if drafter_of(method) == "pard":
        mask_token_id = mask_token_of(config, mask_token_id)
        logger.info("draft: mask token: %d (in place of drafts)", mask_token_id)
    return FoundDraft(method, path, draft_tokens_of(drafter_of(method), config, shapes), mask_token_id)


def draft_vocabulary(
    speculative: SpeculativeConfig | None, target: Checkpoint, draft: Checkpoint, tokenizer: Tokenizer | None
) -> VocabMapping | None:
    """How the draft model's token ids read in the target's, or None where they are the same.

    Raises: ConfigError where its vocabulary is another one and the config does not say so, or nothing can be mapped.
    """
    sizes = target.config.vocab_size, draft.config.vocab_size
    is_other = speculative is not None and speculative.use_heterogeneous_vocab
    reason = ""
    try:
        own = load_tokenizer(draft.path)
    except ConfigError as error:
        own, reason = None, str(error)
    if tokenizer is not None and own is not None:
        sides = vocabulary_of(tokenizer, sizes[0]), vocabulary_of(own, sizes[1])
        if not is_other:
            return align_copies(*sides)
        mapping = map_vocabularies(*sides)
        logger.info("draft and target share %d tokens; nothing else is drafted", mapping.num_shared)
        return mapping
    if is_other:
        lacking = "the target" if tokenizer is None else f"the draft ({reason})"
        raise ConfigError(f"use_heterogeneous_vocab needs both tokenizers, and {lacking} brings none; add its files")
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the draft model's vocabulary of {sizes[1]} must equal the target's {sizes[0]}, unless both bring their "
            "tokenizers and these agree; add the files, or take a draft that shares the vocabulary"
        )
    return None
