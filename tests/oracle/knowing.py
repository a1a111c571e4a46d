"""Host. A target whose text is known, and for every kind of head one that knows it, made by hand.

A token's successor is NEXT of it. In the target each layer moves a one-hot vector on by a permutation of its own, so
that every stream says which token it is in a code of its own, and only there. A head is right by one path alone:
through a stream, a state, the token it is fed, or the token before it by way of the rotation; so whatever is wrong with
how it was loaded shows.
"""

from functools import reduce
from pathlib import Path

import numpy as np

from tests.oracle.folders import write_folder

SIZE, NUM_LAYERS, MASK = 32, 5, 31
HEAD_SIZE, NUM_HEADS = 8, 4
THETA, LAG_PAIR = 10000.0, 1  # the pair of a head's features by whose rotation a head finds the token before
NORM = np.sqrt(SIZE)  # what a norm makes of a one-hot vector's one


def _cycle(rng, size):
    """A permutation of one cycle, as far as `size`; the rest stay."""
    order, found = rng.permutation(size), np.arange(SIZE)
    found[order] = np.roll(order, -1)
    return found


_RNG = np.random.default_rng(0)
NEXT = _cycle(_RNG, MASK)
CODES = [np.arange(SIZE)]  # CODES[i][x]: where stream i has token x's one
for _ in range(NUM_LAYERS):
    CODES.append(_RNG.permutation(SIZE)[CODES[-1]])


def matrix(images) -> np.ndarray:
    """[out, in]: moves the one at x to images[x]."""
    found = np.zeros((SIZE, SIZE), np.float32)
    found[images, np.arange(SIZE)] = 1.0
    return found


def power(images, times) -> np.ndarray:
    return reduce(lambda so_far, _: images[so_far], range(times), np.arange(SIZE))


def move(start, end) -> np.ndarray:
    """Reads a token in the code `start` and writes it in the code `end`: arrays of places by token."""
    images = np.empty(SIZE, int)
    images[start] = end
    return matrix(images)


ONE, NONE, ONES = np.eye(SIZE, dtype=np.float32), np.zeros((SIZE, SIZE), np.float32), np.ones(SIZE, np.float32)
IDS = np.arange(SIZE)
FINAL = CODES[-1]
_SUM = NORM * NORM / (1 + np.exp(-NORM))
LAYER = {
    **{f"self_attn.{part}_proj.weight": NONE for part in "qkvo"},
    **{f"mlp.{part}_proj.weight": NONE for part in ("gate", "up", "down")},
    **{f"{part}_layernorm.weight": ONES for part in ("input", "post_attention")},
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": SIZE, "intermediate_size": SIZE,
    "num_hidden_layers": NUM_LAYERS, "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_HEADS,
    "head_dim": HEAD_SIZE, "max_position_embeddings": 128, "vocab_size": SIZE, "hidden_act": "silu",
    "rms_norm_eps": 1e-9, "rope_theta": THETA, "tie_word_embeddings": False,
}  # fmt: skip
ONE_LAYER = CONFIG | {"num_hidden_layers": 1}


def moving_mlp(start, end) -> dict[str, np.ndarray]:
    """An MLP behind a norm that turns a one-hot vector from one code into another."""
    down = ((move(start, end) - ONE) / _SUM).astype(np.float32)
    return {"mlp.gate_proj.weight": ONE, "mlp.up_proj.weight": ONE, "mlp.down_proj.weight": down}


def lagging(width: int, scale: float, lag: int = 1) -> dict[str, np.ndarray]:
    """q and k projections that read nothing but the sum of the first SIZE features and attend `lag` tokens back."""
    angle = lag * THETA ** (-2 * LAG_PAIR / HEAD_SIZE)
    found = {}
    for part, turned in (("q", 0.0), ("k", angle)):
        rows = np.zeros((NUM_HEADS, HEAD_SIZE, width), np.float32)
        rows[:, LAG_PAIR, :SIZE] = scale * np.cos(turned)
        rows[:, LAG_PAIR + HEAD_SIZE // 2, :SIZE] = scale * np.sin(turned)
        found[f"self_attn.{part}_proj.weight"] = rows.reshape(SIZE, width)
    return found


def in_pairs(rows) -> np.ndarray:
    """Rows of heads whose halves turn together, as a file has them where neighbours do."""
    heads = rows.reshape(NUM_HEADS, 2, HEAD_SIZE // 2, -1)
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))


