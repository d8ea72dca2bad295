"""A prediction as a record, as JSON, and as a table for people."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_duck.errors import DuckConfigError
from vllm_duck.plan.card import CardMemory, card_memory, check_card
from vllm_duck.plan.machines import LINK_STEPS
from vllm_duck.plan.sizes import INT4_BYTES
from vllm_duck.plan.steps import CHUNK_ROWS, Planner, Stages, Step

PROMPTS = (100, 2_000, 32_000)
# A duck's Python, gRPC and buffers; and what it holds besides its slice.
_DUCK_BASE_BYTES, _DUCK_SHARE = 0.1e9, 1.03
# What a CPU host takes while it loads over what it holds: benchmarks.real_width.
_CPU_LOAD_SHARE = 1.01


@dataclass(frozen=True)
class Change:
    """What another fleet would do. Rates are tokens a second."""

    what: str
    decode_tok_s: float
    prefill_tok_s: float


@dataclass(frozen=True)
class Prediction:
    """Bytes, seconds, tokens a second."""

    host: str
    num_ducks: int
    duck_bytes: float
    host_bytes: float
    # Of a GPU host.
    card: CardMemory | None
    # Of a decoded token, on each duck's link and on the host's port.
    link_bytes_per_token: float
    host_port_bytes_per_token: float
    # Of one lane in a MoE layer.
    stages: Stages
    lane_layer_s: float
    # By number of drafts; `step` is the one that was asked for or is best.
    steps: tuple[Step, ...]
    step: Step
    prefill_tok_s: float
    # By prompt tokens.
    first_token_s: dict[int, float]
    decode_bottleneck: str
    prefill_bottleneck: str
    changes: tuple[Change, ...]

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["step"] |= {"seconds": self.step.seconds, "tok_s": self.step.tok_s}
        if self.card:
            found["card"]["num_tokens"] = self.card.num_tokens
        return found


def predict(planner: Planner, num_drafts: int | None) -> Prediction:
    """num_drafts: None for as many as bring most tokens a second.

    Raises:
        DuckConfigError: the host's weights do not fit its card, or the model drafts
            fewer.
    """
    if num_drafts is not None and num_drafts > planner.most_drafts:
        raise DuckConfigError(
            f"--drafts {num_drafts} is more than {planner.most_drafts}: the model has "
            "no MTP layer"
        )
    sizes, fleet, host = planner.sizes, planner.fleet, planner.host
    step = planner.best_step() if num_drafts is None else planner.step(num_drafts)
    rows = 1 + step.num_drafts
    card = card_memory(sizes, host.card_gib) if host.card_gib else None
    if card:
        check_card(card, host.name)
        host_bytes = card.pinned_bytes
    else:
        # The embedding is read from the mapped file.
        held = sizes.host_bytes(planner.host_bytes) + sizes.vocabulary_bytes
        host_bytes = held * _CPU_LOAD_SHARE
    per_duck = sizes.experts_bytes(planner.expert_bytes) / fleet.num_ducks
    # The MTP layer asks for one row of each draft.
    num_rows = sizes.num_moe * rows + step.num_drafts
    link_bytes = 2 * num_rows * planner.row_bytes / step.tokens
    stages = planner.stages((rows + 1) // 2)
    return Prediction(
        host=host.name,
        num_ducks=fleet.num_ducks,
        duck_bytes=per_duck * _DUCK_SHARE + _DUCK_BASE_BYTES,
        host_bytes=host_bytes,
        card=card,
        link_bytes_per_token=link_bytes,
        host_port_bytes_per_token=link_bytes * fleet.num_ducks,
        stages=stages,
        lane_layer_s=planner.layer_s(rows) / min(2, rows),
        steps=tuple(planner.step(count) for count in range(planner.most_drafts + 1)),
        step=step,
        prefill_tok_s=planner.prefill_tok_s(),
        first_token_s={count: planner.prefill_s(count) for count in PROMPTS},
        decode_bottleneck=planner.bottleneck(rows),
        prefill_bottleneck=planner.bottleneck(CHUNK_ROWS),
        changes=tuple(_changes(planner, step)),
    )


def _changes(planner: Planner, step: Step) -> Iterator[Change]:
    fleet = planner.fleet

    def change(what: str, other: Planner, num_drafts: int = step.num_drafts) -> Change:
        return Change(what, other.step(num_drafts).tok_s, other.prefill_tok_s())

    more = replace(fleet, num_ducks=fleet.num_ducks + 1)
    yield change("one more duck", replace(planner, fleet=more))
    faster = [gbps for gbps in LINK_STEPS if gbps > fleet.link_gbps][:1]
    for gbps in faster:
        quick = replace(fleet, link_gbps=gbps)
        yield change(f"links of {gbps:g} Gb/s", replace(planner, fleet=quick))
    if step.num_drafts < planner.most_drafts:
        yield change("one more draft", planner, step.num_drafts + 1)
    if planner.expert_bytes > INT4_BYTES:
        yield change("int4 experts", replace(planner, expert_bytes=INT4_BYTES))


def as_table(found: Prediction) -> str:
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Prediction) -> Iterator[str]:
    step, stages = found.step, found.stages
    yield "memory"
    yield _line(f"each of {found.num_ducks} ducks", _gb(found.duck_bytes))
    if found.card:
        card = found.card
        yield _line(f"{found.host}, weights", _gb(card.weight_bytes))
        yield _line(f"{found.host}, fp8 caches", f"{card.num_tokens:,} tokens")
        yield _line("pinned memory of the host", _gb(found.host_bytes))
    else:
        yield _line("host, while it loads", _gb(found.host_bytes))
    yield "on the wires, both ways, for each decoded token"
    yield _line("each duck's link", _gb(found.link_bytes_per_token))
    yield _line("the host's port", _gb(found.host_port_bytes_per_token))
    yield "one lane in a MoE layer"
    for name, seconds in (
        ("attention, router, shared expert", stages.host_s),
        ("the host's thread with calls", stages.calls_s),
        ("the rows there and back", stages.there_s + stages.back_s),
        ("the ducks", stages.ducks_s),
        ("network latency", stages.round_trip_s),
        ("takes, beside the other lane", found.lane_layer_s),
    ):
        yield _line(name, f"{seconds * 1e3:.2f} ms")
    yield "decoding, one user"
    for each in found.steps:
        mark = "  <-" if each.num_drafts == step.num_drafts else ""
        yield _line(
            f"{each.num_drafts} drafts",
            f"{each.tok_s:.1f} tok/s  ({each.tokens:.2f} tokens in "
            f"{each.seconds * 1e3:.0f} ms){mark}",
        )
    yield _line("held up by", found.decode_bottleneck)
    yield "prompts"
    yield _line(f"chunks of {CHUNK_ROWS}", f"{found.prefill_tok_s:.0f} tok/s")
    for count, seconds in found.first_token_s.items():
        yield _line(f"first token behind {count:,}", f"{seconds:.1f} s")
    yield _line("held up by", found.prefill_bottleneck)
    yield "what would change it: decoding, prompts"
    for change in found.changes:
        rates = f"{change.decode_tok_s:.1f} tok/s, {change.prefill_tok_s:.0f} tok/s"
        yield _line(change.what, rates)


def _line(name: str, value: str) -> str:
    return f"  {name:34} {value}"


def _gb(num_bytes: float) -> str:
    if num_bytes < 1e9:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes / 1e9:.1f} GB"
