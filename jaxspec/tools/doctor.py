"""Host. `jaxspec doctor`: what a target and its drafter were taken for, whether drafting pays, and if not, why.

Exit status: 0 well, 1 drafting is useless or another reading of the drafter's files is clearly better, 2 nothing could
be examined. On stdout is a text, whose last line is one JSON object with --json.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspec.cache.pages import pool_shape
from jaxspec.config.detect import detect
from jaxspec.config.engine import EngineConfig
from jaxspec.config.heads import MtpConfig
from jaxspec.config.load import add_flags, gather, parse_flags, pick
from jaxspec.config.methods import drafter_of, looks_up
from jaxspec.config.model import ModelConfig
from jaxspec.engine.build import EngineParts, build
from jaxspec.engine.core import EngineCore
from jaxspec.engine.drafts import find_draft
from jaxspec.engine.heads import METHODS_WITH_HEADS, head_proposer
from jaxspec.engine.probe import answer_greedily
from jaxspec.errors import CapacityError, ConfigError, JaxspecError
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.models.heads.load import open_head, unread_tensors
from jaxspec.models.registry import family_of
from jaxspec.proposers.base import Proposer
from jaxspec.proposers.draft_model import draft_model
from jaxspec.tools.diagnosis import CONTEXT, compare, explanation, plausible_range, verdict_of
from jaxspec.tools.inspect import inspect
from jaxspec.tools.prompts import default_prompts_path, read_prompts, tokenizer_of
from jaxspec.tools.replay import Hits, Replay
from jaxspec.tools.suspects import Drafter, usual_suspects
from jaxspec.weights.aliases import resolve_model
from jaxspec.weights.checkpoint import describe_checkpoint, open_checkpoint

DEFAULT_PROMPTS, DEFAULT_TOKENS = 6, 48
MAX_LISTED = 8  # tensors spelled out


def main(argv: Sequence[str] | None = None) -> int:
    """Examine a pair. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "jaxspec doctor",
        description="Loads a model and its drafter, says what they were taken for, measures how many drafts are kept, "
        "and tries other readings of the drafter's files.",
        allow_abbrev=False,
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="as `jaxspec verify` takes them")
    parser.add_argument(
        "--num-prompts", type=int, default=DEFAULT_PROMPTS, metavar="N", help=f"prompts asked; {DEFAULT_PROMPTS}"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=DEFAULT_TOKENS, metavar="N", help=f"tokens an answer; {DEFAULT_TOKENS}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object behind the text")
    add_flags(parser, (EngineConfig,))
    try:
        args = parse_flags(parser, sys.argv[1:] if argv is None else argv)
        if args.positional_model is not None:
            args.model = args.positional_model
        report = run(args)
    except JaxspecError as error:
        print(f"jaxspec doctor: {error}", file=sys.stderr)
        return 2
    print("\n".join(text_of(report)))
    if args.json:
        print(json.dumps(report))
    return 1 if report["verdict"] == "useless" or report["better"] else 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Build the pair that the flags describe, and examine it."""
    started = time.monotonic()
    data = gather((EngineConfig,), args)
    config = pick(EngineConfig, data)
    for name in ("num_prompts", "max_tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if config.speculative_config is None:
        raise ConfigError("without speculative_config there is no drafter to examine; give it")
    if config.speculative_config.rejection_sample_method == "synthetic":
        raise ConfigError("rejection_sample_method 'synthetic' keeps drafts whatever they are; leave it out here")
    prompts = read_prompts(args.prompts or default_prompts_path(), tokenizer_of(config), args.num_prompts)
    if config.max_num_seqs is not None and config.max_num_seqs < len(prompts):
        raise ConfigError(
            f"max_num_seqs={config.max_num_seqs} must hold all {len(prompts)} prompts; raise it or lower --num-prompts"
        )
    fitting: dict[str, Any] = {"max_num_seqs": len(prompts), "enable_structured_outputs": False}
    if config.max_model_len is None:
        # No more cache than the answers need.
        most = max(len(prompt) for prompt in prompts) + args.max_tokens + 1
        fitting["max_model_len"] = -(-most // 64) * 64
    config = pick(EngineConfig, fitting | data)
    pair, drafter, mask_token_id = describe_pair(config)
    with _what_is_logged() as said:
        core = EngineCore(build(config, show_progress=True))
    report = pair | {"loading": said} | shared_with_target(core.parts)
    report |= examine(core, drafter, prompts, args.max_tokens, mask_token_id)
    return report | {
        "dtype": core.config.dtype,
        "platform": core.config.platform,
        "seconds": round(time.monotonic() - started, 1),
    }


def describe_pair(config: EngineConfig) -> tuple[dict[str, Any], Drafter | None, int | None]:
    """What the files are taken for, by which field or tensor, and what stays unread; the drafter as data, where other
    readings of its files can be tried; and the mask token of a whole model that fills masks.

    Raises: ConfigError, WeightsError: what building would say.
    """
    speculative = config.speculative_config
    assert speculative is not None
    target_found = inspect(config.model)
    drafter: Drafter | None = None
    with open_checkpoint(resolve_model(config.model)) as target:
        found = find_draft(speculative, target)
        skipped: list[str] = []
        if found.drafter in METHODS_WITH_HEADS:
            streams = speculative.eagle_aux_hidden_state_layer_ids
            ids = None if streams is None else tuple(streams)
            mask_token_id = found.mask_token_id
            with open_head(found.drafter, found.path, target, aux_layer_ids=ids, mask_token_id=mask_token_id) as head:
                drafter = head.config
                # A module inside a target's checkpoint leaves the target unread, which is not skipping.
                skipped = [] if isinstance(drafter, MtpConfig) else unread_tensors(head)
        elif found.path is not None:
            if found.drafter in ("draft_model", "pard"):
                with open_checkpoint(found.path) as draft:
                    drafter = draft.config
            skipped = inspect(str(found.path))["ignored"]
    # What the target leaves unread of a module is what the drafter reads.
    module = drafter.prefix if isinstance(drafter, MtpConfig) else "\0"
    because = "as asked for"
    if found.path is not None and not isinstance(drafter, MtpConfig):
        told = detect(*describe_checkpoint(found.path))
        because = told.because if told is not None else "a whole model"
    report = {
        "model": config.model,
        "target": target_found["loads_as"],
        "target_skipped": [name for name in target_found["ignored"] if not name.startswith(module)],
        "method": found.method,
        "because": because,
        "draft": None if found.path is None else str(found.path),
        "drafter": None if drafter is None else drafter.model_dump(mode="json"),
        "skipped": skipped,
    }
    return report, drafter, found.mask_token_id


def shared_with_target(parts: EngineParts) -> dict[str, Any]:
    """Which of the drafter's tables are the target's, and how its tokens map to the target's."""
    shared, mapped = {}, None
    draft, target = parts.weights.get("draft"), parts.weights["target"]
    speculative = parts.config.speculative_config
    if draft is not None and speculative is not None and drafter_of(speculative.method) in METHODS_WITH_HEADS:
        draft = draft.get("modules", [draft])[0]
        for path, words in (("embed", "embedding"), ("head", "vocabulary head")):
            if path in draft:
                is_tied = path == "head" and draft[path] is draft.get("embed")
                is_targets = draft[path] is target.get(path)
                shared[words] = "the target's" if is_targets else "the embedding" if is_tied else "its own"
            elif path == "head" and not {"heads", "emb"} & draft.keys():
                shared[words] = "the target's"
        if "target_ids" in draft:
            mapped = f"{len(draft['target_ids'])} draft tokens to as many of the target's {_vocab_size(parts)}"
    if "vocabulary" in parts.weights:
        count = int(jnp.sum(parts.weights["vocabulary"]["is_shared_V"]))
        mapped = f"{count} of the target's {_vocab_size(parts)} tokens, which both vocabularies have"
    return {"shared": shared, "mapped": mapped}


