"""Host. Bytes and operations, against numbers worked out by hand from the published sizes."""

import pytest

from jaxspec.aot.cost import (
    Cost,
    Pass,
    cost_of,
    drafter_shape,
    experts_touched,
    first_layers,
    plain_passes,
    round_passes,
    target_shape,
)
from tests.aot.paper import fields, on_paper

# Of one layer of Llama-3.1-8B: q, k and v of 48 heads; o; gate and up; down.
LAYER_8B = 48 * 128 * 4096 + 4096 * 4096 + 2 * 14336 * 4096 + 14336 * 4096
TABLE_8B = 128256 * 4096  # its embedding, and its head
NORMS_8B = (2 * 32 + 1) * 4096


def shapes(name, **more):
    _, described, resolved = on_paper(name, **more)
    draft = None if described.drafter is None else drafter_shape(described.drafter, resolved)
    return described, resolved, target_shape(described.target, resolved), draft


def test_llama_8b_by_hand():
    _, _, shape, _ = shapes("llama3.1-8b-eagle3")
    assert shape.parameters == 32 * LAYER_8B + 2 * TABLE_8B + NORMS_8B == 8_030_261_248
    assert shape.bytes == 2 * (32 * LAYER_8B + 2 * TABLE_8B) + 4 * NORMS_8B  # norms are float32
    assert shape.entry_bytes * len(shape.windows) == 2 * 8 * 128 * 2 * 32 == 131_072


def test_parameters_are_those_that_everyone_quotes():
    billions = {
        name: round(shapes(name)[2].parameters / 1e9, 2)
        for name in ("llama3.1-70b-draft", "qwen3-32b-eagle3", "qwen3-30b-a3b")
    }
    assert billions == {"llama3.1-70b-draft": 70.55, "qwen3-32b-eagle3": 32.76, "qwen3-30b-a3b": 30.53}


def test_deepseek_v3_by_hand():
    described, _, shape, draft = shapes("deepseek-v3-mtp")
    D, V = 7168, 129280
    attention = D * 1536 + 1536 + 1536 * 128 * 192 + D * 576 + 512 + 512 * 128 * 256 + 128 * 128 * D
    expert = 3 * D * 2048
    sparse = attention + 257 * expert + 256 * D + 256 + 2 * D
    dense = attention + 3 * D * 18432 + 2 * D
    assert shape.parameters == 58 * sparse + 3 * dense + 2 * V * D + D
    assert round(shape.parameters / 1e9, 1) == 671.0
    # 512 of a latent and 64 of a rotary key, for all heads together.
    assert shape.entry_bytes == 576 * 2
    # The module: two norms and one behind, a projection, a layer of the kind of the last.
    assert draft.parameters == sparse + 2 * D * D + 3 * D
    assert described.target.num_mtp_layers == 1


def test_an_eagle3_head_by_hand():
    _, _, _, draft = shapes("llama3.1-8b-eagle3")
    attention = 48 * 128 * 2 * 4096 + 4096 * 4096  # it attends from embedding and features side by side
    mlp, fc, head = 3 * 14336 * 4096, 3 * 4096 * 4096, 32000 * 4096
    assert draft.parameters == attention + mlp + fc + head + 4 * 4096 + 32000  # four norms, and the map of ids
    assert draft.head_bytes == 2 * head
    assert draft.features_bytes == 2 * fc


def test_a_plain_step_of_llama_8b_by_hand():
    _, _, shape, _ = shapes("llama3.1-8b-eagle3")
    ((one, vocabulary),) = plain_passes(shape, 128256)
    rows, context = 4, 1000
    cost = cost_of(one, rows, context, vocabulary)
    weights = 2 * (32 * LAYER_8B + TABLE_8B) + 4 * NORMS_8B  # the embedding is looked up, not read
    cache = 131_072 * rows * (context + 1)  # all tokens read, one a row written
    logits = 2 * rows * 128256 * 4  # written and read
    assert cost.bytes == weights + cache + logits + rows * 4096 * 2
    attention = 4 * 32 * 128 * 32 * context
    assert cost.flops == 2 * rows * (32 * LAYER_8B + TABLE_8B) + rows * attention
    assert cost.sent_bytes == 0


