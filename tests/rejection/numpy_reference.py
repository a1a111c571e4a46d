"""Host. Rejection sampling written a second time, one row and one position after the other, in float64 numpy.

Shares nothing with jaxspec: its own hash, its own filters by sorting, its own rules.
"""

from dataclasses import dataclass

import numpy as np

ACCEPT, RECOVER, BONUS, DRAFT, COUPLED = range(5)


def hash_words(key, count):
    """Threefry-2x32, 20 rounds, on Python integers."""
    mask = 0xFFFFFFFF
    k = (int(key[0]), int(key[1]), int(key[0]) ^ int(key[1]) ^ 0x1BD11BDA)
    a, b = (int(count[0]) + k[0]) & mask, (int(count[1]) + k[1]) & mask
    for r in range(20):
        turn = (13, 15, 26, 6, 17, 29, 16, 24)[r % 8]
        a = (a + b) & mask
        b = (((b << turn) | (b >> (32 - turn))) & mask) ^ a
        if r % 4 == 3:
            i = r // 4 + 1
            a, b = (a + k[i % 3]) & mask, (b + k[(i + 1) % 3] + i) & mask
    return a, b


def unit(word):
    return ((word >> 9) + 0.5) / 2**23


def noise(key, vocab_size):
    return np.array([-np.log(-np.log(unit(hash_words(key, (v, 0))[0]))) for v in range(vocab_size)])


@dataclass
class Row:
    """One row's sampling: a key of two words and the parameters of its table."""

    key: tuple[int, int]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()

    def draw_key(self, anchor, offset, purpose):
        return hash_words(self.key, (anchor, offset * 16 + purpose))


def kept_logits(logits_V, row):
    """log of the row's target distribution, up to a constant."""
    x = np.asarray(logits_V, np.float64) / row.temperature
    x = np.where(x >= x.max() + np.log(max(row.min_p, 1e-300)), x, -np.inf)
    if 0 < row.top_k < len(x):
        x = np.where(x >= np.sort(x)[-row.top_k], x, -np.inf)
    prob = softmax(x)
    order = np.argsort(-prob, kind="stable")
    before = np.cumsum(prob[order]) - prob[order]
    return np.where(prob >= prob[order][before < row.top_p].min(), x, -np.inf)


def softmax(x):
    weight = np.exp(x - x.max())
    return weight / weight.sum()


def penalised(logits_V, row, drafts):
    """The logits of the token that follows the row's output and these drafts."""
    logits_V = np.array(logits_V, np.float64)
    output = [*row.output, *drafts]
    for token in range(len(logits_V)):
        times = output.count(token)
        if times or token in row.prompt:
            logits_V[token] *= 1 / row.repetition if logits_V[token] > 0 else row.repetition
        logits_V[token] -= row.frequency * times + row.presence * (times > 0)
    return logits_V


def judge(logits_JV, drafts, draft_logits_KV, row, anchor, rule, rates=None):
    """(tokens of the round, how many of them are accepted drafts) of one row with these drafts."""
    vocab_size = np.shape(logits_JV)[1]
    logits_JV = [penalised(logits_JV[place], row, drafts[:place]) for place in range(len(drafts) + 1)]

    def uniform(place):
        return unit(row.draw_key(anchor, place, ACCEPT)[0])

    def draw(weight_V, place):
        key = row.draw_key(anchor, place, BONUS if place == len(drafts) else RECOVER)
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(weight_V) + noise(key, vocab_size)))

    def is_id(place):
        return place < len(drafts) and 0 <= drafts[place] < vocab_size

    def target(place):
        return softmax(kept_logits(logits_JV[place], row))

    def drafted_from(place):
        if not is_id(place):
            return np.zeros(vocab_size)
        if draft_logits_KV is None:
            return np.eye(vocab_size)[drafts[place]]
        return softmax(np.asarray(draft_logits_KV[place], np.float64))

    def own_pick(place):
        if row.temperature == 0:
            return int(np.argmax(logits_JV[place]))
        if rule == "coupled":
            key = row.draw_key(anchor + place, 0, COUPLED)
            return int(np.argmax(kept_logits(logits_JV[place], row) + noise(key, vocab_size)))
        return draw(np.maximum(target(place) - drafted_from(place), 0), place)

    if rule == "block" and row.temperature > 0:
        return judge_block(drafts, [is_id(place) for place in range(len(drafts))], target, drafted_from, uniform, draw)
    accepted = 0
    while is_id(accepted):
        draft, u = drafts[accepted], uniform(accepted)
        if rates is not None:
            before = rates[accepted - 1] if accepted else 1.0
            stands = u * before < rates[accepted]
        elif row.temperature == 0 or rule == "coupled":
            stands = own_pick(accepted) == draft
        else:
            stands = target(accepted)[draft] > u * drafted_from(accepted)[draft] > 0
        if not stands:
            break
        accepted += 1
    return [*drafts[:accepted], own_pick(accepted)], accepted


def judge_block(drafts, are_ids, target, drafted_from, uniform, draw):
    """Block verification as behaviours.md 2.5 has it; the drafts before the first that is no id are the block."""
    length = are_ids.index(False) if False in are_ids else len(drafts)
    joint = [1.0]
    for place in range(length):
        p, q = target(place)[drafts[place]], drafted_from(place)[drafts[place]]
        joint.append(min(joint[-1] * p / q, 1.0) if q > 0 else 0.0)
    accepted = 0
    for place in range(1, length + 1):
        h = joint[place]
        if place < length:
            left = np.maximum(joint[place] * target(place) - drafted_from(place), 0).sum()
            h = left / (left + 1 - joint[place]) if left + 1 - joint[place] > 0 else 1.0
        if uniform(place - 1) <= h:
            accepted = place
    weights = target(accepted)
    if accepted < length:
        weights = np.maximum(joint[accepted] * weights - drafted_from(accepted), 0)
    return [*drafts[:accepted], draw(weights, accepted)], accepted