def _vocab_size(parts: EngineParts) -> int:
    return parts.target.config.vocab_size


def examine(
    core: EngineCore,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    max_tokens: int,
    mask_token_id: int | None = None,
) -> dict[str, Any]:
    """The probe, its verdict, and every usual suspect beside the drafter as it was loaded. mask_token_id: as
    `try_suspects` takes it."""
    speculative, parts = core.config.speculative_config, core.parts
    assert speculative is not None
    answers, stats = answer_greedily(core, prompts, max_tokens)
    verdict = verdict_of(speculative.method, stats)
    suspects = []
    if drafter is not None and parts.host_proposer is None:
        _, suspects = try_suspects(parts, drafter, list(zip(prompts, answers, strict=True)), mask_token_id)
    bounds = plausible_range(speculative.method)
    return {
        "speculative_config": speculative.model_dump(mode="json"),
        "num_prompts": len(prompts),
        "num_tokens": sum(map(len, answers)),
        "acceptance": stats.as_dict() | {"acceptance_per_position": stats.acceptance_per_position},
        "plausible": None if bounds is None else list(bounds),
        "verdict": verdict,
        "explanation": explanation(speculative.method, verdict),
        "suspects": suspects,
        "better": next((suspect["setting"] for suspect in suspects if suspect["is_clear"]), None),
    }


