#!/usr/bin/env python3
"""Host. Writes docs/methods.md from the tables that the checks read.

python scripts/methods_doc.py > docs/methods.md
"""

from jaxspec.config.methods import ALIASES, METHODS
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
    reasons = list(dict.fromkeys(reason for row in SUPPORT.values() for reason in row.values() if reason))
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
        "For methods and keys that are built, below and above. A number is the reason for a refusal.",
        "",
        f"| asked for by | {' | '.join(f'`{name}`' for name in METHODS)} |",
        f"| --- |{' --- |' * len(METHODS)}",
        *(
            f"| `{setting}` | "
            + " | ".join(
                "yes" if (why := SUPPORT[name][key]) is None else str(reasons.index(why) + 1) for name in METHODS
            )
            + " |"
            for key, setting in FEATURES.items()
        ),
        "",
        *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)),
        "",
        "## vLLM's keys of `speculative_config`",
        "",
        "A key that the method does not read is accepted with a note.",
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
    return "read by all" if len(methods) == len(METHODS) else f"read by {', '.join(f'`{name}`' for name in methods)}"


if __name__ == "__main__":
    print(methods_doc(), end="")