def test_a_round_is_its_passes():
    described, resolved, shape, draft = shapes("llama3.1-8b-eagle3")
    passes = round_passes(shape, described.drafter, draft, resolved, described.target)
    assert [(one.name, one.tokens, one.logits, one.times, vocabulary) for one, vocabulary in passes] == [
        ("first draft", 5, 1, 1, 32000),
        ("draft step", 1, 1, 3, 32000),
        ("verify", 5, 5, 1, 128256),
    ]
    first, step = (cost_of(one, 1, 0, vocabulary) for one, vocabulary in passes[:2])
    # The projection of the target's states is in the first pass alone.
    assert first.bytes - step.bytes == 3 * 4096 * 4096 * 2 + 4 * draft.entry_bytes


def test_an_mtp_module_drafts_with_the_targets_head():
    described, resolved, shape, draft = shapes("deepseek-v3-mtp", topology="h200:2x8")
    passes = round_passes(shape, described.drafter, draft, resolved, described.target)
    assert [(one.name, one.tokens, one.head is shape) for one, _ in passes] == [
        ("first draft", 2, True),
        ("verify", 2, True),
    ]


@pytest.mark.parametrize(("K", "wanted"), [(1, [(1, 2, 1)]), (2, [(2, 4, 1)]), (4, [(2, 6, 1), (1, 1, 2)])])
def test_of_two_modules_the_last_goes_on_alone(K, wanted):
    described, resolved, shape, one = shapes("deepseek-v3-mtp", topology="h200:2x8")
    model, speculative = described.drafter.model, resolved.speculative_config
    twice = {"num_layers": 2, "moe": model.moe.model_copy(update={"layers": (True, True)})}
    twice["sliding_window_layers"] = (None, None)
    drafter = described.drafter.model_copy(update={"model": model.model_copy(update=twice)})
    speculative = speculative.model_copy(update={"num_speculative_tokens": K})
    resolved = resolved.model_copy(update={"speculative_config": speculative})
    *passes, (verify, _) = round_passes(shape, drafter, drafter_shape(drafter, resolved), resolved, described.target)
    assert verify.tokens == K + 1
    assert [(len(made.model.windows), made.tokens, made.times) for made, _ in passes] == wanted
    assert all(made.model.dense_bytes == len(made.model.windows) * one.dense_bytes for made, _ in passes)
    assert all(made.model.expert_bytes == len(made.model.windows) * one.expert_bytes for made, _ in passes)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_lookups_are_free(method):
    speculative = {"method": method, "num_speculative_tokens": 3}
    described, resolved, shape, draft = shapes("qwen3-30b-a3b", speculative_config=speculative)
    ((one, _),) = round_passes(shape, described.drafter, draft, resolved, described.target)
    assert (one.name, one.tokens, one.logits) == ("verify", 4, 4)


def test_without_drafts_a_round_is_a_plain_step():
    described, resolved, shape, draft = shapes("qwen3-30b-a3b", speculative_config=None)
    passes = round_passes(shape, described.drafter, draft, resolved, described.target)
    assert passes == plain_passes(shape, 151936)


def test_own_layers_draft_with_a_part_of_the_model():
    speculative = {"method": "self", "num_speculative_tokens": 2, "exit_layer": 8}
    described, resolved, shape, draft = shapes("llama3.1-8b-eagle3", speculative_config=speculative)
    (own, _), (verify, _) = round_passes(shape, described.drafter, draft, resolved, described.target)
    assert (own.times, len(own.model.windows), verify.tokens) == (2, 8, 3)
    assert own.model.num_weights == 8 * LAYER_8B


def test_experts_that_are_touched():
    assert experts_touched(8 / 128, 1) == pytest.approx(1 / 16)
    assert experts_touched(8 / 128, 2) == pytest.approx(1 - (15 / 16) ** 2)
    assert experts_touched(0.0, 5) == 0
    _, _, shape, _ = shapes("qwen3-30b-a3b")
    ((plain, vocabulary),) = plain_passes(shape, 151936)
    expert, layers = 3 * 2048 * 768, 48
    assert shape.expert_bytes == 2 * layers * 128 * expert
    one, two = (cost_of(plain, rows, 0, vocabulary) for rows in (1, 2))
    # Beside the second token's row, entries and logits.
    second = 2048 * 2 + layers * shape.entry_bytes + 2 * 151936 * 4
    assert two.bytes - one.bytes - second == pytest.approx(2 * layers * 128 * expert * (15 / 256))
    # Eight experts a token, whoever shares them.
    assert two.flops == 2 * one.flops
    attention = 40 * 128 * 2048 + 32 * 128 * 2048
    assert one.flops == pytest.approx(2 * (layers * (attention + 128 * 2048 + 8 * expert) + 151936 * 2048))


