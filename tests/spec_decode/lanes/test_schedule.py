"""The order of stages, in virtual time: rules that always hold, and no idle host."""

import random
from dataclasses import dataclass, field

import pytest

from vllm_duck.spec_decode.lanes.schedule import run_lanes


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

    def stage0(self, layer):
        assert self.ready_at is None
        self.world.log.append(("stage0", self.name, layer))
        self.world.now += self.s0(layer)
        begins = max(self.world.now, self.world.ducks_free_at)
        self.ready_at = self.world.ducks_free_at = begins + self.s1(layer)
        self.layer = layer

    def is_sent(self):
        return True

    def is_done(self):
        return self.ready_at <= self.world.now

    def stage1(self):
        self.world.now = max(self.world.now, self.ready_at)
        self.ready_at = None
        self.world.log.append(("stage1", self.name, self.layer))


def check_order(log, num_lanes, num_layers):
    """Every stage once, and the two rules of the module."""
    at = {event: i for i, event in enumerate(log)}
    assert len(at) == len(log) == 2 * num_lanes * num_layers
    for lane in range(num_lanes):
        for layer in range(num_layers):
            assert at["stage0", lane, layer] < at["stage1", lane, layer]
            if layer:
                assert at["stage1", lane, layer - 1] < at["stage0", lane, layer]
            if lane:
                assert at["stage0", lane - 1, layer] < at["stage0", lane, layer]


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
    assert [event[1:] for event in world.log if event[0] == "stage0"] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]


def test_an_error_of_a_stage_ends_the_step():
    class Broken(FakeLane):
        def stage1(self):
            raise ConnectionError("the duck is gone")

    world = World()
    lanes = [
        FakeLane(world, 0, lambda _: 1, lambda _: 9),
        Broken(world, 1, lambda _: 1, lambda _: 1),
    ]
    with pytest.raises(ConnectionError, match="gone"):
        run_lanes(lanes, 4)


@dataclass
class Device:
    """Computes stages 0 one after the other, beside the host, which only polls."""

    free_at: float = 0.0


class DeviceLane:
    """Its rows are ready when the device has computed them; then the host sends."""

    POLL = 0.001

    def __init__(self, world, device, name, s0, s1, lanes):
        self.world, self.device, self.name = world, device, name
        self.s0, self.s1, self.lanes = s0, s1, lanes
        self.ready_at = self.done_at = None
        lanes.append(self)

    def stage0(self, layer):
        self.world.log.append(("stage0", self.name, layer))
        begins = max(self.world.now, self.device.free_at)
        self.ready_at = self.device.free_at = begins + self.s0(layer)
        self.layer, self.done_at = layer, None

    def is_sent(self):
        self.world.now += self.POLL
        if self.done_at is None and self.ready_at <= self.world.now:
            begins = max(self.world.now, self.world.ducks_free_at)
            self.done_at = self.world.ducks_free_at = begins + self.s1(self.layer)
        return self.done_at is not None

    def is_done(self):
        return self.is_sent() and self.done_at <= self.world.now

    def stage1(self):
        if self.done_at > self.world.now:
            # The host sleeps: nobody would send the rows of another lane.
            assert not [k for k in self.lanes if k.ready_at and k.done_at is None]
            self.world.now = self.done_at
        self.ready_at = None
        self.world.log.append(("stage1", self.name, self.layer))


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_the_host_never_sleeps_while_rows_are_to_be_sent(num_lanes):
    for seed in range(300):
        rng = random.Random(seed)
        world, device, lanes = World(), Device(), []
        for k in range(num_lanes):
            slow = rng.choice((0.1, 1, 10))
            DeviceLane(
                world,
                device,
                k,
                lambda _, rng=rng: rng.expovariate(1),
                lambda _, rng=rng, slow=slow: rng.expovariate(slow),
                lanes,
            )
        num_layers = rng.randrange(0, 6)
        run_lanes(lanes, num_layers)
        check_order(world.log, num_lanes, num_layers)


@pytest.mark.parametrize(("c", "d"), [(1, 1), (1, 4), (4, 1), (2, 1.5)])
def test_two_lanes_on_a_device_take_the_ideal_time_too(c, d):
    world, device, lanes = World(), Device(), []
    for k in range(2):
        DeviceLane(world, device, k, lambda _: c, lambda _: d, lanes)
    run_lanes(lanes, 10)
    # But for the polls.
    assert world.now == pytest.approx(10 * 2 * max(c, d) + min(c, d), rel=0.01)
