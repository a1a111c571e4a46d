#!/usr/bin/env python3
"""Host. Writes docs/methods.md from the tables that the checks read.

python scripts/methods_doc.py > docs/methods.md
"""

from jaxspec.config.methods import ALIASES, LOOKUP_FIRST, METHODS, drafter_of
from jaxspec.config.speculative_keys import KEYS
from jaxspec.config.support import FEATURES, SUPPORT

NEEDS = {
    "context": "nothing",
    "model": "a draft model",
    "head": "a head trained for the target",
    "target": "the target's own checkpoint",
    "code": "your code",
}


def methods_doc() -> str:
    """The whole document."""
    alone = [name for name in METHODS if drafter_of(name) == name]
    reasons = list(dict.fromkeys(reason for name in alone for reason in SUPPORT[name].values() if reason))
    lines = [
        "# Drafting methods",
        "",
        "Written by `python scripts/methods_doc.py > docs/methods.md` from the tables that the checks read:",
        "`jaxspec/config/methods.py::METHODS`, `jaxspec/config/support.py::SUPPORT`,",
        "`jaxspec/config/speculative_keys.py::KEYS`. A test keeps it so.",
        "",
        "## The methods",
        "",
        "What a draft's files are for is told by their config and tensors, never by a folder's name; a `method` that",
        "is given is obeyed, or refused naming both sides. Asking for one that is not built is refused by name.",
        "",
        "| `method` | guesses | needs | built |",
        "| --- | --- | --- | --- |",
        *(
            f"| `{name}` | {method.summary} | {NEEDS[method.needs]} | {'yes' if method.is_built else 'not yet'} |"
            for name, method in METHODS.items()
        ),
        "",
        f"Aliases: {', '.join(f'`{alias}` is `{name}`' for alias, name in ALIASES.items())}; vLLM's `…_mtp` names are",
        "deprecated and mean `mtp`.",
        "",
        "## What works with what",
        "",
        "For methods and keys that are built, below and above. A number is the reason for a refusal. A method behind",
        f"`{LOOKUP_FIRST}` works with what it works with alone.",
        "",
        f"| asked for by | {' | '.join(f'`{name}`' for name in alone)} |",
        f"| --- |{' --- |' * len(alone)}",
        *(
            f"| `{setting}` | "
            + " | ".join(
                "yes" if (why := SUPPORT[name][key]) is None else str(reasons.index(why) + 1) for name in alone
            )
            + " |"
            for key, setting in FEATURES.items()
        ),
        "",
        *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)),
        "",
        "## How many drafts",
        "",
        "`num_speculative_tokens` is K, the drafts a row in every round. With `auto` each round makes as many as pay:",
        "none, a few, or all of the most that is tried (what the draft's files say, else 8). It goes by how often each",
        "request's drafts were kept of late, and by what rounds of each size take, timed before the engine is ready;",
        "1 % of the time at most goes into drafts that do not seem to pay, so that text which turns predictable is",
        "found again. Where drafts are looked up, a round weighs those that it has; where a model makes them, their",
        "number is settled before. Greedy text, and sampled text under `coupled`, does not depend on it; under",
        "`standard` and `block` a seed's text depends on the number of drafts, and so on the machine's speed.",
        "`num_speculative_tokens_per_batch_size` says it by hand, and then stands; rounds are compiled for the numbers",
        'it names. A request\'s own `speculative: {"enabled": …, "num_speculative_tokens": …}` is a limit.',
        "`python -m jaxspec.bench sweep` shows what each number gives, and `jaxspec tune` writes the best one.",
        "",
        "## The keys of `speculative_config`: vLLM's, and a few of ours",
        "",
        f"A key that the method does not read is accepted with a note. `{LOOKUP_FIRST}…` reads what `ngram` reads, and",
        "what the method behind it reads.",
        "",
        "| key | here | because |",
        "| --- | --- | --- |",
        *(
            f"| `{name}` | {key.status if key.status != 'noted' else 'accepted with a note'} | "
            f"{key.note or _read_by(key.methods)} |"
            for name, key in KEYS.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _read_by(methods: tuple[str, ...]) -> str:
    named = [f"`{name}`" for name in methods if drafter_of(name) == name]
    return "read by all" if len(methods) == len(METHODS) else f"read by {', '.join(named)}"


if __name__ == "__main__":
    print(methods_doc(), end="")
