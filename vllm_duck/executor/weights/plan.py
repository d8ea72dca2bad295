"""The shard plan: which duck owns which columns of which experts, as data.

Invariant, pinned by tests: a ShardPlan that exists tiles the model exactly. Every
(expert, column) belongs to one shard.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.duck import Shard

# The kernel's vectors of bf16 and its loops want whole groups of this many columns.
COLUMN_STEP = 16


@dataclass(frozen=True)
class ShardPlan:
    """All shards of a model, in duck order.

    Raises:
        DuckConfigError: they leave a gap, overlap, or reach beyond the model.
    """

    moe_intermediate_size: int
    n_routed_experts: int
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        names = [f"shard {index}" for index in range(len(self.shards))]
        check_tiling(
            self.shards,
            names,
            num_columns=self.moe_intermediate_size,
            num_experts=self.n_routed_experts,
        )

    @classmethod
    def even(
        cls,
        num_ducks: int,
        *,
        num_columns: int,
        num_experts: int,
        weights: Sequence[float] | None = None,
    ) -> "ShardPlan":
        """Split by columns, in proportion to `weights` if there are any.

        Each duck gets a slice of every expert as long as there are columns enough: then
        all ducks have work in every call. With more ducks than that, groups of experts
        are shared out too.

        Raises:
            DuckConfigError: more ducks than pieces, or weights that do not fit.
        """
        weights = _checked_weights(num_ducks, weights)
        column_units = -(-num_columns // COLUMN_STEP)
        num_groups = -(-num_ducks // column_units)
        if num_groups > num_experts:
            raise DuckConfigError(
                f"{num_experts} experts of {num_columns} columns make at most "
                f"{num_experts * column_units} shards, got {num_ducks} ducks"
            )
        groups = [
            list(weights[lo:hi])
            for lo, hi in pairwise(_cuts(num_ducks, [1.0] * num_groups))
        ]
        expert_cuts = _cuts(num_experts, [sum(group) for group in groups])
        shards = []
        for group, experts in zip(groups, pairwise(expert_cuts), strict=True):
            for unit_lo, unit_hi in pairwise(_cuts(column_units, group)):
                column_lo = unit_lo * COLUMN_STEP
                column_hi = min(unit_hi * COLUMN_STEP, num_columns)
                shards.append(Shard(column_lo, column_hi, *experts))
        return cls(num_columns, num_experts, tuple(shards))

    @classmethod
    def from_json(cls, text: str) -> "ShardPlan":
        """Read a plan.

        Raises:
            DuckConfigError: the text is not a plan, or the plan does not tile.
        """
        try:
            data = json.loads(text)
            return cls(
                moe_intermediate_size=int(data["moe_intermediate_size"]),
                n_routed_experts=int(data["n_routed_experts"]),
                shards=tuple(_shard_from_data(shard) for shard in data["shards"]),
            )
        except DuckConfigError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DuckConfigError(
                'a shard plan is JSON like {"moe_intermediate_size": 64, '
                '"n_routed_experts": 8, "shards": [{"columns": [0, 64], '
                f'"experts": [0, 8]}}]}}, got one that lacks or garbles {error}'
            ) from error

    def to_json(self) -> str:
        shards = [
            {
                "columns": [shard.column_lo, shard.column_hi],
                "experts": [shard.expert_lo, shard.expert_hi],
            }
            for shard in self.shards
        ]
        lines = ",\n".join(f"    {json.dumps(shard)}" for shard in shards)
        return (
            f'{{\n  "moe_intermediate_size": {self.moe_intermediate_size},\n'
            f'  "n_routed_experts": {self.n_routed_experts},\n'
            f'  "shards": [\n{lines}\n  ]\n}}\n'
        )


def check_tiling(
    shards: Sequence[Shard],
    names: Sequence[str],
    *,
    num_columns: int,
    num_experts: int,
) -> None:
    """Check that the shards cover every (expert, column) exactly once.

    Raises:
        DuckConfigError: the first gap or overlap, by the names of its owners.
    """
    whole = Shard(0, num_columns, 0, num_experts)
    for shard, name in zip(shards, names, strict=True):
        _check_inside(shard, name, whole)
    column_cuts = sorted(
        {0, num_columns}.union(*((s.column_lo, s.column_hi) for s in shards))
    )
    expert_cuts = sorted(
        {0, num_experts}.union(*((s.expert_lo, s.expert_hi) for s in shards))
    )
    for experts in pairwise(expert_cuts):
        for columns in pairwise(column_cuts):
            cell = Shard(*columns, *experts)
            owners = [
                name
                for shard, name in zip(shards, names, strict=True)
                if _contains(shard, cell)
            ]
            if not owners:
                raise DuckConfigError(
                    f"{len(shards)} shards leave a gap: nobody holds {cell}; "
                    f"they must tile {whole}"
                )
            if len(owners) > 1:
                raise DuckConfigError(
                    f"shards overlap: {owners[0]} and {owners[1]} both hold {cell}"
                )


def _check_inside(shard: Shard, name: str, whole: Shard) -> None:
    if shard.num_columns <= 0 or shard.num_experts <= 0:
        raise DuckConfigError(f"{name} is empty: {shard}")
    if not _contains(whole, shard):
        raise DuckConfigError(f"{name} holds {shard}, but the model has {whole}")


def _contains(outer: Shard, inner: Shard) -> bool:
    return (
        outer.column_lo <= inner.column_lo
        and inner.column_hi <= outer.column_hi
        and outer.expert_lo <= inner.expert_lo
        and inner.expert_hi <= outer.expert_hi
    )


def _checked_weights(num_ducks: int, weights: Sequence[float] | None) -> list[float]:
    if num_ducks < 1:
        raise DuckConfigError(
            f"the number of ducks must be at least 1, got {num_ducks}"
        )
    if weights is None:
        return [1.0] * num_ducks
    if len(weights) != num_ducks or not all(0 < w < float("inf") for w in weights):
        raise DuckConfigError(
            f"weights must be {num_ducks} positive numbers, got {list(weights)}"
        )
    return list(weights)


def _cuts(total: int, weights: Sequence[float]) -> list[int]:
    """Cut `total` units in proportion to the weights, at least one unit each.

    Returns len(weights) + 1 ascending positions.
    """
    weight_sum = sum(weights)
    exact = [total * weight / weight_sum for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    # One unit at a time to who lacks most of its exact share, or from who has most
    # beyond it; the first one on a tie.
    while sum(counts) < total:
        counts[_argmax([e - c for e, c in zip(exact, counts, strict=True)])] += 1
    while sum(counts) > total:
        excess = [c - e if c > 1 else 0 for e, c in zip(exact, counts, strict=True)]
        counts[_argmax(excess)] -= 1
    positions = [0]
    for count in counts:
        positions.append(positions[-1] + count)
    return positions


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda index: (values[index], -index))


def _shard_from_data(data: dict[str, Any]) -> Shard:
    column_lo, column_hi = (int(value) for value in data["columns"])
    expert_lo, expert_hi = (int(value) for value in data["experts"])
    return Shard(column_lo, column_hi, expert_lo, expert_hi)
