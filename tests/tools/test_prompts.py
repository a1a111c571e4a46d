"""Host. The prompts of `verify`: what a line may be, and what it may not."""

import json

import pytest

from jaxspec import ConfigError
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.tools.prompts import default_prompts_path, read_prompts
from tests.serve.fake import ids, letter_tokenizer


def written(tmp_path, *lines):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_a_line_is_ids_a_text_or_a_conversation(tmp_path):
    file = written(
        tmp_path,
        {"prompt_token_ids": [3, 1]},
        "",
        {"prompt": "abc", "kind": "letters"},
        {"messages": [{"role": "user", "content": "hi"}]},
    )
    tokenizer = letter_tokenizer()
    assert read_prompts(file, tokenizer) == [[3, 1], ids("abc"), ids("user:hi\nassistant:")]
    assert read_prompts(file, tokenizer, 2) == [[3, 1], ids("abc")]
    assert read_prompts(written(tmp_path, {"prompt_token_ids": [3, 1]}), None) == [[3, 1]]


def test_without_a_template_the_bare_words_are_asked(tmp_path):
    file = written(tmp_path, {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "you"}]})
    assert read_prompts(file, Tokenizer(letter_tokenizer().backend)) == [ids("hi\nyou")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "prompts.jsonl:2 is not a prompt"),
        ("[1]", "prompts.jsonl:2 is not a prompt"),
        ({"text": "a"}, "prompts.jsonl:2 is not a prompt"),
        ({"prompt_token_ids": []}, "at least one token id"),
        ({"prompt_token_ids": ["a"]}, "at least one token id"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    with pytest.raises(ConfigError, match=says):
        read_prompts(written(tmp_path, {"prompt": "a"}, line), letter_tokenizer())


def test_files_that_hold_nothing(tmp_path):
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(written(tmp_path, "", " "), None)
    with pytest.raises(ConfigError, match="cannot read prompts"):
        read_prompts(tmp_path / "none.jsonl", None)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        read_prompts(written(tmp_path, {"prompt": "a"}), None)


def test_prompts_ship():
    assert len(read_prompts(default_prompts_path(), letter_tokenizer())) == 8
