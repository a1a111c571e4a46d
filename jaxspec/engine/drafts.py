"""Host. What `speculative_config` names, found: a draft's files and their method, or a proposer of the user's."""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.config.detect import DraftTokens, check_mtp, detect, draft_tokens_of, settle_method
from jaxspec.config.methods import METHODS
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.config.support import check_built
from jaxspec.errors import ConfigError
from jaxspec.proposers.base import HostProposer, Proposer
from jaxspec.weights.aliases import resolve_model
from jaxspec.weights.checkpoint import Checkpoint, describe_checkpoint


class FoundDraft(NamedTuple):
    """The settled method, where the draft's files are, and how many drafts a row they speak of; None: no such thing."""

    method: str | None = None
    path: Path | None = None
    num_tokens: DraftTokens | None = None


def find_draft(speculative: SpeculativeConfig | None, target: Checkpoint) -> FoundDraft:
    """Look at the draft's files, without loading them.

    Raises: ConfigError where they are not what was asked for, or nothing that can be drafted with yet.
    """
    if speculative is None:
        return FoundDraft()
    method = speculative.method
    if method == "mtp":
        config, shapes = describe_checkpoint(target.path)
        check_mtp(shapes, str(target.path))
        return FoundDraft(method, None, draft_tokens_of(method, config, shapes))
    if method is not None and METHODS[method].needs not in ("model", "head"):
        return FoundDraft(method)
    assert speculative.model is not None  # the config saw to it
    path = Path(resolve_model(speculative.model))
    config, shapes = describe_checkpoint(path)
    method = settle_method(method, speculative.model, detect(config, shapes), is_parallel=speculative.parallel_drafting)
    check_built(method)
    return FoundDraft(method, path, draft_tokens_of(method, config, shapes))


def check_custom(speculative: SpeculativeConfig | None, proposer: Proposer | HostProposer | None) -> None:
    """Raises: ConfigError unless a proposer of the user's comes from exactly one place."""
    is_custom = speculative is not None and speculative.method == "custom"
    is_named = speculative is not None and is_custom and speculative.model is not None
    if proposer is not None and is_named:
        raise ConfigError("method 'custom' takes `model`, a dotted path, or the engine's argument `proposer`; drop one")
    if is_custom != (proposer is not None or is_named):
        raise ConfigError("method 'custom' and the engine's argument `proposer` go together; give both or neither")


def load_custom(resolved: ResolvedConfig) -> Proposer | HostProposer:
    """The proposer at the dotted path that is the config's `model`: an object, or a function of the ResolvedConfig.

    Raises: ConfigError where there is none.
    """
    assert resolved.speculative_config is not None
    name = resolved.speculative_config.model or ""
    module, _, attribute = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"method 'custom' needs model='package.module.name', which can be imported, and there is no file or folder "
            f"of that name either; got {name!r} ({error})"
        ) from error
    if not isinstance(found, Proposer) and (isinstance(found, type) or not hasattr(found, "observe")):
        if not callable(found):
            raise ConfigError(
                f"{name!r} must be a Proposer, a HostProposer or a function that makes one, got {found!r}"
            )
        found = found(resolved)
    if not isinstance(found, Proposer) and not all(hasattr(found, key) for key in ("num_tokens", "observe", "propose")):
        raise ConfigError(f"{name!r} must give a Proposer or a HostProposer, got {found!r}")
    return found
