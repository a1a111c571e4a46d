"""What int8 weights and an int8 cache do to a model: its logits, which token comes first, and the speed and acceptance
of an engine with n-gram drafts.

`python scripts/measure_int8.py [MODEL]`; prompts and answers are those of tests/data/goldens/smollm2_greedy.json.
"""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import Engine, SamplingParams
from jaxspec.cache.pages import new_pool, pool_shape
from jaxspec.engine.build import _load
from jaxspec.models.base import Tokens
from jaxspec.models.registry import family_of
from jaxspec.weights.aliases import resolve_model
from jaxspec.weights.checkpoint import open_checkpoint

CASES = Path(__file__).resolve().parent.parent / "tests" / "data" / "goldens" / "smollm2_greedy.json"
LENGTH = 256  # tokens of each text that are looked at


def main(model: str) -> None:
    """Print one line a dtype."""
    texts = [case["prompt_token_ids"] + case["token_ids"] for case in json.loads(CASES.read_text())["cases"]]
    texts = [text[:LENGTH] for text in texts if len(text) >= LENGTH] or [text[:64] for text in texts]
    wanted = _logits(model, "float32", None, "float32", texts)
    for dtype, quantization, cache in (
        ("float32", None, "int8"),
        ("bfloat16", None, "float32"),
        ("bfloat16", None, "int8"),
        ("float32", "int8", "float32"),
        ("bfloat16", "int8", "float32"),
    ):
        found = _logits(model, dtype, quantization, cache, texts)
        relative = np.abs(found - wanted).max() / np.abs(wanted).max()
        error = np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean())
        top_1 = (found.argmax(-1) == wanted.argmax(-1)).mean()
        print(
            f"{dtype} {quantization or 'as it is'}, cache {cache}: max|difference| / max|logits| {relative:.4f}, "
            f"root mean square {error:.4f}, same first token {top_1:.4f} of {top_1.size * wanted[..., 0].size}"
        )

    for quantization, cache in ((None, "auto"), (None, "int8"), ("int8", "auto")):
        _speed(model, quantization, cache)


def _speed(model: str, quantization: str | None, cache: str) -> None:
    """Greedy answers to the same prompts, one row; the engines run one after the other."""
    engine = Engine(
        model,
        dtype="bfloat16",
        quantization=quantization,
        kv_cache_dtype=cache,
        max_num_seqs=1,
        max_model_len=512,
        use_tqdm=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2},
    )
    prompts = [{"prompt_token_ids": case["prompt_token_ids"]} for case in json.loads(CASES.read_text())["cases"]]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    engine.generate(prompts[0], params, use_tqdm=False)  # not counted: page in what was never touched
    started = time.perf_counter()
    outputs = [engine.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    seconds = time.perf_counter() - started
    lengths = [output.metrics.speculative_decoding["mean_acceptance_length"] for output in outputs]
    print(
        f"bfloat16 {quantization or 'as it is'}, cache {cache}: {64 * len(prompts) / seconds:.1f} tokens/s, "
        f"prefill included, mean acceptance length {np.mean(lengths):.2f} over {len(prompts)} prompts"
    )


def _logits(model: str, dtype: str, quantization: str | None, cache: str, texts: list[list[int]]) -> np.ndarray:
    with open_checkpoint(resolve_model(model)) as checkpoint:
        config, weights = checkpoint.config, _load(checkpoint, dtype, quantization)
    family, length = family_of(config.family), len(texts[0])
    place_BT = np.arange(length, dtype=np.int32)[None]

    @jax.jit
    def run(weights, ids_BT):
        pages_BM = jnp.zeros((1, 1), jnp.int32)
        tokens = Tokens(token_ids_BT=ids_BT, positions_BT=place_BT, slots_BT=place_BT, pages_BM=pages_BM)
        hidden_BTD, _ = family.forward(weights, config, tokens, new_pool(pool_shape(config, 1, length), cache))
        return family.logits(weights, config, hidden_BTD)

    return np.stack([np.asarray(run(weights, np.asarray([text], np.int32)))[0] for text in texts])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct")
