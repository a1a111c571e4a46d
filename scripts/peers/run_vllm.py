"""vLLM on CPU in float32, its engine in this process, its threads bound to the cores: plain, and with n-gram drafts."""

import os
import sys

from line import CORES, THREADS, serve

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": str(THREADS),
    "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else what the CPU can do is probed anew for every kernel: minutes
}
import vllm  # it reads the environment when imported

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def variant(**options):
    sizes = {"max_model_len": 512, "max_num_seqs": 1, "enable_prefix_caching": False}  # prompts are asked again
    engine = vllm.LLM(sys.argv[1], dtype="float32", **sizes, **options)

    def generate(ids, tokens):
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return engine.generate({"prompt_token_ids": list(ids)}, params, use_tqdm=False)[0].outputs[0].token_ids

    return generate


serve(vllm.__version__, {"vLLM float32": variant(), "vLLM float32, ngram 4": variant(speculative_config=NGRAM)})
