"""Host. What happens to an engine, in order, one event a line: `jaxspec replay` makes it happen again.

A step follows from the requests, the steps before it and the config alone, so the requests are the input, and plans and
tokens are what must come out the same.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.config.shipped import FOLDER as SHIPPED_FOLDER
from jaxspec.engine.build import EngineParts
from jaxspec.engine.request import Request
from jaxspec.errors import ConfigError, RequestError
from jaxspec.sampling.params import SamplingParams
from jaxspec.scheduler.scheduler import Plan
from jaxspec.step.costs import RoundCosts

FORMAT = "jaxspec-journal-1"
# Settled for the machine that the engine ran on, and kept for the one that replays.
_SETTLED = (
    "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_dtype", "num_pages",
    "rounds_per_batch", "async_scheduling", "implementation",
)  # fmt: skip
# One process replays what several have run, over as many devices.
_OF_A_JOB = ("nnodes", "node_rank", "master_addr", "master_port", "watchdog_timeout_s")
_DEFAULTS = {entry.name: entry.default for entry in dataclasses.fields(SamplingParams)}

Event = dict[str, Any]


class Journal:
    """Tells `write` of each event, a JSON object; without one it tells nobody."""

    def __init__(self, write: Callable[[Event], None] | None = None):
        self._write = write
        self._plan: Event = {}
        self._ahead: Event = {}
        self._tokens: dict[str, list[int]] = {}

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError for a request that could not be written down."""
        if self._write is not None and params.logits_processors:
            raise RequestError(
                "logits_processors are code, which the engine's `record` cannot hold; leave one of the two out",
                param="logits_processors",
            )

    def add(self, request: Request, seed: int) -> None:
        """A request was queued; seed: what its keys come from."""
        if self._write is not None:
            params = params_event(dataclasses.replace(request.params, seed=seed))
            event = {"event": "add", "id": request.request_id, "prompt": request.prompt_token_ids, "params": params}
            self._write(event | {"priority": request.priority, "cache_salt": request.cache_salt})

    def abort(self, request_id: str) -> None:
        """A request was ended by its caller."""
        if self._write is not None:
            self._write({"event": "abort", "id": request_id})

    def plan(self, plan: Plan | None) -> None:
        """A step begins; None: it goes on with rounds that run already."""
        if self._write is None:
            return
        self._tokens, self._ahead, self._plan = {}, {}, {}
        if plan is None:
            return
        self._plan = {
            "preempted": [one.sequence_id for one in plan.preempted],
            "admitted": [[one.sequence_id, one.row, one.num_cached_tokens] for one in plan.admitted],
            "chunks": [[chunk.sequence.sequence_id, chunk.start, chunk.num_tokens] for chunk in plan.chunks],
            "decoding": [one.sequence_id for one in plan.decoding],
            "num_rounds": plan.num_rounds,
        }

    def ahead(self, num_rounds: int) -> None:
        """Rounds were launched behind those of the step that goes on."""
        self._ahead = {"ahead": num_rounds}

    def commit(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        """Tokens of the step that goes on."""
        if self._write is not None:
            self._tokens.setdefault(sequence_id, []).extend(token_ids)

    def end_step(self, fault: BaseException | None = None) -> None:
        """The step is over; fault: what the device raised in it."""
        if self._write is not None:
            event = {"event": "step", "plan": self._plan, "tokens": self._tokens} | self._ahead
            self._write(event if fault is None else event | {"fault": repr(fault)})


def open_journal(config: EngineConfig, parts: EngineParts, *, has_own_code: bool, startup_probe_tokens: int) -> Journal:
    """The journal of an engine that was just built: `config.record`'s file, begun anew, or none.

    Args:
        has_own_code: a proposer or logits processors were given as objects.
        startup_probe_tokens: of the probe that is run before requests come; a host's drafter may learn from it.

    Raises:
        ConfigError: the engine holds code of its user's, or the file cannot be written.
    """
    if config.record is None:
        return Journal()
    if has_own_code:
        raise ConfigError(
            "record cannot hold a proposer or logits processors that were given as objects; name the proposer by its "
            "dotted path, or leave record out"
        )
    path = Path(config.record)

    def write(event: Event, mode: str = "a") -> None:  # opened each time, so that a line is out before the next step
        with path.open(mode, encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    given = config.model_dump(mode="json", exclude_unset=True, exclude={"record", *_OF_A_JOB})
    speculative = given.get("speculative_config") or {}
    if Path(speculative.get("model") or "").parent == SHIPPED_FOLDER:  # whoever replays has it elsewhere
        del speculative["model"]
    head = {
        "event": "engine",
        "format": FORMAT,
        "config": given | parts.config.model_dump(mode="json", include=set(_SETTLED)),
        "startup_probe_tokens": startup_probe_tokens,
        "costs": None if parts.costs is None else costs_event(parts.costs),
    }
    try:
        write(head, "w")
    except OSError as error:
        raise ConfigError(f"record: cannot write {config.record}: {error}; name another file") from error
    return Journal(write)


def params_event(params: SamplingParams) -> Event:
    """What of the parameters is not as it is by default."""
    values = {name: value for name in _DEFAULTS if (value := getattr(params, name)) not in (_DEFAULTS[name], ())}
    if params.structured_outputs is not None:
        form = dataclasses.asdict(params.structured_outputs)
        form.pop("param")
        values["structured_outputs"] = {name: value for name, value in form.items() if value not in (None, False)}
    return json.loads(json.dumps(values))


def params_of(event: Mapping[str, Any]) -> SamplingParams:
    """`params_event` undone. Raises RequestError for what are no parameters."""
    values = dict(event)
    if isinstance(values.get("logit_bias"), dict):
        try:  # JSON's names are texts
            values["logit_bias"] = {int(token_id): bias for token_id, bias in values["logit_bias"].items()}
        except ValueError as error:
            raise RequestError(f"logit_bias: {error}; ids are integers", param="logit_bias") from error
    unknown = values.keys() - _DEFAULTS.keys()
    if unknown:
        raise RequestError(f"{sorted(unknown)} are no sampling parameters; this journal is of another version")
    return SamplingParams(**values)


def costs_event(costs: RoundCosts) -> Event:
    seconds = {str(bucket): table.tolist() for bucket, table in costs.seconds.items()}
    return {"contexts": list(costs.contexts), "drafts": list(costs.drafts), "seconds": seconds}


def costs_of(event: Mapping[str, Any]) -> RoundCosts:
    """`costs_event` undone."""
    seconds = {int(bucket): np.array(table, np.float64) for bucket, table in event["seconds"].items()}
    return RoundCosts(tuple(event["contexts"]), tuple(event["drafts"]), seconds)
