"""The CUDA copiers' order of streams, on a pretended device: nothing runs but what its waits allow, in any order.

Streams are queues that nobody works off by himself; a drawn schedule takes from whichever may go on. What the copiers
do not say must wait for what will then come out wrong in some of the schedules. It is the copiers' own code that runs;
only streams, events and the moves themselves are stand-ins.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvpolicy_vllm.plugin.copiers import cuda
from kvpolicy_vllm.plugin.copiers.arena import host_arena, segments_in
from kvpolicy_vllm.plugin.copiers.cuda import CudaCopier, StagedCudaCopier
from kvpolicy_vllm.plugin.copiers.staging import Staging, part_of, runs_of
from kvpolicy_vllm.plugin.forward_timer import MAX_FAILURES, ForwardTimer
from kvpolicy_vllm.plugin.messages import Forward, Job

pytestmark = pytest.mark.scheduler

SCHEDULES = 60
OLD, NEW, OTHER = 3.0, 4.0, 5.0


@dataclass(eq=False)
class Stream:
    """What is launched waits here; a wait names a stream and how far it must have come."""

    device: Any = None
    launched: list[Callable[[], None] | tuple[Stream, int]] = field(default_factory=list)
    done: int = 0
    passed: list[float] = field(default_factory=lambda: [0.0])
    """When so much of it was done, in milliseconds of the device."""

    def wait_stream(self, other: Stream) -> None:
        self.launched.append((other, len(other.launched)))

    def wait_event(self, event: Any) -> None:
        self.launched.append((event.stream, event.at))

    def synchronize(self) -> None:
        """Until all that was launched here is done, others going on beside it."""
        while self.done < len(self.launched):
            self.device.run(random.Random(self.done), 1)

    @property
    def ready(self) -> bool:
        if self.done == len(self.launched):
            return False
        first = self.launched[self.done]
        return callable(first) or first[0].done >= first[1]

    def go_on(self) -> None:
        first = self.launched[self.done]
        if callable(first):
            self.device.now_ms += 1.0
            first()
        self.done += 1
        self.passed.append(self.device.now_ms)


class Device:
    """Stands in for ``torch.cuda`` where the copiers ask for it."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.compute = self._current = Stream(self)
        self.streams = [self.compute]
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.stream, self.at, self.recorded_ms = device.compute, 0, 0.0
                self.timed = enable_timing

            def record(self) -> None:
                self.stream, self.at = device._current, len(device._current.launched)
                self.recorded_ms = device.now_ms

            def query(self) -> bool:
                return self.stream.done >= self.at

            def elapsed_time(self, other: Event) -> float:
                if not (self.timed and other.timed):
                    raise RuntimeError("both events must be made with enable_timing=True")  # as CUDA's own do
                return other.passed_ms() - self.passed_ms()

            def passed_ms(self) -> float:
                return max(self.recorded_ms, self.stream.passed[self.at])

        self.Event = Event

    def made_stream(self, device: Any = None) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def launch(self, what: Callable[[], None]) -> None:
        self._current.launched.append(what)

    def in_steps(self, steps: Iterator[Callable[[], None]]) -> None:
        for step in steps:
            self.launch(step)

    def run(self, rng: random.Random, most: int | None = None) -> None:
        """Let the device do ``most`` things, None: all."""
        while (most is None or most > 0) and (ready := [stream for stream in self.streams if stream.ready]):
            rng.choice(ready).go_on()
            most = None if most is None else most - 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    pretended = {"Event": device.Event, "Stream": device.made_stream}
    pretended |= {"current_stream": device.current_stream, "stream": device.stream}
    for name, stand_in in pretended.items():
        monkeypatch.setattr(cuda.torch.cuda, name, stand_in)

    def move_pieces(source: torch.Tensor, target: torch.Tensor, sizes: torch.Tensor) -> None:
        pieces = list(zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True))
        for a, b, size in pieces:  # each by itself, as a copy engine may be interrupted between any two
            device.launch(lambda a=a, b=b, size=size: ctypes.memmove(b, a, size))

    monkeypatch.setattr(cuda.ops, "swap_blocks_batch", move_pieces)
    monkeypatch.setattr(cuda, "URGENT_BYTES", 400)  # two blocks of 192 bytes
    monkeypatch.setattr(Staging, "gather", lambda self, job, at=0: device.in_steps(gather_steps(self, job, at)))
    monkeypatch.setattr(Staging, "send", lambda self, job, at=0: device.in_steps(send_steps(self, job, at)))
    monkeypatch.setattr(Staging, "back", lambda self, job: device.in_steps(back_steps(self, job)))
    return device


