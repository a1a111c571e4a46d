"""Host. The two proofs of losslessness: token by token beside plain decoding, and by the distribution of what came."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxspec.config.resolve import ResolvedConfig
from jaxspec.engine.core import EngineCore
from jaxspec.errors import ConfigError, RequestError
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.sampling.params import SamplingParams
from jaxspec.text.bad_words import bad_word_token_ids
from jaxspec.tools import distribution
from jaxspec.tools.recording import Answer, Asked, Recorder, Round
from jaxspec.tools.statistics import ALPHA, DistributionTest
from jaxspec.tools.teacher import Teacher

# How far apart two tokens' logits may be for rounding to decide between them: passes over one position and over several
# do not sum in the same order. An int8 cache rounds a sum that lies on the edge of two integers to either.
MARGINS = {"float32": 1e-3, "bfloat16": 0.25, "int8": 0.1}

PROVED_BY_EQUALITY = ("greedy", "coupled")
PROVED_BY_DISTRIBUTION = ("standard", "block")
WAVE_BYTES = 256 * 2**20  # of drafters' logits kept at a time


@dataclass(frozen=True)
class Finding:
    """A token that was not to be expected.

    kind: "differs" from plain decoding, the first time; "unlike its prefix", judged by the text before it alone; "ends"
    where plain decoding goes on or the other way round; "outside" the filters; "improbable".
    position: in the answer, from 0; gap: of logits, 0 where both tokens lead, None where there is none to tell.
    """

    kind: str
    prompt: int
    seed: int
    position: int
    token: int | None
    expected: int | None
    gap: float | None


@dataclass
class _Found:
    answers: list[Answer] = field(default_factory=list)
    ties: list[Finding] = field(default_factory=list)
    faults: list[Finding] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


def rule_of(core: EngineCore, params: SamplingParams) -> str:
    """By which rule such requests are judged: "greedy" or the engine's.

    Raises: ConfigError for an engine that does not speculate, or whose rule promises nothing or cannot be judged.
    """
    if core.config.speculative_config is None:
        raise ConfigError("without speculation there is nothing to verify; give speculative_config")
    if core.parts.target.processors:
        raise ConfigError("verify cannot judge an engine's own logits processors; build it without them")
    rule = "greedy" if params.is_greedy else core.parts.target.rule
    if rule not in PROVED_BY_EQUALITY + PROVED_BY_DISTRIBUTION:
        raise ConfigError(f"rejection_sample_method {rule!r} does not promise lossless answers; choose another")
    return rule


def margin_of(config: ResolvedConfig) -> float:
    """The coarser of what weights and cache are kept in."""
    return max(MARGINS[config.dtype], MARGINS[config.kv_cache_dtype])


def verify(
    core: EngineCore,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    seed: int = 0,
    margin: float | None = None,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Prove that an engine's speculative answers are those of plain decoding, or find where they are not.

    Greedy and coupled answers are compared with plain decoding's, token by token; under the other rules each token is
    tested against the distribution that a plain forward pass over its own prefix gives it.

    Args:
        core: of an idle engine.
        prompts: token ids.
        params: of every request; with n > 1 each prompt is asked n times, by requests with seeds of their own.
        seed: of the first request, and of the statistics' own random numbers.
        margin: tokens whose logits are nearer than this are a tie; None: what MARGINS has for the engine's dtypes.

    Returns:
        The report: "verdict" is "lossless" or "fault", "ties" and "faults" list `Finding`s, "tests" the statistics.

    Raises:
        ConfigError: there is nothing to verify, or nothing was drafted. RequestError: of a prompt or a parameter.
    """
    distribution.check_params(params)
    rule = rule_of(core, params)
    if not prompts:
        raise RequestError("verify needs prompts, got none; give at least one", param="prompts")
    margin = margin_of(core.config) if margin is None else margin
    asked = [Asked(i % len(prompts), prompts[i % len(prompts)], seed + i) for i in range(len(prompts) * params.n)]
    one = dataclasses.replace(params, n=1)
    stats = AcceptanceStats(core.config.num_speculative_tokens)
    if rule in PROVED_BY_EQUALITY:
        with tqdm(total=3 * len(asked), desc="answers", disable=not show_progress) as bar:
            found = _by_equality(core, asked, one, margin, stats, bar)
    else:
        with tqdm(total=2 * len(asked), desc="answers", disable=not show_progress) as bar:
            found = _by_distribution(core, asked, one, margin, stats, bar)
    if stats.num_draft_tokens == 0:
        raise ConfigError(
            "not one token was drafted, so nothing was verified; give more tokens or other prompts, for n-grams such "
            "as repeat themselves"
        )
    faults: list[dict[str, Any]] = [asdict(fault) for fault in found.faults]
    faults += [{"kind": "distribution"} | test for test in found.more.get("tests", ()) if test["failed"]]
    return {
        "verdict": "fault" if faults else "lossless",
        "rule": rule,
        "exact": core.config.exact,
        "margin": margin,
        "num_prompts": len(prompts),
        "num_answers": len(found.answers),
        "num_tokens": sum(len(answer.token_ids) for answer in found.answers),
        "num_ties": len(found.ties),
        "num_faults": len(faults),
        "ties": [asdict(tie) for tie in found.ties],
        "faults": faults,
        **found.more,
        "acceptance": stats.as_dict(),
    }


