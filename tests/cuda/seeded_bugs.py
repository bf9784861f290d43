"""The bugs that mutate.py seeds in the kernels, and which test has to find each, and how."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Place:
    """An expression or statements in a file; with the context before it, it occurs exactly once."""

    file: str  # In cuda/kernels.
    text: str
    context: str = ""

    @property
    def is_statement(self) -> bool:
        return self.text.endswith(";")


@dataclasses.dataclass(frozen=True)
class Test:
    """Cases of a program, in an emulator with or without ThreadSanitizer."""

    __test__ = False  # For pytest.

    program: str
    cases: str
    sanitizer: str = ""

    def __str__(self) -> str:
        return f"{self.program} {self.cases}{', TSan' if self.sanitizer else ''}"


@dataclasses.dataclass(frozen=True)
class Bug:
    name: str
    place: Place
    text: str  # Of the same kind as the place's.
    test: Test
    symptoms: tuple[str, ...]  # By one of these.


# How a run may end.
PASSED = "not at all"
RACE = "a data race"
TIMEOUT = "a time-out"  # Kernels gave up though nobody stopped.
VALUES = "wrong values"
POISON = "no poison"
STATE = "wrong state"  # Of counters, or what an error record says.
HANG = "a hang"

CALLS = Test("schedules_test", "ThreeRanks")
EMPTY_CALLS = Test("schedules_test", "EmptyMessages")
PLANS = Test("plan_schedules_test", "ThreeRanks")
TURNS = Test("plan_schedules_test", "SeveralTurns")
LATE_PLANS = Test("plan_schedules_test", "LateReceiver")
STOPS = Test("faults_test", "RankThatNeverLaunches")
OVERLAP = Test("faults_test", "LaunchesThatOverlap")
LATE = Test("faults_test", "RankThatComesLate")
AFTERWARDS = Test("faults_test", "NextLaunchFailsAtOnce")
LARGE = Test("large_test", "AllGather")
STOPS_IN_PLANS = Test("plan_faults_test", "RankThatNeverLaunches")
# What a strong memory order or luck may hide is found by ThreadSanitizer.
CALLS_TSAN = dataclasses.replace(CALLS, cases="TwoRanks", sanitizer="thread")
BARRIERS_TSAN = Test("schedules_test", "BarrierOrders", "thread")
PLANS_TSAN = dataclasses.replace(PLANS, cases="TwoRanks", sanitizer="thread")


def value_bug(test: Test, name: str, place: Place, text: str) -> Bug:
    return Bug(name, place, text, test, (VALUES,))


def counter_bug(test: Test, name: str, place: Place, text: str) -> Bug:
    """Ranks that disagree about a counter pass too early, or wait for what never comes."""
    return Bug(name, place, text, test, (VALUES, TIMEOUT, STATE))


def lost_signal(test: Test, name: str, place: Place, text: str) -> Bug:
    return Bug(name, place, text, test, (TIMEOUT,))


def race(test: Test, name: str, place: Place, text: str) -> Bug:
    return Bug(name, place, text, test, (RACE,))


def missing_barriers(file: str, last_order: str, kernel: str = "") -> list[Bug]:
    """A kernel without its first barrier, and without its last. `kernel`: if there are several."""
    name = kernel or file.removesuffix(".cu")
    begin = f"""{kernel}(const __grid_constant__ Args args) {{
  const PeerTable& peers = args.peers;
  BlockSync sync(peers, args.op_id);
  """
    first = Place(file, "sync.Barrier(Order::kData)", f"{begin if kernel else ''}if (")
    last = Place(file, f"sync.Barrier(Order::{last_order});")
    return [
        value_bug(CALLS, f"{name} without its first barrier", first, "sync.alive()"),
        value_bug(CALLS, f"{name} without its last barrier", last, ";"),
    ]


def barrier_bugs() -> list[Bug]:
    file = "signal.cuh"
    compare = Place(file, "static_cast<int32_t>(seen - expected) >= 0")
    inbox = Place(file, "peers_.pad[peer]->inbox[blockIdx.x][peers_.rank]")
    keep = "if (threadIdx.x == 0) pad_->epoch[blockIdx.x] = epoch_;"
    enter = Place(file, "__syncthreads();", "phase_ = Phase::kEntering;\n    ")
    return [
        value_bug(CALLS, "waits for one epoch too few", compare, "int32_t(seen - expected) >= -1"),
        counter_bug(CALLS, "compares without wrap-around", compare, "seen >= expected"),
        lost_signal(CALLS, "compares for equality", compare, "seen == expected"),
        counter_bug(
            CALLS,
            "epoch is not kept",
            Place(file, keep, "const bool failed = !Await(order);\n    "),
            ";",
        ),
        counter_bug(PLANS, "ticks are not kept", Place(file, keep, "epoch_ += ticks;\n    "), ";"),
        lost_signal(
            CALLS,
            "signals in the receiver's row",
            inbox,
            "peers_.pad[peer]->inbox[blockIdx.x][peer]",
        ),
        lost_signal(
            CALLS, "blocks share an inbox", inbox, "peers_.pad[peer]->inbox[0][peers_.rank]"
        ),
        race(CALLS_TSAN, "signals before the block is there", enter, ";"),
        race(
            CALLS_TSAN,
            "release is relaxed",
            Place("memory_order.cuh", "__atomic_store_n(p, value, __ATOMIC_RELEASE);"),
            "__atomic_store_n(p, value, __ATOMIC_RELAXED);",
        ),
        race(
            CALLS_TSAN,
            "acquire is relaxed",
            Place("memory_order.cuh", "__atomic_load_n(p, __ATOMIC_ACQUIRE)"),
            "__atomic_load_n(p, __ATOMIC_RELAXED)",
        ),
        race(
            BARRIERS_TSAN,
            "barrier does nothing",
            Place("barrier.cu", "sync.Barrier(Order::kData);"),
            ";",
        ),
    ]


def end_bugs() -> list[Bug]:
    """At the end of a kernel, and of a communicator."""
    file = "signal.cuh"
    return [
        Bug(
            "blocks that are done are not counted afresh",
            Place(file, "pad_->blocks_done = 0;"),
            ";",
            CALLS,
            (STATE,),
        ),
        Bug(
            "output is not poisoned",
            Place(file, "Fill(poison);", "if (__syncthreads_or(poisons)) "),
            ";",
            STOPS,
            (POISON,),
        ),
        Bug(
            "deadline is ignored", Place(file, "waited < peers_.timeout_ns"), "true", STOPS, (HANG,)
        ),
        Bug(
            "comes late and does not look",
            Place(file, "is_told && GaveUp()"),
            "false",
            LATE,
            (STATE,),
        ),
        Bug(
            "leaves while a peer is inside",
            Place(file, "AwaitPeersGone();", "gone[blockIdx.x], 1);\n      "),
            ";",
            LATE,
            (STATE,),
        ),
        Bug(
            "does not see a launch that runs",
            Place(file, "exchange_relaxed_sys(&pad_->owned, 1) == 0"),
            "exchange_relaxed_sys(&pad_->owned, 1) != 2",
            OVERLAP,
            (STATE,),
        ),
        Bug("dead flag is ignored", Place(file, "dead == 0"), "true", AFTERWARDS, (STATE,)),
        Bug(
            "peers are not told",
            Place(file, "peers_.pad[p]->dead", "st_relaxed_sys(&"),
            "peers_.pad[peers_.rank]->dead",
            AFTERWARDS,
            (STATE,),
        ),
        Bug(
            "blames whom it waits for",
            Place(file, "FindCulprit(peers_, peer)"),
            "peer",
            STOPS_IN_PLANS,
            (STATE,),
        ),
    ]


def line_bugs() -> list[Bug]:
    file = "all_reduce_one_shot_ll.cu"
    half = Place(file, "flag % 2", "blockIdx.x * 2 + ")
    return [
        value_bug(
            CALLS,
            "looks at one flag of a line",
            Place("memory_order.cuh", "half[0] >> 32 == flag && half[1] >> 32 == flag"),
            "half[0] >> 32 == flag",
        ),
        value_bug(
            CALLS, "a flag is 0", Place("signal.cuh", "++line_epoch_ == 0"), "++line_epoch_ == 1"
        ),
        counter_bug(
            CALLS,
            "flag of lines is not kept",
            Place(
                "signal.cuh", "if (threadIdx.x == 0) pad_->line_epoch[blockIdx.x] = line_epoch_;"
            ),
            ";",
        ),
        counter_bug(CALLS, "lines have one half", half, "0u"),
        counter_bug(
            EMPTY_CALLS,
            "an empty message has no line",
            Place(file, "left < 1 ? 1 : left < size ? left : size"),
            "left < 1 ? 0 : left < size ? left : size",
        ),
        lost_signal(
            CALLS,
            "lines lie where the receiver's would",
            Place(file, "LinesOf(peers, p, peers.rank, flag)"),
            "LinesOf(peers, p, p, flag)",
        ),
    ]


def part_bugs() -> list[Bug]:
    """Who does which part."""
    return [
        value_bug(
            CALLS,
            "everybody owns the first part",
            Place(
                "all_reduce_two_shot.cu",
                "ShardOf(args.count, sizeof(S), peers.rank, peers.num_ranks)",
            ),
            "ShardOf(args.count, sizeof(S), 0, peers.num_ranks)",
        ),
        value_bug(
            CALLS,
            "reduces the block of the opposite rank",
            Place("reduce_scatter.cu", "peers.rank * args.count"),
            "(peers.num_ranks - 1 - peers.rank) * args.count",
        ),
        counter_bug(
            CALLS,
            "rotation does not go round",
            Place("shards.cuh", "peer < peers.num_ranks ? peer : peer - peers.num_ranks"),
            "peer < peers.num_ranks ? peer : 0",
        ),
        value_bug(
            CALLS,
            "all_to_all sends everybody the same block",
            Place("all_to_all.cu", "input + p * args.nbytes"),
            "input",
        ),
        value_bug(
            LARGE,
            "counts bytes in 32 bits",
            Place("all_gather.cu", "peers.rank * args.nbytes"),
            "static_cast<uint32_t>(peers.rank * args.nbytes)",
        ),
    ]


def plan_bugs() -> list[Bug]:
    file = "plan_simple.cu"
    return [
        counter_bug(
            PLANS,
            "plan without its barrier",
            Place(file, "sync.Barrier(Order::kData)"),
            "sync.alive()",
        ),
        value_bug(
            PLANS,
            "waits for one message too few",
            Place(file, "ticks + messages"),
            "ticks + messages - 1",
        ),
        race(
            PLANS_TSAN,
            "counts a message before the block has stored it",
            Place(file, "__syncthreads();", "if (action.num_posts == 0) continue;\n    "),
            ";",
        ),
        counter_bug(TURNS, "does not wait for free slots", Place(file, "turn < 2"), "true"),
        counter_bug(
            TURNS,
            "waits for the turn before the last reader's",
            Place(file, "static_cast<uint32_t>(turn - 1)"),
            "static_cast<uint32_t>(turn - 2)",
        ),
        counter_bug(TURNS, "slots have one half", Place(file, "turn % 2"), "0"),
    ]


def plan_line_bugs() -> list[Bug]:
    file = "plan_ll.cu"
    credit = Place(file, "AwaitRead(receivers[r], flag_ - 2)")
    return [
        counter_bug(LATE_PLANS, "drops the credits", credit, "true"),
        counter_bug(
            LATE_PLANS,
            "takes credits of a turn too early",
            credit,
            "AwaitRead(receivers[r], flag_ - 3)",
        ),
        counter_bug(
            PLANS,
            "flag of turns is not kept",
            Place(file, "if (threadIdx.x == 0) pad_->plan_lines[blockIdx.x] = flag_;"),
            ";",
        ),
        lost_signal(PLANS, "does not tell that lines are read", Place(file, "flow.End();"), ";"),
        counter_bug(PLANS, "slots of lines have one half", Place(file, "flag_ % 2"), "0u"),
    ]


BUGS = [
    *barrier_bugs(),
    *missing_barriers("all_reduce_one_shot.cu", "kReads"),
    *missing_barriers("all_reduce_two_shot.cu", "kData"),
    *missing_barriers("all_reduce_multimem.cu", "kReads", "AllReduceMultimemOneShot"),
    *missing_barriers("all_reduce_multimem.cu", "kData", "AllReduceMultimemTwoShot"),
    *missing_barriers("reduce_scatter.cu", "kReads"),
    *missing_barriers("all_gather.cu", "kData"),
    *missing_barriers("all_to_all.cu", "kData"),
    *missing_barriers("ragged_all_to_all.cu", "kData"),
    *missing_barriers("broadcast.cu", "kData"),
    *line_bugs(),
    *part_bugs(),
    *plan_bugs(),
    *plan_line_bugs(),
    *end_bugs(),
]
