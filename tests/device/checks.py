"""Host. What must hold on an accelerator; written so that the CPU runs the same lines, with kernels interpreted."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from jaxspec import SamplingParams
from jaxspec.pallas_kernels.rejection.api import reject
from jaxspec.pallas_kernels.rejection.arg_specs import REJECTION_SPECS, RejectionSpec
from jaxspec.pallas_kernels.rejection.rules import BLOCK, COUPLED, GREEDY, STANDARD
from tests.lossless.engines import draft_model, make_engine, ngram
from tests.oracle.folders import write_llama
from tests.pallas_kernels.cases import assert_equal, random_arguments

ROOT = Path(__file__).resolve().parent.parent.parent
SPECS = {spec.name: spec for spec in REJECTION_SPECS}


def check_kernels(spec: RejectionSpec, platform: str, seeds: int = 2) -> None:
    """The kernels' integers are those of the plain form, computed on the CPU."""
    rules = (GREEDY, STANDARD) if spec.has_rates else (GREEDY, STANDARD, COUPLED, BLOCK)
    kernels = jax.jit(functools.partial(reject, rules=rules, implementation="pallas", platform=platform))
    plain = jax.jit(functools.partial(reject, rules=rules, implementation="reference"))
    cpu = jax.local_devices(backend="cpu")[0]
    for seed in range(seeds):
        arguments = random_arguments(spec, rules, np.random.default_rng(seed), broken=0.3 if seed else 0)
        found = jax.device_get(kernels(**arguments))
        assert_equal(found, plain(**jax.device_put(arguments, cpu)))


def check_lossless(folder: Path, num_tokens: int = 24) -> None:
    """Speculation changes no token: greedy, and sampled under the coupled rule; n-gram and a draft model."""
    target = write_llama(folder / "target", seed=1)
    drafter = write_llama(folder / "drafter", seed=2, num_layers=1)
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(0, 32, length).tolist() * 2} for length in (3, 5, 9)]
    params = [SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=t, seed=7) for t in (0.0, 1.0, 0.7)]

    def answers(speculative_config):
        # exact: products at the highest precision, and one row shape whoever drafts; so not a token may differ.
        engine = make_engine(target, speculative_config, exact=True)
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    plain = answers(None)
    assert all(len(tokens) == num_tokens for tokens in plain)
    assert answers(ngram(3)) == plain
    assert answers(draft_model(3, drafter) | {"rejection_sample_method": "coupled"}) == plain


def predicted_and_measured(spec_name: str) -> tuple[int, int | None]:
    """Peak bytes of one call of the kernels: what XLA says beforehand, and what the device counted.

    In a process of its own, whose peak is then this call's. None: the device does not count (a CPU).
    """
    command = [sys.executable, "-m", "tests.device.memory", spec_name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return found["predicted"], found["measured"]
