"""The simulation: against closed formulas, and against the model written out for one message."""

import resource

import numpy as np
import pytest

from jcoll.algorithms import registry
from jcoll.plan.builder import Batch
from jcoll.plan.simulate import Simulation, simulate
from jcoll.plan.topology import PRESETS, Link, Topology, flat

ALPHA, BETA, GAMMA = 1e-6, 1e-9, 3e-10
FLAT = flat(ALPHA, BETA, gamma=GAMMA)
SIZES = 2 ** np.arange(10, 30)


def algorithm(op, build, chunks=1):
    return registry.Algorithm("mine", op, build, lambda n: chunks)


def times(op, build, num_ranks, nbytes, topology, chunks=1, **kwargs):
    return simulate(algorithm(op, build, chunks), num_ranks, nbytes, topology, **kwargs)


@pytest.mark.parametrize("n", [2, 3, 8, 17])
def test_ring(n):
    chunk = -(-SIZES // n)
    phases = {"reduce_scatter": [1], "all_gather": [0], "all_reduce": [1, 0]}
    for op, reducing in phases.items():
        ring = registry.get(op, "ring")
        expected = sum((n - 1) * (ALPHA + chunk * (BETA + GAMMA * r)) for r in reducing)
        local = chunk * GAMMA if op == "all_gather" else 0  # Its own block, to the output.
        np.testing.assert_allclose(simulate(ring, n, SIZES, FLAT), expected + local)


@pytest.mark.parametrize("n", [2, 4, 16])
def test_halving_doubling(n):
    found = simulate(registry.get("all_reduce", "halving_doubling"), n, SIZES, FLAT)
    moved = SIZES * (n - 1) / n
    expected = 2 * np.log2(n) * ALPHA + 2 * moved * BETA + moved * GAMMA
    np.testing.assert_allclose(found, expected)


def test_recursive_doubling():
    def build(p):
        for k in range(4):
            p.send(p.ranks, p.ranks ^ (1 << k), reduce=True)

    found = times("all_reduce", build, 16, SIZES, FLAT)
    np.testing.assert_allclose(found, 4 * (ALPHA + SIZES * (BETA + GAMMA)))


def test_one_rank_takes_no_time_but_for_copies():
    for op, copies in (("all_reduce", 1), ("broadcast", 1), ("reduce_scatter", 1)):
        found = times(op, lambda p: None, 1, np.array([1000]), FLAT)
        np.testing.assert_allclose(found, copies * 1000 * GAMMA)


def test_the_root_receives_one_message_at_a_time():
    def build(p):
        for r in range(1, p.num_ranks):
            p.send(r, 0, chunk=r)

    topology = flat(ALPHA, BETA, gap=2e-7)
    found = times("gather", build, 9, np.array([9000]), topology)
    np.testing.assert_allclose(found, ALPHA + 8 * (2e-7 + 1000 * BETA))


def test_the_root_sends_on_while_messages_travel():
    def build(p):
        for r in range(1, p.num_ranks):
            p.send(0, r)

    found = times("broadcast", build, 9, np.array([1000]), flat(ALPHA, BETA))
    np.testing.assert_allclose(found, ALPHA + 8 * 1000 * BETA)


def test_a_message_waits_for_the_one_it_forwards():
    def chain(p):
        for r in range(1, p.num_ranks):
            p.send(r - 1, r)

    found = times("broadcast", chain, 9, np.array([1000]), flat(ALPHA, BETA))
    np.testing.assert_allclose(found, 8 * (ALPHA + 1000 * BETA))


def test_latencies_of_one_round_overlap():
    def in_turn(p):
        for k in range(1, p.num_ranks):
            p.send(p.ranks, (p.ranks + k) % p.num_ranks, chunk=p.ranks)

    def at_once(p):
        with p.at_once():
            in_turn(p)

    topology = flat(ALPHA, BETA)
    for build, latencies in ((in_turn, 7), (at_once, 1)):
        found = times("all_gather", build, 8, np.array([8000]), topology)
        np.testing.assert_allclose(found, latencies * ALPHA + 7 * 1000 * BETA)


def test_root_is_passed_on():
    def build(p):
        others = p.ranks[p.ranks != p.root]
        for r in others:
            p.send(p.root, r)

    found = times("broadcast", build, 4, np.array([1000]), flat(ALPHA, BETA), root=3)
    np.testing.assert_allclose(found, ALPHA + 3 * 1000 * BETA)


@pytest.mark.parametrize(("ranks_per_port", "messages"), [(1, 1), (2, 2), (4, 4), ("all", 8)])
def test_messages_share_a_port(ranks_per_port, messages):
    """Two hosts of 4; every rank sends to its mirror image in the other host."""
    topology = Topology(
        "two hosts",
        (
            Link("in", 0, 0, ranks=4),
            Link("out", ALPHA, BETA, ranks_per_port=ranks_per_port, gap=1e-7),
        ),
    )
    build = lambda p: p.send(p.ranks, (p.ranks + 4) % 8)  # noqa: E731
    found = times("all_reduce", build, 8, np.array([1000]), topology)
    np.testing.assert_allclose(found, ALPHA + messages * (1e-7 + 1000 * BETA))


def test_near_ranks_use_the_near_link():
    topology = Topology("hosts", (Link("in", 1e-6, 0, ranks=4), Link("out", 1e-3, 0)))
    for src, dst, expected in ((0, 3, 1e-6), (3, 4, 1e-3), (4, 7, 1e-6), (0, 7, 1e-3)):
        found = times("all_reduce", lambda p, a=src, b=dst: p.send(a, b), 8, [1], topology)
        np.testing.assert_allclose(found, expected)


def test_chunks_are_rounded_up():
    build = lambda p: p.send(p.ranks, (p.ranks + 1) % 4, chunk=3)  # noqa: E731
    found = times("all_reduce", build, 4, [1, 4, 5, 8], flat(0, 1.0), chunks=4)
    np.testing.assert_allclose(found, [1, 1, 2, 2])


def test_the_same_pairs_with_other_counts():
    def build(p):
        for count in (1, 4):
            p.send(p.ranks, (p.ranks + 1) % 4, count=count)

    found = times("all_reduce", build, 4, np.array([4000]), flat(ALPHA, BETA), chunks=4)
    np.testing.assert_allclose(found, 2 * ALPHA + 5 * 1000 * BETA)


# -- The model, one message and one size at a time -------------------------------------------------


class Reference:
    def __init__(self, num_ranks, chunk_bytes, topology):
        self.topology, self.chunk_bytes = topology, chunk_bytes
        self.clock = [0.0] * num_ranks
        self.round_clock = list(self.clock)
        self.free = {}

    def messages(self, batch):
        for i in range(len(batch.src)):
            src, dst = int(batch.src[i]), int(batch.dst[i])
            nbytes = int(batch.count[i]) * self.chunk_bytes
            level = 0
            for link in self.topology.links[:-1]:
                level += src // link.ranks != dst // link.ranks
            yield src, dst, nbytes, level

    def ports(self, src, dst, level):
        link = self.topology.links[level]
        width = link.ranks if link.ranks_per_port == "all" else link.ranks_per_port
        number = (lambda r: 0) if width == "all" else (lambda r: r // width)
        return ("send", level, number(src)), ("receive", level, number(dst))

    def step(self, batch):
        load, before = {}, list(self.clock)
        self.round_clock = self.round_clock if batch.together else before
        for src, dst, nbytes, level in self.messages(batch):
            link = self.topology.links[level]
            for port in self.ports(src, dst, level) if src != dst else ():
                load[port] = load.get(port, 0) + link.gap + link.beta * nbytes
        free = dict(self.free)
        for src, dst, nbytes, level in self.messages(batch):
            gamma = self.topology.gamma * nbytes
            if src == dst:
                self.clock[dst] = before[dst] + gamma
                continue
            ports = self.ports(src, dst, level)
            start = max(self.round_clock[src], *(self.free.get(port, 0) for port in ports))
            end = start + max(load[port] for port in ports)
            for port in ports:
                free[port] = max(free.get(port, 0), end)
            arrival = end + self.topology.links[level].alpha
            self.clock[dst] = max(before[dst], arrival) + (gamma if batch.reduce else 0)
        self.free = free


def random_batch(rng, n):
    size = int(rng.integers(1, n + 1))
    src, dst = rng.permutation(n)[:size], rng.permutation(n)[:size]
    if rng.random() < 0.3:
        dst = (src + 1) % n
    zero = np.zeros_like(src)
    count = rng.integers(1, 4, size) if rng.random() < 0.5 else zero + 1
    flags = map(bool, rng.random(2) < 0.5)
    return Batch(src, dst, zero, zero, zero, zero, zero, zero, count, *flags)


THREE_LEVELS = Topology(
    "racks",
    (
        Link("chip", 1e-6, 1e-11, ranks=2, ranks_per_port="all"),
        Link("host", 3e-6, 1e-10, ranks=6, ranks_per_port=3, gap=1e-7),
        Link("rack", 1e-5, 1e-9, ranks_per_port=1),
    ),
    gamma=1e-10,
)


@pytest.mark.parametrize("topology", [*PRESETS.values(), THREE_LEVELS, FLAT], ids=lambda t: t.name)
@pytest.mark.parametrize("n", [1, 2, 7, 20])
def test_random_batches_against_the_model_written_out(topology, n):
    rng = np.random.default_rng(n)
    sizes = np.array([1, 1000, 10**6])
    simulation = Simulation(n, sizes, topology)
    references = [Reference(n, int(size), topology) for size in sizes]
    for _ in range(40):
        batch = random_batch(rng, n)
        for state in (simulation, *references):
            state.step(batch)
        expected = [max(reference.clock) for reference in references]
        np.testing.assert_allclose(simulation.times(), expected)


@pytest.mark.parametrize("topology", PRESETS.values(), ids=lambda t: t.name)
def test_every_algorithm_takes_longer_for_more(topology):
    for a in registry.all_algorithms():
        for n in (1, 2, 6, 16):
            if a.supports(n) is None:
                found = simulate(a, n, SIZES, topology)
                assert np.all(np.diff(found) >= 0)
                assert n == 1 or found[0] > 0, a
                one = simulate(a, n, SIZES[7:8], topology)
                np.testing.assert_allclose(found[7:8], one)


def test_many_ranks():
    """Nothing is kept: 1,024 ranks take little memory. docs/topologies.md has the time of 4,096."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for a in registry.all_algorithms("all_reduce"):
        assert np.all(simulate(a, 1024, SIZES, PRESETS["nvswitch"]) > 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
