"""Host. Draft heads a second time, in float64 numpy: no cache, every position recomputed at every step.

Shares nothing with jaxspec: reads config.json and the tensors of a safetensors folder by itself.
"""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def silu(x):
    return x / (1 + np.exp(-x))


def _gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


class _Folder:
    def __init__(self, folder, target):
        folder = Path(folder)
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: np.asarray(t, np.float64) for name, t in load_file(folder / "model.safetensors").items()}
        self.target = target  # a NumpyLlama

    def seen(self, ids):
        """What the target's hidden states are: [T, D] after the final norm, and [L, T, D] before each layer."""
        hidden, streams = self.target.hidden([ids])
        return hidden[0], streams[:, 0]

    def target_head(self):
        weights = self.target.weights
        return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


class NumpyEagle(_Folder):
    """EAGLE and EAGLE-3, in the layouts that `write_eagle` writes."""

    def __init__(self, folder, target, kind):
        super().__init__(folder, target)
        self.kind = kind
        self.layer_config = self.config.get("transformer_layer_config", self.config)

    def drafts(self, ids, num_tokens):
        """The greedy continuation that the head guesses."""
        ids = list(ids)
        if len(ids) < 2:
            return []
        features = [self.feature(row) for row in self.rows(ids[:-1])]
        tokens, drafts = ids[1:], []
        while len(drafts) < num_tokens:
            logits, states = self.run(np.array(features), tokens)
            drafts.append(self.target_id(int(logits[-1].argmax())))
            features.append(states[-1])
            tokens = [*tokens, drafts[-1]]
        return drafts

    def rows(self, ids):
        hidden, streams = self.seen(ids)
        if self.kind == "eagle" or self.config.get("eagle_config", {}).get("use_aux_hidden_state") is False:
            return hidden
        return np.concatenate([streams[i] for i in self.streams(len(streams))], axis=-1)

    def streams(self, n):
        ids = self.config.get("eagle_aux_hidden_state_layer_ids")
        if ids is None:
            return 2, n // 2, n - 3
        return [i + 1 for i in ids] if ids[0] == 1 and "speculators_model_type" not in self.config else ids

    def feature(self, row):
        w = self.weights
        if self.kind == "eagle" or "fc.weight" not in w:
            return row
        if "input_norm.weight" in w:
            row = self.norm(row, "input_norm.weight")
        if "fc_norm.0.weight" in w:
            parts = np.split(row, sum(name.startswith("fc_norm.") for name in w))
            row = np.concatenate([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)])
        return w["fc.weight"] @ row + w.get("fc.bias", 0)

    def run(self, features_TD, tokens):
        """(draft-vocabulary logits, states fed back), each [T, ...]."""
        w, eagle3 = self.weights, self.kind == "eagle3"
        table = w.get("embed_tokens.weight", self.target.weights["model.embed_tokens.weight"])
        embedded = table[np.array(tokens)]
        h = features_TD
        if not eagle3:
            h = np.concatenate([embedded, features_TD], axis=-1) @ w["fc.weight"].T + w.get("fc.bias", 0)
        for i in range(self.layer_config["num_hidden_layers"]):
            name = f"layers.{i}."
            if eagle3 and i == 0:
                normed = self.norm(h, name + "hidden_norm.weight")
                h = normed if self.norm_before_residual() else h
                x = np.concatenate([self.norm(embedded, name + "input_layernorm.weight"), normed], axis=-1)
            else:
                later = name + ("hidden_norm.weight" if name + "hidden_norm.weight" in w else "input_layernorm.weight")
                x = self.norm(h, later) if later in w else h
            h = h + self.attention(x, name + "self_attn.")
            y = self.norm(h, name + "post_attention_layernorm.weight")
            gated = silu(self.linear(y, name + "mlp.gate_proj")) * self.linear(y, name + "mlp.up_proj")
            h = h + self.linear(gated, name + "mlp.down_proj")
        out = self.norm(h, "norm.weight") if "norm.weight" in w else h
        head = w.get("lm_head.weight")
        if head is None:
            head = table if self.config.get("tie_word_embeddings") else self.target_head()
        fed_back = out if self.config.get("norm_output") or not eagle3 else h
        return out @ head.T * self.config.get("logit_scale", 1.0), fed_back

    def norm_before_residual(self):
        return self.config.get("norm_before_residual", "speculators_model_type" in self.config)

    def target_id(self, draft_id):
        return draft_id + int(self.weights["d2t"][draft_id]) if "d2t" in self.weights else draft_id

    def norm(self, x, name):
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.layer_config["rms_norm_eps"])
        return x / scale * self.weights[name]

    def linear(self, x, name):
        return x @ self.weights[name + ".weight"].T + self.weights.get(name + ".bias", 0)

    def attention(self, x, name):
        config, T = self.layer_config, len(x)
        num_heads = config["num_attention_heads"]
        num_kv, size = config.get("num_key_value_heads", num_heads), config["head_dim"]
        inv = config.get("rope_theta", 10000.0) ** (-2 * np.arange(size // 2) / size)
        turn_TH = np.exp(1j * np.arange(T)[:, None] * inv[None])
        parts = {}
        for kind, count in (("q", num_heads), ("k", num_kv), ("v", num_kv)):
            y = self.linear(x, f"{name}{kind}_proj").reshape(T, count, size)
            if f"{name}{kind}_norm.weight" in self.weights:
                y = self.norm(y, f"{name}{kind}_norm.weight")
            if kind != "v":
                pairs = (y[..., : size // 2] + 1j * y[..., size // 2 :]) * turn_TH[:, None]
                y = np.concatenate([pairs.real, pairs.imag], axis=-1)
            parts[kind] = np.repeat(y, num_heads // count, axis=1)
        score = np.einsum("thd,shd->hts", parts["q"], parts["k"]) / math.sqrt(size)
        score = np.where(np.tril(np.ones((T, T), bool)), score, -np.inf)
        weight = np.exp(score - score.max(axis=-1, keepdims=True))
        weight /= weight.sum(axis=-1, keepdims=True)
        return self.linear(np.einsum("hts,shd->thd", weight, parts["v"]).reshape(T, -1), name + "o_proj")


class NumpyMedusa(_Folder):
    """Original or vLLM names; a head for each place ahead."""

    def drafts(self, ids, num_tokens):
        if len(ids) < 2:
            return []
        hidden = self.seen(list(ids)[:-1])[0][-1]
        return [int(self.logits(hidden, i).argmax()) for i in range(num_tokens)]

    def logits(self, x, i):
        w = self.weights
        for j in range(8):
            name = next((n for n in (f"{i}.{j}.linear", f"blocks.{i}.layers.{j}") if n + ".weight" in w), None)
            if name is None:
                break
            x = x + silu(w[name + ".weight"] @ x + w.get(name + ".bias", 0))
        heads = (f"{i}.{j}.weight", f"lm_heads.{i}.weight", "lm_head.weight")
        return w[next(n for n in heads if n in w)] @ x if any(n in w for n in heads) else self.target_head() @ x


class NumpyMlpSpeculator(_Folder):
    """Tied or not."""

    def drafts(self, ids, num_tokens):
        if len(ids) < 2:
            return []
        drafts = []
        for _ in range(num_tokens):  # what a step says depends on the tokens before it alone
            said = list(self.logits(self.seen(list(ids)[:-1])[0][-1], [ids[-1], *drafts]))
            drafts.append(int(said[-1].argmax()))
        return drafts

    def logits(self, state, tokens):
        """Each step's, over the token before it."""
        config, w = self.config, self.weights
        state_weight = 0.5 ** (0.5 / config["n_predict"])
        inner = config["inner_dim"] or config["emb_dim"]
        emb_weight = math.sqrt((1 - state_weight**2) * inner / 2)
        if config.get("scale_input"):
            state = self.norm(state) / math.sqrt(2)
        for i, token in enumerate(tokens):
            e = 0 if config.get("tie_weights") else i
            p = min(i, 1) if config.get("tie_weights") else i
            x = w[f"speculator.proj.{p}.weight"] @ state
            x = self.norm(x + w[f"speculator.emb.{e}.weight"][token] * emb_weight / state_weight)
            state = _gelu(x * w[f"speculator.ln.{e}.weight"] + w[f"speculator.ln.{e}.bias"])
            yield w[f"speculator.head.{e}.weight"] @ state

    def norm(self, x):
        return x / np.sqrt((x * x).mean() + 1e-6)


class NumpyMimo:
    """The modules of a MiMo target (a NumpyLlama): each one's states go into the next, a token further."""

    def __init__(self, target):
        self.target, self.weights = target, target.weights

    def drafts(self, ids, num_tokens):
        """One a module: module k pairs position t with the token at t + k + 1, a draft where there is none. Past the
        last module, that one goes on over its own states."""
        text = list(ids)
        if len(text) < 2:
            return []
        last = self.target.config["num_nextn_predict_layers"] - 1
        fed, states = None, self.target.streams([text[:-1]])[-1, 0]
        for k in range(num_tokens):
            fed, k = (states, k) if k <= last else (np.concatenate([fed, states[-1:]]), last)
            states = self.run(k, fed, text[k + 1 : k + 1 + len(fed)])
            text.append(int((states[-1] @ self.weights["lm_head.weight"].T).argmax()))
        return text[len(ids) :]

    def run(self, k, states_TD, tokens):
        """The states behind module k's last norm."""
        name = f"model.mtp_layers.{k}."
        embedded = self.weights["model.embed_tokens.weight"][np.array(tokens)]
        pair = [self.norm(states_TD, name + "hidden_layernorm"), self.norm(embedded, name + "token_layernorm")]
        x = np.concatenate(pair, axis=-1) @ self.weights[name + "input_proj.weight"].T
        return self.norm(self.target.layer(x[None], name)[0], name + "final_layernorm")

    def norm(self, x, name):
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.target.config["rms_norm_eps"])
        return x / scale * self.weights[name + ".weight"]
