"""Host. A config on devices that are not there: whether it fits, what a round costs, what drafting gains."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxspec.aot.cost import (
    Cost,
    ModelShape,
    Pass,
    cost_of,
    drafter_shape,
    plain_passes,
    round_passes,
    target_shape,
)
from jaxspec.aot.describe import Described
from jaxspec.aot.memory import DEFAULT_SHARE, Fit, estimated_temp_bytes, page_bytes
from jaxspec.aot.parts import make_parts, table_bytes
from jaxspec.aot.settle import settle
from jaxspec.aot.topology import Topology
from jaxspec.config.engine import EngineConfig
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.errors import ConfigError

ACCEPTANCE_LENGTHS = (1.5, 2.0, 2.5, 3.0)
DEFAULT_CONTEXT = 4096
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Paper:
    """A config on a topology, counted."""

    resolved: ResolvedConfig
    described: Described
    topology: Topology
    target: ModelShape
    draft: ModelShape | None
    tables: int

    @property
    def num_devices(self) -> int:
        """That one copy of the model is split over."""
        return self.resolved.tensor_parallel_size

    @property
    def passes(self) -> list[tuple[Pass, int]]:
        return round_passes(self.target, self.described.drafter, self.draft, self.resolved, self.described.target)

    def cost(self, passes: Sequence[tuple[Pass, int]], rows: int, context: int) -> tuple[Cost, float]:
        """(what the passes cost a device together, seconds of their rooflines one after another)."""
        chip, link = self.topology.chip, self.topology.bandwidth_between(self.num_devices)
        total, seconds = Cost(), 0.0
        for one, vocabulary in passes:
            cost = cost_of(one, rows, context, vocabulary, self.num_devices)
            total += cost.times(one.times)
            seconds += one.times * cost.seconds(chip.memory_bandwidth, chip.bf16_flops, link)
        return total, seconds


def paper_of(config: EngineConfig, described: Described, topology: Topology) -> Paper:
    """The config over as many devices as it says.

    Raises:
        ConfigError: more than there are, or than the models can be split over; or what an engine would refuse.
    """
    resolved, drafter = settle(config, described, topology), described.drafter
    if resolved.tensor_parallel_size * resolved.data_parallel_size > topology.num_devices:
        raise ConfigError(
            f"tensor_parallel_size={resolved.tensor_parallel_size} x data_parallel_size={resolved.data_parallel_size} "
            f"must not exceed the {topology.num_devices} devices of {topology.name}; lower it"
        )
    target = target_shape(described.target, resolved)
    draft = None if drafter is None else drafter_shape(drafter, resolved)
    tables = table_bytes(make_parts(described, resolved, topology.chip.platform).state)
    return Paper(resolved, described, topology, target, draft, tables)


def fit_of(paper: Paper, config: EngineConfig, temp_bytes: int | None = None) -> Fit:
    """Args:
    temp_bytes: scratch of the largest program, where one was compiled; else it is estimated.
    """
    resolved, chip = paper.resolved, paper.topology.chip
    estimate = estimated_temp_bytes(paper.described.target, resolved, paper.num_devices)
    return Fit(
        memory_bytes=chip.memory_bytes,
        plan_bytes=int(chip.memory_bytes * (config.gpu_memory_utilization or DEFAULT_SHARE)),
        target_bytes=paper.target.bytes,
        draft_bytes=0 if paper.draft is None else paper.draft.bytes,
        table_bytes=paper.tables,
        temp_bytes=estimate if temp_bytes is None else temp_bytes,
        is_compiled=temp_bytes is not None,
        page_bytes=page_bytes(paper.target, paper.draft, resolved.block_size),
        block_size=resolved.block_size,
        max_num_seqs=resolved.max_num_seqs,
        wanted_pages=resolved.num_pages,
    )


def fewest_devices(config: EngineConfig, described: Described, topology: Topology, context: int) -> Paper:
    """The config over the fewest devices, of powers of two, on which max_num_seqs requests of `context` tokens fit;
    over as many as it can be where they never do.

    Raises:
        ConfigError: as `paper_of`.
    """
    number, found = 1, None
    while found is None or number * config.data_parallel_size <= topology.num_devices:
        try:
            paper = paper_of(config.model_copy(update={"tensor_parallel_size": number}), described, topology)
        except ConfigError:
            if found is None:
                raise  # it is not the number
            break
        found = paper
        if fit_of(paper, config).fits(context, paper.resolved.max_num_seqs):
            break
        number *= 2
    assert found is not None
    return found


def default_context(resolved: ResolvedConfig) -> int:
    """Tokens a request holds, where nobody says: texts longer than the drafter can hold get no drafts."""
    drafting = resolved.speculative_config
    return min(DEFAULT_CONTEXT, resolved.max_model_len if drafting is None else drafting.max_model_len)


def acceptance_lengths(given: Sequence[float] | None, num_drafts: int) -> list[float]:
    """The mean numbers of tokens a round to report for.

    Raises: ConfigError for one that this many drafts cannot give.
    """
    if given is None:
        return [length for length in ACCEPTANCE_LENGTHS if num_drafts and length <= num_drafts + 1]
    for length in given:
        if not 1 <= length <= num_drafts + 1:
            raise ConfigError(
                f"--acceptance-length {length} must be in [1, {num_drafts + 1}]: a round of {num_drafts} drafts gives "
                "no other mean"
            )
    return list(given)


def extrapolated(programs: Sequence[dict[str, Any]], key: str, num_layers: int) -> dict[str, float]:
    """{program: its figure at all layers}, on the line through those that were compiled; without any it is left out."""
    found: dict[str, list[tuple[int, float]]] = {}
    for one in programs:
        if one.get(key) is not None:
            found.setdefault(one["name"], []).append((one["layers"], float(one[key])))
    out = {}
    for name, points in found.items():
        (first, low), (last, high) = min(points), max(points)
        slope = 0.0 if first == last else (high - low) / (last - first)
        out[name] = high + slope * (num_layers - last)
    return out


def report_of(
    paper: Paper,
    config: EngineConfig,
    *,
    context: int,
    lengths: Sequence[float],
    programs: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Everything as plain values.

    Args:
        context: tokens that each row holds, prompt and answer so far.
        lengths: tokens a round.
        programs: what `compiling.compile_in_child` gave; none: on paper alone.
    """
    resolved, described, topology = paper.resolved, paper.described, paper.topology
    num_layers = described.target.num_layers
    temps = extrapolated(programs, "temp_bytes", num_layers)
    fit = fit_of(paper, config, max(map(int, temps.values())) if temps else None)
    chip = topology.chip
    speeds = [_speed(paper, rows, context, lengths) for rows in _batches(fit.largest_batch(context))]
    return {
        "model": config.model,
        "drafter": None if config.speculative_config is None else config.speculative_config.model,
        "method": described.method,
        "num_speculative_tokens": resolved.num_speculative_tokens,
        "dtype": resolved.dtype,
        "quantization": resolved.quantization,
        "kv_cache_dtype": resolved.kv_cache_dtype,
        "parameters": paper.target.parameters,
        "draft_parameters": 0 if paper.draft is None else paper.draft.parameters,
        "topology": topology.name,
        "chip": {
            "title": chip.title,
            "memory_bytes": chip.memory_bytes,
            "memory_bandwidth": chip.memory_bandwidth,
            "bf16_flops": chip.bf16_flops,
            "bandwidth_between": topology.bandwidth_between(paper.num_devices),
        },
        "num_devices": topology.num_devices,
        "tensor": paper.num_devices,
        "data": resolved.data_parallel_size,
        "replicas": topology.num_devices // paper.num_devices,
        "max_model_len": resolved.max_model_len,
        "max_num_seqs": resolved.max_num_seqs,
        "context": context,
        "fit": asdict(fit)
        | {
            "pages": fit.pages,
            "fits": fit.fits(context),
            "kv_bytes_per_token": fit.page_bytes // fit.block_size,
            "largest_batch": fit.largest_batch(context),
            "largest_batch_at_max_model_len": fit.largest_batch(resolved.max_model_len),
            "longest_context_at_max_num_seqs": fit.longest_context(resolved.max_num_seqs),
        },
        "passes": [_pass(paper, one, vocabulary, context) for one, vocabulary in paper.passes],
        "speeds": speeds,
        "compiled": _compiled(programs, num_layers),
        "notes": _notes(paper, fit, context, programs),
    }


