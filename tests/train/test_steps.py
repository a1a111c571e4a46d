"""Device. One step of each trainer against formulas of its own: losses and gradients by float64 numpy that recomputes
every chain from its beginning, AdamW by hand."""

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.train.batches import split, training_batch
from jaxspec.train.config import TrainConfig
from jaxspec.train.data.shards import read_corpus
from jaxspec.train.run import make_trainer
from jaxspec.train.seen import see_corpus
from jaxspec.train.step import TrainState, make_optimizer, make_step
from jaxspec.train.target import open_target
from tests.oracle.heads import NumpyEagle, NumpyMlpSpeculator, silu
from tests.oracle.llama import NumpyLlama
from tests.oracle.parallel_heads import NumpyDflash
from tests.quick import heavy_but
from tests.train.conftest import HEADS, VOCAB

ROWS = 2


class Target(NumpyLlama):
    """The frozen target: what it says of a text is worked out once."""

    def __init__(self, folder):
        super().__init__(folder)
        self.known = {}

    def hidden(self, ids_BT):
        key = tuple(map(tuple, ids_BT))
        if key not in self.known:
            self.known[key] = super().hidden(ids_BT)
        return self.known[key]


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


class Eagle3Oracle:
    """Every chain anew: the target's features up to t, then the head's own states, over the text's own tokens."""

    layout = "speculators"

    def __init__(self, folder, target, head):
        self.model, self.head = NumpyEagle(folder, target, "eagle3"), head
        self.weights, self.target = self.model.weights, target

    def guesses(self, ids, num_prompt, draw):
        """(place ahead, loss or None where nothing is taught, whether right) of all chains."""
        kept = np.arange(self.head["draft_vocab_size"]) + self.weights["d2t"].astype(int)
        teacher = self.target.logits([ids])[0]
        rows = [self.model.feature(row) for row in self.model.rows(ids)]
        for t in range(len(ids)):
            features, tokens = rows[: t + 1], list(ids[1 : t + 2])
            for k in range(self.head["num_steps"]):
                if t + 2 + k >= len(ids):
                    break
                logits, states = self.model.run(np.array(features), tokens)
                features, tokens = [*features, states[-1]], [*tokens, ids[t + 2 + k]]
                if t + 2 + k < num_prompt:
                    continue
                best = int(teacher[t + 1 + k].argmax())
                soft = np.exp(log_softmax(teacher[t + 1 + k][kept]))
                loss = -(soft * log_softmax(logits[-1])).sum() if best in kept else None
                yield k, loss, kept[logits[-1].argmax()] == best

    decay, num_ahead = 0.8, 3


class DflashOracle:
    """Every block anew, from the text before it."""

    decay, num_ahead, layout = 0.8, 3, None

    def __init__(self, folder, target, head):
        self.model, self.head = NumpyDflash(folder, target), head
        self.weights, self.target = self.model.weights, target

    def guesses(self, ids, num_prompt, draw):
        kept = np.arange(self.head["draft_vocab_size"]) + self.weights["d2t"].astype(int)
        teacher = self.target.logits([ids])[0]
        for t in range(draw % 2, len(ids), 2):
            logits = self.model.draft_logits(ids[: t + 1], 3)
            for k in range(1, 4):
                if not num_prompt <= t + k < len(ids):
                    continue
                best = int(teacher[t + k - 1].argmax())
                soft = np.exp(log_softmax(teacher[t + k - 1][kept]))
                loss = -(soft * log_softmax(logits[k - 1])).sum() if best in kept else None
                yield k - 1, loss, kept[logits[k - 1].argmax()] == best


class MedusaOracle:
    decay, num_ahead, layout = 0.8, 2, None

    def __init__(self, folder, target, head):
        self.weights = {name: x.astype(np.float64) for name, x in load_file(folder / "model.safetensors").items()}
        self.target, self.head = target, head

    def guesses(self, ids, num_prompt, draw):
        hidden, teacher = self.target.hidden([ids])[0][0], self.target.logits([ids])[0]
        for t in range(len(ids)):
            for k in range(2):
                if not num_prompt <= t + 2 + k < len(ids):
                    continue
                x = hidden[t]
                for j in range(2):
                    x = x + silu(self.weights[f"{k}.{j}.linear.weight"] @ x + self.weights[f"{k}.{j}.linear.bias"])
                logits = self.target.weights["lm_head.weight"] @ x
                soft = np.exp(log_softmax(teacher[t + 1 + k]))
                right = logits.argmax() == teacher[t + 1 + k].argmax()
                yield k, -(soft * log_softmax(logits)).sum(), right