def try_suspects(
    parts: EngineParts,
    drafter: Drafter,
    texts: Sequence[tuple[list[int], list[int]]],
    mask_token_id: int | None = None,
) -> tuple[AcceptanceStats, list[dict[str, Any]]]:
    """The loaded drafter's acceptance over known texts, and each suspect's beside it, the best first.

    Args:
        texts: prompts and the target's greedy answers to them.
        mask_token_id: of a whole model that fills masks.

    Raises: CapacityError where they do not all fit the engine's pages, ConfigError for an engine on several devices.
    """
    parts.check_one_device("jaxspec doctor")
    config = parts.config
    num_pages = len(texts) * -(-max(len(prompt) + len(answer) for prompt, answer in texts) // config.block_size)
    if num_pages > config.num_pages:
        raise CapacityError(
            f"trying other readings needs {num_pages} pages at once, num_pages={config.num_pages}; lower --num-prompts "
            "or --max-tokens, or raise num_pages"
        )
    weights = {name: tree for name, tree in parts.weights.items() if name != "target"}
    tried = list(usual_suspects(drafter, weights["draft"], parts.target.config, parts.weights["target"]))
    streams = [stream for one in (drafter, *(suspect.config for suspect in tried)) for stream in _streams_of(one)]
    replay = Replay(
        parts.target,
        parts.weights["target"],
        texts,
        streams,
        block_size=config.block_size,
        dtype=config.page_dtype,
    )
    made: dict[Drafter, Proposer] = {}  # where only weights differ, nothing is compiled again

    def hits_of(one: Drafter, draft: Any) -> Hits:
        made.setdefault(one, _proposer(parts, one, mask_token_id))
        return replay.hits(made[one], weights | {"draft": draft})

    loaded = hits_of(drafter, weights["draft"])
    contexts, kept = replay.contexts(loaded, CONTEXT), loaded.kept()
    found = []
    for suspect in tried:
        hits = hits_of(suspect.config, suspect.weights)
        comparison, acceptance = compare(kept, hits.kept(), contexts), hits.acceptance()
        found.append(
            {
                "name": suspect.name,
                "setting": suspect.setting,
                "mean_acceptance_length": acceptance.mean_acceptance_length,
                "acceptance_per_position": acceptance.acceptance_per_position,
                **asdict(comparison),
                "is_clear": comparison.is_clear(len(tried)),
            }
        )
    return loaded.acceptance(), sorted(found, key=lambda one: (-one["is_clear"], -one["gain"]))


def _streams_of(config: Drafter) -> tuple[int, ...]:
    return () if isinstance(config, ModelConfig) else config.aux_streams


def _proposer(parts: EngineParts, config: Drafter, mask_token_id: int | None) -> Proposer:
    """The drafter of this config, in the engine it stands in, guessing greedily."""
    resolved = parts.config
    speculative = resolved.speculative_config
    assert speculative is not None
    greedy = speculative.model_copy(update={"draft_sample_method": "greedy"})
    resolved = resolved.model_copy(update={"speculative_config": greedy})
    if not isinstance(config, ModelConfig):
        return head_proposer(config, resolved, parts.target.family, parts.target.config)
    return draft_model(
        family_of(config.family),
        config.for_run(greedy.max_model_len),
        num_tokens=greedy.num_speculative_tokens,
        max_model_len=greedy.max_model_len,
        sample_method="greedy",
        pool_shape=pool_shape(config, resolved.num_pages, resolved.block_size),
        pool_dtype=resolved.page_dtype,
        has_own_vocabulary="vocabulary" in parts.weights,
        mask_token_id=mask_token_id,
    )


@contextmanager
def _what_is_logged() -> Iterator[list[str]]:
    """What loading says about the drafter, in its own words."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text.startswith("draft") or record.levelno >= logging.WARNING:
                said.append(text)

    root, listener = logging.getLogger("jaxspec"), Listener(logging.INFO)
    level = root.level
    root.addHandler(listener)
    root.setLevel(logging.INFO if level == logging.NOTSET else min(level, logging.INFO))
    try:
        yield said
    finally:
        root.removeHandler(listener)
        root.setLevel(level)


def text_of(report: Mapping[str, Any]) -> Iterator[str]:
    """The report for people, line by line."""
    yield f"{'target':<10} {report['model']}: {report['target']}"
    where = "" if report["draft"] is None else f"{report['draft']}: "
    yield f"{'drafter':<10} {where}method {report['method']!r} ({report['because']})"
    for words, whose in report["shared"].items():
        yield f"{'shared' if whose != 'its own' else 'own':<10} {words}: {whose}"
    if report["mapped"]:
        yield f"{'mapped':<10} {report['mapped']}"
    for title, names in (("skipped", report["skipped"]), ("skipped", report["target_skipped"])):
        if names:
            more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
            yield f"{title:<10} {', '.join(names[:MAX_LISTED])}{more}"
    for line in report["loading"]:
        yield f"{'loading':<10} {line}"
    acceptance = report["acceptance"]
    yield (
        f"{'probe':<10} {report['num_tokens']} tokens to {report['num_prompts']} prompts in "
        f"{acceptance['num_rounds']} rounds, mean acceptance length {acceptance['mean_acceptance_length']:.2f}"
    )
    yield f"{'kept':<10} {_rates(acceptance['acceptance_per_position'])}{_usual(report['plausible'])}"
    yield f"{'verdict':<10} {report['verdict']}: {report['explanation']}"
    if report["suspects"] and looks_up(report["method"]):
        yield f"{'tried':<10} by the drafter alone, without the lookup before it"
    for suspect in report["suspects"]:
        change = (
            f"mean acceptance length {suspect['mean_acceptance_length']:.2f}, {suspect['gain']:+.2f} drafts a round, "
            f"better at {suspect['num_better']} positions, worse at {suspect['num_worse']}"
        )
        yield f"{'BETTER' if suspect['is_clear'] else 'tried':<10} {suspect['name']}: {change}"
        if suspect["is_clear"]:
            yield f"{'  set':<10} {suspect['setting']}"


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates) + " of the drafts, by position"


def _usual(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f" (usual for the first: {bounds[0]:.2f} to {bounds[1]:.2f})"