def _batches(largest: int) -> list[int]:
    batches = [rows for rows in BATCHES if rows < largest]
    return [*batches, largest] if 0 < largest <= BATCHES[-1] else batches


def _speed(paper: Paper, rows: int, context: int, lengths: Sequence[float]) -> dict[str, Any]:
    """Of one batch: seconds of a step and of a round, tokens a second of a chip."""
    V = paper.described.target.vocab_size
    plain, plain_s = paper.cost(plain_passes(paper.target, V), rows, context)
    whole, round_s = paper.cost(paper.passes, rows, context)
    a_chip = rows / paper.num_devices * paper.topology.chip.devices_per_chip
    return {
        "batch": rows,
        "plain_ms": plain_s * 1e3,
        "round_ms": round_s * 1e3,
        "plain_bytes": plain.bytes,
        "round_bytes": whole.bytes,
        "plain_flops": plain.flops,
        "round_flops": whole.flops,
        "round_sent_bytes": whole.sent_bytes,
        "plain_tokens_per_s_per_chip": a_chip / plain_s,
        "breakeven_acceptance_length": round_s / plain_s,
        "at_acceptance_length": {
            str(length): {
                "tokens_per_s_per_chip": a_chip * length / round_s,
                "tokens_per_s_per_request": length / round_s,
                "speedup": length * plain_s / round_s,
            }
            for length in lengths
        },
    }


