"""jaxspec: plain, n-gram of a fixed K and of an adaptive one in bfloat16, and the last in float32."""

import sys

from line import serve

import jaxspec

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
AUTO = NGRAM | {"num_speculative_tokens": "auto"}


def variant(dtype: str, speculative_config: dict | None):
    sizes = {"max_model_len": 512, "max_num_seqs": 1, "enable_prefix_caching": False}  # prompts are asked again
    engine = jaxspec.Engine(sys.argv[1], dtype=dtype, speculative_config=speculative_config, **sizes)

    def generate(ids, tokens):
        params = jaxspec.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return engine.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0].token_ids

    return generate


serve(
    jaxspec.__version__,
    {
        "jaxspec bfloat16": variant("bfloat16", None),
        "jaxspec bfloat16, ngram 4": variant("bfloat16", NGRAM),
        "jaxspec bfloat16, ngram auto": variant("bfloat16", AUTO),
        "jaxspec float32, ngram auto": variant("float32", AUTO),
    },
)
