"""Host. The engine's loop body: plan, run, commit. One thread drives it; nothing here waits but for the device."""

import logging
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.engine.build import EngineParts
from jaxspec.engine.commit import Progress
from jaxspec.engine.drafting import Choice, DraftChooser, Row
from jaxspec.engine.host_edits import HostEdits
from jaxspec.engine.journal import Journal
from jaxspec.engine.logprobs import describe, on_host
from jaxspec.engine.outputs import TokenLogprobs
from jaxspec.engine.request import Prompt, Request, Sequence, check_prompt_token_ids
from jaxspec.errors import CapacityError, ConfigError, RequestError
from jaxspec.keys import request_key
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.metrics.prometheus import EngineMetrics
from jaxspec.rejection.rows import parse_output
from jaxspec.sampling.edit_table import check_ids, check_leaves_a_token, edit_row, mask_words
from jaxspec.sampling.grammar import Grammar
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.table import table_row
from jaxspec.scheduler.groups import Groups, joined
from jaxspec.scheduler.request import SequenceState
from jaxspec.scheduler.scheduler import Limits, Plan, PrefillChunk, Scheduler
from jaxspec.step import pack
from jaxspec.step.compiles import compile_count
from jaxspec.step.prefill import Admission, Chunk
from jaxspec.step.programs import no_admission, no_chunk
from jaxspec.step.state import Batch, RoundOutput
from jaxspec.text.bad_words import bad_word_token_ids
from jaxspec.text.detokenizer import IncrementalDetokenizer
from jaxspec.types import Drafts

logger = logging.getLogger(__name__)

PROMPT_FIELDS = {"prompt", "prompt_token_ids", "cache_salt"}
MAX_FAILURES = 3  # of the device, one after the other without a token between them
# A call reads all weights: as long as so many tokens take to compute, to the nearest power of two or so.
_CALL_TOKENS_ON_CPU, _CALL_TOKENS = 16, 256

Rows = list[tuple[Request, Sequence]]  # of a batch, in its order


class _DeviceFault(Exception):
    """A program failed, at once or when its results were asked for; the state that it took is lost."""


class _Launched(NamedTuple):
    """A batch of decode rounds that the device was given, and the host has not read."""

    groups: list[Rows]
    num_rounds: int
    choice: Choice
    output: RoundOutput  # of all groups, as `Spread.join` puts them
    may_be_followed: bool  # nothing between its rounds and the next is the host's