def test_a_window_bounds_what_is_read():
    described, resolved, _, _ = shapes("llama3.1-8b-eagle3")
    windows = (512, *[None] * 31)
    shape = target_shape(described.target.model_copy(update={"sliding_window_layers": windows}), resolved)
    one = Pass("plain", shape, 1, 0, shape)
    full, near = cost_of(one, 1, 4096, 1), cost_of(one, 1, 512, 1)
    assert full.bytes - near.bytes == 31 * (4096 - 512) * shape.entry_bytes


def test_pages_of_integers_have_a_scale_a_head():
    _, _, shape, _ = shapes("llama3.1-8b-eagle3", kv_cache_dtype="int8")
    assert shape.entry_bytes == 2 * 8 * (128 + 4)


def test_integer_weights_are_half_the_bytes_and_all_the_operations():
    _, _, shape, _ = shapes("llama3.1-8b-eagle3", quantization="int8")
    rows = 48 * 128 + 4096 + 2 * 14336 + 4096  # of a layer's maps, each with a scale
    assert shape.dense_bytes == 32 * (LAYER_8B + 4 * rows) + 4 * NORMS_8B
    assert shape.num_weights == 32 * LAYER_8B


def test_over_devices_each_has_its_part():
    whole, part = (shapes("llama3.1-8b-eagle3", tensor_parallel_size=number)[2] for number in (1, 8))
    assert part.parameters == whole.parameters
    assert part.bytes == (whole.bytes - 4 * NORMS_8B) // 8 + 4 * NORMS_8B  # norms are on each
    assert part.entry_bytes == whole.entry_bytes // 8
    # Key heads that are fewer than the devices are repeated.
    more = shapes("llama3.1-8b-eagle3", topology="h100:2x8", tensor_parallel_size=16)[2]
    assert more.entry_bytes == part.entry_bytes
    one = Pass("plain", part, 1, 0, part)
    # Behind attention, MLP and embedding, as a ring adds: 2 * 7 / 8 of each array of float32.
    assert cost_of(one, 3, 0, 1, 8).sent_bytes == pytest.approx(2 * 7 / 8 * (2 * 32 + 1) * 3 * 4096 * 4)


def test_latents_and_routers_are_on_every_device():
    (whole, one), (part, own) = (
        shapes("deepseek-v3-mtp", topology="h200:2x8", tensor_parallel_size=number)[2:] for number in (1, 16)
    )
    assert own == one  # its module is on each, too
    assert part.entry_bytes == whole.entry_bytes
    D, A, C, Y = 7168, 1536, 512, 64
    routers = 58 * 256 * (D + 1) * 4
    latents = 61 * (2 * (A * D + (C + Y) * D) + 4 * (A + C))  # into which and out of which the heads' parts lead
    norms = 4 * (2 * 61 + 1) * D
    assert part.bytes == (whole.bytes - routers - latents - norms) / 16 + routers + latents + norms


def test_a_tied_head_is_read_as_a_head_and_kept_once():
    described, resolved, whole, _ = shapes("llama3.1-8b-eagle3")
    tied = target_shape(described.target.model_copy(update={"tie_word_embeddings": True}), resolved)
    assert whole.bytes - tied.bytes == 2 * TABLE_8B
    assert tied.head_bytes == whole.head_bytes == 2 * TABLE_8B


def test_the_roofline():
    assert Cost(100.0, 10.0).seconds(10.0, 10.0, 1.0) == 10.0  # it reads
    assert Cost(10.0, 100.0).seconds(10.0, 10.0, 1.0) == 10.0  # it computes
    assert Cost(100.0, 10.0, 5.0).seconds(10.0, 10.0, 1.0) == 15.0  # and then waits for the others
    assert Cost(1.0, 2.0, 3.0) + Cost(1.0, 1.0, 1.0).times(2) == Cost(3.0, 4.0, 5.0)


def test_the_first_layers_keep_their_kinds():
    _, described, _ = on_paper("deepseek-v3-mtp")
    short = first_layers(described.target, 4)
    assert (short.num_layers, short.moe.layers) == (4, (False, False, False, True))


def test_descriptions_say_what_is_published():
    """The sizes above, which are written out by hand, are the files'."""
    assert fields("meta-llama/Llama-3.1-8B-Instruct")["vocab_size"] == 128256
    assert fields("deepseek-ai/DeepSeek-V3")["kv_lora_rank"] == 512