def gather_steps(staging: Staging, job: Job, at: int = 0) -> Iterator[Callable[[], None]]:
    """What `Staging.gather` launches, launch by launch: between any two another stream may write into its buffer."""
    blocks = torch.tensor(job.block_ids)
    for piece, segment in pieces_of(staging, len(job.slots), at):
        yield lambda piece=piece, segment=segment: piece.copy_(segment[blocks])


def send_steps(staging: Staging, job: Job, at: int = 0) -> Iterator[Callable[[], None]]:
    """The same of `Staging.send`."""
    for position, first, count in runs_of(job.slots):
        host, buffer = staging._arena[first : first + count], staging._buffer[at:][position : position + count]
        yield lambda host=host, buffer=buffer: host.copy_(buffer)


def back_steps(staging: Staging, job: Job) -> Iterator[Callable[[], None]]:
    """The same of `Staging.back`."""
    for blocks, slots in staging._parts(job):
        for at, first, count in runs_of(slots):
            host, buffer = staging._arena[first : first + count], staging._buffer[at : at + count]
            yield lambda host=host, buffer=buffer: buffer.copy_(host)
        for piece, segment in pieces_of(staging, len(slots)):
            yield lambda piece=piece, segment=segment, blocks=blocks: segment.index_copy_(0, blocks, piece)