def _pass(paper: Paper, one: Pass, vocabulary: int, context: int) -> dict[str, Any]:
    cost, seconds = paper.cost([(one, vocabulary)], 1, context)
    return {
        "name": one.name,
        "times": one.times,
        "tokens": one.tokens,
        "logits": one.logits,
        "bytes": cost.bytes / one.times,
        "flops": cost.flops / one.times,
        "sent_bytes": cost.sent_bytes / one.times,
        "ms": seconds / one.times * 1e3,
    }


def _compiled(programs: Sequence[dict[str, Any]], num_layers: int) -> dict[str, Any] | None:
    if not programs:
        return None
    return {
        "programs": list(programs),
        "num_layers": num_layers,
        "temp_bytes": extrapolated(programs, "temp_bytes", num_layers),
        "flops": extrapolated(programs, "flops", num_layers),
    }


def _notes(paper: Paper, fit: Fit, context: int, programs: Sequence[dict[str, Any]]) -> list[str]:
    resolved, drafting = paper.resolved, paper.resolved.speculative_config
    notes = list(paper.described.assumed)
    if not fit.is_compiled:
        notes.append("temporaries are an estimate: nothing was compiled")
    else:
        layers = sorted({one["layers"] for one in programs if "error" not in one})
        line = f"continued in a straight line to {paper.described.target.num_layers}"
        notes.append(
            f"temporaries are XLA's, of programs of {' and '.join(map(str, layers))} layers (the model's last), "
            + (line if len(layers) > 1 else "as if more layers needed no more: compile two numbers of them")
        )
    notes += [f"{one['name']}, {one['layers']} layers: {one['error']}" for one in programs if "error" in one]
    if drafting is not None and drafting.max_model_len < context:
        notes.append(
            f"the drafter works on texts of up to {drafting.max_model_len} tokens: rows of {context} decode plainly"
        )
    if paper.described.target.moe is not None:
        notes.append("experts are counted as if tokens were sent to them evenly and at random")
    if paper.num_devices > 1:
        notes.append("what devices send each other is not overlapped with anything, and takes no time to begin")
    if fit.fits(context) and fit.pages < fit.wanted_pages and resolved.max_num_seqs > 1:
        notes.append(
            f"{fit.pages} pages fit of the {fit.wanted_pages} that {resolved.max_num_seqs} rows of "
            f"{resolved.max_model_len} tokens would fill: rows wait, or are preempted, when they run short"
        )
    return notes


