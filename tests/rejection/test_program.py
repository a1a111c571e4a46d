"""Host. The compiled verdict: a batch of greedy rows pays for one arg-max, and the logits are never copied."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rejection.verify import verify
from jaxspec.sampling.table import neutral_table
from jaxspec.types import Drafts
from tests.lossless.engines import SAME_HLO
from tests.quick import heavy_but

B, K, V = 2, 4, 8192


def compiled_text(rule, has_draft_logits, has_counts=False):
    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    drafts = Drafts(
        shape(B, K, dtype=jnp.int32), shape(B, dtype=jnp.int32), shape(B, K, V) if has_draft_logits else None
    )
    table = jax.eval_shape(lambda: neutral_table(B))
    counts_BV = shape(B, V, dtype=jnp.int32) if has_counts else None
    run = jax.jit(lambda *inputs: verify(*inputs, rule=rule))
    lowered = run.lower(shape(B, K + 1, V), drafts, table, shape(B, dtype=jnp.int32), counts_BV)
    return lowered.compile(SAME_HLO).as_text()


def instructions(text):
    """(computation, name of the operation, largest array it gives) of each instruction outside fused computations."""
    computation = ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            computation = "ENTRY" if header[1] else header[2]
        found = re.match(r"\s+(?:ROOT )?%[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", line)
        if found and "fused" not in computation:
            sizes = [np.prod([int(n) for n in dims.split(",") if n]) for dims in re.findall(r"\[([\d,]*)\]", found[1])]
            yield computation, found[2], max(sizes, default=0)


CASES = [(rule, q, False) for rule in ("standard", "block", "coupled") for q in (False, True)] + [("block", True, True)]
QUICK = (("standard", True, False), ("block", True, True))


@pytest.mark.parametrize("case", heavy_but(CASES, QUICK.__contains__), ids=lambda case: "-".join(map(str, case)))
def test_the_logits_are_read_in_place(case):
    rule, has_draft_logits, has_counts = case
    text = compiled_text(rule, has_draft_logits, has_counts)
    found = list(instructions(text))
    assert {"ENTRY"} < {computation for computation, _, _ in found}
    assert "conditional" in {operation for _, operation, _ in found}
    # Wherever it is, a copy of the logits is a mistake; so is sorting a vocabulary.
    assert [one for one in found if one[1] == "copy" and one[2] >= B * V] == []
    assert [one for one in found if one[1] == "sort" and one[2] >= V] == []
    if has_counts:  # the way of batches that edit logits: penalised logits are arrays of their own
        return
    # Outside the conditionals nothing of that size comes to be: greedy rows pay for no softmax, noise or filter.
    passive = {"parameter", "bitcast", "tuple", "get-tuple-element", "conditional", "while"}
    assert [one for one in found if one[0] == "ENTRY" and one[1] not in passive and one[2] >= V] == []
