"""Test the functions of iroh's binding that are replaced, and that they still need it."""

import asyncio
import itertools
import time
from pathlib import Path

import pytest
from helpers.network.transport_pairs import open_channel, start_transports
from iroh import iroh_ffi

from barnraise.peering.transports import iroh_binding

READY, WAKE = iroh_ffi._UNIFFI_RUST_FUTURE_POLL_READY, iroh_ffi._UNIFFI_RUST_FUTURE_POLL_WAKE


class FakeCall:
    """An asynchronous function of iroh that gives these answers, one for each question.

    An answer of None is no answer: the test gives one later, from another thread.
    """

    def __init__(self, *answers):
        self.answers = list(answers)
        self.is_free = False
        self.answer_later = None

    def poll(self, rust_future, callback, handle):
        answer = self.answers.pop(0)
        if answer is None:
            self.answer_later = lambda answer: callback(handle, answer)
        else:
            callback(handle, answer)

    def complete(self, rust_future, status):
        return "the result"

    def free(self, rust_future):
        self.is_free = True

    async def run(self):
        lift, converter = str, None
        return await iroh_ffi._uniffi_rust_call_async(
            None, self.poll, self.complete, self.free, lift, converter
        )


def test_iroh_binding_still_needs_its_byte_copy_replaced():
    """When this fails, a newer iroh copies fast: remove the replacement in iroh_binding.py."""
    written = iroh_ffi._UniffiRustBufferBuilder.write
    assert written.__module__ == "barnraise.peering.transports.iroh_binding"
    source = Path(iroh_ffi.__file__).read_text()
    generated = source[source.index("    def write(self, value):") :][:250]
    assert "for i, byte in enumerate(value):" in generated
    assert "self.rbuf.data[self.rbuf.len + i] = byte" in generated


def test_replaced_copy_writes_the_same_bytes_fast():
    data = bytes(range(256)) * 4096
    builder = iroh_ffi._UniffiRustBufferBuilder()
    started_at = time.thread_time()
    for piece in (b"", b"abc", data, bytearray(b"xyz")):
        builder.write(piece)
    seconds = time.thread_time() - started_at
    buffer = builder.finalize()
    assert buffer.data[: buffer.len] == b"abc" + data + b"xyz"
    buffer.free()
    assert seconds < 0.15, "byte by byte, a megabyte takes a third of a second"


def test_iroh_binding_still_wakes_its_loop_for_every_answer():
    """When this fails, a newer iroh waits otherwise: compare it with iroh_binding.py."""
    assert iroh_ffi._uniffi_rust_call_async is iroh_binding.await_result
    source = Path(iroh_ffi.__file__).read_text()
    generated = source[source.index("async def _uniffi_rust_call_async(") :][:800]
    assert "poll_code = await future" in generated
    callback = source[source.index("def _uniffi_continuation_callback(") :][:250]
    assert "eventloop.call_soon_threadsafe(_uniffi_set_future_result" in callback


async def test_result_that_is_there_at_once_takes_no_turn_of_the_loop(monkeypatch):
    # Every sixteenth result does take one, counted over all transports of this process.
    monkeypatch.setattr(iroh_binding, "_immediate_results", itertools.count(1))
    turns = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    call = FakeCall(WAKE, READY)
    assert await call.run() == "the result" and call.is_free
    assert not turns


async def test_results_that_are_there_at_once_let_the_loop_go_on():
    turns = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    for _ in range(iroh_binding.MAX_IMMEDIATE):
        await FakeCall(READY).run()
    assert turns


@pytest.mark.parametrize("in_thread", [True, False])
async def test_result_that_comes_later_resumes_the_call(in_thread):
    call = FakeCall(None, READY)
    running = asyncio.create_task(call.run())
    await asyncio.sleep(0)
    assert not running.done() and call.answer_later is not None
    if in_thread:
        await asyncio.to_thread(call.answer_later, WAKE)
    else:
        call.answer_later(WAKE)  # as when a connection is closed on this side
    assert await asyncio.wait_for(running, 20) == "the result" and call.is_free


async def test_cancelled_call_is_freed_and_ignores_its_answer():
    call = FakeCall(None)
    running = asyncio.create_task(call.run())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    call.answer_later(READY)
    await asyncio.sleep(0)
    assert call.is_free


async def test_channel_that_is_closed_ends_a_read_that_waits():
    async with start_transports("iroh") as (one, other):
        channel, _ = await open_channel(one, other)
        reading = asyncio.create_task(channel.receive())
        await asyncio.sleep(0.05)
        channel.close("done")
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(reading, 60)
