"""llama.cpp by llama-cpp-python: float32 throughout, and the Q4_1 file as it is; plain and with its prompt lookup."""

import sys

import llama_cpp
from line import THREADS, serve
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

F32 = 0  # ggml's type: llama.cpp is float32 only with float32 keys and values and without flash attention


def variant(path: str, float32: bool, lookup: bool):
    model = llama_cpp.Llama(
        path,
        n_ctx=512,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        draft_model=LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=4) if lookup else None,
        logits_all=lookup,
        verbose=False,
        **({"type_k": F32, "type_v": F32, "flash_attn": False} if float32 else {}),
    )

    def generate(ids, tokens):
        made = []
        model.reset()
        for token in model.generate(list(ids), temp=0.0, top_k=1, repeat_penalty=1.0):
            made.append(token)
            if len(made) == tokens:
                return made
        raise AssertionError("llama.cpp stopped early")

    return generate


_, float32_path, quantised_path = sys.argv
serve(
    llama_cpp.__version__,
    {
        "llama.cpp float32": variant(float32_path, True, False),
        "llama.cpp float32, prompt lookup": variant(float32_path, True, True),
        "llama.cpp Q4_1": variant(quantised_path, False, False),
        "llama.cpp Q4_1, prompt lookup": variant(quantised_path, False, True),
    },
)
