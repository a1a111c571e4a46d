"""Host. The configs take vLLM's keys, refuse the rest by name, and fill defaults as vLLM does."""

import pytest

from jaxspec.config.engine import EngineConfig
from jaxspec.config.server import ServerConfig
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.errors import ConfigError


def test_defaults_are_open_until_resolved():
    config = EngineConfig(model="m")
    assert (config.dtype, config.block_size, config.max_model_len, config.speculative_config) == (
        "auto",
        None,
        None,
        None,
    )


def test_a_dict_becomes_a_speculative_config():
    config = EngineConfig(model="m", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    assert isinstance(config.speculative_config, SpeculativeConfig)
    assert config.speculative_config.num_speculative_tokens == 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, (5, 5)), ({"prompt_lookup_max": 4}, (4, 4)), ({"prompt_lookup_min": 2}, (2, 2)),
     ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)), ({"prompt_lookup_min": None}, (5, 5))],
)  # fmt: skip
def test_lookup_bounds_default_as_in_vllm(given, expected):
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=3, **given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected


@pytest.mark.parametrize(
    ("given", "method"),
    [({"method": "ngram"}, "ngram"), ({"method": "[ngram]"}, "ngram"), ({"method": "ngram_gpu"}, "ngram"),
     ({"model": "ngram"}, "ngram"), ({"model": "[ngram]"}, "ngram"), ({"model": "org/eagle3-head"}, None),
     ({"model": "Llama-3.2-1B"}, None), ({"model": "package.module.make"}, "custom"),
     ({"method": "draft_model", "model": "x"}, "draft_model")],
)  # fmt: skip
def test_method_comes_from_keys_never_from_a_name(given, method):
    config = SpeculativeConfig(num_speculative_tokens=3, **given)
    assert config.method == method
    assert (config.model is None) == (method == "ngram")


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "ngram"}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 4}, "'method'"),
        (NGRAM | {"num_speculative_tokens": 0}, "greater than 0"),
        (NGRAM | {"num_speculative_tokens": 129}, "129"),
        (NGRAM | {"num_speculative_tokens": "4"}, "valid integer"),
        (NGRAM | {"num_speculative_tokens": True}, "True"),
        (NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 2}, "prompt_lookup_min=5"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min"),
        (NGRAM | {"prompt_lookup_max": 129}, "less than or equal to 128"),
        (NGRAM | {"model": "some/model"}, "loads no model"),
        (NGRAM | {"prompt_lookup_maxx": 2}, "did you mean 'prompt_lookup_max'"),
        (NGRAM | {"tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
        (NGRAM | {"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size"),
        (NGRAM | {"parallel_drafting": True}, "parallel_drafting only works with"),
        (NGRAM | {"use_heterogeneous_vocab": True}, "only works with method='draft_model'"),
        (NGRAM | {"use_heterogeneous_vocab": 0}, "valid boolean"),
        (NGRAM | {"quantization": "fp8"}, "'quantization' is refused, got 'fp8'"),
        (NGRAM | {"suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth=0 must be >= 1"),
        (NGRAM | {"suffix_decoding_max_cached_requests": -1}, "max_cached_requests=-1 must be >= 0"),
        (NGRAM | {"suffix_decoding_max_spec_factor": -0.1}, "max_spec_factor=-0.1 must be >= 0"),
        (NGRAM | {"suffix_decoding_max_spec_factor": float("nan")}, "max_spec_factor=nan must be >= 0"),
        (NGRAM | {"suffix_decoding_max_spec_factor": float("inf")}, "max_spec_factor=inf must be >= 0"),
        (NGRAM | {"suffix_decoding_min_token_prob": 1.5}, "min_token_prob=1.5 must be in [0, 1]"),
        ({"method": "custom_class", "num_speculative_tokens": 4}, "'custom_class' needs 'model'"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": []}, "must be a non-empty list"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[2, 4, 3]]}, "must start at 1"),
        (NGRAM | {"rejection_sample_method": "probabilistic"}, "draft_sample_method"),
        (NGRAM | {"rejection_sample_method": "fast"}, "'standard'"),
        ({"method": "draft_model", "num_speculative_tokens": 4}, "needs 'model'"),
        ({"method": "peagle", "num_speculative_tokens": 4}, "'p_eagle' needs 'model'"),
        ({"method": "pard", "model": "m"}, "num_speculative_tokens must be provided"),
        ({"method": "pard", "model": "m", "num_speculative_tokens": 4, "mask_token_id": -1}, "mask_token_id"),
        ({"method": "ngrams", "num_speculative_tokens": 4}, "'ngrams'"),
        ({"method": ["ngram"], "num_speculative_tokens": 4}, "'method'"),
        (NGRAM | {"rejection_sample_method": ["strict"]}, "rejection_sample_method"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_an_error_that_names_itself(given, says):
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(**given)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("given", "noted"),
    [
        (NGRAM | {"prompt_lookup_min": 2, "model": "ngram", "max_model_len": None}, []),
        (
            NGRAM | {"draft_sample_method": "probabilistic", "max_model_len": 9},
            ["draft_sample_method", "max_model_len"],
        ),
        (
            {
                "method": "draft_model",
                "model": "d",
                "num_speculative_tokens": 4,
                "max_model_len": 9,
                "prompt_lookup_max": 4,
            },
            ["prompt_lookup_max"],
        ),
        ({"model": "d", "num_speculative_tokens": 4, "prompt_lookup_max": 4}, []),  # nobody knows yet
    ],
)
def test_a_key_that_the_method_does_not_read_is_noted(caplog, given, noted):
    SpeculativeConfig(**given)
    assert [record.args[0] for record in caplog.records] == noted


def test_neutral_values_ask_for_nothing():
    config = SpeculativeConfig(**NGRAM, parallel_drafting=False, suffix_decoding_max_tree_depth=24, quantization=None)
    assert config == SpeculativeConfig(**NGRAM)


def test_strict_is_the_old_name_of_standard():
    assert SpeculativeConfig(**NGRAM, rejection_sample_method="strict").rejection_sample_method == "standard"


@pytest.mark.parametrize(
    ("given", "says"),
    [({}, "'model'"), ({"model": "m", "max_model_lenn": 5}, "'max_model_len'"),
     ({"model": "m", "block_size": 0}, "block_size"),
     ({"model": "m", "max_num_seqs": True}, "max_num_seqs"), ({"model": "m", "dtype": "float16"}, "float16"),
     ({"model": "m", "seed": -1}, "seed"), ({"model": "m", "rounds_per_batch": 0}, "rounds_per_batch"),
     ({"model": "m", "gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
     ({"model": "m", "pipeline_parallel_size": 2}, "'pipeline_parallel_size' is not supported yet"),
     ({"model": "m", "speculative_config": "ngram"}, "speculative_config")],
)  # fmt: skip
def test_engine_config_refuses_by_name(given, says):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**given)
    assert says in str(caught.value)


def test_configs_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        EngineConfig(model="m").block_size = 4


@pytest.mark.parametrize("kind", [EngineConfig, ServerConfig, SpeculativeConfig])
def test_every_field_says_what_it_is(kind):
    assert [name for name, field in kind.model_fields.items() if not field.description] == []
    assert not set(kind.NOT_YET) & set(kind.model_fields)


SYNTHETIC = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "exactly one of"),
        ({"synthetic_acceptance_rates": [0.5, 0.2, 0.1], "synthetic_acceptance_length": 2.0}, "exactly one of"),
        ({"synthetic_acceptance_rate": 0.5, "synthetic_acceptance_length": 2.0}, "exactly one of"),
        ({"synthetic_acceptance_rates": [0.5]}, "must have length 3"),
        ({"synthetic_acceptance_rates": []}, "must have length 3"),
        ({"synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "non-increasing"),
        ({"synthetic_acceptance_rates": [1.5, 0.6, 0.1]}, "must be in [0, 1]"),
        ({"synthetic_acceptance_rates": [0.5, 0.2, -0.1]}, "must be in [0, 1]"),
        ({"synthetic_acceptance_rates": [0.5, float("nan"), 0.1]}, "must be in [0, 1]"),
        ({"synthetic_acceptance_rates": ["0.5", 0.2, 0.1]}, "synthetic_acceptance_rates.0"),
        ({"synthetic_acceptance_length": 4.1}, "must be in [1, 4]"),
        ({"synthetic_acceptance_length": 0.9}, "must be in [1, 4]"),
        ({"synthetic_acceptance_length": float("nan")}, "must be in [1, 4]"),
        ({"synthetic_acceptance_rate": 1.1}, "must be in [0, 1]"),
        ({"synthetic_acceptance_rates": [0.5, 0.2, 0.1], "rejection_sample_method": "block"}, "needs rejection_sample"),
        ({"synthetic_acceptance_length": 2.0, "rejection_sample_method": "auto"}, "needs rejection_sample_method"),
    ],
)
def test_synthetic_acceptance_is_given_once_and_rightly(given, says):
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(**(SYNTHETIC | given))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({"synthetic_acceptance_rates": [0.9, 0.5, 0.5]}, (0.9, 0.5, 0.5)),
        ({"synthetic_acceptance_rates": (1, 1, 0)}, (1.0, 1.0, 0.0)),
        ({"synthetic_acceptance_length": 2.5}, (1.0, 0.5, 0.0)),
        ({"synthetic_acceptance_length": 1}, (0.0, 0.0, 0.0)),
        ({"synthetic_acceptance_length": 4.0}, (1.0, 1.0, 1.0)),
        ({"synthetic_acceptance_rate": 0.5}, (1.0, 0.5, 0.0)),
    ],
)
def test_synthetic_rates(given, rates):
    assert SpeculativeConfig(**(SYNTHETIC | given)).synthetic_rates(3) == pytest.approx(rates)
    assert SpeculativeConfig(**NGRAM).synthetic_rates(4) is None
