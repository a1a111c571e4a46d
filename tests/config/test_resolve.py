"""Host. resolve() settles every open value from facts alone, logs it, and refuses what contradicts them."""

import dataclasses
import logging

import pytest

from jaxspec.config.detect import DraftTokens
from jaxspec.config.engine import EngineConfig
from jaxspec.config.hardware import HardwareFacts, read_hardware
from jaxspec.config.methods import METHODS
from jaxspec.config.model import ModelConfig, RopeConfig
from jaxspec.config.resolve import ModelFacts, resolve
from jaxspec.config.schedule import MOST_WIDTHS, draft_widths
from jaxspec.errors import CapacityError, ConfigError

GIB = 2**30
CPU = HardwareFacts("cpu", 8 * GIB, "abc123", "/home/me/.cache")
TPU = HardwareFacts("tpu", 16 * GIB, "abc123", "/home/me/.cache")
# SmolLM2-135M's shape.
SMOL = ModelConfig(
    family="llama", model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30,
    num_heads=9, num_kv_heads=3, head_dim=64, max_position_embeddings=2048, norm_eps=1e-5, rope=RopeConfig(),
    sliding_window_layers=(None,) * 30, dtype="bfloat16",
)  # fmt: skip
MODELS = ModelFacts(SMOL, 135_000_000)
# keys and values of 64 tokens over 30 layers of 3 heads of 64, in bfloat16
PAGE_BYTES = 64 * 30 * 2 * 3 * 64 * 2
ROUND_BYTES = 8 * 49152 * 4  # float32 logits of one position of every row, 8 rows as on CPU


def test_everything_open_is_settled_on_cpu():
    resolved = resolve(EngineConfig(model="smol"), CPU, MODELS)
    assert resolved.dtype == "bfloat16"
    assert (resolved.max_model_len, resolved.max_num_seqs, resolved.max_num_batched_tokens) == (2048, 8, 256)
    assert (resolved.block_size, resolved.kv_cache_dtype, resolved.page_dtype) == (64, "bfloat16", "uint16")
    assert (resolved.num_pages, resolved.pages_per_row) == (8 * 32, 32)
    assert (resolved.rounds_per_batch, resolved.implementation, resolved.async_scheduling) == (1, "reference", False)
    assert (resolved.tokenizer, resolved.served_model_name) == ("smol", "smol")
    assert resolved.compilation_cache_dir == "/home/me/.cache/jaxspec/cpu-abc123"
    assert resolved.num_speculative_tokens == 0


def test_accelerators_differ():
    resolved = resolve(EngineConfig(model="smol"), TPU, MODELS)
    assert (resolved.max_num_seqs, resolved.rounds_per_batch, resolved.implementation) == (64, 8, "pallas")
    assert (resolved.block_size, resolved.kv_cache_dtype, resolved.async_scheduling) == (16, "bfloat16", True)
    assert resolved.page_dtype == "bfloat16"
    gpu = HardwareFacts("gpu", 16 * GIB, "abc123", "/home/me/.cache")
    assert resolve(EngineConfig(model="smol"), gpu, MODELS).implementation == "pallas"


def test_what_is_set_is_obeyed():
    given = {
        "dtype": "float32", "max_model_len": 100, "max_num_seqs": 3, "max_num_batched_tokens": 32, "num_pages": 50,
        "rounds_per_batch": 4, "implementation": "pallas", "tokenizer": "t", "served_model_name": "s", "seed": 7,
        "block_size": 16, "exact": True, "async_scheduling": True,
    }  # fmt: skip
    resolved = resolve(EngineConfig(model="smol", compilation_cache_dir=None, **given), CPU, MODELS)
    assert resolved.model_dump(include=set(given)) == given
    assert resolved.compilation_cache_dir is None
    assert resolved.pages_per_row == 7


def test_resolve_is_pure_and_logs_each_choice(caplog):
    config = EngineConfig(model="smol")
    with caplog.at_level(logging.INFO, logger="jaxspec"):
        assert resolve(config, CPU, MODELS) == resolve(config, CPU, MODELS)
    logged = {record.getMessage().partition(":")[0] for record in caplog.records}
    assert logged == {
        "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_pages", "rounds_per_batch",
        "implementation", "compilation_cache_dir", "block_size", "async_scheduling",
    }  # fmt: skip


