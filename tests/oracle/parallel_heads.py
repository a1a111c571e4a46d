"""Host. Drafters that make all drafts in one pass a second time, in float64 numpy: no cache, everything recomputed.

Shares nothing with jaxspec: reads config.json and the tensors of a safetensors folder by itself.
"""

import math

import numpy as np

from tests.oracle.heads import NumpyEagle, silu


class NumpyPEagle(NumpyEagle):
    """P-EAGLE: an EAGLE-3 head, once over the positions and then K - 1 masks."""

    def __init__(self, folder, target):
        super().__init__(folder, target, "eagle3")

    def drafts(self, ids, num_tokens):
        return [self.target_id(int(row.argmax())) for row in self.draft_logits(ids, num_tokens)]

    def draft_logits(self, ids, num_tokens):
        """Of each draft, in draft ids; none without a position."""
        ids, num_masks = list(ids), num_tokens - 1
        if len(ids) < 2:
            return np.zeros((0, 1))
        mask = self.feature(self.weights["mask_hidden"].reshape(-1))
        features = [*(self.feature(row) for row in self.rows(ids[:-1])), *[mask] * num_masks]
        logits, _ = self.run(np.array(features), ids[1:] + [self.config["mask_token_id"]] * num_masks)
        return logits[-num_tokens:]

    def norm_before_residual(self):
        return self.config.get("norm_before_residual", False)


class NumpyPard:
    """PARD: a whole model, over the tokens and then K - 1 masks; `model` is a NumpyLlama of its folder."""

    def __init__(self, model, mask_token_id):
        self.model, self.mask_token_id = model, mask_token_id

    def drafts(self, ids, num_tokens):
        return [int(row.argmax()) for row in self.draft_logits(ids, num_tokens)]

    def draft_logits(self, ids, num_tokens):
        return self.model.logits([[*ids, *[self.mask_token_id] * (num_tokens - 1)]])[0, -num_tokens:]


class NumpyDflash(NumpyEagle):
    """DFlash and DSpark, in the layouts that `write_dflash` writes."""

    def __init__(self, folder, target):
        super().__init__(folder, target, "dflash")
        self.own = {**self.config, **self.config.get("dflash_config", {})}

    def drafts(self, ids, num_tokens):
        return self.walk(ids, num_tokens)[0]

    def draft_logits(self, ids, num_tokens):
        return self.walk(ids, num_tokens)[1]

    def walk(self, ids, num_tokens, said=None):
        """(drafts, the draft-vocabulary logits of each) of one block; each follows the drafts before it, or `said`."""
        hidden, base = self.block(ids, num_tokens)
        drafts, logits, memory, before = [], [], 0.0, ids[-1]
        for k in range(num_tokens):
            bias, memory = self.markov(before, hidden[k], memory)
            logits.append((base[k] + bias) * self.own.get("logit_scale", 1.0))
            drafts.append(self.target_id(int(logits[-1].argmax())))
            before = drafts[-1] if said is None else said[k]
        return drafts, np.array(logits)

    def markov(self, token, hidden, memory):
        w = self.weights
        if "markov_head.markov_w1.weight" not in w:
            return 0.0, memory
        said = w["markov_head.markov_w1.weight"][token]
        if "markov_head.gate_proj.weight" in w:
            gate = self.linear(np.concatenate([hidden, said]), "markov_head.gate_proj")
            said = said / (1 + np.exp(-gate))
        if "markov_head.joint_proj.weight" in w:
            memory = np.broadcast_to(memory, said.shape)
            joint = self.linear(np.concatenate([memory, said, hidden]), "markov_head.joint_proj")
            keep, new, out = np.split(joint, 3)
            keep = 1 / (1 + np.exp(-keep))
            memory, said = keep * memory + (1 - keep) * np.tanh(new), np.tanh(out)
        # Tokens that only the draft knows are cut off.
        return w["markov_head.markov_w2.weight"][: len(self.target_head())] @ said, memory

    def block(self, ids, num_tokens):
        """(normed hidden states, logits) at the places that make drafts; no cache, all positions at once."""
        w, config, n = self.weights, self.layer_config, len(ids) - 1
        anchors = self.own.get(
            "sample_from_anchor", "markov_rank" in self.own and "speculators_model_type" not in self.own
        )
        places = [ids[-1], *[self.own["mask_token_id"]] * (num_tokens - anchors)]
        table = w.get("embed_tokens.weight", self.target.weights["model.embed_tokens.weight"])
        is_vector = "mask_embedding" in w
        x = np.array([w["mask_embedding"] if is_vector and i else table[token] for i, token in enumerate(places)])
        context = np.zeros((n, x.shape[1]))
        if n:
            streams = self.seen(ids[:-1])[1]
            rows = np.concatenate([streams[i] for i in self.streams(len(streams))], axis=-1)
            context = self.norm(rows @ w["fc.weight"].T, "hidden_norm.weight")
        for i in range(config["num_hidden_layers"]):
            name = f"layers.{i}."
            x = x + self.block_attention(context, self.norm(x, name + "input_layernorm.weight"), i)
            y = self.norm(x, name + "post_attention_layernorm.weight")
            gated = silu(self.linear(y, name + "mlp.gate_proj")) * self.linear(y, name + "mlp.up_proj")
            x = x + self.linear(gated, name + "mlp.down_proj")
        hidden = self.norm(x, "norm.weight")[-num_tokens:]
        return hidden, hidden @ w.get("lm_head.weight", self.target_head())[: len(self.target_head())].T

    def streams(self, n):
        ids = self.own.get("aux_hidden_state_layer_ids")
        return ids if ids is not None else [i + 1 for i in self.own["target_layer_ids"]]

    def block_attention(self, context, block, index):
        config, n, T = self.layer_config, len(context), len(block)
        num_heads, num_kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        inv = config.get("rope_theta", 1e6) ** (-2 * np.arange(size // 2) / size)
        turn_TH = np.exp(1j * np.arange(n + T)[:, None] * inv[None])
        name, parts = f"layers.{index}.self_attn.", {}
        for kind, count in (("q", num_heads), ("k", num_kv), ("v", num_kv)):
            y = self.linear(np.concatenate([context, block]), f"{name}{kind}_proj").reshape(n + T, count, size)
            if kind == "v":
                y = y * self.own.get("attention_value_scale", 1.0)
            else:
                y = self.norm(y, f"{name}{kind}_norm.weight")
                pairs = (y[..., : size // 2] + 1j * y[..., size // 2 :]) * turn_TH[:, None]
                y = np.concatenate([pairs.real, pairs.imag], axis=-1)
            parts[kind] = np.repeat(y, num_heads // count, axis=1)
        score = np.einsum("thd,shd->hts", parts["q"][n:], parts["k"]) / math.sqrt(size)
        window = (
            config.get("sliding_window") if config.get("layer_types", [""] * 9)[index] == "sliding_attention" else None
        )
        distance = np.arange(n, n + T)[:, None] - np.arange(n + T)[None]
        looks_ahead = window is None or (
            "speculators_model_type" in self.own and self.own.get("sliding_window_non_causal", True)
        )
        if self.own.get("is_causal", self.own.get("causal", not looks_ahead)):
            score = np.where(distance >= 0, score, -np.inf)
        if window is not None:
            score = np.where(distance < window, score, -np.inf)
        weight = np.exp(score - score.max(axis=-1, keepdims=True))
        weight /= weight.sum(axis=-1, keepdims=True)
        return self.linear(np.einsum("hts,shd->thd", weight, parts["v"]).reshape(T, -1), name + "o_proj")