def text(start: int, length: int) -> list[int]:
    """The token and what follows."""
    found = [start]
    while len(found) < length:
        found.append(int(NEXT[found[-1]]))
    return found


def write_target(folder: Path, *, with_mtp: bool = False, **changes) -> Path:
    """With the module of `mtp` where asked; changes to its tensors."""
    weights = {"model.embed_tokens.weight": ONE, "model.norm.weight": ONES, "lm_head.weight": move(FINAL, NEXT)}
    for i in range(NUM_LAYERS):
        layer = LAYER | moving_mlp(CODES[i], CODES[i + 1])
        weights |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    if with_mtp:
        weights |= {f"mtp.{name}": tensor for name, tensor in (mtp() | changes).items()}
    return write_folder(folder, CONFIG, weights)


def mtp() -> dict[str, np.ndarray]:
    """A module of Qwen's kind, by the target's state; its norms are stored as what is added to one."""
    zero = 0 * ONES
    layer = LAYER | {f"{part}_layernorm.weight": zero for part in ("input", "post_attention")}
    layer |= {f"self_attn.{part}_norm.weight": np.zeros(HEAD_SIZE, np.float32) for part in "qk"}
    layer["self_attn.q_proj.weight"] = np.zeros((2 * SIZE, SIZE), np.float32)  # queries and gates
    weights = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
    weights |= {f"{part}.weight": zero for part in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return weights | {"fc.weight": np.concatenate([NONE, move(FINAL, FINAL[NEXT])], axis=1)}


def eagle(reads: str = "state") -> tuple[dict, dict[str, np.ndarray]]:
    """EAGLE, by the target's "state", or by the "token" that it is fed."""
    by_state = np.concatenate([NONE, move(FINAL, FINAL[NEXT])], axis=1)
    by_token = np.concatenate([move(IDS, FINAL), NONE], axis=1)
    layer = {name: tensor for name, tensor in LAYER.items() if name != "input_layernorm.weight"}
    weights = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
    weights |= {"fc.weight": by_state if reads == "state" else by_token, "embed_tokens.weight": ONE}
    return dict(ONE_LAYER), weights


STREAMS = (2, 3, 4)


def eagle3(reads: str = "stream") -> tuple[dict, dict[str, np.ndarray]]:
    """EAGLE-3, by the first "stream" it reads, or by the token "before" the one it is fed, which attention finds."""
    wide = {f"self_attn.{part}_proj.weight": np.zeros((SIZE, 2 * SIZE), np.float32) for part in "qkv"}
    layer = LAYER | wide | {"hidden_norm.weight": ONES}
    fc = np.zeros((SIZE, len(STREAMS) * SIZE), np.float32)
    if reads == "stream":
        fc[:, :SIZE] = move(CODES[STREAMS[0]], IDS)
        layer |= moving_mlp(IDS, NEXT)
    else:
        layer |= lagging(2 * SIZE, 24.0)
        layer["self_attn.v_proj.weight"] = np.concatenate([ONE, NONE], axis=1)
        layer["self_attn.o_proj.weight"] = 4 * matrix(NEXT)  # louder than the state that is fed back, which is normed
    weights = {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    weights |= {"fc.weight": fc, "norm.weight": ONES, "lm_head.weight": matrix(NEXT)}
    weights |= {"embed_tokens.weight": ONE, "d2t": np.zeros(SIZE, np.int64), "t2d": np.ones(SIZE, bool)}
    config = {"eagle_aux_hidden_state_layer_ids": list(STREAMS), "draft_vocab_size": SIZE}
    return ONE_LAYER | config | {"norm_before_residual": reads == "before"}, weights


def medusa(num_heads: int = 3) -> tuple[dict, dict[str, np.ndarray]]:
    weights = {}
    for i in range(num_heads):
        weights |= {f"{i}.0.linear.weight": NONE, f"{i}.0.linear.bias": 0 * ONES}
        weights[f"{i}.1.weight"] = move(FINAL, power(NEXT, i + 2))
    return {"medusa_num_heads": num_heads, "medusa_num_layers": 1}, weights


def mlp_speculator(num_steps: int = 3) -> tuple[dict, dict[str, np.ndarray]]:
    """Its state says what is right, its embedding what is not, nearly as loudly."""
    state_weight = 0.5 ** (0.5 / num_steps)
    embed_weight = np.sqrt((1 - state_weight**2) * SIZE / 2)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": SIZE,
        "inner_dim": SIZE, "n_predict": num_steps, "vocab_size": SIZE,
    }  # fmt: skip
    weights = {}
    for i in range(num_steps):
        # The state is NORM of a one-hot vector: with scale_input it would be less by the square root of two.
        wrong = 0.85 * NORM * state_weight / embed_weight if i == 0 else 0.0
        weights[f"speculator.emb.{i}.weight"] = (wrong * ONE).astype(np.float32)
        weights[f"speculator.proj.{i}.weight"] = move(FINAL, NEXT[NEXT]) if i == 0 else matrix(NEXT)
        weights[f"speculator.head.{i}.weight"] = ONE
        weights[f"speculator.ln.{i}.weight"] = ONES
        weights[f"speculator.ln.{i}.bias"] = 0 * ONES
    return config, weights


def dflash() -> tuple[dict, dict[str, np.ndarray]]:
    """A block of two: the mask finds, two tokens back, the token before the last in the first of its streams."""
    layer = LAYER | lagging(SIZE, 1.0, lag=2)
    layer |= {f"self_attn.{part}_norm.weight": np.full(HEAD_SIZE, 50.0, np.float32) for part in "qk"}
    layer["self_attn.v_proj.weight"] = ONE
    layer["self_attn.o_proj.weight"] = 5 * move(IDS, FINAL[NEXT])
    fc = np.concatenate([move(CODES[STREAMS[0]], IDS), NONE], axis=1)
    config = ONE_LAYER | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 2,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [STREAMS[0] - 1, STREAMS[1] - 1]},
    }  # fmt: skip
    weights = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
    return config, weights | {"fc.weight": fc, "hidden_norm.weight": ONES, "norm.weight": ONES}


