"""A stream whose options do not name include_usage is complete; stock cuts it before [DONE]."""

from __future__ import annotations

import pytest

from kit.harness import Inconclusive, Server
from kit.streams import Stream

PATHS = {
    "/v1/completions": {"prompt": "some text"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


def stream(server, path, **options):
    stream = Stream(server, {**PATHS[path], "max_tokens": 5, **options}, path).join()
    assert stream.status == 200
    return stream


def choices_of(stream):
    return [event["choices"] for event in stream.events]


def usage_of(stream):
    return [event["usage"] for event in stream.events if "usage" in event]


@pytest.mark.guard("missing_include_usage")
def test_no_option_means_no_usage(line, tiny, tmp_path):
    with Server(line, tiny, tmp_path / "log") as server:
        assert server.ready().get("/health")[1]["guards"]["missing_include_usage"] == "active"
        for path in PATHS:
            without = stream(server, path)
            assert without.done
            for options in ({}, {"include_usage": False}, {"include_obfuscation": False}, None):
                other = stream(server, path, stream_options=options)
                assert other.done, options
                assert choices_of(other) == choices_of(without)
                assert usage_of(other) == []
            wanted = stream(server, path, stream_options={"include_usage": True})
            assert wanted.done
            assert choices_of(wanted)[:-1] == choices_of(without)
            (usage,) = usage_of(wanted)
            assert usage["completion_tokens"] == 5
        assert server.post({"prompt": "some text", "max_tokens": 2, "stream_options": {}})[0] == 200


@pytest.mark.control("missing_include_usage")
def test_control_stock_cuts_the_stream(line, tiny, tmp_path):
    with Server(
        line, tiny, tmp_path / "log", environ={"MLX_SHIM_MISSING_INCLUDE_USAGE": "0"}
    ) as server:
        cut = stream(server.ready(), "/v1/completions", stream_options={})
        if cut.done or "include_usage" not in server.text():
            raise Inconclusive(f"stock ends it well: {cut.lines[-3:]}")
