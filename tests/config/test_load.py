"""Host. Files and flags build the same configs, later words win, and a wrong word names its neighbours."""

import argparse
from pathlib import Path

import pytest

from jaxspec.config.engine import EngineConfig
from jaxspec.config.load import add_flags, as_yaml, gather, parse_flags, pick
from jaxspec.config.server import ServerConfig
from jaxspec.errors import ConfigError

KINDS = (EngineConfig, ServerConfig)
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def from_words(*words, environ=None):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, KINDS)
    data = gather(KINDS, parse_flags(parser, words), environ)
    return [pick(kind, data) for kind in KINDS]


def write(path, text):
    path.write_text(text)
    return str(path)


def test_every_field_is_a_flag():
    parser = argparse.ArgumentParser()
    add_flags(parser, KINDS)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert flags >= {f"--{name.replace('_', '-')}" for kind in KINDS for name in kind.model_fields}
    parser.format_help()  # a stray % in a description would raise


def test_every_field_is_a_variable(tmp_path):
    """Variables win over files, flags over variables."""
    texts = {
        "JAXSPEC_MODEL": "v", "JAXSPEC_MAX_MODEL_LEN": "128", "JAXSPEC_EXACT": "true", "JAXSPEC_PORT": "9000",
        "JAXSPEC_SPECULATIVE_CONFIG": '{"method": "ngram", "num_speculative_tokens": 2}',
        "JAXSPEC_ALLOWED_ORIGINS": "http://a.test, http://b.test", "JAXSPEC_API_KEY": '["x", "y,z"]',
        "JAXSPEC_COMPILATION_CACHE_DIR": "null", "JAXSPEC_TEST_DEVICE": "1", "JAXSPEC_SERVICE_HOST": "10.0.0.1",
        "OTHER": "x",
    }  # fmt: skip
    base = write(tmp_path / "a.yaml", "model: f\nseed: 4\nmax_model_len: 7\n")
    engine, server = from_words("--config", base, "--model", "w", environ=texts)
    assert (engine.model, engine.seed, engine.max_model_len, engine.exact) == ("w", 4, 128, True)
    assert (engine.compilation_cache_dir, engine.speculative_config.num_speculative_tokens) == (None, 2)
    assert (server.port, server.allowed_origins, server.api_key) == (
        9000, ["http://a.test", "http://b.test"], ["x", "y,z"]
    )  # fmt: skip
    assert from_words("--model", "m", "--api-key", "x,y")[1].api_key == ["x", "y"]


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("JAXSPEC_MAX_MODEL_LENS", "5", "did you mean JAXSPEC_MAX_MODEL_LEN"),
        ("JAXSPEC_PORT", "tcp://10.0.0.1:8000", "JAXSPEC_PORT: "),
        ("JAXSPEC_SPECULATIVE_CONFIG", "{method", "JAXSPEC_SPECULATIVE_CONFIG must be JSON"),
        ("JAXSPEC_DTYPE", "int4", "JAXSPEC_DTYPE: "),
    ],
)
def test_wrong_variables_are_errors(variable, text, says):
    with pytest.raises(ConfigError) as caught:
        from_words("--model", "m", environ={variable: text})
    assert says in str(caught.value)


def test_what_is_printed_says_the_same_again(tmp_path):
    configs = from_words(
        "--config", str(CONFIGS / "demo.yaml"), "--allowed-origins", "http://a.test", "--seed", "3",
        "--api-key", "sesame",
    )  # fmt: skip
    text = as_yaml(configs)
    assert "sesame" not in text
    assert "# api_key is set" in text
    again = from_words("--config", write(tmp_path / "again.yaml", text), "--api-key", "sesame")
    assert again == configs


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_we_ship_is_right(path):
    engine, _ = from_words("--model", "m", "--config", str(path))
    assert path.read_text().startswith("# ")
    assert engine.model


def test_flags_become_typed_values():
    engine, server = from_words(
        "--model", "m", "--max-model-len", "128", "--rounds-per-batch", "3", "--gpu-memory-utilization", "0.5",
        "--dtype", "bfloat16", "--compilation-cache-dir", "null", "--port", "9000",
        "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}',
    )  # fmt: skip
    assert (engine.max_model_len, engine.rounds_per_batch, engine.gpu_memory_utilization) == (128, 3, 0.5)
    assert (engine.dtype, engine.compilation_cache_dir, server.port) == ("bfloat16", None, 9000)
    assert engine.speculative_config.num_speculative_tokens == 2


