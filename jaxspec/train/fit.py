"""Host. Where EAGLE-3 begins: a head that says what least squares say of a few conversations, before any step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.heads import EagleConfig
from jaxspec.train.batches import Batch

_SELF_SCORE = 12.0  # of a token with itself in the fitted attention; with others, about 0
_RIDGE = 1e-3
_NUM_CALIBRATED = 256  # tokens


def fitted(params, config: EagleConfig, target_weights: Any, teacher: Any, sample: Batch):
    """A head whose first guess is linear: the target's next state as least squares guess it from its state and the
    next token.

    fc passes the last stream, and the target's norm and vocabulary head read the layer's output. Queries and keys are
    one random projection of the token, so that a place attends to itself; values and output are the fitted map, cut
    to the rank that the heads have; the MLP adds nothing yet. The norm is scaled to make the guesses as sure as they
    should be.
    """
    model, D = config.model, config.model.hidden_size
    Q, G, H = model.num_heads, model.num_kv_heads, model.head_dim
    final_norm_D = np.asarray(target_weights["final_norm"], np.float32)
    is_known_N = (np.arange(sample.token_ids_BT.shape[1] - 1)[None] < sample.len_B[:, None] - 1).ravel()
    after_ND = (np.asarray(sample.hidden_BTD, np.float32)[:, 1:] / final_norm_D).reshape(-1, D)[is_known_N]
    before_ND = np.asarray(sample.streams_BTX, np.float32)[:, :-1, -D:].reshape(-1, D)[is_known_N]
    before_ND = _normed(before_ND, model.norm_eps) if config.fc_norm else before_ND
    token_VD = np.asarray(target_weights["embed"], np.float32)
    token_ND = _normed(token_VD[sample.token_ids_BT[:, 1:].ravel()[is_known_N]], model.norm_eps)
    seen_NX = np.concatenate([token_ND, _normed(before_ND, model.norm_eps)], axis=1)
    gram_XX = seen_NX.T @ seen_NX
    gram_XX += _RIDGE * np.trace(gram_XX) / (2 * D) * np.eye(2 * D, dtype=np.float32)
    map_XD = np.linalg.solve(gram_XX, seen_NX.T @ (after_ND - before_ND))
    head_VD = np.asarray(teacher.get("head", teacher["embed"]), np.float32)
    some = slice(None, None, max(1, len(seen_NX) // _NUM_CALIBRATED))
    guess_ND = _normed(before_ND[some] + seen_NX[some] @ map_XD, model.norm_eps) * final_norm_D
    sure = _surest(guess_ND @ head_VD.T, (after_ND[some] * final_norm_D) @ head_VD.T)
    out_DR, size_R, in_RX = np.linalg.svd(map_XD.T, full_matrices=False)
    rank, group = min(G * H, D), Q // G
    value = np.zeros((G * H, 2 * D), np.float32)
    value[:rank] = np.sqrt(size_R[:rank, None]) * in_RX[:rank]
    out = np.zeros((D, G * H), np.float32)
    out[:, :rank] = out_DR[:, :rank] * np.sqrt(size_R[:rank])
    common_D = token_ND.mean(axis=0)  # what all tokens share tells none from another
    common_D /= np.linalg.norm(common_D)
    rng = np.random.default_rng(0)
    key = np.zeros((G, H, 2 * D), np.float32)
    for g in range(G):
        turned_DH, _ = np.linalg.qr(rng.standard_normal((D, H)))
        turned_DH -= np.outer(common_D, common_D @ turned_DH)
        key[g, :, :D] = turned_DH.T * (_SELF_SCORE / np.sqrt(H)) ** 0.5
    query = np.repeat(key, group, axis=0)
    layer = dict(params["layers"][0])
    layer |= {
        "qkv": np.concatenate([query.reshape(-1, 2 * D), key.reshape(-1, 2 * D), value]),
        "o": np.repeat(out.reshape(D, G, 1, H) / group, group, axis=2).reshape(D, Q * H),
        "down": np.zeros(layer["down"].shape, np.float32),
    }
    fc = np.zeros(params["fc"].shape, np.float32)
    fc[:, -D:] = np.eye(D)
    found = {"layers": [layer], "fc": fc, "final_norm": sure * final_norm_D, "head": head_VD}
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), params | found)


def _surest(logits_NV: np.ndarray, teacher_NV: np.ndarray) -> float:
    """What guessed logits are best multiplied with: the guess is less sure than the target."""

    def log_softmax(x_NV):
        x_NV = x_NV - x_NV.max(axis=-1, keepdims=True)
        return x_NV - np.log(np.exp(x_NV).sum(axis=-1, keepdims=True))

    prob_NV = np.exp(log_softmax(teacher_NV))
    sures = [0.1 * i for i in range(1, 11)]
    return min(sures, key=lambda sure: float(-np.sum(prob_NV * log_softmax(sure * logits_NV))))


def _normed(x_ND: np.ndarray, eps: float) -> np.ndarray:
    return x_ND / np.sqrt(np.mean(np.square(x_ND), axis=-1, keepdims=True) + eps)