class EngineCore:
    """Requests in, tokens out, over the compiled programs of `parts`."""

    def __init__(self, parts: EngineParts, journal: Journal | None = None):
        """journal: told of requests and steps."""
        self.parts = parts
        self._journal = journal or Journal()
        self.config = parts.config
        self._weights = parts.weights
        self.state: Any = parts.state  # taken: whoever else holds `parts.state` finds it donated
        self._programs = parts.programs
        self._host_proposer = parts.host_proposer
        self.last_host_width = 0  # columns of drafts in the last round, where they come from the host
        self._requests: dict[str, Request] = {}
        self._sequences: dict[str, tuple[Request, Sequence]] = {}
        self._seeds = np.random.default_rng(self.config.seed)
        self._num_failures = 0
        self._launched: _Launched | None = None  # between steps: rounds that follow those of the last step
        # A draft model reads the history when it is asked, so that nothing but a draft of its own tells how far it is.
        self._may_lag = parts.proposer.commit is None and bool(jax.tree.leaves(self.state.proposer))
        self._spread = parts.programs.spread
        self.scheduler = Groups(_limits(parts), self._spread.num_groups)
        self._no_admission = no_admission(parts.target, parts.programs.shapes)
        self._no_chunk = no_chunk(parts.programs.shapes)
        self._drafting = DraftChooser(self.config, parts.programs.shapes, parts.costs)
        self.metrics = EngineMetrics(self.config.served_model_name, self.config.num_speculative_tokens)
        self.compiles_at_ready = compile_count()

    @property
    def compiles_after_ready(self) -> int:
        """Programs compiled since the engine was built; anything but 0 is a fault worth a report."""
        return compile_count() - self.compiles_at_ready

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        """A prompt's text (if it has one) and ids.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
        """
        tokenizer = self.parts.tokenizer
        fields = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if not isinstance(fields, dict) or not fields or not set(fields) <= PROMPT_FIELDS:
            raise RequestError(
                f"a prompt is a string or {{'prompt_token_ids': [...]}}, got {prompt!r:.80}", param="prompt"
            )
        text, ids, salt = (fields.get(name) for name in ("prompt", "prompt_token_ids", "cache_salt"))
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise RequestError(
                f"cache_salt must be a non-empty text, got {salt!r:.80}; leave it out", param="cache_salt"
            )
        if "prompt_token_ids" not in fields:
            if not isinstance(text, str):
                raise RequestError(f"a prompt must be a text, got {text!r:.80}", param="prompt")
            if tokenizer is None:
                raise RequestError("this model has no tokenizer; send {'prompt_token_ids': [...]}", param="prompt")
            ids = tokenizer.encode(text)
        vocab_size = self.parts.target.config.vocab_size
        ids = check_prompt_token_ids(ids, vocab_size=vocab_size, max_model_len=self.config.max_model_len)
        self._check_params(params, vocab_size)
        return text, ids

    def _check_params(self, params: SamplingParams, vocab_size: int) -> None:
        if self.parts.tokenizer is None:
            for param in ("stop", "bad_words", "structured_outputs"):
                if getattr(params, param):
                    raise RequestError(
                        f"{param} needs a tokenizer, which this model has not; leave it out", param=param
                    )
        check_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
        for param in ("logprobs", "prompt_logprobs"):
            wish, most = getattr(params, param), self.config.max_logprobs
            if wish is not None and (vocab_size if wish == -1 else wish) > most:
                raise RequestError(
                    f"{param}={wish} must not exceed the engine's max_logprobs={most}; ask for fewer or raise it",
                    param=param,
                )
        for param in ("logits_processors", "structured_outputs"):
            if getattr(params, param) and not self.config.enable_structured_outputs:
                raise RequestError(f"{param} need an engine with enable_structured_outputs; build it so", param=param)
        if params.logits_processors:
            self.parts.check_one_host("a request's own logits_processors")
        check_leaves_a_token(params, self._bad_words_ids(params), self._stop_ids(params), vocab_size)
        self.compile_grammar(params)

    def compile_grammar(self, params: SamplingParams) -> Grammar | None:
        """The request's grammar, if it has one. Any thread may call this, to have it ready when the request is added.

        Raises:
            RequestError: it cannot be compiled, or this engine works with no grammar.
        """
        grammars = self.parts.grammars
        if params.structured_outputs is None or grammars is None:
            return None
        return grammars.compile(params.structured_outputs)

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0) -> Request:
        """Queue a request. priority: lower ones run first, where the scheduling policy is "priority".

        Raises:
            RequestError: it is malformed, or its id is in use.
            CapacityError: it can never fit, or (QueueFullError) too many wait; nothing of it is queued.
        """
        if priority and self.config.scheduling_policy != "priority":
            raise RequestError(
                f"{priority=} needs an engine with scheduling_policy 'priority'; leave it out", param="priority"
            )
        if self.parts.is_follower:
            raise ConfigError("process 0 takes the requests of a job, and this is another; call `follow` here instead")
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; ids must be unique", param="request_id")
        text, ids = self.check(prompt, params)
        self._journal.check(params)
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**63))
        salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        request = Request(request_id, text, ids, params, [], priority=priority, cache_salt=salt)
        request.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        for index in range(params.n):
            request.sequences.append(self._new_sequence(request, index, request_key(seed, index)))
        try:
            for sequence in request.sequences:
                self._admission(request, sequence)  # refuses what does not fit the tables, before anything is queued
                self.scheduler.add(sequence.state)
        except (RequestError, CapacityError):
            for sequence in request.sequences:
                self.scheduler.finish(sequence.state)
            raise
        self._requests[request_id] = request
        for sequence in request.sequences:
            self._sequences[sequence.state.sequence_id] = (request, sequence)
        self._journal.add(request, seed)
        return request

    def abort(self, request_id: str) -> Request | None:
        """End a request where it stands; unknown ids are ignored, since it may just have finished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._journal.abort(request_id)
        self._end(request)
        self._report_load()
        return request

    def _end(self, request: Request) -> None:
        for sequence in request.sequences:
            if not sequence.is_finished:
                sequence.progress.finish_reason = "abort"
                self._release(sequence)
                self._observe_on_host(request, sequence)
        self._close_if_finished(request)

    def step(self) -> list[Request]:
        """Run one plan, or go on with the last; returns the requests that gained tokens or ended, by an error of their
        own (`error`) too.

        With `async_scheduling`, where nothing waits for the host, the next rounds are launched before the results of
        those that run are read; a row that the host then ends runs on in them, and nobody reads what it makes.

        When a program fails, the state that it took is lost with it: everyone who runs then begins again with what is
        committed, and nobody notices but by the time it takes.

        Raises:
            Whatever the device raised, when it fails again and again and no token comes between.
        """
        touched: dict[str, Request] = {}
        plans = self.scheduler.plan() if self._launched is None else None
        self._journal.plan(None if plans is None else joined(plans))
        try:
            launched, self._launched = self._launched, None
            num_tokens = 0
            if plans is not None:
                launched = self._run(plans, touched)
                num_tokens = sum(chunk.num_tokens for plan in plans for chunk in plan.chunks)
            if launched is not None:
                self._launched = self._launch_ahead(launched)
                num_tokens += self._collect(launched, touched)
            self.metrics.observe_step(num_tokens)
            if not self.scheduler.decoding:
                self._launched = None  # whatever it makes belongs to nobody
        except _DeviceFault as fault:
            error = fault.__cause__ or fault
            self._launched = None
            self._journal.end_step(error)
            self._recover(error)
        else:
            self._journal.end_step()
        self._report_load()
        return list(touched.values())

    def take_back(self, state: Any) -> None:
        """Go on with the state that another core has used meanwhile; this one is idle, and knows none of its pages."""
        self.state = state
        self.scheduler.forget_pages()

    def running_batch(self) -> Batch:
        """The batch that the next step would decode, with pages to its end, for benchmarks that run it on their own."""
        assert self._launched is None, "rounds of the engine's own would be lost: build it without async_scheduling"
        self.scheduler.reserve()
        return self._pack(self._rows(self.scheduler.each), self._programs.shapes.batch_rows)[0]

    def _rows(self, groups: Iterable[Plan | Scheduler]) -> list[Rows]:
        """The rows that each group decodes."""
        return [[self._sequences[one.sequence_id] for one in group.decoding] for group in groups]

    def _run(self, plans: SequenceOf[Plan], touched: dict[str, Request]) -> _Launched | None:
        """All of the groups' plans, the first admission of each in one call, and so on; their rounds are launched."""
        self.metrics.observe_preemptions(sum(len(plan.preempted) for plan in plans))
        now = time.monotonic()
        for states in zip_longest(*(plan.admitted for plan in plans)):
            admissions = [self._no_admission if state is None else self._admit(state, now) for state in states]
            with self._on_device():
                self.state = self._programs.admit(self.state, self._spread.join(admissions))
        for chunks in zip_longest(*(plan.chunks for plan in plans)):
            packed = [self._no_chunk if chunk is None else self._pack_chunk(chunk) for chunk in chunks]
            with self._on_device():
                self.state, hidden_1TD = self._programs.prefill(self._weights, self.state, self._spread.join(packed))
            for group, chunk in enumerate(chunks):
                if chunk is not None:
                    self._end_chunk(chunk, group, hidden_1TD)
        if not any(plan.decoding for plan in plans):
            return None
        return self._launch(self._rows(plans), joined(plans).num_rounds, touched)

    def _admit(self, state: SequenceState, now: float) -> Admission:
        request, sequence = self._sequences[state.sequence_id]
        request.first_scheduled_time = request.first_scheduled_time or now
        return self._admission(request, sequence)

    def _pack_chunk(self, chunk: PrefillChunk) -> Chunk:
        state, pages_per_row = chunk.sequence, self._programs.shapes.pages_per_row
        return pack.pack_chunk(state.row, chunk.start, chunk.num_tokens, state.pages, pages_per_row)

    def _end_chunk(self, chunk: PrefillChunk, group: int, hidden_1TD: Any) -> None:
        """hidden_1TD: what all groups' chunks gave."""
        request, sequence = self._sequences[chunk.sequence.sequence_id]
        if request.prompt_logprobs is not None and sequence.index == 0:
            with self._on_device():
                self._score(request, chunk, group, hidden_1TD)
        state = chunk.sequence
        if chunk.is_last:
            if not sequence.was_prefilled:
                sequence.was_prefilled = True
                num_cached = state.num_cached_tokens if state.may_hit and state.names is not None else None
                self.metrics.observe_prompt(len(request.prompt_token_ids), num_cached)
            self._observe_on_host(request, sequence)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Around what donates the state, or waits for what became of it."""
        try:
            yield
        except Exception as error:
            raise _DeviceFault from error

    def _recover(self, error: BaseException) -> None:
        if self.parts.hosts is not None:
            self.parts.hosts.fail(error)
        self._num_failures += 1
        logger.error("a program failed, %d in a row; what runs goes on anew", self._num_failures, exc_info=error)
        self.metrics.observe_preemptions(self.scheduler.num_running)
        self.scheduler.preempt_all()
        self.state = None  # there is no room for two
        self.state = self.parts.new_state()
        if self._num_failures > MAX_FAILURES:
            self._num_failures = 0
            raise error

    def _score(self, request: Request, chunk: PrefillChunk, group: int, hidden_1TD: Any) -> None:
        """The log-probabilities of the prompt's tokens that follow a chunk's, but for those that are known already."""
        assert request.prompt_logprobs is not None
        behind = chunk.start + 1
        first = max(behind, len(request.prompt_logprobs))
        scored = request.prompt_token_ids[first : behind + chunk.num_tokens]
        if scored:
            arrays = self._programs.prompt_logprobs(self._weights, hidden_1TD, group, first - behind, scored)
            request.prompt_logprobs += self._describe(arrays, 0, scored, request.params.prompt_logprobs)

    def _collect(self, launched: _Launched, touched: dict[str, Request]) -> int:
        """Wait for the rounds, and commit what they made; returns how many tokens that is."""
        output, everybody = launched.output, list(chain.from_iterable(launched.groups))
        wants_logprobs = any(sequence.logprobs is not None for _, sequence in everybody)
        with self._on_device():
            packed, logprobs = np.asarray(output.packed_BX), on_host(output.logprobs) if wants_logprobs else None
        self._num_failures = num_tokens = 0
        now = time.monotonic()
        parts = [self._spread.part((packed, logprobs), group) for group in range(len(launched.groups))]
        for round_index in range(parts[0][0].shape[0]):
            for rows, (packed_RBX, own_logprobs) in zip(launched.groups, parts, strict=True):
                packed_BX = packed_RBX[round_index, : len(rows)]
                num_tokens += self._commit(rows, packed_BX, own_logprobs, round_index, now, touched)
            self._drafting.end_round(launched.choice)
        # The host proposer is told last: should it raise, every row has its tokens.
        for request, sequence in everybody:
            if sequence.progress.finish_reason != "abort":  # `abort` has told it
                self._observe_on_host(request, sequence)
        return num_tokens

    def _commit(
        self,
        rows: Rows,
        packed_BX: np.ndarray,
        logprobs: Any,
        round_index: int,
        now: float,
        touched: dict[str, Request],
    ) -> int:
        """One group's part of a round; returns how many tokens that is."""
        num_tokens = 0
        blocks = parse_output(packed_BX[:, :-2].tolist(), self.parts.target.config.vocab_size)
        for row, ((request, sequence), block, (num_drafted, num_accepted)) in enumerate(
            zip(rows, blocks, packed_BX[:, -2:].tolist(), strict=True)
        ):
            # Without a token the round did not run; the device may also run on after a stop string.
            if not block or sequence.is_finished:
                continue
            request.first_token_time = request.first_token_time or now
            touched[request.request_id] = request
            described: list[TokenLogprobs] = []
            if logprobs is not None and sequence.logprobs is not None:
                described = self._describe(logprobs, (round_index, row), block, request.params.logprobs)
            try:
                cut = sequence.commit(block, num_drafted, num_accepted, described)
            except RequestError as error:
                self._fail(request, error)
                continue
            num_tokens += len(cut.token_ids)
            if sequence.last_token_time is not None and sequence.last_token_time < now:
                self.metrics.observe_gap(now - sequence.last_token_time)
            sequence.last_token_time = now
            is_taken_in = num_drafted > 0 or not self._may_lag
            self.scheduler.commit(sequence.state, cut.token_ids, is_taken_in=is_taken_in)
            self._journal.commit(sequence.state.sequence_id, cut.token_ids)
            self.metrics.observe_round(num_drafted, num_accepted, len(cut.token_ids))
            self._drafting.observe(sequence.state.sequence_id, num_drafted, num_accepted)
            if sequence.is_finished:
                self._release(sequence)
                self._close_if_finished(request)
        return num_tokens

    def _launch_ahead(self, launched: _Launched) -> _Launched | None:
        """The rounds that follow those, if they may be launched before anybody has looked at them."""
        if not (self.config.async_scheduling and launched.may_be_followed):
            return None
        num_rounds = self.scheduler.plan_ahead(launched.num_rounds)
        if num_rounds == 0:
            return None
        self._journal.ahead(num_rounds)
        return self._launch_rounds(self._rows(self.scheduler.each), num_rounds)

    def _launch(self, groups: list[Rows], num_rounds: int, touched: dict[str, Request]) -> _Launched:
        """One round, or several where nothing waits for the host; outputs stacked by round."""
        if any(sequence.host_edits.is_needed for rows in groups for _, sequence in rows):
            batch, choice = self._pack(groups, self._programs.shapes.split_rows)
            return _Launched(groups, 1, choice, self._run_split(groups, batch, choice, touched), may_be_followed=False)
        if self._host_proposer is None:
            return self._launch_rounds(groups, num_rounds)
        batch, choice = self._pack(groups, self._programs.shapes.batch_rows)
        drafts = self._host_drafts(groups, batch, choice, may_be_short=not self.config.exact)
        with self._on_device():
            self.state, output = self._programs.verify_commit(self._weights, self.state, batch, drafts)
        return _Launched(groups, 1, choice, output, may_be_followed=False)

    def _launch_rounds(self, groups: list[Rows], num_rounds: int) -> _Launched:
        batch, choice = self._pack(groups, self._programs.shapes.batch_rows)
        with self._on_device():
            self.state, output = self._programs.decode_rounds(self._weights, self.state, batch, num_rounds)
        return _Launched(groups, num_rounds, choice, output, may_be_followed=True)

    def _run_split(
        self, groups: SequenceOf[Rows], batch: Batch, choice: Choice, touched: dict[str, Request]
    ) -> RoundOutput:
        """One round in three parts; the host edits logits before the last."""
        programs = self._programs
        if self._host_proposer is None:
            with self._on_device():
                drafts, self.state = programs.propose(self._weights, self.state, batch)
        else:
            drafts = self._host_drafts(groups, batch, choice, may_be_short=False)
        with self._on_device():
            self.state, logits_BJV, seen_BJX = programs.forward(self._weights, self.state, batch, drafts)
            # What the host does with the drafts overlaps the forward pass.
            ids, counts = np.asarray(drafts.token_ids_BK), np.asarray(drafts.counts_B)
        vocab_size = self.parts.target.config.vocab_size  # logits of a split vocabulary may reach beyond it
        mask = np.full((*logits_BJV.shape[:-1], mask_words(vocab_size)), 0xFFFFFFFF, np.uint32)
        edited = None
        if any(sequence.host_edits.processors for rows in groups for _, sequence in rows):
            with self._on_device():
                edited = np.array(logits_BJV)
        for group, rows in enumerate(groups):
            ids_BK, counts_B, mask_BJU, own_BJV = self._spread.part((ids, counts, mask, edited), group)
            for index, (request, sequence) in enumerate(rows):
                draft_ids = ids_BK[index, : counts_B[index]].tolist()
                try:
                    sequence.host_edits.fill_masks(draft_ids, mask_BJU[index])
                    if sequence.host_edits.processors:
                        own_JV = own_BJV[index, :, :vocab_size]
                        sequence.host_edits.process(sequence.progress.token_ids, draft_ids, own_JV)
                except Exception as error:  # a caller's own code may raise anything
                    touched[request.request_id] = request
                    self._fail(request, error)
        with self._on_device():
            logits = logits_BJV if edited is None else edited
            self.state, output = programs.judge_commit(self.state, batch, drafts, logits, seen_BJX, mask)
        return output

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request, and no other, by a fault of its own."""
        logger.warning("request %s failed: %r", request.request_id, error)
        request.error = error
        self._end(request)

    def _describe(self, arrays, row, token_ids: SequenceOf[int], num_top: int | None) -> list[TokenLogprobs]:
        return describe(arrays, row, token_ids, num_top or 0, self.parts.tokenizer)

    def _pack(self, groups: SequenceOf[Rows], buckets: SequenceOf[int]) -> tuple[Batch, Choice]:
        """All groups' rows in the bucket of the largest; what was chosen holds for all of them."""
        shapes, most_rows = self._programs.shapes, max(map(len, groups))
        bucket = pack.bucket_of(most_rows, buckets)
        choice = self._drafting.choose(self._drafting_rows(groups), bucket, most_rows)
        batches, first = [], 0
        for rows in groups:
            own = slice(first, first := first + len(rows))
            batch = pack.pack_batch(
                [sequence.state.row for _, sequence in rows],
                [sequence.state.pages for _, sequence in rows],
                bucket,
                shapes.guard_row,
                shapes.pages_per_row,
                choice.max_drafts,
                None if choice.survival is None else choice.survival[own],
                choice.seconds,
            )
            batches.append(batch)
        return self._spread.join(batches), choice

    def _drafting_rows(self, groups: SequenceOf[Rows]) -> list[Row]:
        return [
            Row(sequence.state.sequence_id, len(sequence.state.token_ids), request.params.max_drafts)
            for request, sequence in chain.from_iterable(groups)
        ]

    def _host_drafts(self, groups: SequenceOf[Rows], batch: Batch, choice: Choice, *, may_be_short: bool) -> Drafts:
        """What the host proposer guesses, cut to what each row can use, padded.

        may_be_short: fewer columns than K where the guesses are short, none where nothing is guessed at all.
        """
        assert self._host_proposer is not None
        K, rows = self._programs.shapes.num_host_drafts, list(chain.from_iterable(groups))
        guesses = self._host_proposer.propose([sequence.state.sequence_id for _, sequence in rows])
        if len(guesses) != len(rows) or any(len(guess) > K for guess in guesses):
            raise ConfigError(
                f"a host proposer must give one list of at most {K} ids for each of {len(rows)} requests, got "
                f"{guesses!r:.200}; correct its `propose`"
            )
        counts = []
        for (request, sequence), guess in zip(rows, guesses, strict=True):
            wish = request.params.max_drafts
            room = sequence.progress.max_output_tokens - len(sequence.progress.token_ids) - 1
            counts.append(min(len(guess), choice.max_drafts, room, K if wish is None else wish))
        if may_be_short:
            width = self._drafting.narrow(choice, self._drafting_rows(groups), np.array(counts, np.int32))
            counts = [min(count, width) for count in counts]
            K = pack.bucket_of(max(counts), self._programs.shapes.host_drafts)
        self.last_host_width = K
        drafts, found = [], zip(guesses, counts, strict=True)
        for own in groups:
            token_ids_BK = np.full((batch.rows_B.shape[-1], K), -1, np.int32)
            counts_B = np.zeros(batch.rows_B.shape[-1], np.int32)
            for index, (guess, count) in enumerate(islice(found, len(own))):
                token_ids_BK[index, :count] = guess[:count]
                counts_B[index] = count
            drafts.append(Drafts(token_ids_BK=token_ids_BK, counts_B=counts_B))  # pyright: ignore[reportArgumentType]
        return self._spread.join(drafts)

    def _observe_on_host(self, request: Request, sequence: Sequence) -> None:
        """Tell the host proposer what is committed, or that it was the last."""
        if self._host_proposer is None:
            return
        if sequence.is_finished:
            self._host_proposer.finish(sequence.state.sequence_id)
        else:
            self._host_proposer.observe(
                sequence.state.sequence_id, request.prompt_token_ids, sequence.progress.token_ids
            )

    def _new_sequence(self, request: Request, index: int, key: np.ndarray) -> Sequence:
        params, tokenizer, num_prompt = request.params, self.parts.tokenizer, len(request.prompt_token_ids)
        room = self.config.max_model_len - num_prompt
        max_output = room if params.max_tokens is None else min(params.max_tokens, room)
        detokenizer = None
        if tokenizer is not None and params.detokenize:
            detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        state = SequenceState(
            f"{request.request_id}-{index}",
            list(request.prompt_token_ids),
            num_prompt + max_output,
            priority=request.priority,
            cache_salt=request.cache_salt,
            may_hit=request.prompt_logprobs is None or index > 0,
        )
        compiled = self.compile_grammar(params)
        grammar = None if compiled is None else compiled.start(ignore_eos=params.ignore_eos)
        eos_token_ids = frozenset(self.parts.target.config.eos_token_ids)
        progress = Progress(params, eos_token_ids, max_output, detokenizer, grammar)
        stats = AcceptanceStats(self.config.num_speculative_tokens)
        host_edits = HostEdits(tuple(params.logits_processors or ()), grammar)
        return Sequence(index, state, progress, key, stats, host_edits, None if params.logprobs is None else [])

    def _admission(self, request: Request, sequence: Sequence) -> Admission:
        params, state = request.params, sequence.state
        return pack.pack_admission(
            row=state.row,
            token_ids=state.token_ids,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_model_len=self.config.max_model_len,
            min_len=len(request.prompt_token_ids) + params.min_tokens,
            max_len=state.max_len,
            max_drafts=params.max_drafts,
            wants_logprobs=params.logprobs is not None,
            stop_ids=self._stop_ids(params),
            sampling=table_row(params, sequence.key),
            edits=edit_row(
                params,
                self._bad_words_ids(params),
                self.parts.target.config.vocab_size,
                self.parts.target.processors,
            ),
        )

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        eos_ids = () if params.ignore_eos else self.parts.target.config.eos_token_ids
        return list(dict.fromkeys((*eos_ids, *(params.stop_token_ids or ()))))

    def _bad_words_ids(self, params: SamplingParams) -> list[list[int]]:
        tokenizer = self.parts.tokenizer
        return bad_word_token_ids(params.bad_words or (), tokenizer) if tokenizer is not None else []

    def _report_load(self) -> None:
        self.metrics.set_load(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            cache_usage=self.scheduler.num_used / self.scheduler.num_pages,
        )
        self.metrics.set_compiles_after_ready(self.compiles_after_ready)

    def _release(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence.state)
        self._drafting.forget(sequence.state.sequence_id)
        del self._sequences[sequence.state.sequence_id]

    def _close_if_finished(self, request: Request) -> None:
        if not request.is_finished:
            return
        del self._requests[request.request_id]
        request.finished_time = time.monotonic()
        arrival, scheduled, first = request.arrival_time, request.first_scheduled_time, request.first_token_time
        lengths = [len(sequence.progress.token_ids) for sequence in request.sequences]
        self.metrics.observe_request(len(lengths), request.params.max_tokens, max(lengths))
        for sequence, num_tokens in zip(request.sequences, lengths, strict=True):
            self.metrics.observe_finish(
                sequence.progress.finish_reason or "abort",
                request.finished_time - arrival,
                None if first is None else first - arrival,
                num_tokens,
                None if scheduled is None else scheduled - arrival,
            )


def _limits(parts: EngineParts) -> Limits:
    """What the engine's config and its drafter mean for the scheduler."""
    config, lookahead = parts.config, parts.proposer.page_lookahead
    if config.enable_prefix_caching and lookahead is None:
        logger.info("enable_prefix_caching: off (the proposer does not say what its pages depend on: page_lookahead)")
    return Limits(
        max_rows=config.max_num_seqs,
        num_pages=config.num_pages,
        block_size=config.block_size,
        max_chunk_tokens=parts.programs.shapes.chunk_tokens[-1],
        chunk_tokens=parts.programs.shapes.chunk_tokens,
        call_tokens=_CALL_TOKENS_ON_CPU if config.platform == "cpu" else _CALL_TOKENS,
        tokens_per_round=config.num_speculative_tokens + 1,
        max_rounds=parts.programs.shapes.max_rounds,
        lookahead=lookahead if config.enable_prefix_caching else None,
        is_by_priority=config.scheduling_policy == "priority",
        max_queued=config.max_queued_requests,
        is_exact=config.exact,
    )
