"""Host. What a token may be drawn from, by raw logits and sampling parameters, in float64 numpy.

Written apart from the engine's own processing, so that it can judge that: it sorts where the engine bisects, and shares
nothing with it but the order of steps that docs/design.md promises.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxspec.errors import RequestError
from jaxspec.keys import Purpose, threefry2x32
from jaxspec.sampling.params import SamplingParams

LARGEST_GAP = 8.0  # beyond this no rounding error is to blame

# Parameters that shape a distribution in ways that are not written a second time here, and their neutral values.
NOT_JUDGED = {"structured_outputs": (None,), "logits_processors": (None, ())}


def check_params(params: SamplingParams) -> None:
    """Raises: RequestError for a parameter whose effect cannot be judged."""
    for name, neutral in NOT_JUDGED.items():
        if getattr(params, name, None) not in neutral:
            raise RequestError(f"verify cannot judge {name} yet; leave it out", param=name)


def adjusted_logits(
    logits_TV: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
    stop_ids: Collection[int],
    bad_words: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """f64 logits of an answer's tokens after bias, what removes tokens, and penalties; each sees those before it.

    Args:
        logits_TV: raw; row t is of the answer's token t.
        stop_ids: EOS (unless ignored) and stop token ids; removed before min_tokens.
        bad_words: as token ids; the last of one is removed where the answer so far ends in those before it.
    """
    logits_TV = np.array(logits_TV, np.float64)
    vocab_size = logits_TV.shape[1]
    for token_id, bias in (params.logit_bias or {}).items():
        logits_TV[:, int(token_id)] += bias
    if params.allowed_token_ids is not None:
        is_barred_V = np.ones(vocab_size, bool)
        is_barred_V[list(params.allowed_token_ids)] = False
        logits_TV[:, is_barred_V] = -np.inf
    logits_TV[: params.min_tokens, list(stop_ids)] = -np.inf
    for *before, last in bad_words:
        for place in range(len(before), len(logits_TV)):
            if list(answer[place - len(before) : place]) == before:
                logits_TV[place, last] = -np.inf

    presence, frequency, repetition = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    if presence == 0 and frequency == 0 and repetition == 1:
        return logits_TV
    count_V, is_seen_V = np.zeros(vocab_size), np.zeros(vocab_size, bool)
    is_seen_V[list(prompt)] = True
    for logits_V, token_id in zip(logits_TV, answer, strict=True):
        repeated_V = np.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
        logits_V[:] = np.where(is_seen_V, repeated_V, logits_V) - frequency * count_V - presence * (count_V > 0)
        count_V[token_id] += 1
        is_seen_V[token_id] = True
    return logits_TV


def kept(x_NV: np.ndarray, params: SamplingParams) -> np.ndarray:
    """bool[N, V]: what min-p, top-k and top-p, in this order, leave of logits that are divided by the temperature.

    A token is kept if what is likelier does not fill the bound by itself, so equal ones at the edge are all kept.
    """
    vocab_size = x_NV.shape[1]
    peak_N1 = x_NV.max(axis=1, keepdims=True)
    cutoff_N1 = np.full_like(peak_N1, -np.inf)
    if params.min_p > 0:
        cutoff_N1 = peak_N1 + np.log(params.min_p)
    if 0 < params.top_k < vocab_size or params.top_p < 1:
        sorted_NV = -np.sort(-x_NV, axis=1)
        if 0 < params.top_k < vocab_size:
            cutoff_N1 = np.maximum(cutoff_N1, sorted_NV[:, params.top_k - 1 : params.top_k])
        if params.top_p < 1:
            weight_NV = np.where(sorted_NV >= cutoff_N1, np.exp(sorted_NV - peak_N1), 0)
            before_NV = np.cumsum(weight_NV, axis=1) - weight_NV
            is_in_NV = before_NV < params.top_p * weight_NV.sum(axis=1, keepdims=True)
            last_N1 = is_in_NV.sum(axis=1, keepdims=True) - 1
            cutoff_N1 = np.maximum(cutoff_N1, np.take_along_axis(sorted_NV, last_N1, axis=1))
    return (x_NV >= cutoff_N1) & (x_NV > -np.inf)


def probabilities(logits_NV: np.ndarray, params: SamplingParams) -> np.ndarray:
    """f64[N, V]: the distribution that a token of a sampled request has, by adjusted logits."""
    x_NV = logits_NV / params.temperature
    x_NV = np.where(kept(x_NV, params), x_NV, -np.inf)
    weight_NV = np.exp(x_NV - x_NV.max(axis=1, keepdims=True))
    return weight_NV / weight_NV.sum(axis=1, keepdims=True)


def kept_if_shifted(x_V: np.ndarray, params: SamplingParams, shift: float) -> np.ndarray:
    """bool[V]: with a positive shift, every token that the filters can keep when errors of up to `shift` are added to
    each entry; with a negative one only such as they are sure to keep. At 0 the same as `kept`."""
    sorted_V = np.sort(x_V)
    is_possible_V, is_sure_V = _kept_by_min_p_and_top_k(x_V, sorted_V, params, np.array([[shift], [-shift]]))
    if params.top_p >= 1:
        return is_possible_V
    # In favour of a token: what stands above it comes down and may be gone before, what is below goes up and is there.
    weight_V = np.exp(x_V - sorted_V[-1])
    threshold_V = x_V + 2 * shift
    above_V = _mass_above(x_V, weight_V * is_sure_V, threshold_V)
    rest_V = (weight_V * is_possible_V).sum() - _mass_above(x_V, weight_V * is_possible_V, threshold_V)
    if shift < 0:  # a token does not stand above itself
        above_V, rest_V = above_V - weight_V * is_sure_V, rest_V + weight_V * is_possible_V
    before_V, after_V = above_V * np.exp(-shift), rest_V * np.exp(shift)
    return is_possible_V & ((before_V < params.top_p * (before_V + after_V)) | (before_V <= 0))


def _kept_by_min_p_and_top_k(
    x_V: np.ndarray, sorted_V: np.ndarray, params: SamplingParams, shift_S1: np.ndarray
) -> np.ndarray:
    """bool[S, V]: tokens kept were they `shift` higher and all others lower by it."""
    threshold_SV = x_V[None] + 2 * shift_S1
    is_kept_SV = threshold_SV > -np.inf
    if params.min_p > 0:
        is_top_V = x_V == sorted_V[-1]
        other_peak_V = np.where(is_top_V, sorted_V[-2] if x_V.size > 1 else -np.inf, sorted_V[-1])
        is_kept_SV = is_kept_SV & (threshold_SV >= other_peak_V + np.log(params.min_p))
    if 0 < params.top_k < x_V.size:
        num_above_SV = x_V.size - np.searchsorted(sorted_V, threshold_SV, side="right") - (shift_S1 < 0)
        is_kept_SV = is_kept_SV & (num_above_SV < params.top_k)
    return is_kept_SV


def _mass_above(x_V: np.ndarray, weight_V: np.ndarray, threshold_V: np.ndarray) -> np.ndarray:
    """For each threshold the weight of the entries above it."""
    order_V = np.argsort(x_V)
    from_V = np.append(np.cumsum(weight_V[order_V][::-1])[::-1], 0)
    return from_V[np.searchsorted(x_V[order_V], threshold_V, side="right")]


def pick(logits_V: np.ndarray, noise_V: np.ndarray | None, params: SamplingParams) -> int:
    """The token that adjusted logits ask for: the largest, after noise and filters where sampled."""
    if noise_V is None:
        return int(logits_V.argmax())
    x_V = logits_V / params.temperature
    return int(np.where(kept(x_V[None], params)[0], x_V + noise_V, -np.inf).argmax())


def gap(logits_V: np.ndarray, noise_V: np.ndarray | None, token_id: int, params: SamplingParams) -> float:
    """How far the token is from being the one that adjusted logits ask for; 0 if it is.

    Greedy: by how much the largest logit exceeds its own. Sampled: twice the smallest change of each logit that could
    let it lead, with its noise and past the filters; inf if no change up to LARGEST_GAP could.
    """
    if noise_V is None:
        return float(logits_V.max() - logits_V[token_id])
    x_V = logits_V / params.temperature
    score_V = x_V + noise_V

    def leads(shift: float) -> bool:
        if not kept_if_shifted(x_V, params, shift)[token_id]:
            return False
        rival_V = np.where(kept_if_shifted(x_V, params, -shift), score_V, -np.inf)
        rival_V[token_id] = -np.inf
        return bool(score_V[token_id] + shift >= rival_V.max() - shift)

    return _twice_least_shift(leads, params.temperature)


def gap_to_kept(logits_V: np.ndarray, token_id: int, params: SamplingParams) -> float:
    """Twice the smallest change of each adjusted logit that could bring the token past the filters; see `gap`."""
    x_V = logits_V / params.temperature
    return _twice_least_shift(lambda shift: bool(kept_if_shifted(x_V, params, shift)[token_id]), params.temperature)


def _twice_least_shift(is_enough: Callable[[float], bool], temperature: float) -> float:
    """By bisection, in units of logits; is_enough is given it in units of logits divided by the temperature."""
    low, high = 0.0, LARGEST_GAP / 2 / temperature
    if is_enough(low):
        return 0.0
    if not is_enough(high):
        return float("inf")
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return 2 * high * temperature


def coupled_noise(key_2: np.ndarray, position: int, vocab_size: int) -> np.ndarray:
    """f64[V]: the Gumbel noise of a request's token at an absolute position under the coupled rule; key_2 u32."""
    ids_V = np.arange(vocab_size, dtype=np.uint32)
    place, purpose = np.array([position], np.uint32), np.array([Purpose.COUPLED], np.uint32)
    with np.errstate(over="ignore"):
        token_key = threefry2x32(key_2[:1], key_2[1:], place, purpose)
        word_V, _ = threefry2x32(*token_key, ids_V, np.zeros_like(ids_V))
    return -np.log(-np.log(((word_V >> np.uint32(9)) + 0.5) * 2.0**-23))
