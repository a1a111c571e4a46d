"""Host. The one table of drafting methods: what each needs, and whether an engine can be built with it."""

import difflib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxspec.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method:
    """One way to guess.

    summary: for people. needs: nothing but the context's tokens, a model of its own, a head trained for the target,
    what the target's own checkpoint holds, or the user's code. num_tokens: whether the drafts a row must be said, can
    be told by the draft's files, or default to the suffix tree's depth. is_parallel: all drafts come from one pass.
    is_on_host: guesses between the two halves of a round. extra_slots: what vLLM's drafter feeds beyond the target's
    tokens, by the drafts a row.
    """

    summary: str
    needs: Literal["context", "model", "head", "target", "code"]
    is_built: bool
    num_tokens: Literal["needed", "told", "depth"] = "needed"
    is_parallel: bool = False
    is_on_host: bool = False
    extra_slots: Callable[[int], int] = lambda num_tokens: 0


METHODS: dict[str, Method] = {
    "ngram": Method("copies what followed the longest earlier occurrence in the context", "context", True),
    "suffix": Method(
        "copies what most often followed, in this request and in past answers", "context", True, "depth",
        is_on_host=True,
    ),
    "draft_model": Method("a smaller model", "model", True, extra_slots=lambda num_tokens: 1),
    "pard": Method(
        "a smaller model trained to fill mask tokens, in one pass", "model", True, is_parallel=True,
        extra_slots=lambda num_tokens: num_tokens,
    ),
    "eagle": Method("EAGLE 1 and 2: a layer over the target's last hidden state", "head", True, "told"),
    "eagle3": Method("EAGLE-3: a layer over three of the target's hidden states", "head", True, "told"),
    "p_eagle": Method(
        "P-EAGLE: EAGLE-3 in one pass", "head", True, "told", is_parallel=True,
        extra_slots=lambda num_tokens: num_tokens - 1,
    ),
    "mtp": Method("the multi-token-prediction modules of the target's checkpoint", "target", True, "told"),
    "medusa": Method("a head for each position to come", "head", True, "told", is_parallel=True),
    "mlp_speculator": Method("an MLP a step over the last hidden state", "head", True, "told"),
    "dflash": Method(
        "block diffusion over the target's hidden states, in one pass", "head", True, "told", is_parallel=True,
        extra_slots=lambda num_tokens: num_tokens,
    ),
    "dspark": Method(
        "DFlash with a Markov head", "head", True, "told", is_parallel=True,
        extra_slots=lambda num_tokens: num_tokens - 1,
    ),
    "self": Method("the target's own first layers, untrained", "target", True),
    "custom": Method("yours: the engine's argument `proposer`, or a dotted path as `model`", "code", True),
}  # fmt: skip
LOOKUP_FIRST = "ngram+"
# Looked up first, drafted where nothing is found: with "model" by whatever its files are for, else by the method named.
METHODS |= {
    f"{LOOKUP_FIRST}model": Method(
        "looks up as `ngram`, and where nothing is found asks `model`", "model", True, "told"
    ),
    **{
        f"{LOOKUP_FIRST}{name}": replace(method, summary=f"looks up as `ngram`, else drafts as `{name}`")
        for name, method in METHODS.items()
        if method.needs != "context"
    },
}

# Spellings that people bring along. vLLM has besides one MTP name for each family: see `canonical_method`.
ALIASES = {"[ngram]": "ngram", "ngram_gpu": "ngram", "custom_class": "custom", "peagle": "p_eagle"}
# The methods whose heads can be of the parallel kind, and what they then are.
PARALLEL = {
    "eagle3": "p_eagle", "draft_model": "pard", "p_eagle": "p_eagle", "pard": "pard", "dflash": "dflash",
    "dspark": "dspark",
}  # fmt: skip
PARALLEL |= {LOOKUP_FIRST + plain: LOOKUP_FIRST + parallel for plain, parallel in PARALLEL.items()}
NO_METHODS = {"extract_hidden_states": "it drafts nothing, it writes hidden states out for training"}


def looks_up(method: str) -> bool:
    """Whether drafts are first looked up in the context."""
    return method == "ngram" or method.startswith(LOOKUP_FIRST)


def drafter_of(method: str) -> str:
    """The method that drafts where nothing is looked up, or nothing was found.

    >>> drafter_of("ngram+eagle3"), drafter_of("eagle3")
    ('eagle3', 'eagle3')
    """
    return method.removeprefix(LOOKUP_FIRST)


def canonical_method(name: str) -> str:
    """The method of METHODS that a name means; a deprecated one is warned about.

    Raises: ConfigError for a name that means none.
    """
    if name in METHODS:
        return name
    if name.startswith(LOOKUP_FIRST) and (method := LOOKUP_FIRST + _meant(drafter_of(name))) in METHODS:
        return method
    if (method := _meant(name)) in METHODS:
        return method
    if name in NO_METHODS:
        raise ConfigError(f"speculative method {name!r} is refused: {NO_METHODS[name]}; take one of {list(METHODS)}")
    near = difflib.get_close_matches(name, [*METHODS, *ALIASES], n=3)
    remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(METHODS)}"
    raise ConfigError(f"unknown speculative method {name!r}; {remedy}")


def _meant(name: str) -> str:
    """The name that an alias or a deprecated name stands for; any other as it is."""
    if name in ALIASES:
        logger.info("speculative method %r means %r here", name, ALIASES[name])
        return ALIASES[name]
    if name.endswith("_mtp"):  # vLLM has one for each family; here the checkpoint tells the family
        logger.warning("speculative method %r is deprecated and replaced with mtp", name)
        return "mtp"
    return name


def initial_method(method: Any, model: Any) -> str:
    """The method that is asked for, or that the kind of `model` implies, before the draft's files are looked at.

    Names of models and folders never matter: whatever is no dotted path to code is some drafter, and what kind of one
    its files say.
    """
    if isinstance(method, str):
        return canonical_method(method)
    if model in ("ngram", "[ngram]"):
        return "ngram"
    return "custom" if isinstance(model, str) and is_class_path(model) else "draft_model"


def is_class_path(model: str) -> bool:
    """Whether it reads `package.module.name` and is no file or folder ("llama3.awq" may be one)."""
    parts = model.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts) and not os.path.exists(model)


def extra_slots(method: str, num_tokens: int, *, is_parallel: bool = False) -> int:
    """Tokens a row that a drafter of vLLM's layout is fed beyond the target's own.

    >>> extra_slots("eagle3", 5), extra_slots("eagle3", 5, is_parallel=True)
    (0, 4)
    """
    method = canonical_method(method)
    return METHODS[PARALLEL.get(method, method) if is_parallel else method].extra_slots(num_tokens)