class DraftModelOracle:
    decay, num_ahead, layout = 1.0, 1, None

    def __init__(self, folder, target, head):
        self.model = NumpyLlama(folder)
        self.weights, self.target = self.model.weights, target

    def guesses(self, ids, num_prompt, draw):
        own, teacher = self.model.logits([ids])[0], self.target.logits([ids])[0]
        for t in range(max(num_prompt, 1) - 1, len(ids) - 1):
            soft = np.exp(log_softmax(teacher[t]))
            yield 0, -(soft * log_softmax(own[t])).sum(), own[t].argmax() == teacher[t].argmax()


class EagleOracle:
    """Every chain anew, as `Eagle3Oracle`; the states themselves are taught too, by a smooth L1."""

    decay, num_ahead, layout = 0.8, 3, None

    def __init__(self, folder, target, head):
        self.model = NumpyEagle(folder, target, "eagle")
        self.weights, self.target = self.model.weights, target

    def guesses(self, ids, num_prompt, draw):
        hidden, teacher = self.target.hidden([ids])[0][0], self.target.logits([ids])[0]
        for t in range(len(ids)):
            features, tokens = list(hidden[: t + 1]), list(ids[1 : t + 2])
            for k in range(3):
                if t + 2 + k >= len(ids):
                    break
                logits, states = self.model.run(np.array(features), tokens)
                features, tokens = [*features, states[-1]], [*tokens, ids[t + 2 + k]]
                if t + 2 + k < num_prompt:
                    continue
                apart = np.abs(states[-1] - hidden[t + 1 + k])
                smooth = np.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
                soft = np.exp(log_softmax(teacher[t + 1 + k]))
                loss = smooth - 0.1 * (soft * log_softmax(logits[-1])).sum()
                yield k, loss, logits[-1].argmax() == teacher[t + 1 + k].argmax()


class MlpSpeculatorOracle:
    decay, num_ahead, layout = 0.8, 2, None

    def __init__(self, folder, target, head):
        self.model = NumpyMlpSpeculator(folder, target)
        self.weights, self.target = self.model.weights, target

    def guesses(self, ids, num_prompt, draw):
        hidden, teacher = self.target.hidden([ids])[0][0], self.target.logits([ids])[0]
        for t in range(len(ids)):
            for k, logits in enumerate(self.model.logits(hidden[t], ids[t + 1 : t + 3])):
                if not num_prompt <= t + 2 + k < len(ids):
                    continue
                soft = np.exp(log_softmax(teacher[t + 1 + k]))
                right = logits.argmax() == teacher[t + 1 + k].argmax()
                yield k, -(soft * log_softmax(logits)).sum(), right


ORACLES = {"eagle3": Eagle3Oracle, "dflash": DflashOracle, "medusa": MedusaOracle, "draft_model": DraftModelOracle}
ORACLES |= {"eagle": EagleOracle, "mlp_speculator": MlpSpeculatorOracle}
HEAVY = ("dflash", "eagle", "eagle3")


def oracle_loss(oracle, batch):
    """(the loss, the counts by place ahead) of one micro-batch."""
    losses, asked, right = ([[] for _ in range(oracle.num_ahead)] for _ in range(3))
    rows = zip(batch.token_ids_BT, batch.len_B, batch.num_prompt_B, batch.draw_B, strict=True)
    for ids, length, num_prompt, draw in rows:
        for k, loss, is_right in oracle.guesses(ids[:length].tolist(), int(num_prompt), int(draw)):
            asked[k].append(1)
            right[k].append(is_right)
            if loss is not None:
                losses[k].append(loss)
    loss = sum(oracle.decay**k * np.mean(each) for k, each in enumerate(losses) if each)
    return loss, [sum(each) for each in asked], [sum(each) for each in right], [len(each) for each in losses]


