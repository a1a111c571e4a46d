"""Runs golden checkpoints and compares with what their folders say: python scripts/check_golden.py FOLDER...

A folder holds a checkpoint, case.json and expected.npz (tests/data/goldens/tiny has some). One line a folder; the exit
status is 1 if any failed. A folder of folders stands for all of them. A drafter needs its target's folder, which its
case.json names.
"""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import pool_shape, slots_of
from jaxspec.errors import JaxspecError, WeightsError
from jaxspec.models.base import Tokens
from jaxspec.models.heads import dflash, eagle, medusa, mlp_speculator, mtp
from jaxspec.models.heads.base import RecurrentHead, head_logits
from jaxspec.models.heads.load import load_head, open_head
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


class HeadRunner:
    """A drafter's head in float32, beside its target, over a page pool of its own."""

    def __init__(self, folder: Path, case: dict, kind: str):
        with ExitStack() as opened:
            in_target = "target" not in case
            self.runner = Runner(folder if in_target else (folder / case["target"]).resolve())
            target = opened.enter_context(open_checkpoint(folder if in_target else folder / case["target"]))
            head = opened.enter_context(open_head(kind, None if in_target else folder, target))
            self.config: Any = head.config
            self.weights = load_head(head, target.config, self.runner.weights, jnp.float32)
        self.num_pages = 8
        self.pages_1M = jnp.arange(self.num_pages, dtype=jnp.int32)[None]

    def pool(self) -> jax.Array:
        shape = pool_shape(self.config.model, self.num_pages, PAGE_SIZE)
        return jnp.full(shape, jnp.nan, jnp.float32)

    def tokens(self, ids, positions) -> Tokens:
        positions_1T = jnp.asarray(positions, jnp.int32)[None]
        return Tokens(
            token_ids_BT=jnp.asarray(ids, jnp.int32)[None],
            positions_BT=positions_1T,
            slots_BT=slots_of(positions_1T, self.pages_1M, PAGE_SIZE),
            pages_BM=self.pages_1M,
        )

    def logits(self, hidden_BTD) -> np.ndarray:
        """In draft ids, of the head's own vocabulary head or the target's."""
        if "head" in self.weights:
            return np.asarray(head_logits(self.weights["head"], hidden_BTD, getattr(self.config, "logit_scale", 1.0)))
        runner = self.runner
        return np.asarray(runner.family.logits(runner.weights, runner.config, hidden_BTD))

    def target_id(self, draft_id: int) -> int:
        return int(self.weights["target_ids"][draft_id]) if "target_ids" in self.weights else draft_id

    def chain(self, head: RecurrentHead, seen_TX, next_ids, num_steps: int) -> dict[str, np.ndarray]:
        """The first pass over the target's states and the tokens after them, then steps on its own drafts."""
        forward = jax.jit(
            lambda weights, tokens, features, pool: head.forward(weights, self.config, tokens, features, pool)
        )
        features_BTD = head.features(self.weights, self.config, jnp.asarray(seen_TX)[None])
        T, pool = len(next_ids), self.pool()
        hidden, state, pool = forward(self.weights, self.tokens(next_ids, range(T)), features_BTD, pool)
        found = {"first_logits": self.logits(hidden)[0], "first_state": np.asarray(state)[0]}
        drafts = [self.target_id(int(found["first_logits"][-1].argmax()))]
        logits, states = [], []
        for position in range(T, T + num_steps):
            hidden, state, pool = forward(self.weights, self.tokens(drafts[-1:], [position]), state[:, -1:], pool)
            logits.append(self.logits(hidden)[0, 0])
            states.append(np.asarray(state)[0, 0])
            drafts.append(self.target_id(int(logits[-1].argmax())))
        return found | {
            "step_logits": np.array(logits),
            "step_states": np.array(states),
            "draft_tokens": np.array(drafts),
        }


