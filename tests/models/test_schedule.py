"""The order of stages, in virtual time: rules that always hold, and no idle host."""

import random
from dataclasses import dataclass, field

import pytest

from vllm_duck.models.schedule import run_lanes


@dataclass
class World:
    """A clock, one host, and ducks that compute one request after the other."""

    now: float = 0.0
    ducks_free_at: float = 0.0
    log: list[tuple[str, int, int]] = field(default_factory=list)


class FakeLane:
    """Stage 0 takes the host s0(layer), stage 1 the ducks s1(layer)."""

    def __init__(self, world, name, s0, s1):
        self.world, self.name, self.s0, self.s1 = world, name, s0, s1
        self.layer, self.ready_at = -1, None

    def start(self, layer):
        assert self.ready_at is None
        self.world.log.append(("start", self.name, layer))
        self.world.now += self.s0(layer)
        begins = max(self.world.now, self.world.ducks_free_at)
        self.ready_at = self.world.ducks_free_at = begins + self.s1(layer)
        self.layer = layer

    def is_done(self):
        return self.ready_at <= self.world.now

    def finish(self):
        self.world.now = max(self.world.now, self.ready_at)
        self.ready_at = None
        self.world.log.append(("finish", self.name, self.layer))


def check_order(log, num_lanes, num_layers):
    """Every stage once, and the two rules of the module."""
    at = {event: i for i, event in enumerate(log)}
    assert len(at) == len(log) == 2 * num_lanes * num_layers
    for lane in range(num_lanes):
        for layer in range(num_layers):
            assert at["start", lane, layer] < at["finish", lane, layer]
            if layer:
                assert at["finish", lane, layer - 1] < at["start", lane, layer]
            if lane:
                assert at["start", lane - 1, layer] < at["start", lane, layer]


def _random_lane(world, name, rng):
    return FakeLane(
        world,
        name,
        lambda _: rng.expovariate(1),
        lambda _: rng.expovariate(rng.choice((0.1, 1, 10))),
    )


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_the_rules_hold_whatever_the_times(num_lanes):
    for seed in range(300):
        rng = random.Random(seed)
        world = World()
        lanes = [_random_lane(world, k, rng) for k in range(num_lanes)]
        num_layers = rng.randrange(0, 8)
        run_lanes(lanes, num_layers)
        check_order(world.log, num_lanes, num_layers)


@pytest.mark.parametrize(("c", "d"), [(1, 1), (1, 4), (4, 1), (1, 0), (2, 1.5)])
def test_two_lanes_take_the_ideal_time(c, d):
    """L * 2 * max(c, d) + min(c, d): the first or the last stage overlaps nothing."""
    world = World()
    lanes = [FakeLane(world, k, lambda _: c, lambda _: d) for k in range(2)]
    run_lanes(lanes, 10)
    assert world.now == pytest.approx(10 * 2 * max(c, d) + min(c, d))


def test_one_lane_takes_the_sum():
    world = World()
    run_lanes([FakeLane(world, 0, lambda _: 1, lambda _: 2)], 5)
    assert world.now == 15


def test_the_first_lane_runs_ahead_while_the_second_waits():
    world = World()
    first = FakeLane(world, 0, lambda _: 1, lambda _: 0)
    second = FakeLane(world, 1, lambda _: 1, lambda _: 0)
    second.is_done = lambda: False
    run_lanes([first, second], 3)
    assert [event[1:] for event in world.log if event[0] == "start"] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]


def test_an_error_of_a_stage_ends_the_step():
    class Broken(FakeLane):
        def finish(self):
            raise ConnectionError("the duck is gone")

    world = World()
    lanes = [
        FakeLane(world, 0, lambda _: 1, lambda _: 9),
        Broken(world, 1, lambda _: 1, lambda _: 1),
    ]
    with pytest.raises(ConnectionError, match="gone"):
        run_lanes(lanes, 4)
