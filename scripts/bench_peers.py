"""Times jaxspec beside transformers on PyTorch float32: plain and n-gram, same weights, prompts, machine and run.

Needs the `parity` extra (torch). Peers: transformers' greedy `generate`, and its prompt lookup. The last line of
stdout is one JSON object.

    python scripts/bench_peers.py [--pairs 5] [--tokens 96] [--num-prompts 12]
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch
import transformers

from jaxspec import Engine, SamplingParams
from jaxspec.bench.prompts import default_prompts_path, read_prompts
from jaxspec.weights.aliases import resolve_model
from jaxspec.weights.checkpoint import open_checkpoint

MODEL = "smollm2-135m-instruct"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--num-prompts", type=int, default=12)
    args = parser.parse_args()

    settings = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 1}
    plain = Engine(MODEL, **settings)
    ngram = Engine(MODEL, speculative_config=NGRAM, **settings)
    torch_model = _torch_model()
    prompts = [one.token_ids for kind in read_prompts(default_prompts_path(), plain.tokenizer).values() for one in kind]
    prompts = prompts[: args.num_prompts]

    def jaxspec(engine: Engine):
        params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
        return lambda ids: engine.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0].token_ids

    def peer(**options):
        def run(ids):
            with torch.inference_mode():
                inputs = torch.tensor([ids])
                out = torch_model.generate(
                    inputs,
                    attention_mask=torch.ones_like(inputs),
                    do_sample=False,
                    min_new_tokens=args.tokens,
                    max_new_tokens=args.tokens,
                    **options,
                )
            return out[0, len(ids) :].tolist()

        return run

    sides = {
        "jaxspec_plain": jaxspec(plain),
        "jaxspec_ngram": jaxspec(ngram),
        "transformers_torch_float32": peer(),
        "transformers_torch_float32_prompt_lookup": peer(prompt_lookup_num_tokens=4),
    }
    seconds = {name: [] for name in sides}
    for run in sides.values():
        run(prompts[0])
    for pair in range(args.pairs):
        for name, run in sides.items():
            started = time.perf_counter()
            for ids in prompts:
                assert len(run(ids)) == args.tokens
            seconds[name].append(time.perf_counter() - started)
            print(
                f"pair {pair + 1}: {name:42} {args.tokens * len(prompts) / seconds[name][-1]:7.1f} tokens/s", flush=True
            )

    base = np.array(seconds["transformers_torch_float32"])
    report = {
        name: {
            "tokens_per_s": args.tokens * len(prompts) / statistics.median(values),
            "times_transformers": float(np.median(base / np.array(values))),
            "times_transformers_min": float((base / np.array(values)).min()),
            "times_transformers_max": float((base / np.array(values)).max()),
        }
        for name, values in seconds.items()
    }
    print(json.dumps({"pairs": args.pairs, "torch": torch.__version__, "threads": torch.get_num_threads(), **report}))


def _torch_model() -> transformers.LlamaForCausalLM:
    """The same checkpoint in PyTorch: float32, tensors renamed from the GGUF file by transformers' own names."""
    from jaxspec.models.llama import name_table

    with open_checkpoint(resolve_model(MODEL)) as checkpoint:
        config = checkpoint.config
        ours, theirs = name_table(config, "gguf").sources, name_table(config, "hf").sources
        state = {}
        for path, source in theirs.items():
            for index, name in enumerate(source.names):
                tensor = checkpoint.reader.read(ours[path].names[index])
                transform = ours[path].transform_of(index)
                array = tensor if transform is None else transform(tensor)
                state[name] = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    assert config.rope is not None
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=config.bos_token_id,
            eos_token_id=list(config.eos_token_ids),
            pad_token_id=config.eos_token_ids[0],
        )
    )
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.eval()


if __name__ == "__main__":
    main()
