"""transformers on PyTorch float32: greedy `generate`, and its prompt lookup."""

import sys

import torch
import transformers
from line import THREADS, serve

torch.set_num_threads(THREADS)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()


def variant(**options):
    def generate(ids, tokens):
        inputs = torch.tensor([ids])
        with torch.inference_mode():
            out = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),  # without it the EOS ids inside a chat prompt are masked
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                **options,
            )
        return out[0, len(ids) :].tolist()

    return generate


serve(
    f"{transformers.__version__}, torch {torch.__version__}",
    {"transformers float32": variant(), "transformers float32, prompt lookup": variant(prompt_lookup_num_tokens=4)},
)