def text_of(report: dict[str, Any]) -> str:
    """The report for people."""
    fit, chip = report["fit"], report["chip"]
    what = report["method"] or "no drafts"
    by = f" by {report['drafter']}" if report["drafter"] else ""
    drafts = f"{what}{by}, {report['num_speculative_tokens']} drafts a round" if report["method"] else what
    copies = f"{report['replicas']} cop{'y' if report['replicas'] == 1 else 'ies'} of the model"
    over = f"over {report['tensor']} device{'s' * (report['tensor'] > 1)} each"
    over += f", {report['data']} of them in one engine" if report["data"] > 1 else ""
    lines = [
        f"{report['model']} ({report['parameters'] / 1e9:.2f} B parameters, {report['dtype']}), {drafts}",
        f"{report['topology']}: {report['num_devices']} x {chip['title']}, {copies} {over}",
        "",
        "memory of a device, GB",
        f"  {'there is':<34}{_gb(fit['memory_bytes'])}, planned with {_gb(fit['plan_bytes']).strip()}",
        f"  {'target':<34}{_gb(fit['target_bytes'])}",
        f"  {'drafter':<34}{_gb(fit['draft_bytes'])}",
        f"  {'tables of the rows':<34}{_gb(fit['table_bytes'])}",
        f"  {'temporaries' + ('' if fit['is_compiled'] else ' (estimate)'):<34}{_gb(fit['temp_bytes'])}",
        f"  {'left for pages':<34}{_gb(_left(fit))}",
        f"  a token's pages are {fit['kv_bytes_per_token'] / 1e3:.1f} kB of it",
    ]
    if not fit["fits"]:
        rows = f"{report['max_num_seqs']} row{'s' * (report['max_num_seqs'] > 1)}"
        lines += [f"  it does not fit: not one request of {report['context']} tokens with tables for {rows}", ""]
    else:
        most = f"{fit['largest_batch']} of {report['context']} tokens"
        lines += [
            f"  requests at once: {most}, {fit['largest_batch_at_max_model_len']} of {report['max_model_len']}",
            f"  longest: {fit['longest_context_at_max_num_seqs']} tokens each with {report['max_num_seqs']} requests",
            "",
        ]
    lines.append(f"passes of a round for one request of {report['context']} tokens")
    lines.append(f"  {'':<20}{'times':>6}{'tokens':>8}{'GB read':>10}{'GFLOP':>10}{'MB sent':>10}{'ms':>9}")
    for one in report["passes"]:
        lines.append(
            f"  {one['name']:<20}{one['times']:>6}{one['tokens']:>8}{one['bytes'] / 1e9:>10.2f}"
            f"{one['flops'] / 1e9:>10.1f}{one['sent_bytes'] / 1e6:>10.2f}{one['ms']:>9.3f}"
        )
    if report["speeds"]:
        lines += ["", f"tokens a second of a chip at {report['context']} tokens a request, roofline"]
        lengths = list(report["speeds"][0]["at_acceptance_length"])
        columns = "".join(f"{'at ' + length:>16}" for length in lengths)
        lines.append(f"  {'requests':>8}{'step ms':>9}{'round ms':>9}{'even at':>9}{'plain':>10}{columns}")
        for one in report["speeds"]:
            cells = "".join(
                f"{cell['tokens_per_s_per_chip']:>9.0f} ({cell['speedup']:.2f})"
                for cell in one["at_acceptance_length"].values()
            )
            lines.append(
                f"  {one['batch']:>8}{one['plain_ms']:>9.2f}{one['round_ms']:>9.2f}"
                f"{one['breakeven_acceptance_length']:>9.2f}{one['plain_tokens_per_s_per_chip']:>10.0f}{cells}"
            )
        if lengths:
            lines.append("  at N: tokens a round, in brackets against plain; even at: tokens a round that pay for it")
    if report["compiled"]:
        lines += ["", "compiled", f"  {'':<32}{'layers':>7}{'s':>8}{'temporaries GB':>16}{'GFLOP':>12}  collectives"]
        for one in report["compiled"]["programs"]:
            if "error" in one:
                lines.append(f"  {one['name']:<32}{one['layers']:>7}  {one['error'][:70]}")
                continue
            flops = "-" if one["flops"] is None else f"{one['flops'] / 1e9:.1f}"
            sent = ", ".join(f"{n} {kind} of {size / 1e6:.2f} MB" for kind, (n, size) in one["collectives"].items())
            lines.append(
                f"  {one['name']:<32}{one['layers']:>7}{one['seconds']:>8.1f}{one['temp_bytes'] / 1e9:>16.3f}"
                f"{flops:>12}  {sent or 'none'}"
            )
    lines += ["", *(f"note: {note}" for note in report["notes"])]
    return "\n".join(lines)


def _left(fit: dict[str, Any]) -> int:
    parts = ("target_bytes", "draft_bytes", "table_bytes", "temp_bytes")
    return fit["plan_bytes"] - sum(fit[part] for part in parts)


def _gb(size: int) -> str:
    return f"{size / 1e9:8.2f}"
