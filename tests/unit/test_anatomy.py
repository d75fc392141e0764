"""The shim finds the parts of a generator by what they are, not by name."""

from __future__ import annotations

import queue
import threading
import types

import pytest

from shim.engine import anatomy


class Generator:
    """A generator as in a future release: every name is different."""

    __module__ = "mlx_lm.serving"

    def __init__(self):
        self.inbox = queue.Queue()
        self.should_stop_soon = False
        self.worker = threading.Thread(target=self.work, daemon=True)

    def work(self):
        self.inbox.get()


@pytest.fixture
def generator():
    made = Generator()
    made.worker.start()
    yield made
    made.inbox.put(None)
    made.worker.join(10)


def test_parts_of_a_generator_with_other_names(generator):
    assert anatomy.thread_of(generator) is generator.worker
    assert anatomy.requests_of(generator) is generator.inbox
    assert anatomy.stop_flag(generator) == "should_stop_soon"
    assert anatomy.running_generator() is generator


def test_a_program_with_a_thread_of_its_own_is_no_generator():
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    holder = types.SimpleNamespace(thread=thread)
    thread.start()
    try:
        assert anatomy.running_generator() is None
        assert anatomy.thread_of(holder) is thread
    finally:
        over.set()
        thread.join(10)


def test_a_thread_that_a_generator_does_not_hold_is_the_one_it_started():
    before = set(threading.enumerate())
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    try:
        assert anatomy.thread_of(object(), before) is thread
    finally:
        over.set()
        thread.join(10)


def test_two_flags_that_say_stop_tell_nothing():
    assert anatomy.stop_flag(types.SimpleNamespace(stop_now=False, stop_later=False)) is None
    assert anatomy.stop_flag(types.SimpleNamespace(_stop=False, stop_later=False)) == "_stop"


def test_a_flag_that_is_an_event():
    generator = types.SimpleNamespace(_stop=threading.Event())
    assert anatomy.stop_flag(generator) == "_stop"
    assert not anatomy.is_asked_to_stop(generator)
    assert anatomy.ask_to_stop(generator)
    assert generator._stop.is_set()
    assert anatomy.is_asked_to_stop(generator)


def test_asked_to_stop_by_the_flag_or_by_a_call():
    by_flag, by_call = types.SimpleNamespace(_stop=True), types.SimpleNamespace(_stop=False)
    assert anatomy.is_asked_to_stop(by_flag)
    assert not anatomy.is_asked_to_stop(by_call)
    anatomy.parts_of(by_call).asked_to_stop = True
    assert anatomy.is_asked_to_stop(by_call)
