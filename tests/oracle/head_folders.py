"""Host. Draft heads made for tests: published layouts with random weights, for a target folder of `write_llama`."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.oracle.folders import write_folder, write_llama

VOCAB, HIDDEN, SMALL_VOCAB = 32, 16, 20  # of `write_llama`, and a reduced vocabulary


def _rng_of(seed):
    rng = np.random.default_rng(seed)
    return lambda *shape, scale=0.3: (rng.standard_normal(shape) * scale).astype(np.float32)


def write_eagle(
    folder: Path,
    kind: str,
    *,
    seed: int = 0,
    num_layers: int = 1,
    streams: tuple[int, ...] = (0, 1),
    draft_vocab_size: int | None = None,
    vocab_size: int = VOCAB,
    hidden_size: int = HIDDEN,
    stored: tuple[str, ...] = (),
    later_norm: str = "input_layernorm",
    biases: tuple[str, ...] = (),
    qk_norm: bool = False,
    is_speculators: bool = False,
    prefix: str = "",
    layer_0: str = "layers.0.",
    mask_token_id: int | None = None,
    **config,
) -> Path:
    """An EAGLE ("eagle") or EAGLE-3 head, or with a mask token a P-EAGLE one.

    stored: of embed_tokens, lm_head, fc, norm (eagle), input_norm, fc_norm, t2d those the file has; biases: of q, o,
    fc; config: what is written beside the shape. A tensor's name is prefix + the published one.
    """
    random, size = _rng_of(seed), 4
    D, F, X = hidden_size, 24, hidden_size * len(streams)
    draft_vocab_size = draft_vocab_size or vocab_size
    layer_config = {
        "model_type": "qwen3" if qk_norm else "llama",
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": size,
        "max_position_embeddings": 128,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    }
    w: dict[str, np.ndarray] = {}

    def norm(name, width=D):
        w[name] = 1 + random(width, scale=0.1)

    for i in range(num_layers):
        name = layer_0 if i == 0 else f"layers.{i}."
        wide = 2 * D if kind == "eagle3" and i == 0 else D
        norm(name + "post_attention_layernorm.weight")
        if kind == "eagle3" and i == 0:
            norm(name + "input_layernorm.weight")
            norm(name + "hidden_norm.weight")
        elif i or "input_layernorm" in stored:
            norm(f"{name}{later_norm}.weight")
        for part, out in (("q", 4 * size), ("k", 2 * size), ("v", 2 * size)):
            w[f"{name}self_attn.{part}_proj.weight"] = random(out, wide)
            if "q" in biases:
                w[f"{name}self_attn.{part}_proj.bias"] = random(out)
        w[f"{name}self_attn.o_proj.weight"] = random(D, 4 * size)
        if "o" in biases:
            w[f"{name}self_attn.o_proj.bias"] = random(D)
        if qk_norm:
            norm(name + "self_attn.q_norm.weight", size)
            norm(name + "self_attn.k_norm.weight", size)
        for part, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            w[f"{name}mlp.{part}_proj.weight"] = random(*shape)
    if kind == "eagle" or streams:
        w["fc.weight"] = random(D, X if kind == "eagle3" else 2 * D)
        if "fc" in biases:
            w["fc.bias"] = random(D)
    if kind == "eagle3" or "norm" in stored:
        norm("norm.weight")
    if "input_norm" in stored:
        norm("input_norm.weight", X)
    if "fc_norm" in stored:
        for i in range(len(streams)):
            norm(f"fc_norm.{i}.weight")
    if "embed_tokens" in stored:
        w["embed_tokens.weight"] = random(vocab_size, D, scale=1.0)
    if "lm_head" in stored or draft_vocab_size < vocab_size:
        w["lm_head.weight"] = random(draft_vocab_size, D, scale=1.0)
    if draft_vocab_size < vocab_size:
        kept = np.sort(np.random.default_rng(seed).permutation(vocab_size)[:draft_vocab_size])
        w["d2t"] = kept - np.arange(draft_vocab_size)
        if "t2d" in stored:
            w["t2d"] = np.isin(np.arange(vocab_size), kept)
    values = {"draft_vocab_size": draft_vocab_size} if kind == "eagle3" else {}
    if kind == "eagle3" and streams:
        values["eagle_aux_hidden_state_layer_ids"] = list(streams)
    if mask_token_id is not None:
        w["mask_hidden"] = random(1, 1, X or D)
        values["mask_token_id"] = mask_token_id
    if is_speculators:
        name = "eagle3" if mask_token_id is None else "peagle"
        values |= {"speculators_model_type": name, "transformer_layer_config": layer_config}
    else:
        values |= layer_config | {"architectures": ["LlamaForCausalLM"]}
    return write_folder(folder, values | config, {prefix + name: tensor for name, tensor in w.items()})


def write_dflash(
    folder: Path,
    *,
    seed: int = 0,
    num_layers: int = 1,
    streams: tuple[int, ...] = (0, 1),
    block_size: int = 8,
    mask_token_id: int = VOCAB - 1,
    vocab_size: int = VOCAB,
    hidden_size: int = HIDDEN,
    draft_vocab_size: int | None = None,
    embedded: int = 0,
    markov: str | None = None,
    rank: int = 6,
    stored: tuple[str, ...] = (),
    layout: str = "flat",
    layers: dict | None = None,
    **config,
) -> Path:
    """A DFlash head, or with a kind of `markov` a DSpark one, whose tokens hear of each other loudly.

    embedded: tokens of an embedding of its own, 0 for none; stored: of lm_head, bias (of attention), confidence_head,
    mask_embedding those the file has; layout: of the config, "flat", "nested" or "speculators"; layers: what it says of
    its layers beside their sizes.
    """
    random, size = _rng_of(seed), 4
    D, F, R = hidden_size, 24, rank
    known = embedded or vocab_size
    is_reduced = draft_vocab_size is not None and draft_vocab_size < vocab_size
    said = draft_vocab_size if draft_vocab_size is not None and is_reduced else known
    layer_config = {
        "model_type": "qwen3", "hidden_size": D, "intermediate_size": F, "num_hidden_layers": num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size, "max_position_embeddings": 128,
        "vocab_size": known, "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": "bias" in stored,
        **(layers or {}),
    }  # fmt: skip
    w: dict[str, np.ndarray] = {"fc.weight": random(D, D * len(streams))}

    def norm(name, width=D):
        w[name] = 1 + random(width, scale=0.1)

    for name in ("hidden_norm", "norm"):
        norm(f"{name}.weight")
    for i in range(num_layers):
        name = f"layers.{i}."
        for part in ("input_layernorm", "post_attention_layernorm"):
            norm(f"{name}{part}.weight")
        for part, shape in (("q", (4 * size, D)), ("k", (2 * size, D)), ("v", (2 * size, D)), ("o", (D, 4 * size))):
            w[f"{name}self_attn.{part}_proj.weight"] = random(*shape, scale=0.6)
            if "bias" in stored:
                w[f"{name}self_attn.{part}_proj.bias"] = random(shape[0])
        for part in "qk":
            norm(f"{name}self_attn.{part}_norm.weight", size)
        for part, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            w[f"{name}mlp.{part}_proj.weight"] = random(*shape)
    if embedded:
        w["embed_tokens.weight"] = random(embedded, D, scale=1.0)
    if "lm_head" in stored or is_reduced:
        w["lm_head.weight"] = random(said, D, scale=1.0)
    if "mask_embedding" in stored:
        w["mask_embedding"] = random(D, scale=1.0)
    if is_reduced:
        w["d2t"] = np.sort(np.random.default_rng(seed).permutation(vocab_size)[:said]) - np.arange(said)
    own: dict = {"block_size": block_size, "mask_token_id": mask_token_id}
    own["target_layer_ids"] = [stream - 1 for stream in streams]
    if markov is not None:
        own |= {"markov_head_type": markov, "markov_rank": rank}
        w["markov_head.markov_w1.weight"] = random(known, R, scale=1.0)
        w["markov_head.markov_w2.weight"] = random(said, R, scale=1.0)
        part, out, wide = {"vanilla": ("", 0, 0), "gated": ("gate", R, D + R), "rnn": ("joint", 3 * R, 2 * R + D)}[
            markov
        ]
        if part:
            w[f"markov_head.{part}_proj.weight"] = random(out, wide, scale=0.6)
            w[f"markov_head.{part}_proj.bias"] = random(out)
    if "confidence_head" in stored:
        w |= {"confidence_head.proj.weight": random(1, D + R), "confidence_head.proj.bias": random(1)}
    if layout == "speculators":
        own |= {"aux_hidden_state_layer_ids": list(streams), "transformer_layer_config": layer_config}
        own["speculators_model_type"] = "dflash" if markov is None else "dspark"
        del own["target_layer_ids"]
        values = own | config
    else:
        architecture = "DFlashDraftModel" if markov is None or layout == "nested" else "Qwen3DSparkModel"
        values = layer_config | {"architectures": [architecture]}
        values |= {"dflash_config": own | config} if layout == "nested" else own | config
    if is_reduced:
        values["draft_vocab_size"] = said
    return write_folder(folder, values, w)


def write_medusa(
    folder: Path,
    *,
    seed: int = 0,
    num_heads: int = 3,
    num_blocks: int = 1,
    names: str = "original",
    heads: str = "each",
    hidden_size: int = HIDDEN,
    vocab_size: int = VOCAB,
) -> Path:
    """Medusa heads under the "original" names or "vllm" ones (there without biases)."""
    random, w = _rng_of(seed), {}
    for i in range(num_heads):
        for j in range(num_blocks):
            name = f"{i}.{j}.linear" if names == "original" else f"blocks.{i}.layers.{j}"
            w[name + ".weight"] = random(hidden_size, hidden_size)
            if names == "original":
                w[name + ".bias"] = random(hidden_size)
        if heads == "each":
            name = f"{i}.{num_blocks}.weight" if names == "original" else f"lm_heads.{i}.weight"
            w[name] = random(vocab_size, hidden_size, scale=1.0)
    if heads == "one":
        w["lm_head.weight"] = random(vocab_size, hidden_size, scale=1.0)
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_blocks}
    if names == "vllm":
        config = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": num_heads}
    return write_folder(folder, config, w)


def write_mlp_speculator(
    folder: Path,
    *,
    seed: int = 0,
    num_steps: int = 3,
    inner: int = 12,
    tied: bool = False,
    hidden_size: int = HIDDEN,
    vocab_size: int = VOCAB,
) -> Path:
    """An MLP speculator; the tied kind scales its input too."""
    random, w = _rng_of(seed), {}
    width = inner or hidden_size
    for i in range(1 if tied else num_steps):
        w[f"speculator.emb.{i}.weight"] = random(vocab_size, width, scale=1.0)
        w[f"speculator.head.{i}.weight"] = random(vocab_size, width, scale=1.0)
        w[f"speculator.ln.{i}.weight"] = 1 + random(width, scale=0.1)
        w[f"speculator.ln.{i}.bias"] = random(width)
    for i in range(min(2, num_steps) if tied else num_steps):
        w[f"speculator.proj.{i}.weight"] = random(width, hidden_size if i == 0 else width)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": hidden_size,
        "inner_dim": inner, "n_predict": num_steps, "vocab_size": vocab_size,
    }  # fmt: skip
    return write_folder(folder, config | ({"tie_weights": True, "scale_input": True} if tied else {}), w)


def write_mimo(folder: Path, *, seed: int = 0, num_modules: int = 1) -> Path:
    """A target of MiMo's kind, a Llama with biases on q, k and v, and its multi-token-prediction modules."""
    write_llama(folder, seed=seed)
    random = _rng_of(seed)
    w = load_file(folder / "model.safetensors")
    layer = {name: tensor for name, tensor in w.items() if name.startswith("model.layers.0.")}
    for k in range(num_modules):
        own = f"model.mtp_layers.{k}."
        w |= {name.replace("model.layers.0.", own): random(*tensor.shape) for name, tensor in layer.items()}
        for part in ("token", "hidden", "final", "input", "post_attention"):
            w[f"{own}{part}_layernorm.weight"] = 1 + random(HIDDEN, scale=0.1)
        w[f"{own}input_proj.weight"] = random(HIDDEN, 2 * HIDDEN)
    weights = [name for name in w if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
    w |= {name.replace("weight", "bias"): random(len(w[name])) for name in weights}
    save_file(w, folder / "model.safetensors")
    return edit_config(
        folder, architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=num_modules
    )


def edit_config(folder: Path, **changes) -> Path:
    """The folder, its config changed in place; None removes a key."""
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return folder
