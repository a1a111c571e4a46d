"""Host. What sampling parameters do to one position's logits before temperature, one token id at a time, in float64."""

import numpy as np


def edited(logits_V, params, prompt, output, *, bad_words_ids=(), stop_ids=()):
    """bias; then removals by allowed ids, bad words and min_tokens; then penalties."""
    x = np.array(logits_V, np.float64)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in range(len(x)):
        is_forbidden = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        for word in bad_words_ids:
            is_forbidden |= [*output, token][-len(word) :] == list(word)
        is_forbidden |= len(output) < params.min_tokens and token in stop_ids
        if is_forbidden:
            x[token] = -np.inf
    for token in range(len(x)):
        count = list(output).count(token)
        if count or token in prompt:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return x