def dspark(reads: str = "stream") -> tuple[dict, dict[str, np.ndarray]]:
    """A block of two that drafts from its anchor on, by the first "stream" of the token before, or, in the block, by
    that token itself; or by the "token" before through the Markov head alone, over a backbone that says nothing."""
    layer = LAYER | lagging(SIZE, 1.0)
    layer |= {f"self_attn.{part}_norm.weight": np.full(HEAD_SIZE, 50.0, np.float32) for part in "qk"}
    layer["self_attn.v_proj.weight"] = ONE
    weights = {"fc.weight": np.concatenate([move(CODES[STREAMS[0]], IDS), NONE], axis=1), "lm_head.weight": NONE}
    weights |= {"hidden_norm.weight": ONES, "norm.weight": ONES}
    weights |= {"markov_head.markov_w1.weight": ONE, "markov_head.markov_w2.weight": matrix(NEXT)}
    if reads == "stream":
        del weights["lm_head.weight"]  # the target's is meant
        layer["self_attn.o_proj.weight"] = 5 * move(IDS, FINAL[NEXT])
        weights["markov_head.markov_w2.weight"] = NONE
    config = ONE_LAYER | {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": 2, "mask_token_id": MASK,
        "target_layer_ids": [STREAMS[0] - 1, STREAMS[1] - 1], "markov_rank": SIZE, "markov_head_type": "vanilla",
    }  # fmt: skip
    return config, weights | {f"layers.0.{name}": tensor for name, tensor in layer.items()}


def p_eagle() -> tuple[dict, dict[str, np.ndarray]]:
    """By the first stream that it reads, and in a mask's place by what attention finds one place before."""
    config, weights = eagle3("stream")
    found = lagging(2 * SIZE, 24.0)
    found["self_attn.v_proj.weight"] = np.concatenate([NONE, ONE], axis=1)
    found["self_attn.o_proj.weight"] = (0.5 / NORM * matrix(NEXT)).astype(np.float32)  # half as loud as a stream
    weights |= {f"midlayer.{name}": tensor for name, tensor in found.items()}
    return config | {"mask_token_id": MASK}, weights | {
        "mask_hidden": np.zeros((1, 1, len(STREAMS) * SIZE), np.float32)
    }


def pard() -> tuple[dict, dict[str, np.ndarray]]:
    """A model of one layer, which looks a token back: a mask says what follows the token that would follow that."""
    layer = LAYER | lagging(SIZE, 24.0) | {"self_attn.v_proj.weight": ONE, "self_attn.o_proj.weight": matrix(NEXT)}
    weights = {"model.embed_tokens.weight": ONE, "model.norm.weight": ONES, "lm_head.weight": matrix(NEXT)}
    return ONE_LAYER | {"pard_token": MASK}, weights | {f"model.layers.0.{key}": one for key, one in layer.items()}