CASES = heavy_but(ORACLES, lambda name: name not in HEAVY)


@pytest.mark.parametrize("method", CASES)
def test_one_step_is_the_formula(method, recipe, target_folder, tmp_path):
    head = HEADS[method] | ({"layout": "speculators"} if method == "eagle3" else {})
    config = TrainConfig(**recipe, method=method, head=head, accumulate=2, weight_decay=0.1)
    config = config.model_copy(update={"batch_size": ROWS, "warmup_steps": 0})
    target, weights = open_target(config.model, "float32")
    corpus = read_corpus(Path(config.data), VOCAB)
    records = split(corpus, 4, None, 16).train
    trainer = make_trainer(config, target, weights, corpus, records)
    seen = see_corpus(tmp_path / "seen", target, weights, corpus, trainer.aux_streams, dtype=np.float32)
    batch = training_batch(corpus, seen, records, 0, 0, (2, ROWS, 9))
    micro = [jax.tree.map(lambda x, a=a: x[a], batch) for a in range(2)]
    rng = np.random.default_rng(0)
    # Away from where training begins: there some gradients are exactly zero.
    params = trainer.init(micro[0])
    params = jax.tree.map(lambda x: np.asarray(x + 0.2 * rng.standard_normal(x.shape), np.float32), params)

    trainer.export(params, tmp_path / "before")
    oracle = ORACLES[method](tmp_path / "before", Target(target_folder), head)

    def loss_of():
        return np.mean([oracle_loss(oracle, one)[0] for one in micro])

    optimizer = make_optimizer(config)
    step = make_step(trainer, optimizer)
    state = TrainState(step=np.int32(0), params=params, opt_state=optimizer.init(params))
    after, output = step(jax.tree.map(jax.numpy.array, state), trainer.frozen, batch)

    np.testing.assert_allclose(float(output.loss), loss_of(), rtol=2e-5)
    counts = [oracle_loss(oracle, one)[1:] for one in micro]
    asked, right, taught = (np.sum([count[i] for count in counts], axis=0) for i in range(3))
    assert np.asarray(output.metrics.num_asked_K).tolist() == asked.tolist()
    assert np.asarray(output.metrics.num_right_K).tolist() == right.tolist()
    assert np.asarray(output.metrics.num_taught_K).tolist() == taught.tolist()
    assert min(taught) > 0

    # The gradient, along one direction a tensor, by central differences of the formula.
    gradient = jax.jit(jax.grad(lambda params, frozen, one: trainer.loss(params, frozen, one)[0]))
    both = [gradient(params, trainer.frozen, one) for one in micro]
    grads = jax.tree.map(lambda a, b: (a + b) / 2, *both)
    trainer.export(grads, tmp_path / "grads")
    mine = ORACLES[method](tmp_path / "grads", oracle.target, head).weights
    for name, tensor in oracle.weights.items():
        if name in ("d2t", "t2d"):
            continue
        direction = rng.standard_normal(tensor.shape) / np.sqrt(tensor.size)
        ends = []
        for sign in (1, -1):
            tensor += sign * 1e-4 * direction
            ends.append(loss_of())
            tensor -= sign * 1e-4 * direction
        slope = (ends[0] - ends[1]) / 2e-4
        assert np.isclose((mine[name] * direction).sum(), slope, rtol=2e-3, atol=2e-5), name

    # AdamW's first step after clipping: the moments' ratio is the gradient over its own magnitude.
    flat = [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)]
    norm = np.sqrt(sum((g * g).sum() for g in flat))
    np.testing.assert_allclose(float(output.grad_norm), norm, rtol=1e-4)
    scale = min(1.0, config.clip_norm / norm)
    for old, new, grad in zip(jax.tree.leaves(params), jax.tree.leaves(after.params), flat, strict=True):
        update = grad * scale / (np.abs(grad * scale) + 1e-8) + 0.1 * old
        # Where a gradient is as small as its own rounding, its sign is not certain.
        is_sure = np.abs(grad) > 1e-4 * norm
        np.testing.assert_allclose(np.asarray(new)[is_sure], (old - 0.01 * update)[is_sure], atol=2e-5)
    assert int(after.step) == 1
