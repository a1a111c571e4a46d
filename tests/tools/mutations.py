"""Host. One table of what may be wrong with a drafter's files, for every method that has some, and what comes of it.

Each drafter is one that knows its target (`tests/oracle/knowing.py`), so that what is wrong with it can be seen.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.build import EngineParts
from tests.lossless.engines import DEFAULTS, make_parts
from tests.oracle import knowing
from tests.oracle.folders import write_folder
from tests.oracle.knowing import FINAL, MASK, NEXT, ONE, SIZE, matrix

K = 2
SMALL = {"max_num_seqs": 2, "block_size": 8}


def load_pair(model, speculative_config) -> tuple[EngineConfig, EngineParts]:
    """(config, parts) as an engine is built, but that nothing is compiled."""
    config = EngineConfig(model=str(model), speculative_config=speculative_config, **(DEFAULTS | SMALL))
    return config, make_parts(model, speculative_config, **SMALL)


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Mutation(NamedTuple):
    """What is changed, and what comes of it: an error with all of the words `refused`, a log with all of `logged`, or,
    found by trying other readings, the suspect `named`. Some are also `useless` by the probe, where nothing is named.

    tensors: by name, an array, a function of what was there, or ... to take it away; reads: the variant of the head;
    more: of speculative_config; cut: bytes that the file lacks at its end.
    """

    tensors: Mapping[str, Any] = NOTHING
    config: Mapping[str, Any] = NOTHING
    more: Mapping[str, Any] = NOTHING
    reads: tuple[str, ...] = ()
    cut: int = 0
    refused: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()
    named: str = ""
    useless: bool = False


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def halves_exchanged(fc):
    return np.concatenate(np.split(fc, 2, axis=1)[::-1], axis=1)


def scrambled(rows):
    return rows[np.random.default_rng(5).permutation(len(rows))]


def transposed(matrix):
    return matrix.T


def with_eight_more(table):
    return np.concatenate([table, table[:8]])


def as_integers(tensor):
    return tensor.astype(np.int64)


def renamed(name, shape=(SIZE, SIZE)):
    """A tensor under another name: what is missing is named, and what is there in its place."""
    other = "another." + name.rpartition("mtp.")[2]
    prefix = name[: len(name) - len(name.rpartition("mtp.")[2])]
    return Mutation(
        {name: ..., prefix + other: zeros(*shape)},
        refused=("missing", name, "unexpected", f"{prefix}{other} {list(shape)}"),
    )


def missing(name, *words):
    return Mutation({name: ...}, refused=("missing", name, *words))


def misshaped(name, *shape, words=()):
    return Mutation({name: zeros(*shape)}, refused=(name, str(list(shape)), *words))


def unexpected(name, *shape):
    return Mutation({name: zeros(*shape)}, refused=("unexpected", f"{name} {list(shape)}"))


def not_floats(name):
    return Mutation({name: as_integers}, refused=(name, "int64", "cannot fill"))


TRUNCATED = Mutation(cut=100, refused=("model.safetensors",))
QUANTISED = Mutation(config={"quantization_config": {"quant_method": "gptq"}}, refused=("gptq",))
UP, DOWN, QUERY = "mlp.up_proj.weight", "mlp.down_proj.weight", "self_attn.q_proj.weight"

EAGLE = {
    "renamed key": renamed(f"layers.0.{UP}"),
    "missing tensor": missing(f"layers.0.{DOWN}", "[32, 32]"),
    "wrong fc width": Mutation(
        {"fc.weight": zeros(SIZE, 48)}, more={"method": "eagle"}, refused=("'eagle'", "eagle3", "fc.weight", "(32, 48)")
    ),
    "misshaped tensor": misshaped(f"layers.0.{DOWN}", SIZE, 16),
    "extra tensor": unexpected(f"layers.1.{UP}", SIZE, SIZE),
    "extra embedding": Mutation({"embed_tokens.weight": ONE}, logged=("embedding: the target's", "is equal")),
    "other hidden size": Mutation(config={"hidden_size": 24}, refused=("24", "32")),
    "another vocabulary": Mutation(config={"vocab_size": 40}, refused=("40", "32")),
    "quantisation flag": QUANTISED,
    "missing bias": Mutation(config={"attention_bias": True}, refused=("missing", "layers.0.self_attn.q_proj.bias")),
    "bias that is not stored": Mutation(config={"bias": True}, logged=("bias True", "fc.bias is not stored")),
    "truncated file": TRUNCATED,
    "wrong dtype": not_floats(f"layers.0.{DOWN}"),
    "the order in fc": Mutation({"fc.weight": halves_exchanged}, named="order of embedding and state"),
    "a strange embedding": Mutation(
        {"embed_tokens.weight": scrambled}, reads=("token",), named="embedding of the target"
    ),
}

_REDUCED = {"lm_head.weight": lambda head: head[:20], "d2t": zeros(20, dtype=np.int64), "t2d": ...}
_SMALL_VOCABULARY = {"draft_vocab_size": 20}
EAGLE3 = {
    "renamed key": renamed(f"midlayer.{UP}")._replace(
        refused=("missing", f"layers.0.{UP}", "unexpected", f"another.midlayer.{UP} [32, 32]")
    ),
    "missing id map": Mutation(_REDUCED | {"d2t": ...}, _SMALL_VOCABULARY, refused=("d2t", "20")),
    "missing head": Mutation(_REDUCED | {"lm_head.weight": ...}, _SMALL_VOCABULARY, refused=("lm_head.weight", "20")),
    "extra embedding": Mutation({"embed_tokens.weight": ONE}, logged=("embedding: the target's", "is equal")),
    "no embedding": Mutation({"embed_tokens.weight": ...}, logged=("embedding: the target's (none stored)",)),
    "wrong fc width": misshaped("fc.weight", SIZE, 48, words=("3 streams 32 wide", "[32, 96]")),
    "tie flag with a small vocabulary": Mutation(
        _REDUCED, _SMALL_VOCABULARY | {"tie_word_embeddings": True}, logged=("lm_head: False", "smaller than")
    ),
    "the same without a head": Mutation(
        _REDUCED | {"lm_head.weight": ...}, _SMALL_VOCABULARY | {"tie_word_embeddings": True},
        refused=("tie_word_embeddings", "20", "32", "lm_head.weight"),
    ),
    "other hidden size": Mutation(config={"hidden_size": 24}, refused=("24", "32")),
    "quantisation flag": QUANTISED,
    "missing bias": Mutation(config={"attention_bias": True}, refused=("missing", "q_proj.bias")),
    "another target": Mutation(config={"target_hidden_size": 64}, refused=("target_hidden_size", "64", "32")),
    "another vocabulary": Mutation(config={"vocab_size": 40}, refused=("40", "32")),
    "an id map that is none": Mutation({"d2t": np.full(SIZE, 40)}, refused=("32 draft ids", "t2d")),
    "layers that are not there": Mutation(
        config={"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}, refused=("[2, 3, 9]", "0..5")
    ),
    "both norms": Mutation(
        config={"norm_before_fc": True, "fc_norm": True}, refused=("norm_before_fc", "fc_norm", "exclude")
    ),
    "extra tensor": unexpected(f"layers.1.{UP}", SIZE, SIZE),
    "truncated file": TRUNCATED,
    "wrong dtype": not_floats("fc.weight"),
    "layers one too high": Mutation(
        config={"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}, named="target layers one earlier"
    ),
    "layers one too low": Mutation(
        more={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, named="target layers one later"
    ),
    "outputs of layers": Mutation(
        config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, logged=("streams: (2, 3, 4)", "outputs of layers")
    ),
    "norm_before_residual": Mutation(config={"norm_before_residual": True}, named="norm_before_residual"),
    "norm_output": Mutation(config={"norm_output": True}, named="norm_output"),
    "rope theta": Mutation(config={"rope_theta": 500000.0}, reads=("before",), named="rope of the target"),
    "rows in pairs": Mutation(
        {f"midlayer.self_attn.{part}_proj.weight": knowing.in_pairs for part in "qk"}, reads=("before",),
        named="interleaved rotation",
    ),
    "a strange embedding": Mutation(
        {"embed_tokens.weight": scrambled}, reads=("before",), named="embedding of the target"
    ),
    "transposed fc": Mutation({"fc.weight": transposed}, refused=("fc.weight", "[96, 32]", "[32, 96]")),
    "an id map one too high": Mutation(
        _REDUCED | {"d2t": np.ones(20, np.int64)}, _SMALL_VOCABULARY, useless=True
    ),
    "ids exchanged in the map": Mutation({"d2t": np.roll(np.arange(SIZE), 1) - np.arange(SIZE)}, useless=True),
}  # fmt: skip

MEDUSA = {
    "renamed key": Mutation(
        {"1.0.linear.bias": ..., "other.bias": zeros(SIZE)},
        refused=("missing", "1.0.linear.bias", "unexpected", "other.bias [32]"),
    ),
    "missing head": missing("1.1.weight", "[32, 32]"),
    "missing bias": missing("2.0.linear.bias", "[32]"),
    "missing block": missing("0.0.linear.weight"),
    "misshaped block": misshaped("1.0.linear.weight", 16, SIZE, words=("[32, 32]",)),
    "another vocabulary": misshaped("0.1.weight", 40, SIZE, words=("[32, 32]",)),
    "other hidden size": Mutation(
        {f"{i}.0.linear.weight": zeros(24, 24) for i in range(3)}, refused=("24 wide", "the target 32")
    ),
    "extra tensor": unexpected("extra.weight", 3),
    "quantisation flag": QUANTISED,
    "fewer heads by the config": Mutation(
        config={"medusa_num_heads": 2}, logged=("medusa_num_heads=2", "the file has 3", "tensors win")
    ),
    "more drafts than heads": Mutation(more={"num_speculative_tokens": 4}, refused=("num_speculative_tokens=4", "3")),
    "truncated file": TRUNCATED,
    "wrong dtype": not_floats("1.1.weight"),
    "scrambled heads": Mutation({f"{i}.1.weight": scrambled for i in range(3)}, useless=True),
    "heads from the next token on": Mutation(
        {f"{i}.1.weight": knowing.move(FINAL, knowing.power(NEXT, i + 1)) for i in range(3)}, named="heads one earlier"
    ),
}  # fmt: skip

MLP_SPECULATOR = {
    "renamed key": renamed("speculator.emb.1.weight"),
    "missing bias": missing("speculator.ln.2.bias", "[32]"),
    "missing head": missing("speculator.head.1.weight", "[32, 32]"),
    "misshaped head": misshaped("speculator.head.0.weight", 40, SIZE, words=("[32, 32]",)),
    "other hidden size": Mutation(config={"emb_dim": 24}, refused=("24 wide", "32")),
    "other inner size": Mutation(
        config={"inner_dim": 16}, refused=("speculator.proj.0.weight", "[32, 32]", "[16, 32]")
    ),
    "another vocabulary": Mutation(config={"vocab_size": 40}, refused=("40", "32")),
    "more steps than stored": Mutation(config={"n_predict": 4}, refused=("missing", "speculator.emb.3.weight")),
    "fewer steps than stored": Mutation(config={"n_predict": 2}, refused=("unexpected", "speculator.emb.2.weight")),
    "extra tensor": unexpected("speculator.extra.weight", 3),
    "tie flag": Mutation(config={"tie_weights": True}, logged=("left unread", "speculator")),
    "quantisation flag": QUANTISED,
    "truncated file": TRUNCATED,
    "wrong dtype": not_floats("speculator.proj.0.weight"),
    "scale_input": Mutation(config={"scale_input": True}, named="scale_input"),
}

_ONE_DRAFT = {"num_speculative_tokens": 1}
DFLASH = {
    "renamed key": renamed(f"layers.0.{UP}"),
    "missing norm": Mutation(
        {"hidden_norm.weight": ...}, more=_ONE_DRAFT | {"method": "dflash"}, refused=("missing", "hidden_norm.weight")
    ),
    "missing query norm": missing("layers.0.self_attn.q_norm.weight", "[8]"),
    "wrong fc width": misshaped("fc.weight", SIZE, 48, words=("[32, 64]",)),
    "other hidden size": Mutation(config={"hidden_size": 24}, refused=("24", "32")),
    "another vocabulary": Mutation(config={"vocab_size": 40}, refused=("40", "32")),
    "layers that are not there": Mutation(
        config={"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 7]}}, refused=("[2, 8]", "0..5")
    ),
    "no mask token": Mutation(config={"dflash_config": {"target_layer_ids": [1, 2]}}, refused=("mask_token_id",)),
    "a mask token outside the vocabulary": Mutation(
        config={"dflash_config": {"mask_token_id": 99, "target_layer_ids": [1, 2]}},
        refused=("mask_token_id=99", "embedding of 32"),
    ),
    "missing id map": Mutation(
        {"lm_head.weight": zeros(20, SIZE)}, {"draft_vocab_size": 20}, refused=("d2t", "20")
    ),
    "extra embedding": Mutation({"embed_tokens.weight": ONE}, logged=("embedding: the target's", "is equal")),
    "extra tensor": unexpected(f"layers.1.{UP}", SIZE, SIZE),
    "more drafts than the block holds": Mutation(
        more={"num_speculative_tokens": 2}, refused=("num_speculative_tokens=2", "1")
    ),
    "quantisation flag": QUANTISED,
    "truncated file": TRUNCATED,
    "wrong dtype": not_floats("fc.weight"),
    "streams for layers": Mutation(
        config={"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [2, 3]}}, named="target layers one earlier"
    ),
    "rope theta": Mutation(config={"rope_theta": 1e6}, named="rope of the target"),
}  # fmt: skip

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
DSPARK = {
    "renamed key": renamed(f"layers.0.{UP}"),
    "missing norm": missing("hidden_norm.weight", "[32]"),
    "missing table": missing(W2, "[32, 32]"),
    "misshaped table": misshaped(W1, SIZE, 16, words=("[32, 32]",)),
    "another rank": Mutation(config={"markov_rank": 16}, refused=(W1, "[32, 32]", "[32, 16]")),
    "another kind": Mutation(config={"markov_head_type": "rnn"}, refused=("missing", "joint_proj.weight")),
    "no such kind": Mutation(config={"markov_head_type": "fir"}, refused=("markov_head_type", "'fir'")),
    "wrong fc width": misshaped("fc.weight", SIZE, 48, words=("[32, 64]",)),
    "other hidden size": Mutation(config={"hidden_size": 24}, refused=("24", "32")),
    "another vocabulary": Mutation(config={"vocab_size": 30}, refused=("30", "32")),
    "layers that are not there": Mutation(config={"target_layer_ids": [1, 7]}, refused=("[2, 8]", "0..5")),
    "no mask token": Mutation(config={"mask_token_id": None}, refused=("mask_token_id",)),
    "a mask token outside the vocabulary": Mutation(config={"mask_token_id": 99}, refused=("mask_token_id=99", "32")),
    "missing id map": Mutation({"lm_head.weight": zeros(20, SIZE)}, {"draft_vocab_size": 20}, refused=("d2t", "20")),
    "extra tensor": unexpected(f"layers.1.{UP}", SIZE, SIZE),
    "asked for as dflash": Mutation(more={"method": "dflash"}, refused=("'dflash'", "dspark", "Qwen3DSpark")),
    "more drafts than the block holds": Mutation(
        more={"num_speculative_tokens": 3}, refused=("num_speculative_tokens=3", "2")
    ),
    "a confidence head": Mutation(
        {"confidence_head.proj.weight": zeros(1, 2 * SIZE)}, logged=("confidence head: left unread",)
    ),
    "quantisation flag": QUANTISED,
    "truncated file": TRUNCATED,
    "wrong dtype": not_floats(W1),
    "streams for layers": Mutation(config={"target_layer_ids": [2, 3]}, named="target layers one earlier"),
    "the anchor says nothing": Mutation(
        config={"sample_from_anchor": False, "block_size": 3}, named="sample_from_anchor"
    ),
    "rope theta": Mutation(config={"rope_theta": 1e6}, named="rope of the target"),
    "another successor": Mutation({W1: matrix(NEXT), W2: matrix(NEXT)}, reads=("token",), useless=True),
}  # fmt: skip

P_EAGLE = {
    "renamed key": EAGLE3["renamed key"],
    "missing state of masks": Mutation(
        {"mask_hidden": ...}, more={"method": "p_eagle"}, refused=("mask_hidden", "P-EAGLE", "parallel_drafting")
    ),
    "misshaped state of masks": misshaped("mask_hidden", 1, 1, 64, words=("[96]",)),
    "no mask token": Mutation(config={"mask_token_id": None}, refused=("mask_token_id", "pard_token")),
    "a mask token outside the vocabulary": Mutation(config={"mask_token_id": 99}, refused=("mask_token_id=99", "32")),
    **{
        name: EAGLE3[name]
        for name in (
            "missing id map", "wrong fc width", "other hidden size", "truncated file", "wrong dtype",
            "layers one too high", "norm_before_residual", "ids exchanged in the map",
        )
    },
    "rope theta": Mutation(config={"rope_theta": 1e6}, named="rope of the target"),
}  # fmt: skip

MTP = {
    "renamed key": renamed(f"mtp.layers.0.{UP}"),
    "missing projection": missing("mtp.fc.weight", "[32, 64]"),
    "no module": Mutation(dict.fromkeys(("mtp." + key for key in knowing.mtp()), ...), refused=("no MTP modules",)),
    "missing norm": missing("mtp.pre_fc_norm_hidden.weight", "[32]"),
    "missing query norm": missing("mtp.layers.0.self_attn.q_norm.weight", "[8]"),
    "wrong fc width": misshaped("mtp.fc.weight", SIZE, SIZE, words=("[32, 64]",)),
    "queries without gates": misshaped("mtp.layers.0.self_attn.q_proj.weight", SIZE, SIZE, words=("[96, 32]",)),
    "missing bias": Mutation({"mtp.layers.0.self_attn.q_proj.bias": zeros(2 * SIZE)}, refused=("k_proj.bias",)),
    "extra tensor": unexpected("mtp.layers.1.mlp.up_proj.weight", SIZE, SIZE),
    "experts": Mutation({"mtp.layers.0.mlp.experts.0.up_proj.weight": ONE}, refused=("with experts", "not supported")),
    "quantisation flag": QUANTISED,
    "truncated file": TRUNCATED,
    "wrong dtype": not_floats("mtp.fc.weight"),
    "the order in fc": Mutation({"mtp.fc.weight": halves_exchanged}, named="order of embedding and state"),
}

DRAFT_MODEL = {
    "renamed key": Mutation(
        {f"model.layers.1.{UP}": ..., "up.weight": ONE},
        refused=("missing", f"model.layers.1.{UP}", "unexpected", "up.weight [32, 32]"),
    ),
    "missing tensor": missing(f"model.layers.2.{DOWN}", "[32, 32]"),
    "misshaped tensor": misshaped(f"model.layers.0.{DOWN}", SIZE, 16),
    "other hidden size": Mutation(config={"hidden_size": 24}, refused=("embed_tokens.weight [32, 32]", "[32, 24]")),
    "a layer too many": Mutation(config={"num_hidden_layers": 6}, refused=("missing", f"model.layers.5.{UP}")),
    "a layer too few": Mutation(config={"num_hidden_layers": 4}, refused=("unexpected", f"model.layers.4.{UP}")),
    "missing bias": Mutation(config={"attention_bias": True}, refused=("missing", "q_proj.bias")),
    "another vocabulary": Mutation(
        dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), with_eight_more),
        {"vocab_size": 40}, refused=("40", "32", "tokenizers"),
    ),
    "extra tensor": unexpected("extra.weight", 3),
    "quantisation flag": QUANTISED,
    "unknown architecture": Mutation(config={"model_type": "marvel", "architectures": ["Marvel"]}, refused=("marvel",)),
    "tie flag": Mutation(config={"tie_word_embeddings": True}, logged=("left unread", "lm_head.weight")),
    "truncated file": TRUNCATED,
    "wrong dtype": not_floats(f"model.layers.0.{DOWN}"),
}  # fmt: skip

_ONE_LAYER = "model.layers.0."
PARD = {
    "renamed key": Mutation(
        {_ONE_LAYER + UP: ..., "up.weight": ONE},
        refused=("missing", _ONE_LAYER + UP, "unexpected", "up.weight [32, 32]"),
    ),
    "missing tensor": missing(_ONE_LAYER + DOWN, "[32, 32]"),
    "misshaped tensor": misshaped(_ONE_LAYER + DOWN, SIZE, 16),
    "no mask token": Mutation(
        config={"pard_token": None}, more={"method": "pard"}, refused=("mask token", "pard_token")
    ),
    "a mask token that is none": Mutation(
        config={"pard_token": "m"}, more={"method": "pard"}, refused=("pard_token", "'m'")
    ),
    "asked for as eagle3": Mutation(more={"method": "eagle3"}, refused=("'eagle3'", "pard", "pard_token")),
    "a layer too many": Mutation(config={"num_hidden_layers": 2}, refused=("missing", f"model.layers.1.{UP}")),
    **{
        name: DRAFT_MODEL[name]
        for name in ("other hidden size", "another vocabulary", "quantisation flag", "truncated file", "wrong dtype")
    },
    "rope theta": Mutation(config={"rope_theta": 1e6}, named="rope of the target"),
    "rows in pairs": Mutation(
        {f"{_ONE_LAYER}self_attn.{part}_proj.weight": knowing.in_pairs for part in "qk"}, named="interleaved rotation"
    ),
}  # fmt: skip

TABLE: dict[str, dict[str, Mutation]] = {
    "eagle": EAGLE, "eagle3": EAGLE3, "p_eagle": P_EAGLE, "medusa": MEDUSA, "mlp_speculator": MLP_SPECULATOR,
    "dflash": DFLASH, "dspark": DSPARK, "mtp": MTP, "draft_model": DRAFT_MODEL, "pard": PARD,
}  # fmt: skip
MAKERS: dict[str, Callable[..., tuple[dict, dict[str, np.ndarray]]]] = {
    "eagle": knowing.eagle, "eagle3": knowing.eagle3, "p_eagle": knowing.p_eagle, "medusa": knowing.medusa,
    "mlp_speculator": knowing.mlp_speculator, "dflash": knowing.dflash, "dspark": knowing.dspark, "pard": knowing.pard,
}  # fmt: skip


def cases(
    is_wanted: Callable[[Mutation], Any], is_quick: Callable[[str, Mutation], Any] = lambda method, mutation: True
) -> list[Any]:
    """Those of the table, as parameters (method, mutation), heavy where they are not quick."""
    return [
        pytest.param(
            method, mutation, id=f"{method}: {name}", marks=() if is_quick(method, mutation) else (pytest.mark.heavy,)
        )
        for method, mutations in TABLE.items()
        for name, mutation in mutations.items()
        if is_wanted(mutation)
    ]


def write_pair(folder: Path, method: str, mutation: Mutation, target: Path) -> tuple[Path, dict[str, Any]]:
    """(target's folder, speculative_config) of a drafter that is wrong in this way."""
    draft = folder / "draft"
    if method in MAKERS:
        write_folder(draft, *MAKERS[method](*mutation.reads))
    else:
        knowing.write_target(draft, with_mtp=method == "mtp")
    weights = load_file(draft / "model.safetensors")
    for name, change in mutation.tensors.items():
        if change is ...:
            del weights[name]
        else:
            weights[name] = change(weights[name]) if callable(change) else change
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in weights.items()}, draft / "model.safetensors")
    values = json.loads((draft / "config.json").read_text()) | dict(mutation.config)
    (draft / "config.json").write_text(json.dumps(values))
    if mutation.cut:
        file = draft / "model.safetensors"
        file.write_bytes(file.read_bytes()[: -mutation.cut])
    config: dict[str, Any] = {"num_speculative_tokens": 1 if method == "dflash" else K} | dict(mutation.more)
    if method == "mtp":
        return draft, config | {"method": "mtp"}
    return target, config | {"model": str(draft)}
