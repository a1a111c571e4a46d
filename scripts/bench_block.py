"""Acceptance of `block` against `standard`: a target, and a noised copy of its own weights as the drafter.

Temperature 1, drafts drawn from the drafter's distribution; the same prompts and seeds under both rules. The last line
of stdout is one JSON object.

    python scripts/bench_block.py [--model smollm2-135m-instruct] [--noise 0.05] [--drafts 4] [--repeats 2]
        [--tokens 96] [--batch 8]
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxspec import Engine, SamplingParams
from jaxspec.bench.prompts import default_prompts_path, read_prompts
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.text.tokenizer import load_tokenizer
from jaxspec.tools.convert import convert
from jaxspec.weights.aliases import resolve_model


def noised_copy(model: str, folder: Path, noise: float, seed: int = 0) -> Path:
    """The model's weights in float32, each matrix plus normal noise of `noise` times its own standard deviation."""
    convert(model, folder, dtype="float32")
    rng = np.random.default_rng(seed)
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                drawn = rng.standard_normal(tensor.shape, dtype=np.float32)
                tensors[name] = tensor + drawn * np.float32(noise * tensor.std())
        save_file(tensors, shard, metadata={"format": "pt"})
    return folder


def acceptance(args: argparse.Namespace, drafter: Path, rule: str) -> AcceptanceStats:
    engine = Engine(
        args.model,
        dtype="bfloat16",
        max_num_seqs=args.batch,
        max_model_len=512,
        enable_structured_outputs=False,  # its programs would not run
        speculative_config={
            "method": "draft_model",
            "model": str(drafter),
            "num_speculative_tokens": args.drafts,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": rule,
        },
    )
    kinds = read_prompts(default_prompts_path(), load_tokenizer(resolve_model(args.model)))
    requests = []
    for repeat in range(args.repeats):
        for prompt in (one for prompts in kinds.values() for one in prompts):
            params = SamplingParams(temperature=1.0, seed=repeat, max_tokens=args.tokens, ignore_eos=True)
            ids = {"prompt_token_ids": prompt.token_ids}
            requests.append(engine.core.add_request(f"{prompt.name}-{repeat}", ids, params))
    while engine.core.has_work:
        engine.core.step()
    stats = AcceptanceStats(args.drafts)
    for request in requests:
        for sequence in request.sequences:
            stats.merge(sequence.stats)
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance of block verification against standard.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    report = {"noise": args.noise, "drafts": args.drafts}
    with tempfile.TemporaryDirectory() as scratch:
        drafter = noised_copy(args.model, Path(scratch) / "drafter", args.noise)
        for rule in ("standard", "block"):
            stats = acceptance(args, drafter, rule)
            spread = np.sqrt(np.average((np.arange(len(stats.histogram)) - stats.mean_acceptance_length + 1) ** 2,
                                        weights=stats.histogram) / stats.num_drafts)  # fmt: skip
            report[rule] = {
                "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
                "standard_error": round(float(spread), 4),
                "tokens_per_round": round(stats.tokens_per_round, 4),
                "verify_steps": stats.num_drafts,
                "acceptance_per_position": [round(rate, 4) for rate in stats.acceptance_per_position],
            }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