def run_drafter(folder: Path, case: dict, kind: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(what the head says, what the folder says), arrays by name."""
    with np.load(folder / "expected.npz") as arrays:
        expected = dict(arrays)
    kind = {"eagle1": "eagle", "eagle3-speculators": "eagle3"}.get(kind, kind)
    runner = HeadRunner(folder, case, kind)
    if kind in ("eagle", "eagle3"):
        seen = expected["aux_hidden" if "aux_hidden" in expected else "hidden"]
        found = runner.chain(eagle.HEAD, seen, expected["draft_input_ids"], len(expected["step_tokens"]))
    elif kind == "mtp":
        expected = {name.removeprefix("mtp_"): a for name, a in expected.items() if name.startswith("mtp_")}
        found = runner.chain(mtp.HEAD, expected["hidden"], expected["context_ids"][1:], len(expected["step_tokens"]))
    elif kind == "medusa":
        found = _medusa(runner, jnp.asarray(expected["hidden"]))
    elif kind == "mlp_speculator":
        found = _mlp_speculator(runner, expected)
    elif kind == "dflash":
        found = _dflash(runner, expected)
    else:
        raise WeightsError(f"drafters of kind {kind!r} are not known here; add them")
    return found, expected


def _medusa(runner: HeadRunner, hidden_TD: jax.Array) -> dict[str, np.ndarray]:
    config, weights = runner.config, runner.weights
    hidden_TKD = medusa.blocks(weights, config, hidden_TD, config.num_heads)
    if config.own_heads != "none":
        logits_TKV = medusa.own_logits(weights, config, hidden_TKD)
    else:
        logits_TKV = runner.logits(hidden_TKD)
    logits_KTV = np.asarray(logits_TKV).swapaxes(0, 1)
    return {"head_logits": logits_KTV, "draft_tokens": logits_KTV[:, -1].argmax(axis=-1)}


def _mlp_speculator(runner: HeadRunner, expected: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    config, weights = runner.config, runner.weights
    T = len(expected["hidden"])
    state = mlp_speculator.start(config, jnp.asarray(expected["hidden"]))
    last, token = state[-1:], int(expected["context_ids"][-1])
    forced, steps, drafts = [], [], []
    for i in range(config.num_steps):
        ids = jnp.asarray(expected["forced_ids"][i : i + T], jnp.int32)
        state, logits = mlp_speculator.step(weights, config, i, state, ids)
        forced.append(np.asarray(logits))
        last, logits = mlp_speculator.step(weights, config, i, last, jnp.full(1, token, jnp.int32))
        steps.append(np.asarray(logits)[0])
        token = int(steps[-1].argmax())
        drafts.append(token)
    return {"forced_logits": np.array(forced), "step_logits": np.array(steps), "draft_tokens": np.array(drafts)}


def _dflash(runner: HeadRunner, expected: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The second pass brings only what was committed since, over the keys that the first block left behind."""
    config, weights, found = runner.config, runner.weights, {}
    pool, start = runner.pool(), 0
    ids, streams_TX = expected["context_ids"], expected["aux_hidden"]
    size = len(expected["pass1_logits"]) + 1
    remember = jax.jit(lambda weights, *args: dflash.remember(weights, config, *args))
    forward = jax.jit(lambda weights, *args: dflash.forward(weights, config, *args))
    for name, end in (("pass1", len(streams_TX) - (len(ids) - 1 - 16)), ("pass2", len(streams_TX))):
        positions = range(start, end)
        streams_1TX = jnp.asarray(streams_TX[start:end])[None]
        pool = remember(weights, runner.tokens(ids[start:end], positions), streams_1TX, pool)
        block = [int(ids[end]), *[config.mask_token_id] * (size - 1)]
        hidden, pool = forward(weights, runner.tokens(block, range(end, end + size)), pool)
        found[f"{name}_logits"] = runner.logits(hidden)[0, 1:]
        found[f"{name}_tokens"] = found[f"{name}_logits"].argmax(axis=-1)
        start = end
    return found


def check_drafter(folder: Path, case: dict, kind: str) -> tuple[bool, str]:
    """(passed, what a line says)."""
    found, expected = run_drafter(folder, case, kind)
    passed, words = True, []
    for name, ours in found.items():
        theirs = expected[name]
        if name.endswith("tokens"):
            equal = int((ours == theirs).sum()) if ours.shape == theirs.shape else 0
            passed &= equal == len(theirs)
            words.append(f"{name.replace('_', ' ')} {equal} of {len(theirs)}")
        else:
            relative = difference(ours, theirs) if ours.shape == theirs.shape else float("nan")
            passed &= relative <= TOLERANCE
            words.append(f"{name} {relative:.1e}{'' if relative <= TOLERANCE else ' (TOO FAR)'}")
    return passed, ", ".join(words)


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
    num_passed = num_failed = 0
    for folder in folders:
        case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        kinds = str(case.get("kind", "target")).split("+")
        for kind in kinds:
            try:
                passed, words = check_target(folder, case) if kind == "target" else check_drafter(folder, case, kind)
            except JaxspecError as error:
                passed, words = False, " ".join(str(error).split())
            except Exception as error:  # whatever breaks in one folder, the others are checked too
                passed, words = False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            num_passed, num_failed = num_passed + passed, num_failed + (not passed)
            part = "" if len(kinds) == 1 else f" ({kind})"
            print(f"{'ok   ' if passed else 'FAIL '} {folder.name}{part}: {words}", flush=True)
    print(f"{num_passed} passed, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
