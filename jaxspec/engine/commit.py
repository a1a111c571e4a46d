"""Host. The one function that decides what a sequence keeps of a verified block, token by token, and why it ended."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from jaxspec.sampling.grammar import GrammarState
from jaxspec.sampling.params import SamplingParams
from jaxspec.text.detokenizer import IncrementalDetokenizer
from jaxspec.text.stops import StopStrings

FinishReason = Literal["stop", "length", "abort"]


@dataclass
class Progress:
    """One sequence's answer so far. Text, ids, usage, metrics and finish all read what `commit_block` wrote here.

    max_output_tokens: what max_tokens and the model's length leave; detokenizer None: no text is made; grammar None:
    any text will do.
    """

    params: SamplingParams
    eos_token_ids: frozenset[int]
    max_output_tokens: int
    detokenizer: IncrementalDetokenizer | None = None
    grammar: GrammarState | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self):
        stops = self.params.stop if self.detokenizer is not None else ()
        self._stops = StopStrings(stops or (), include_in_output=self.params.include_stop_str_in_output)


@dataclass(frozen=True)
class Cut:
    """What a block added: its kept ids, and the text that became certain with each of them."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.texts)


def commit_block(progress: Progress, token_ids: Iterable[int]) -> Cut:
    """Append a verified block until something ends the sequence; the rest of the block is dropped.

    After each token, in this order: its text and the stop strings in it; while fewer than min_tokens are there nothing
    but the length or its grammar's end ends a sequence; EOS; stop token ids; a stop string; the end of its grammar,
    after which there is no token to emit; the length. The token that ended a sequence is kept among its ids. Its text
    is not shown if it is EOS or a stop id (unless include_stop_str_in_output). A stop string must end beyond the first
    min_tokens tokens, not with them: vLLM's rule.

    Raises:
        RequestError: a token that the sequence's grammar does not allow. The answer is then void.
    """
    kept, texts = [], []
    for token_id in token_ids:
        if progress.finish_reason is not None:
            break
        kept.append(token_id)
        texts.append(_commit_token(progress, token_id))
    progress.text += "".join(texts)
    return Cut(tuple(kept), tuple(texts))


def _commit_token(progress: Progress, token_id: int) -> str:
    params, grammar = progress.params, progress.grammar
    if grammar is not None:
        grammar.commit(token_id)
    progress.token_ids.append(token_id)
    num_output = len(progress.token_ids)

    if num_output >= params.min_tokens:
        if token_id in progress.eos_token_ids and not params.ignore_eos:
            progress.finish_reason = "stop"
        elif token_id in (params.stop_token_ids or ()):
            progress.finish_reason, progress.stop_reason = "stop", token_id
    ended_by_id = progress.finish_reason is not None

    text = ""
    if progress.detokenizer is not None and (not ended_by_id or params.include_stop_str_in_output):
        text, hit = progress._stops.push(progress.detokenizer.push([token_id]), armed=num_output > params.min_tokens)
        if hit is not None:
            if not ended_by_id:
                progress.finish_reason, progress.stop_reason = "stop", hit
            return text
    if progress.finish_reason is None and grammar is not None and grammar.has_ended:
        progress.finish_reason = "stop"
    if progress.finish_reason is None and num_output >= progress.max_output_tokens:
        progress.finish_reason = "length"
    if progress.finish_reason is not None:
        text += _rest_of_text(progress)
    return text


def _rest_of_text(progress: Progress) -> str:
    """What was held back as half a character or as a possible stop string."""
    if progress.detokenizer is None:
        return ""
    text, hit = progress._stops.push(progress.detokenizer.flush(), armed=False)
    return text if hit is not None else text + progress._stops.flush()