def test_a_yaml_block_is_as_good_as_json():
    small = '{"method": "suffix", "suffix_decoding_min_token_prob": 1e-1}'  # no number in YAML
    engine, _ = from_words("--model", "m", "--speculative-config", small)
    assert engine.speculative_config.suffix_decoding_min_token_prob == 0.1
    block = "method: ngram\nnum_speculative_tokens: 2\n"
    engine, _ = from_words("--model", "m", "--speculative-config", block)
    assert (engine.speculative_config.method, engine.speculative_config.num_speculative_tokens) == ("ngram", 2)


def test_the_article_s_flags_are_shorthands():
    engine, _ = from_words(
        "--model", "m", "--speculative-method", "ngram", "--num-speculative-tokens", "5",
        "--ngram-prompt-lookup-max", "3",
    )  # fmt: skip
    assert engine.speculative_config.model_dump(include={"method", "num_speculative_tokens", "prompt_lookup_max"}) == {
        "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}  # fmt: skip
    engine, _ = from_words("--model", "m", "--speculative-method", "ngram", "--num-speculative-tokens", "auto")
    assert engine.speculative_config.num_speculative_tokens == "auto"
    engine, _ = from_words("--model", "m", "--draft-model", "d", "--num-speculative-tokens", "5")
    assert (engine.speculative_config.method, engine.speculative_config.model) == (None, "d")  # its files will say


def test_later_files_win_and_flags_win_over_files(tmp_path):
    base = write(
        tmp_path / "a.yaml",
        "model: m\nmax-num-seqs: 2\nport: 1\nspeculative_config: {method: ngram, num_speculative_tokens: 4}\n",
    )
    overlay = write(tmp_path / "b.yaml", "max_num_seqs: 3\nseed: 9\n")
    engine, server = from_words("--config", base, "--config", overlay, "--seed", "10", "--num-speculative-tokens", "7")
    assert (engine.max_num_seqs, engine.seed, server.port) == (3, 10, 1)
    assert engine.speculative_config.num_speculative_tokens == 7
    engine, _ = from_words("--config", base, "--speculative-config", "null")
    assert engine.speculative_config is None
    engine, _ = from_words("--config", base, "--draft-model", "d")
    assert (engine.speculative_config.method, engine.speculative_config.model) == (None, "d")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "m", "--max-model-length", "5"], "--max-model-len"),
        (["--model", "m", "--draft", "x"], "--draft-model"),
        (["--model", "m", "extra"], "'extra'"),
        (["--model", "m", "--max-model-len", "many"], "--max-model-len"),
        (["--model", "m", "--speculative-config", "{method: ngram"], "must be JSON or a YAML block"),
        (["--model", "m", "--speculative-method", "ngrams"], "did you mean 'ngram'"),
        (["--model", "m", "--speculative-config", "[]"], "speculative_config"),
        (
            ["--model", "m", "--speculative-config", "[1]", "--num-speculative-tokens", "3"],
            "'key: value' pairs, got [1]",
        ),
        (
            ["--model", "m", "--speculative-method", "dspark", "--num-speculative-tokens", "2"],
            "'dspark' needs 'model'",
        ),
        (["--model", "m", "--draft-model", "d", "--num-speculative-tokens", "four"], "'four'"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--port", "80"], "'model'"),
    ],
)
def test_wrong_words_are_errors(words, says):
    with pytest.raises(ConfigError) as caught:
        from_words(*words)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [("model: [", "not YAML"), ("- a\n- b\n", "key: value"), ("modle: m\n", "did you mean 'model'"),
     ("1: 2\n", "key: value"),
     ("model: m\nseed: 1\nseed: 2\n", "'seed' stands twice"), ("max-num-seqs: 1\nmax_num_seqs: 2\n", "stands twice"),
     ("model: m\nspeculative_config: {method: ngram, method: suffix}\n", "'method' stands twice"),
     ("model: 3\n", "valid string"), ("model: m\nmax_num_seqs: '3'\n", "max_num_seqs")],
)  # fmt: skip
def test_bad_files_are_errors(tmp_path, text, says):
    with pytest.raises(ConfigError) as caught:
        from_words("--config", write(tmp_path / "c.yaml", text))
    assert says in str(caught.value)


def test_an_empty_file_says_nothing(tmp_path):
    engine, _ = from_words("--model", "m", "--config", write(tmp_path / "c.yaml", "# nothing\n"))
    assert engine == EngineConfig(model="m")
