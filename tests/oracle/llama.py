"""Host. The Llama skeleton a second time, in float64 numpy: no cache, no pages, every token recomputed at every step.

Shares nothing with jaxspec: it reads config.json and the tensors by itself. What it says is what decoding must say.
"""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.rejection.numpy_reference import COUPLED, Row, hash_words, kept_logits, noise

TIE = 1e-4  # a lead below this may fall either way in float32


class NumpyLlama:
    """A folder with config.json and safetensors; num_layers: the first so many alone, before its final norm."""

    def __init__(self, folder, num_layers=None):
        folder = Path(folder)
        self.config = json.loads((folder / "config.json").read_text())
        self.config["num_hidden_layers"] = num_layers or self.config["num_hidden_layers"]
        self.weights = {
            name: np.asarray(tensor, np.float64)
            for file in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        self.next_logits = functools.lru_cache(maxsize=None)(self._next_logits)

    def logits(self, ids_BT) -> np.ndarray:
        """[B, T, V]: the logits of the token after each."""
        hidden, _ = self.hidden(ids_BT)
        return hidden @ self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"]).T

    def _next_logits(self, ids: tuple[int, ...]) -> np.ndarray:
        return self.logits([ids])[0, -1]

    def hidden(self, ids_BT) -> tuple[np.ndarray, np.ndarray]:
        """[B, T, D] after the final norm, and [L, B, T, D] before each layer."""
        streams = self.streams(ids_BT)
        return self._norm(streams[-1], "model.norm"), streams[:-1]

    def streams(self, ids_BT) -> np.ndarray:
        """[L + 1, B, T, D]: before each layer, and behind the last."""
        streams = [self.weights["model.embed_tokens.weight"][np.asarray(ids_BT)]]
        for index in range(self.config["num_hidden_layers"]):
            streams.append(self.layer(streams[-1], f"model.layers.{index}."))
        return np.stack(streams)

    def layer(self, x, name):
        """[B, T, D] behind the layer whose tensors' names begin so."""
        x = x + self._attention(self._norm(x, name + "input_layernorm"), name + "self_attn.")
        y = self._norm(x, name + "post_attention_layernorm")
        gate = self._linear(y, name + "mlp.gate_proj")
        return x + self._linear(
            gate / (1 + np.exp(-gate)) * self._linear(y, name + "mlp.up_proj"), name + "mlp.down_proj"
        )

    def _attention(self, x, name):
        config, (B, T, D) = self.config, x.shape
        num_heads, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
        size = config.get("head_dim") or D // num_heads
        turn_TH = np.exp(1j * np.arange(T)[:, None] * self._frequencies(size)[None])
        heads = {}
        for kind, count in (("q", num_heads), ("k", num_kv), ("v", num_kv)):
            y = self._linear(x, f"{name}{kind}_proj").reshape(B, T, count, size)
            if f"{name}{kind}_norm.weight" in self.weights:
                y = self._norm(y, f"{name}{kind}_norm")
            if kind != "v":
                pairs = (y[..., : size // 2] + 1j * y[..., size // 2 :]) * turn_TH[:, None]
                y = np.concatenate([pairs.real, pairs.imag], axis=-1)
            heads[kind] = np.repeat(y, num_heads // count, axis=2)
        distance_TT = np.arange(T)[:, None] - np.arange(T)[None]
        window = config["sliding_window"] if config["model_type"] == "mistral" else None
        is_seen_TT = (distance_TT >= 0) & (distance_TT < (window or T))
        score = np.einsum("bthd,bshd->bhts", heads["q"], heads["k"]) / math.sqrt(size)
        weight = np.exp(np.where(is_seen_TT, score - score.max(axis=-1, keepdims=True), -np.inf))
        weight /= weight.sum(axis=-1, keepdims=True)
        out = np.einsum("bhts,bshd->bthd", weight, heads["v"])
        return self._linear(out.reshape(B, T, num_heads * size), name + "o_proj")

    def _frequencies(self, size):
        base = [self.config["rope_theta"] ** (-2 * j / size) for j in range(size // 2)]
        scaling = self.config.get("rope_scaling")
        if not scaling:
            return np.array(base)
        assert scaling["rope_type"] == "llama3"
        scaled = []
        for frequency in base:
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
            scaled.append(kept * frequency + (1 - kept) * frequency / scaling["factor"])
        return np.array(scaled)

    def _norm(self, x, name):
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.weights[name + ".weight"]

    def _linear(self, x, name):
        y = x @ self.weights[name + ".weight"].T
        return y + self.weights[name + ".bias"] if name + ".bias" in self.weights else y


def row_of(params, choice: int = 0) -> Row:
    """A request's draws: its parameters, and the key of its seed and of which of its n answers this is."""
    seed = (params.seed or 0) % 2**64
    key = hash_words((seed & 0xFFFFFFFF, seed >> 32), (choice, 0))
    return Row(key, params.temperature, params.top_k, params.top_p, params.min_p)


@dataclass(frozen=True)
class Answer:
    """What plain decoding says, and by how much each token led the runner-up."""

    token_ids: list[int]
    leads: list[float]

    def cut(self, num_tokens: int) -> "Answer":
        return Answer(self.token_ids[:num_tokens], self.leads[:num_tokens])


def continuation(model: NumpyLlama, prompt, num_tokens: int, row: Row | None = None, edit=None) -> Answer:
    """The naive loop: each token asks the model for the whole sequence; greedy, or drawn by the row's coupled noise.

    edit(logits_V, output ids so far) -> logits_V: what sampling parameters do before temperature.
    """
    ids, leads = list(prompt), []
    for _ in range(num_tokens):
        score_V = model.next_logits(tuple(ids))
        if edit is not None:
            score_V = edit(score_V, ids[len(prompt) :])
        if row is not None and row.temperature > 0:
            score_V = kept_logits(score_V, row) + noise(row.draw_key(len(ids), 0, COUPLED), len(score_V))
        token, second = np.argsort(-score_V)[:2]
        ids.append(int(token))
        leads.append(float(score_V[token] - score_V[second]))
    return Answer(ids[len(prompt) :], leads)


def assert_says(token_ids, answer: Answer) -> None:
    """These ids are the answer's, up to the first token that a tie may change."""
    certain = next((i for i, lead in enumerate(answer.leads) if lead < TIE), len(answer.leads))
    assert len(token_ids) == len(answer.token_ids)
    assert list(token_ids[:certain]) == answer.token_ids[:certain]
