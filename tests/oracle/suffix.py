"""Host. Suffix decoding by trying every suffix at every place, with nothing but lists."""

from collections import Counter


def suffix_guess(ids, limit, *, texts=None, depth=24, factor=1.0, min_prob=0.1):
    """The best continuation of ids after their last tokens, in the texts (by default in ids themselves)."""
    return best(ids, limit, texts=texts, depth=depth, factor=factor, min_prob=min_prob)[0]


def best(ids, limit, *, texts=None, depth=24, factor=1.0, min_prob=0.1):
    """(tokens, what the counts expect of them)."""
    found = ([], 0.0)
    for length in range(min(depth, len(ids)), 0, -1):
        pattern = ids[-length:]
        after = []  # what followed each place, oldest first
        for text in [ids] if texts is None else texts:
            ends = range(length, len(text) + (texts is not None))
            after += [text[end:] for end in ends if text[end - length : end] == pattern]
        guess, score = [], 0.0
        while len(guess) < min(limit, int(factor * length)):
            n = len(guess)
            going_on = [rest[n] for rest in after if rest[:n] == guess and len(rest) > n]
            if not going_on:
                break
            counts = Counter(going_on)
            token = next(token for token in reversed(going_on) if counts[token] == max(counts.values()))
            prob = counts[token] / (len(after) + 1)
            if prob < min_prob:
                break
            guess.append(token)
            score += prob
        if score > found[1]:
            found = (guess, score)
    return found