def _by_equality(
    core: EngineCore, asked: Sequence[Asked], params: SamplingParams, margin: float, stats: AcceptanceStats, bar: tqdm
) -> _Found:
    """Every answer beside plain decoding's, up to their first difference; and every token of it beside what a plain
    forward pass over its own prefix says, so that one difference does not hide what comes after it."""
    recorder = Recorder(core)
    answers = recorder.run(asked, params, stats, bar=bar)
    plain = recorder.run_plain(asked, params, bar=bar)
    teacher = Teacher(core.parts, _longest(answers), one_by_one=True)
    found = _Found(answers)
    num_equal = 0
    for answer, other, logits_TV in zip(answers, plain, _taught(core, teacher, answers, params), strict=True):
        bar.update()
        differs_at = _first_difference(answer.token_ids, other.token_ids)
        num_equal += differs_at is None
        for finding in _unexpected(answer, other.token_ids, differs_at, logits_TV, params):
            # Where rounding has no part, not even a tie may fall the other way.
            is_excused = finding.gap is not None and finding.gap <= margin
            is_excused &= not (core.config.exact and finding.kind == "differs")
            (found.ties if is_excused else found.faults).append(finding)
    found.more = {"num_equal_answers": num_equal}
    return found


def _unexpected(
    answer: Answer, plain_ids: list[int], differs_at: int | None, logits_TV: np.ndarray, params: SamplingParams
) -> Iterator[Finding]:
    """Tokens of an answer that are not plain decoding's, or not what their own prefix asks for."""
    for place, token in enumerate(answer.token_ids):
        noise_V = None
        if not params.is_greedy:
            noise_V = distribution.coupled_noise(answer.key, len(answer.asked.prompt) + place, logits_TV.shape[1])
        gap = distribution.gap(logits_TV[place], noise_V, token, params)
        if place == differs_at and place < len(plain_ids):
            other = plain_ids[place]
            gap = max(gap, distribution.gap(logits_TV[place], noise_V, other, params))
            yield Finding("differs", *_name(answer, place), other, _finite(gap))
        elif gap > 0:
            expected = distribution.pick(logits_TV[place], noise_V, params)
            yield Finding("unlike its prefix", *_name(answer, place), expected, _finite(gap))
    shorter = min(len(answer.token_ids), len(plain_ids))
    if differs_at == shorter:
        token, other = [([*ids, None])[shorter] for ids in (answer.token_ids, plain_ids)]
        yield Finding("ends", answer.asked.prompt_index, answer.asked.seed, shorter, token, other, None)


def _name(answer: Answer, place: int) -> tuple[int, int, int, int]:
    return answer.asked.prompt_index, answer.asked.seed, place, answer.token_ids[place]


