"""A peer's process: says on stdout which variants it has, then answers a request a line until stdin ends."""

import json
import os
import sys
from collections.abc import Callable, Sequence

CORES = sorted(os.sched_getaffinity(0))  # jaxspec takes all of them, so all do
THREADS = len(CORES)
Generate = Callable[[Sequence[int], int], Sequence[int]]  # (prompt, tokens to make) -> their ids, greedy, no EOS

_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever a library prints, from its import on, is not an answer


def serve(version: str, variants: dict[str, Generate]) -> None:
    """Answers {"variant", "ids", "tokens"} with {"ids"}. version: of the library under test."""
    print(json.dumps({"version": version, "variants": list(variants)}), file=_answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        made = variants[asked["variant"]](asked["ids"], asked["tokens"])
        print(json.dumps({"ids": [int(one) for one in made]}), file=_answers, flush=True)