def test_pages_shrink_to_the_memory_there_is():
    weight_bytes = 135_000_000 * 2
    tight = HardwareFacts("cpu", 2 * (weight_bytes + 3 * ROUND_BYTES + 200 * PAGE_BYTES), "abc123", None)
    resolved = resolve(EngineConfig(model="smol", gpu_memory_utilization=0.5), tight, MODELS)
    assert (resolved.num_pages, resolved.max_model_len) == (200, 2048)
    tighter = HardwareFacts("cpu", 2 * (weight_bytes + 3 * ROUND_BYTES + 5 * PAGE_BYTES), "abc123", None)
    resolved = resolve(EngineConfig(model="smol", gpu_memory_utilization=0.5), tighter, MODELS)
    assert (resolved.num_pages, resolved.max_model_len) == (5, 320)
    assert resolved.compilation_cache_dir is None


def test_a_draft_counts_in_the_memory_plan():
    draft = SMOL.model_copy(update={"num_layers": 10, "sliding_window_layers": (None,) * 10})
    models = ModelFacts(SMOL, 135_000_000, draft, 50_000_000)
    plan = (185_000_000 * 2) + 3 * 4 * ROUND_BYTES + 150 * (PAGE_BYTES + PAGE_BYTES // 3)
    facts = HardwareFacts("cpu", plan, "abc123", None)
    drafts = {"model": "d", "num_speculative_tokens": 3}
    config = EngineConfig(model="smol", memory_fraction=1.0, speculative_config=drafts)
    assert resolve(config, facts, models).num_pages == 150
    assert resolve(config, dataclasses.replace(facts, memory_bytes=plan - 1), models).num_pages == 149
    drawn = EngineConfig(
        model="smol", memory_fraction=1.0, speculative_config=drafts | {"draft_sample_method": "probabilistic"}
    )
    facts = dataclasses.replace(facts, memory_bytes=plan + 3 * ROUND_BYTES)
    assert resolve(drawn, facts, models).num_pages == 150
    assert resolve(drawn, dataclasses.replace(facts, memory_bytes=facts.memory_bytes - 1), models).num_pages == 149


def test_kernels_hold_the_logits_once_and_all_rows_count():
    plan = 135_000_000 * 2 + 2 * 16 * 5 * ROUND_BYTES // 8 + 150 * PAGE_BYTES
    config = EngineConfig(
        model="smol", memory_fraction=1.0, max_num_seqs=32, implementation="pallas",
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )  # fmt: skip
    facts = HardwareFacts("cpu", plan, "abc123", None)
    assert resolve(config, facts, MODELS).num_pages == 150
    assert resolve(config, dataclasses.replace(facts, memory_bytes=plan - 1), MODELS).num_pages == 149


def test_one_name_of_the_share_of_memory_at_a_time():
    assert EngineConfig(model="m", memory_fraction=0.5) == EngineConfig(model="m", gpu_memory_utilization=0.5)
    with pytest.raises(ConfigError, match="another name of gpu_memory_utilization"):
        EngineConfig(model="m", memory_fraction=0.5, gpu_memory_utilization=0.5)


def test_an_int8_cache_counts_a_scale_a_slot_and_head():
    draft = SMOL.model_copy(update={"num_layers": 10, "sliding_window_layers": (None,) * 10})
    models = ModelFacts(SMOL, 135_000_000, draft, 50_000_000)
    page_bytes = 64 * 2 * 3 * (64 + 4) * (30 + 10)
    facts = HardwareFacts("cpu", 185_000_000 * 2 + 3 * 4 * ROUND_BYTES + 150 * page_bytes, "abc123", None)
    config = EngineConfig(
        model="smol", gpu_memory_utilization=1.0, kv_cache_dtype="int8",
        speculative_config={"model": "d", "num_speculative_tokens": 3},
    )  # fmt: skip
    resolved = resolve(config, facts, models)
    assert (resolved.kv_cache_dtype, resolved.num_pages) == ("int8", 150)


def test_the_caches_dtype_is_the_users():
    for hardware in (TPU, CPU):
        for dtype in ("float32", "bfloat16", "int8"):
            assert resolve(EngineConfig(model="smol", kv_cache_dtype=dtype), hardware, MODELS).kv_cache_dtype == dtype
        assert resolve(EngineConfig(model="smol", dtype="float32"), hardware, MODELS).kv_cache_dtype == "float32"
    with pytest.raises(ConfigError, match="kv_cache_dtype': Input should be 'auto', 'float32', 'bfloat16' or 'int8'"):
        EngineConfig(model="smol", kv_cache_dtype="fp8_e4m3")


def test_devices_hold_a_part_of_what_is_split():
    """Memory is a device's: a third of the weights, of the logits and of the page heads; all of a draft left whole."""
    draft = SMOL.model_copy(update={"num_layers": 10, "sliding_window_layers": (None,) * 10})
    models = ModelFacts(SMOL, 135_000_000, draft, 50_000_000)
    slot_bytes = 2 * 64 * 2  # a key and a value of one head, in bfloat16
    rows = 8 * 4  # three drafts a row, and one more
    for draft_devices, draft_heads, draft_bytes in ((1, 3, 100_000_000), (3, 1, -(-100_000_000 // 3))):
        page_bytes = 16 * slot_bytes * (30 * 1 + 10 * draft_heads)
        plan = 90_000_000 + draft_bytes + rows * 49152 * 4 // 3 + 150 * page_bytes
        drafts = {"model": "d", "num_speculative_tokens": 3, "draft_tensor_parallel_size": draft_devices}
        config = EngineConfig(
            model="smol", memory_fraction=1.0, max_num_seqs=8, tensor_parallel_size=3, speculative_config=drafts
        )
        facts = HardwareFacts("tpu", plan, "abc123", None)
        resolved = resolve(config, facts, models)
        assert (resolved.num_pages, resolved.tensor_parallel_size) == (150, 3)
        assert resolve(config, dataclasses.replace(facts, memory_bytes=plan - 1), models).num_pages == 149
    # Fake devices are parts of one host.
    facts = HardwareFacts("cpu", 2 * (270_000_000 + 3 * ROUND_BYTES + 200 * PAGE_BYTES), "abc123", None)
    config = EngineConfig(model="smol", gpu_memory_utilization=0.5, tensor_parallel_size=3)
    assert resolve(config, facts, MODELS).num_pages == 200


def test_pages_are_a_groups():
    """Groups have devices of their own, with as much memory each; but on CPU, where all are parts of one host."""
    own = 270_000_000 + 3 * ROUND_BYTES + 200 * PAGE_BYTES
    for platform, memory_bytes in (("tpu", own), ("cpu", 3 * own)):
        facts = HardwareFacts(platform, memory_bytes, "abc123", None)
        config = EngineConfig(
            model="smol",
            memory_fraction=1.0,
            data_parallel_size=3,
            max_num_seqs=8,
            block_size=64,
            implementation="reference",
        )
        assert resolve(config, facts, MODELS).num_pages == 200
        assert resolve(config, dataclasses.replace(facts, memory_bytes=memory_bytes - 1), MODELS).num_pages == 199


def test_a_draft_is_split_as_the_target_or_not_at_all():
    def devices(method, asked=None, **more):
        given = {"model": "d", "num_speculative_tokens": 3, "method": method, "draft_tensor_parallel_size": asked}
        config = EngineConfig(model="smol", tensor_parallel_size=3, speculative_config=given | more)
        models = dataclasses.replace(SHORT_DRAFT, method=method)
        return resolve(config, CPU, models).speculative_config.draft_tensor_parallel_size

    assert [devices("draft_model", asked) for asked in (None, 1, 3)] == [3, 1, 3]
    assert [devices("eagle3"), devices("medusa"), devices("dflash")] == [3, 1, 1]
    with pytest.raises(ConfigError, match="must be 1 or the target's tensor_parallel_size=3"):
        devices("draft_model", 2)
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size=3 is not supported for method 'medusa'"):
        devices("medusa", 3)


def test_int8_weights_count_at_their_own_size():
    models = dataclasses.replace(MODELS, num_draft_parameters=1_000, int8_parameters=100_000_000, int8_scales=150_000)
    plan = (35_001_000 * 2) + 100_000_000 + 150_000 * 4 + 3 * ROUND_BYTES + 150 * PAGE_BYTES
    facts = HardwareFacts("cpu", plan, "abc123", None)
    config = EngineConfig(model="smol", gpu_memory_utilization=1.0, quantization="int8")
    assert resolve(config, facts, models).num_pages == 150
    assert resolve(config, dataclasses.replace(facts, memory_bytes=plan - 1), models).num_pages == 149
    at_full_size = resolve(EngineConfig(model="smol", gpu_memory_utilization=1.0), facts, models)
    assert at_full_size.num_pages == (plan - 135_001_000 * 2 - 3 * ROUND_BYTES) // PAGE_BYTES < 150


@pytest.mark.parametrize(
    ("given", "facts", "error", "says"),
    [
        ({"max_model_len": 4096}, CPU, ConfigError, "max_model_len=4096"),
        ({"max_model_len": 2048, "num_pages": 31}, CPU, CapacityError, "max_model_len=2048"),
        ({"num_pages": 10**9}, CPU, CapacityError, "num_pages=1000000000"),
        ({}, HardwareFacts("cpu", GIB // 8, "a", None), CapacityError, "smaller model"),
    ],
)
def test_what_contradicts_the_facts_is_refused(given, facts, error, says):
    with pytest.raises(error) as caught:
        resolve(EngineConfig(model="smol", **given), facts, MODELS)
    assert says in str(caught.value)


def speculative(models=MODELS, **given):
    config = EngineConfig(model="smol", speculative_config={"num_speculative_tokens": 4} | given)
    return resolve(config, CPU, models).speculative_config


def test_a_third_of_the_layers_draft_by_themselves():
    assert speculative(method="self").exit_layer == 10
    assert speculative(method="ngram+self", exit_layer=30).exit_layer == 30
    assert speculative(method="ngram").exit_layer is None
    small = ModelFacts(SMOL.model_copy(update={"num_layers": 1}), 9)
    assert speculative(small, method="self").exit_layer == 1
    with pytest.raises(ConfigError, match="exit_layer=31 must not exceed the target's 30 layers"):
        speculative(method="self", exit_layer=31)
    with pytest.raises(ConfigError, match="'self' loads no model"):
        speculative(method="self", model="d")


SHORT_DRAFT = ModelFacts(SMOL, 135_000_000, SMOL.model_copy(update={"max_position_embeddings": 64}), 135_000_000)


def test_the_rule_follows_from_what_is_known_of_the_drafts():
    assert speculative(method="ngram").rejection_sample_method == "coupled"
    assert speculative(SHORT_DRAFT, model="d").rejection_sample_method == "coupled"
    assert (
        speculative(SHORT_DRAFT, model="d", draft_sample_method="probabilistic").rejection_sample_method == "standard"
    )
    assert speculative(method="ngram", rejection_sample_method="standard").rejection_sample_method == "standard"


def test_a_schedule_and_rates_are_settled():
    resolved = speculative(
        method="ngram",
        num_speculative_tokens_per_batch_size=[[1, 2, 9], [4, 5, 2], [7, 100, 0]],
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=2.5,
    )
    assert resolved.num_speculative_tokens_per_batch_size == (0, 4, 4, 4, 2, 2, 2, 0, 0)
    assert resolved.synthetic_rates == (1.0, 0.5, 0.0, 0.0)
    assert speculative(method="ngram").num_speculative_tokens_per_batch_size is None
    assert speculative(method="ngram", rejection_sample_method="block").rejection_sample_method == "block"


def test_as_many_drafts_as_pay(monkeypatch):
    def settled(*args, **given):
        resolved = speculative(*args, num_speculative_tokens="auto", **given)
        return resolved.num_speculative_tokens, resolved.is_adaptive

    assert settled(method="ngram") == settled(method="suffix") == settled(SHORT_DRAFT, model="d") == (8, True)
    told = dataclasses.replace(SHORT_DRAFT, draft_tokens=DraftTokens(3, "multiple"))
    assert settled(told, model="d") == (3, True)
    assert settled(method="ngram", num_speculative_tokens_per_batch_size=[[1, 4, 2]]) == (8, False)
    assert not speculative(method="ngram").is_adaptive
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        speculative(method="ngram", num_speculative_tokens="most")


@pytest.mark.parametrize(
    ("rows", "most", "table", "is_adaptive", "widths"),
    [
        ((1, 4), 5, None, False, ((0, 5), (0, 5))),
        ((1,), 1, None, True, ((0, 1),)),
        ((1,), 2, None, True, ((0, 1, 2),)),
        ((1, 4), 8, None, True, ((0, 2, 8), (0, 2, 8))),
        ((1, 4, 6), 8, (0, 8, 8, 3, 1, 0, 0), False, ((0, 8), (0, 1, 3, 8), (0,))),
        ((5,), 5, (0, 5, 4, 3, 2, 1), False, ((0, 1, 2, 5),)),
    ],
)
def test_the_widths_that_rounds_are_compiled_for(rows, most, table, is_adaptive, widths):
    assert draft_widths(rows, most, table, is_adaptive=is_adaptive) == widths
    assert all(len(one) <= MOST_WIDTHS for one in widths)


def test_the_drafts_limit_is_the_smaller_one():
    assert speculative(method="ngram").max_model_len == 2048
    assert speculative(SHORT_DRAFT, model="d").max_model_len == 64
    assert speculative(SHORT_DRAFT, model="d", max_model_len=16).max_model_len == 16
    with pytest.raises(ConfigError, match="max_model_len=65"):
        speculative(SHORT_DRAFT, model="d", max_model_len=65)
    with pytest.raises(ConfigError, match="draft's description"):
        speculative(model="d")


def test_what_the_drafts_files_say_is_settled(monkeypatch):
    told = dataclasses.replace(SHORT_DRAFT, method="draft_model", draft_tokens=DraftTokens(3, "multiple"))
    resolved = speculative(told, model="d", num_speculative_tokens=None)
    assert (resolved.method, resolved.num_speculative_tokens, resolved.draft_tensor_parallel_size) == (
        "draft_model", 3, 1)  # fmt: skip
    assert speculative(told, model="d", num_speculative_tokens=6).num_speculative_tokens == 6
    with pytest.raises(ConfigError, match="divisible by n_predict=3"):
        speculative(told, model="d", num_speculative_tokens=4)
    with pytest.raises(ConfigError, match="must be provided"):
        speculative(SHORT_DRAFT, model="d", num_speculative_tokens=None)
    monkeypatch.setitem(METHODS, "dspark", dataclasses.replace(METHODS["dspark"], is_built=False))
    with pytest.raises(ConfigError, match="'dspark' is not supported yet"):
        speculative(dataclasses.replace(SHORT_DRAFT, method="dspark"), model="d")
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size=2 must be 1"):
        speculative(told, model="d", draft_tensor_parallel_size=2, num_speculative_tokens=3)
    given = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    assert speculative(told, model="d", num_speculative_tokens=None, **given).synthetic_rates == (1.0, 0.5, 0.0)
    given["synthetic_acceptance_length"] = 4.5
    with pytest.raises(ConfigError, match=r"must be in \[1, 4\]"):
        speculative(told, model="d", num_speculative_tokens=None, **given)


def test_this_machine_can_be_read(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    facts = read_hardware("cpu")
    assert facts.memory_bytes > 2**28
    assert len(facts.cpu_features) == 12
    assert facts.cache_home == str(tmp_path / ".cache")
    assert read_hardware("gpu", 123).memory_bytes == 123
    for home in ("", str(tmp_path / "missing")):
        monkeypatch.setenv("HOME", home)
        assert read_hardware("cpu").cache_home is None


def test_a_host_is_planned_with_more_modestly_than_an_accelerator():
    config = EngineConfig(model="smol", block_size=64, dtype="float32", max_num_seqs=8)
    for platform, share, copies in (("cpu", 0.4, 3), ("tpu", 0.9, 1)):
        plan_bytes = 135_000_000 * 4 + copies * ROUND_BYTES + 100 * 2 * PAGE_BYTES
        facts = HardwareFacts(platform, round(plan_bytes / share) + 4, "abc123", None)
        resolved = resolve(config, facts, MODELS)
        assert (resolved.num_pages, resolved.kv_cache_dtype) == (100, "float32")