def _by_distribution(
    core: EngineCore, asked: Sequence[Asked], params: SamplingParams, margin: float, stats: AcceptanceStats, bar: tqdm
) -> _Found:
    """Every token against its distribution, in groups by its place in the round."""
    found, test, recorder = _Found(), DistributionTest(asked[0].seed), Recorder(core)
    longest = max(len(one.prompt) for one in asked) + _most_tokens(core, params)
    teacher = Teacher(core.parts, longest, one_by_one=False)
    wave = _wave_size(core, params)
    for start in range(0, len(asked), wave):
        answers = recorder.run(asked[start : start + wave], params, stats, keep_drafts=True, bar=bar)
        for answer, logits_TV in zip(answers, _taught(core, teacher, answers, params), strict=True):
            bar.update()
            prob_TV = distribution.probabilities(logits_TV, params)
            for place, (group, draft_prob_V) in enumerate(_places(answer, logits_TV.shape[1])):
                token = answer.token_ids[place]
                if prob_TV[place, token] == 0:
                    gap = distribution.gap_to_kept(logits_TV[place], token, params)
                    finding = Finding("outside", *_name(answer, place), None, _finite(gap))
                    (found.ties if gap <= margin else found.faults).append(finding)
                test.add(group, prob_TV[place], token, draft_prob_V, (len(found.answers), place))
            answer.rounds.clear()  # their logits are large
            found.answers.append(answer)
    tests, improbable = test.results()
    for number, place in improbable:
        answer = found.answers[number]
        found.faults.append(Finding("improbable", *_name(answer, place), None, None))
    found.more = {"tests": tests, "alpha": ALPHA}
    return found


def _places(answer: Answer, vocab_size: int) -> Iterator[tuple[str, np.ndarray | None]]:
    """For each token of an answer the group it is counted in, and what the draft in its place was drawn from.

    "first", "second" and "later" draft of a round; "bonus", the token after all drafts; "after rejection", the first of
    a round that follows a rejected draft; "undrafted" in a round without drafts. All known before the token is drawn.
    """
    was_rejected, num_left = False, len(answer.token_ids)
    for one in answer.rounds:
        for j in range(min(len(one.token_ids), num_left)):
            if j == 0 and was_rejected:
                group = "after rejection"
            elif one.num_drafted == 0:
                group = "undrafted"
            elif j == one.num_drafted:
                group = "bonus"
            else:
                group = ("first", "second")[j] if j < 2 else "later"
            yield group, _draft_prob(one, j, vocab_size) if j < one.num_drafted else None
        num_left -= len(one.token_ids)
        was_rejected = one.num_accepted < one.num_drafted


def _draft_prob(one: Round, j: int, vocab_size: int) -> np.ndarray:
    if one.draft_logits_KV is not None:
        logits_V = one.draft_logits_KV[j].astype(np.float64)
        weight_V = np.exp(logits_V - logits_V.max())
        return weight_V / weight_V.sum()
    prob_V = np.zeros(vocab_size)
    token = one.draft_token_ids[j] if one.draft_token_ids is not None else -1
    if 0 <= token < vocab_size:  # a draft that is no token id is never accepted
        prob_V[token] = 1.0
    return prob_V


def _taught(
    core: EngineCore, teacher: Teacher, answers: Sequence[Answer], params: SamplingParams
) -> Iterator[np.ndarray]:
    """Each answer's logits by a plain forward pass over it, adjusted as its parameters ask."""
    eos_ids = () if params.ignore_eos else core.parts.target.config.eos_token_ids
    stop_ids = {*eos_ids, *(params.stop_token_ids or ())}
    tokenizer = core.parts.tokenizer
    bad_words = bad_word_token_ids(params.bad_words or (), tokenizer) if tokenizer is not None else ()
    raw = teacher.logits([(answer.asked.prompt, answer.token_ids) for answer in answers])
    for answer, raw_TV in zip(answers, raw, strict=True):
        yield distribution.adjusted_logits(raw_TV, params, answer.asked.prompt, answer.token_ids, stop_ids, bad_words)


def _first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Where two texts part; the shorter one's length if it is a prefix of the other."""
    for place, (token, other) in enumerate(zip(ids, others, strict=False)):
        if token != other:
            return place
    return min(len(ids), len(others)) if len(ids) != len(others) else None


def _longest(answers: Sequence[Answer]) -> int:
    return max(len(answer.asked.prompt) + len(answer.token_ids) for answer in answers)


def _most_tokens(core: EngineCore, params: SamplingParams) -> int:
    return min(params.max_tokens or core.config.max_model_len, core.config.max_model_len)


def _wave_size(core: EngineCore, params: SamplingParams) -> int:
    """Answers run before their tokens are judged: four times the rows, so that requests join and leave, if it fits."""
    rows = core.config.max_num_seqs
    bytes_an_answer = _most_tokens(core, params) * core.parts.target.config.vocab_size * 4
    return max(rows, min(4 * rows, WAVE_BYTES // bytes_an_answer))


def _finite(gap: float) -> float | None:
    return gap if np.isfinite(gap) else None
