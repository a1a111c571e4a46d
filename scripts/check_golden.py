"""Runs golden checkpoints and compares with what their folders say: python scripts/check_golden.py FOLDER...

A folder holds a checkpoint, case.json and expected.npz (tests/data/goldens/tiny has some). One line a folder; the exit
status is 1 if any failed. A folder of folders stands for all of them. Drafters are counted apart: not yet checked.
"""

import argparse
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import pool_shape, slots_of
from jaxspec.errors import JaxspecError
from jaxspec.models.base import Tokens
from jaxspec.models.registry import family_of
from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.load import load

TOLERANCE = 2e-5  # of max |difference| / max |expected|, in float32
PAGE_SIZE = 8


class Runner:
    """One checkpoint in float32 over a page pool of its own."""

    def __init__(self, folder: Path):
        with open_checkpoint(folder) as checkpoint:
            self.family = family_of(checkpoint.config.family)
            self.config = checkpoint.config
            specs = self.family.specs(self.config, np.float32)
            self.weights = load(checkpoint.reader, specs, self.family.name_table(self.config, checkpoint.source))

    def run(self, ids_BT, num_decoded: int = 0):
        """(logits_BTV, hidden_BTD) of one pass over all rows, and the greedy tokens that follow row 0, one by one."""
        B, T = ids_BT.shape
        length = T + num_decoded
        config, num_pages = self.config.for_run(length), -(-length // PAGE_SIZE)
        pages_BM = jnp.arange(B * num_pages, dtype=jnp.int32).reshape(B, num_pages)

        @jax.jit
        def step(weights, pool, ids_BT, positions_BT, pages_BM):
            tokens = Tokens(
                token_ids_BT=ids_BT,
                positions_BT=positions_BT,
                slots_BT=slots_of(positions_BT, pages_BM, PAGE_SIZE),
                pages_BM=pages_BM,
            )
            hidden_BTD, pool = self.family.forward(weights, config, tokens, pool)
            return self.family.logits(weights, config, hidden_BTD), hidden_BTD, pool

        pool = jnp.full(pool_shape(config, B * num_pages, PAGE_SIZE), jnp.nan, jnp.float32)
        positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        logits_BTV, hidden_BTD, pool = step(self.weights, pool, jnp.asarray(ids_BT), positions_BT, pages_BM)
        greedy, last_V = [], logits_BTV[0, -1]
        for position in range(T, length):
            greedy.append(int(jnp.argmax(last_V)))
            ids_11, position_11 = jnp.full((1, 1), greedy[-1], jnp.int32), jnp.full((1, 1), position, jnp.int32)
            logits_11V, _, pool = step(self.weights, pool, ids_11, position_11, pages_BM[:1])
            last_V = logits_11V[0, 0]
        return np.asarray(logits_BTV), np.asarray(hidden_BTD), greedy


def difference(found, expected) -> float:
    """max |difference| / max |expected|."""
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


def check_target(folder: Path, case: dict) -> tuple[bool, str]:
    """(passed, what a line says)."""
    with np.load(folder / "expected.npz") as arrays:
        expected = dict(arrays)
    runner = Runner(folder)
    greedy = expected["greedy_tokens"].tolist()
    ids_BT = expected["input_ids"]
    logits_BTV, hidden_BTD, found = runner.run(ids_BT, len(greedy))
    if runner.config.for_run(ids_BT.shape[1]) != runner.config.for_run(ids_BT.shape[1] + len(greedy)):
        logits_BTV, hidden_BTD, _ = runner.run(ids_BT)  # recorded in a run that ends with the prompt
    pairs = {"logits": (logits_BTV, expected["logits"])}
    if "final_hidden" in expected:
        pairs["hidden"] = (hidden_BTD, expected["final_hidden"])
    if "short_input_ids" in expected:
        pairs["short"] = (runner.run(expected["short_input_ids"])[0], expected["short_logits"])
    own = case.get("tolerance", {})
    passed, words = found == greedy, []
    for name, (ours, theirs) in pairs.items():
        relative = difference(ours, theirs)
        words.append(f"{name} {relative:.1e}")
        if not relative <= TOLERANCE:
            within = "logits_atol" in own and np.allclose(
                ours, theirs, atol=own["logits_atol"], rtol=own.get("logits_rtol", 0.0)
            )
            passed &= bool(within)
            words[-1] += " (within the case's tolerance)" if within else " (TOO FAR)"
    equal = sum(1 for ours, theirs in zip(found, greedy, strict=True) if ours == theirs)
    return passed, f"{', '.join(words)}, greedy tokens {equal} of {len(greedy)}"


def find_cases(paths: list[Path]) -> list[Path]:
    """Folders with a case.json: those given, and those inside the given."""
    found = []
    for path in paths:
        inside = [path] if (path / "case.json").is_file() else sorted(case.parent for case in path.glob("*/case.json"))
        if not inside:
            raise SystemExit(f"{path} holds no case.json, nor does any folder in it; give golden folders")
        found += inside
    return found


def main(argv: list[str] | None = None) -> int:
    """Checks every folder; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    folders = find_cases(parser.parse_args(argv).folders)
    jax.config.update("jax_default_matmul_precision", "highest")
    num_passed = num_failed = num_later = 0
    for folder in folders:
        case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        kinds = str(case.get("kind", "target")).split("+")
        for kind in kinds:
            if kind != "target":
                num_later += 1
                print(f"later {folder.name}: {kind}, not yet")
                continue
            try:
                passed, words = check_target(folder, case)
            except JaxspecError as error:
                passed, words = False, " ".join(str(error).split())
            except Exception as error:  # whatever breaks in one folder, the others are checked too
                passed, words = False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            num_passed, num_failed = num_passed + passed, num_failed + (not passed)
            print(f"{'ok   ' if passed else 'FAIL '} {folder.name}: {words}", flush=True)
    print(f"{num_passed} passed, {num_failed} failed, {num_later} not yet")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
