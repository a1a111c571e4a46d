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


def judge(logits_JV, drafts, draft_logits_KV, row, anchor, rule):
    """(tokens of the round, how many of them are accepted drafts) of one row with these drafts."""
    logits_JV = np.asarray(logits_JV, np.float64)
    vocab_size = logits_JV.shape[1]
    tokens = []
    for place in range(len(drafts) + 1):
        draft = drafts[place] if place < len(drafts) else None
        is_id = draft is not None and 0 <= draft < vocab_size
        if row.temperature == 0:
            token = int(np.argmax(logits_JV[place]))
        elif rule == "coupled":
            key = row.draw_key(anchor + place, 0, COUPLED)
            token = int(np.argmax(kept_logits(logits_JV[place], row) + noise(key, vocab_size)))
        else:
            x = kept_logits(logits_JV[place], row)
            p, q = softmax(x), np.zeros(vocab_size)
            if is_id and draft_logits_KV is None:
                q[draft] = 1.0
            elif is_id:
                q = softmax(np.asarray(draft_logits_KV[place], np.float64))
            u = unit(row.draw_key(anchor, place, ACCEPT)[0])
            if is_id and p[draft] > u * q[draft] > 0:
                token = draft
            else:
                key = row.draw_key(anchor, place, BONUS if draft is None else RECOVER)
                rest = np.maximum(p - q, 0)
                with np.errstate(divide="ignore"):
                    token = int(np.argmax(np.log(rest) + noise(key, vocab_size)))
                return [*tokens, token], len(tokens)
        tokens.append(token)
        if token != draft:
            break
    return tokens, len(tokens) - 1
