"""Host. Makes a corpus: the instruct model writes questions, the engine answers them in big batches, shard by shard.

A shard depends on the recipe and its own number alone: an interrupted run goes on where it stopped, and a shard made
again on the same machine is the same.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator

from jaxspec.config.base import StrictConfig
from jaxspec.engine.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.sampling.params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.data.kinds import about_a_text, beginning
from jaxspec.train.data.prompts import read_prompts
from jaxspec.train.data.shards import KINDS, Record, read_shard, shard_paths, write_shard

logger = logging.getLogger(__name__)

_MARK = "\x02"  # where the user's words stand in a rendered template
_MIN_QUESTION_TOKENS = 4


class DataConfig(StrictConfig):
    """What `python -m jaxspec.train.data --config FILE` makes."""

    TITLE: ClassVar[str] = "data config"

    model: str = Field(description="the instruct model that answers, and asks: alias, folder or .gguf file")
    output: str = Field(description="folder of the shards; made if it is not there, and continued if it is")
    num_tokens: int = Field(1_000_000, ge=1, description="tokens wanted; the run ends with the shard that has them")
    seed: int = Field(0, ge=0, lt=2**31, description="root of every draw")
    prompts: str | None = Field(None, description="JSONL of {messages, kind}; null: the model asks itself")
    kinds: dict[str, float] = Field(
        {"chat": 0.5, "code": 0.15, "json": 0.1, "editing": 0.125, "summary": 0.125},
        description=f"how often each kind is asked, as weights; kinds: {', '.join(KINDS)}",
    )
    temperatures: tuple[float, ...] = Field(
        (0.0, 0.7, 1.0), min_length=1, strict=False, description="of answers, drawn evenly; 0 is greedy"
    )
    question_temperature: float = Field(0.8, ge=0.0, description="of the questions")
    max_question_tokens: int = Field(96, ge=8, description="longest question that the model writes")
    max_answer_tokens: int = Field(256, ge=1, description="longest answer, in tokens")
    max_text_tokens: int = Field(160, ge=8, description="longest text that is summarised or edited, in tokens")
    records_per_shard: int = Field(256, ge=1, description="conversations begun a shard; a few come to nothing")
    max_num_seqs: int = Field(32, ge=1, description="rows generated together")
    dtype: str = Field("auto", description="as the engine's")

    @field_validator("kinds")
    @classmethod
    def _known(cls, kinds: dict[str, float]) -> dict[str, float]:
        if not set(kinds) <= set(KINDS) or any(weight < 0 for weight in kinds.values()) or not sum(kinds.values()) > 0:
            raise ValueError(f"kinds must give weights of at least 0, not all 0, to {', '.join(KINDS)}")
        return kinds


@dataclass(frozen=True)
class _Asked:
    kind: str
    question: str


Generate = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], list[list[int]]]


def make_corpus(config: DataConfig, *, show_progress: bool = True) -> int:
    """Generate until the folder holds the tokens asked for; returns how many it holds.

    Raises: ConfigError, WeightsError, CapacityError.
    """
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = None if config.prompts is None else read_prompts(Path(config.prompts))
    num_tokens = sum(read_shard(path).num_tokens for path in shard_paths(folder))
    if num_tokens >= config.num_tokens:
        return num_tokens
    longest = config.max_question_tokens + 2 * config.max_text_tokens + config.max_answer_tokens + 64
    engine = Engine(
        config.model,
        dtype=config.dtype,  # type: ignore[arg-type]
        max_num_seqs=config.max_num_seqs,
        max_model_len=longest,
        enable_structured_outputs=False,
        use_tqdm=show_progress,
    )
    tokenizer = engine.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise ConfigError(f"{config.model} has no chat template; a corpus needs an instruct model with its tokenizer")

    def generate(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        outputs = engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=show_progress)
        return [list(output.outputs[0].token_ids) for output in outputs]

    index = 0
    while num_tokens < config.num_tokens:
        path = folder / f"tokens-{index:05}.npz"
        index += 1
        if path.exists():
            continue
        records = make_records(config, index - 1, tokenizer, generate, prompts)
        if not records:
            raise ConfigError(
                f"none of the shard's {config.records_per_shard} questions came to anything; raise max_question_tokens "
                "or records_per_shard, or give prompts in a file"
            )
        about = config.model_dump(mode="json", exclude={"output"}) | {"shard": index - 1}
        num_tokens += write_shard(path, records, vocab_size=tokenizer.vocab_size, about=about)
        logger.info("%s: %d records; %d tokens in all", path.name, len(records), num_tokens)
    return num_tokens


def make_records(
    config: DataConfig,
    shard: int,
    tokenizer: Tokenizer,
    generate: Generate,
    prompts: Sequence[tuple[str, list[dict[str, Any]]]] | None = None,
) -> list[Record]:
    """The records of one shard.

    Args:
        shard: its number; with the config's seed it settles every draw.
        generate: prompts and their sampling parameters in, the answers' tokens out.
        prompts: (kind, messages) to take in order in place of questions of the model's own.
    """
    rng = np.random.default_rng([config.seed, shard])
    if prompts is not None:
        first = shard * config.records_per_shard
        chosen = [prompts[(first + i) % len(prompts)] for i in range(config.records_per_shard)]
        return _answered(config, [(kind, _encode(tokenizer, turns)) for kind, turns in chosen], generate, rng)
    names = sorted(config.kinds)
    weights = np.array([config.kinds[name] for name in names])
    drawn = [names[i] for i in rng.choice(len(names), size=config.records_per_shard, p=weights / weights.sum())]
    alone = [kind for kind in drawn if kind not in ("editing", "summary")] or ["chat"]
    questions = _questions(config, alone, tokenizer, generate, rng)
    records = _answered(config, [(q.kind, _ask(tokenizer, q.question)) for q in questions], generate, rng)
    # What is summarised or edited are answers of this shard.
    special = tokenizer.special_ids
    texts = [
        tokenizer.decode([t for t in record.token_ids[record.num_prompt :].tolist() if t not in special][:limit])
        for record in records
        for limit in (config.max_text_tokens,)
        if len(record.token_ids) - record.num_prompt >= 24
    ]
    about = []
    for kind in drawn:
        if kind in ("editing", "summary") and texts:
            about.append((kind, _ask(tokenizer, about_a_text(kind, texts[rng.integers(len(texts))].strip(), rng))))
    return records + _answered(config, about, generate, rng)


def _questions(
    config: DataConfig, kinds: list[str], tokenizer: Tokenizer, generate: Generate, rng: np.random.Generator
) -> list[_Asked]:
    """Questions in the user's voice; what did not come to an end within its limit is cut after its last sentence."""
    before, _ = _around_the_user(tokenizer)
    beginnings = [beginning(kind, rng) for kind in kinds]
    params = [
        SamplingParams(
            temperature=config.question_temperature,
            max_tokens=config.max_question_tokens,
            seed=int(rng.integers(2**31)),
            detokenize=False,
        )
        for _ in kinds
    ]
    ids = [tokenizer.encode(before + words, add_special_tokens=False) for words in beginnings]
    asked = []
    for kind, words, token_ids in zip(kinds, beginnings, generate(ids, params), strict=True):
        text = words + tokenizer.decode(token_ids)
        if len(token_ids) >= config.max_question_tokens:
            ends = [text.rfind(mark) for mark in (".", "?", "!", "\n")]
            text = text[: max(ends) + 1]
        if len(token_ids) >= _MIN_QUESTION_TOKENS and text.strip():
            asked.append(_Asked(kind, text.strip()))
    return asked


def _answered(
    config: DataConfig, asked: Sequence[tuple[str, list[int]]], generate: Generate, rng: np.random.Generator
) -> list[Record]:
    if not asked:
        return []
    params = [
        SamplingParams(
            temperature=config.temperatures[rng.integers(len(config.temperatures))],
            max_tokens=config.max_answer_tokens,
            seed=int(rng.integers(2**31)),
            detokenize=False,
        )
        for _ in asked
    ]
    answers = generate([ids for _, ids in asked], params)
    return [
        Record(token_ids=np.array([*ids, *answer], np.int32), num_prompt=len(ids), kind=kind)
        for (kind, ids), answer in zip(asked, answers, strict=True)
        if answer
    ]


def _around_the_user(tokenizer: Tokenizer) -> tuple[str, str]:
    """The template's text before and behind what a user says."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}])
    before, mark, behind = text.partition(_MARK)
    if not mark:
        raise ConfigError("the chat template does not repeat what the user says; give prompts in a file instead")
    return before, behind


def _ask(tokenizer: Tokenizer, question: str) -> list[int]:
    return _encode(tokenizer, [{"role": "user", "content": question}])


def _encode(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