def pieces_of(staging: Staging, count: int, at: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of a buffer, with the segment each belongs to."""
    edges = staging._edges
    for number, segment in enumerate(staging._segments):
        yield staging._buffer[at : at + count, edges[number] : edges[number + 1]], segment


def filled(device: Device, segments: list[torch.Tensor], blocks: tuple[int, ...], value: float) -> None:
    """A step that writes ``value`` into blocks."""

    def write() -> None:
        for segment in segments:
            segment[list(blocks)] = value

    device.launch(write)


def both_ways_at_once(copier: CudaCopier, device: Device, segments: list[torch.Tensor], rng: random.Random) -> None:
    """A load is still under way when the next save begins: what each direction uses is its own."""
    filled(device, segments, (0,), OTHER)
    copier.save(Job(3, "t", (0,), (6,)))
    device.run(rng)
    filled(device, segments, (6,), OLD)
    copier.load(Job(3, "t", (4,), (6,)))
    device.run(rng, rng.randrange(8))
    copier.save(Job(4, "u", (6,), (7,)))
    device.run(rng)
    assert [done.ok for done in copier.poll()] == [True]
    for segment, host in zip(segments, copier.host_segments, strict=True):
        assert (segment[4] == OTHER).all(), "what came back is what went out meanwhile"
        assert (host[7] == OLD).all(), "what went out is what came back meanwhile"


def overwritten_at_once_and_later(
    copier: CudaCopier, device: Device, segments: list[torch.Tensor], rng: random.Random
) -> None:
    """Of a save's blocks the next step writes to some, more than its buffer holds or fewer, and a later one to others;
    the save after it uses the buffer while its content may still be under way."""
    blocks, slots = (1, 5, 2, 8), (4, 5, 0, 1)
    at_once = frozenset(rng.sample(blocks, rng.randrange(5)))
    filled(device, segments, blocks, OLD)
    filled(device, segments, (9,), OTHER)
    copier.save(Job(5, "v", blocks, slots), at_once | {3})
    filled(device, segments, tuple(at_once), NEW)
    device.run(rng, rng.randrange(12))
    copier.save(Job(6, "w", (9,), (2,)), frozenset({9}))
    filled(device, segments, (9,), NEW)
    device.run(rng, rng.randrange(12))
    copier.poll()
    later = frozenset(rng.sample(blocks, rng.randrange(5)))
    copier.finish(later)
    filled(device, segments, tuple(later), OTHER)
    device.run(rng)
    assert copier.poll() == [] and not copier._saving and not copier._saves
    for segment, host in zip(segments, copier.host_segments, strict=True):
        assert (host[list(slots)] == OLD).all(), "a block was overwritten before it was saved"
        assert (host[2] == OTHER).all(), "a block was overwritten before it was saved"
        assert (segment[list(later)] == OTHER).all()


@pytest.mark.parametrize("kind", [CudaCopier, StagedCudaCopier])
def test_no_schedule_of_the_device_mixes_anything_up(kind: type[CudaCopier], device: Device) -> None:
    """A victim's blocks are written to as soon as its save is launched; its load goes into blocks that a step in flight
    still reads; its host slots go to the next save as soon as it is back."""
    for seed in range(SCHEDULES):
        rng = random.Random(seed)
        segments = [torch.zeros(12, 16) for _ in range(3)]
        copier = kind(segments, 8, False, None)
        saved, loaded, slots = (1, 5, 2), (7, 3, 9), (4, 5, 0)
        read: list[torch.Tensor] = []
        filled(device, segments, saved, OLD)
        filled(device, segments, loaded, OTHER)
        copier.save(Job(1, "r", saved, slots), frozenset(saved))
        filled(device, segments, saved, NEW)
        device.run(rng, rng.randrange(12))
        device.launch(lambda read=read, segments=segments: read.append(segments[0][7].clone()))
        copier.load(Job(1, "r", loaded, slots))
        finished = []
        while not finished:
            device.run(rng, 1)
            finished = copier.poll()
        assert finished[0].ok
        assert read and (read[0] == OTHER).all(), "the load came before a step that still read its blocks"
        for segment in segments:
            assert (segment[list(loaded)] == OLD).all(), "what came back is not what was saved"
            assert (segment[list(saved)] == NEW).all()
        both_ways_at_once(copier, device, segments, rng)
        copier.save(Job(2, "s", saved, slots))
        copier.load(Job(2, "s", (10, 11, 8), slots))
        device.run(rng)
        assert [done.ok for done in copier.poll()] == [True]
        assert all((segment[[10, 11, 8]] == NEW).all() for segment in segments)
        overwritten_at_once_and_later(copier, device, segments, rng)
        assert len(copier.transfers) == 9 and all(transfer.ok for transfer in copier.transfers)
        assert not copier._saves and not copier._loads, "events of finished copies are kept"


@pytest.mark.parametrize("kind", [CudaCopier, StagedCudaCopier])
def test_blocks_lie_as_far_apart_as_their_strides_say(kind: type[CudaCopier], device: Device) -> None:
    """A piece may be a part of what lies between two blocks: here it is half of that."""
    memory = torch.arange(12 * 32, dtype=torch.float32).reshape(12, 32)
    before = memory.clone()
    copier = kind([memory[:, :16]], 8, False, None)
    copier.save(Job(1, "r", (1, 5), (4, 0)))
    copier.load(Job(1, "r", (7, 3), (4, 0)))
    device.run(random.Random(0))
    assert [done.ok for done in copier.poll()] == [True]
    before[[7, 3], :16] = before[[1, 5], :16]
    assert torch.equal(memory, before)


def test_a_load_that_fails_half_way_writes_no_more(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks go to somebody else at once, whose step must not be written over by what had been launched of it."""
    segments = [torch.zeros(12, 16) for _ in range(3)]
    copier = CudaCopier(segments, 8, False, None)
    job, move = Job(1, "r", (1, 2), (0, 1)), cuda.ops.swap_blocks_batch

    def half(*tables: torch.Tensor) -> None:
        move(*(table[: len(table) // 2] for table in tables))
        raise RuntimeError("made to fail")

    copier.save(job)
    monkeypatch.setattr(cuda.ops, "swap_blocks_batch", half)
    copier.load(job)
    assert [done.ok for done in copier.poll()] == [False]
    for segment in segments:
        segment[[1, 2]] = OTHER
    device.run(random.Random(0))
    assert all((segment[[1, 2]] == OTHER).all() for segment in segments)
    assert not copier._loads


def test_a_save_that_fails_half_way_writes_no_more(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are free at once: what comes there from a file must not be written over by what had been launched of
    it, from the buffer or from the blocks."""
    segments = [torch.zeros(12, 16) for _ in range(3)]
    copier, slots = CudaCopier(segments, 8, False, None), [0, 1, 2, 3]
    move = cuda.ops.swap_blocks_batch

    def half(*tables: torch.Tensor) -> None:
        move(*(table[: len(table) // 2] for table in tables))
        raise RuntimeError("made to fail")

    monkeypatch.setattr(cuda.ops, "swap_blocks_batch", half)
    copier.save(Job(1, "r", (1, 2, 5, 6), tuple(slots)), frozenset({1}))
    assert [done.ok for done in copier.transfers] == [False] and not copier._saves
    for host in copier.host_segments:
        host[slots] = OTHER
    device.run(random.Random(0))
    assert all((host[slots] == OTHER).all() for host in copier.host_segments)


def test_events_of_what_ends_or_breaks_off_are_not_kept(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    copier = CudaCopier([torch.zeros(12, 16)], 8, False, None)
    job = Job(1, "r", (1, 2), (0, 1))
    copier.save(job)
    device.run(random.Random(0))
    assert copier.poll() == [] and not copier._saves and not copier._saving
    copier.save(Job(2, "r", (1, 2), (0, 1)))
    device.run(random.Random(0))
    copier.load(Job(2, "r", (1, 2), (0, 1)))

    def lost(event: Any) -> bool:
        raise RuntimeError("the device is lost")

    copier.poll()
    monkeypatch.setattr(device.Event, "query", lost)
    assert [done.ok for done in copier.poll()] == [False]
    assert not copier._loads and not copier._loading


def test_copies_are_timed_by_the_device_not_by_who_asks(device: Device) -> None:
    """A millisecond a thing: two steps are under way when a copy of six pieces begins, and the poll comes late."""
    segments = [torch.zeros(12, 4) for _ in range(2)]
    copier = CudaCopier(segments, 8, False, None, lambda: 1.0 + device.now_ms / 1e3)
    rng = random.Random(0)
    for job, begin in (
        (Job(1, "r", (1, 2, 3), (0, 1, 2)), copier.save),
        (Job(1, "r", (4, 5, 6), (0, 1, 2)), copier.load),
    ):
        filled(device, segments, (9,), NEW)
        filled(device, segments, (9,), NEW)
        begin(job)
        device.run(rng)
        device.now_ms += 50.0
        copier.poll()
    for transfer, submitted_s in zip(copier.transfers, (1.0, 1.058), strict=True):
        result = (transfer.submit_s, transfer.start_s, transfer.end_s)
        assert result == pytest.approx((submitted_s, submitted_s + 0.002, submitted_s + 0.008)), transfer.direction


def test_a_forward_pass_is_timed_by_the_device_and_nobody_waits(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A millisecond a thing: what was launched before does not count, nor what is launched between two parts."""

    def waited(stream: Stream) -> None:
        raise AssertionError("the stream was waited for")

    monkeypatch.setattr(Stream, "synchronize", waited)
    timer, rng = ForwardTimer("cuda"), random.Random(0)
    launched = {"before": 2, "part": 3, "copies": 5, "rest": 4, "sampling": 2}

    def launch(what: str) -> None:
        for _ in range(launched[what]):
            device.launch(lambda: None)

    launch("before")
    timer.begin(7)
    launch("part")
    timer.interrupt()
    launch("copies")
    timer.go_on()
    launch("rest")
    timer.end()
    launch("sampling")
    device.run(rng, 13)
    assert timer.take() == [], "the device is not through"
    timer.begin(8)
    launch("part")
    timer.end()
    device.run(rng, 1)
    assert timer.take() == [Forward(7, pytest.approx(0.007))], "the step before is asked about in the next one"
    device.run(rng)
    device.now_ms += 50.0
    assert timer.take() == [Forward(8, pytest.approx(0.003))], "when it is asked does not matter"


def test_a_device_that_cannot_say_how_long_it_computed_is_not_asked_for_ever(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(event: Any) -> bool:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(device.Event, "query", lost)
    timer, found = ForwardTimer("cuda"), list[Forward]()
    for step in range(MAX_FAILURES + 3):
        timer.begin(step)
        timer.end()
        found += timer.take()
    assert found == [Forward(step, None) for step in range(MAX_FAILURES)]


@pytest.mark.parametrize("forgotten", ["wait before a save", "wait before a load"])
def test_the_schedules_find_a_forgotten_wait(forgotten: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth: each wait that is left out is found."""
    waits = Stream.wait_stream

    def wait(self: Stream, other: Stream) -> None:
        save = device.streams[-3]  # of the copier that was made last: its load stream comes after it, then the idle one
        left_out = (self, other) == (save, device.compute)
        if forgotten == "wait before a load":
            left_out = self is device.streams[-2]
        if not left_out:
            waits(self, other)

    monkeypatch.setattr(Stream, "wait_stream", wait)
    with pytest.raises(AssertionError):
        test_no_schedule_of_the_device_mixes_anything_up(CudaCopier, device)


def test_small_saves_share_the_buffer_without_waiting(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save is under way, and the buffer has room for one more block: only the third step waits."""
    segments = [torch.zeros(12, 16) for _ in range(3)]
    copier, waited = CudaCopier(segments, 8, True, None), []
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: waited.append(event))
    copier.save(Job(1, "a", (1, 2, 3), (0, 1, 2)), frozenset({1}))
    copier.save(Job(2, "b", (4, 5), (3, 4)), frozenset({4}))
    assert not waited
    copier.save(Job(3, "c", (6,), (5,)), frozenset({6}))
    assert len(waited) == 1


WAITS = ["for what the buffer does not hold", "for the buffer", "for a save of an earlier step"]


@pytest.mark.parametrize("forgotten", range(3), ids=WAITS)
def test_the_schedules_find_a_forgotten_event(forgotten: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits of the compute stream, told apart by where they stand."""
    places = ("_save_parts", "_gather", "finish_copies_out")
    waits = Stream.wait_event

    def wait(self: Stream, event: Any) -> None:
        if sys._getframe(1).f_code.co_name != places[forgotten]:
            waits(self, event)

    monkeypatch.setattr(Stream, "wait_event", wait)
    with pytest.raises(AssertionError):
        test_no_schedule_of_the_device_mixes_anything_up(CudaCopier, device)


def test_the_schedules_find_blocks_that_are_not_taken_for_urgent(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_out = CudaCopier.copy_out
    monkeypatch.setattr(CudaCopier, "copy_out", lambda self, job, urgent: copy_out(self, job, 0))
    with pytest.raises(AssertionError):
        test_no_schedule_of_the_device_mixes_anything_up(CudaCopier, device)


def test_the_schedules_find_a_buffer_that_both_directions_share(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shared(StagedCudaCopier):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._inward = self._outward

    with pytest.raises(AssertionError, match="meanwhile"):
        test_no_schedule_of_the_device_mixes_anything_up(Shared, device)


def test_a_time_is_never_asked_of_an_event_that_takes_none(device: Device) -> None:
    """As CUDA raises, so does the stand-in: a copier that forgot `enable_timing` would not pass here."""
    timed, untimed = device.Event(enable_timing=True), device.Event()
    assert timed.elapsed_time(timed) == 0.0
    with pytest.raises(RuntimeError, match="enable_timing"):
        timed.elapsed_time(untimed)


def test_the_launches_written_out_here_are_those_of_the_staging() -> None:
    """Otherwise the schedules would be those of something else."""
    generator = torch.Generator().manual_seed(0)
    segments = [torch.randn((12, 16), generator=generator) for _ in range(3)]
    job = Job(1, "r", (3, 9, 1, 4, 8), (2, 3, 6, 5, 0))
    arenas = [host_arena(8, 3 * 16 * 4).zero_() for _ in range(2)]
    staged = [Staging(segments, arena, 500) for arena in arenas]
    staged[0].out(job)
    for begin in range(0, 5, staged[1].blocks):
        part = part_of(job, begin, begin + staged[1].blocks)
        for step in (*gather_steps(staged[1], part), *send_steps(staged[1], part)):
            step()
    assert torch.equal(*arenas)
    assert torch.equal(segments_in(arenas[1], segments)[2][6], segments[2][1])
    second = Job(2, "s", (5,), (7,))
    staged[0].gather(second, 1)
    staged[0].send(second, 1)
    for step in (*gather_steps(staged[1], second, 1), *send_steps(staged[1], second, 1)):
        step()
    assert torch.equal(*arenas) and torch.equal(segments_in(arenas[0], segments)[2][7], segments[2][5])
    before = [segment.clone() for segment in segments]
    for way in range(2):
        for segment in segments:
            segment[list(job.block_ids)] = 0.0
        if way == 0:
            staged[0].back(job)
        else:
            for step in back_steps(staged[1], job):
                step()
        assert all(torch.equal(segment, was) for segment, was in zip(segments, before, strict=True))
