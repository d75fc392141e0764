"""What clients are told when something goes wrong; stock (the control) tells them less."""

from __future__ import annotations

import pytest

from kit.harness import Inconclusive, Server
from kit.streams import Stream

# Without the guards that refuse most such requests earlier.
ALONE = {"MLX_SHIM_BAD_REQUEST": "0", "MLX_SHIM_DROPPED_MODEL": "0"}
OFF = ALONE | {"MLX_SHIM_WRONG_STATUS": "0"}
NO_ROLE = {"messages": [{"content": "no role"}]}


@pytest.mark.guard("wrong_status")
def test_bad_input_is_400_and_a_missing_model_404(line, tiny, tmp_path):
    with Server(line, tiny, tmp_path / "log", environ=ALONE) as server:
        server.ready()
        for stream in (False, True):
            status, answer = server.post({**NO_ROLE, "stream": stream}, "/v1/chat/completions")
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert "KeyError" in answer["error"]["message"] or "role" in answer["error"]["message"]
            status, answer = server.post(
                {"prompt": "x", "model": "/no/such/model", "stream": stream}
            )
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
        empty = tmp_path / "empty"
        empty.mkdir()
        status, answer = server.post({"prompt": "x", "model": str(empty)})
        assert (status, answer["error"]["code"]) == (500, "model_load_failed"), "it exists"
        status, answer = server.post({"prompt": "x", "draft_model": 5})
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
        assert server.post({"prompt": "x", "max_tokens": 2})[0] == 200


@pytest.mark.control("wrong_status")
def test_control_stock_says_404_to_a_bad_request(line, tiny, tmp_path):
    with Server(line, tiny, tmp_path / "log", environ=OFF) as server:
        status, answer = server.ready().post(NO_ROLE, "/v1/chat/completions")
        if status != 404 or isinstance(answer["error"], dict):
            raise Inconclusive(f"stock answered {status} {answer}")


@pytest.mark.guard("wrong_status")
@pytest.mark.control("wrong_status")
@pytest.mark.parametrize("guarded", [True, False])
def test_a_failure_in_the_middle(line, faulty, tmp_path, guarded):
    """Alone in the loop an exception belongs to that request.

    It gets an SSE event or a 500, and the log the traceback.
    """
    model = faulty(kind="RuntimeError", delay=0.05)
    with Server(
        line, model.path, tmp_path / "log", args=model.args, environ=ALONE if guarded else OFF
    ) as server:
        stream = Stream(server.ready(), {"prompt": "x", "max_tokens": 1000, "seed": 1})
        assert stream.first.wait(30)
        model.fire()
        stream.join()
        if not guarded:
            if any("error" in event for event in stream.events):
                raise Inconclusive(f"stock told its client: {stream.lines[-3:]}")
            return
        assert stream.status == 200
        assert not stream.done
        error = list(stream.events)[-1]["error"]
        assert error["code"] == "generation_failed"
        assert "RuntimeError: the model's forward failed" in error["message"]
        assert "Traceback" in server.text(), "the original stays in the log"
        status, answer = server.post({"prompt": "y", "seed": 1})
        assert (status, answer["error"]["code"]) == (500, "generation_failed")
        model.trigger.unlink()
        assert server.post({"prompt": "x", "max_tokens": 2})[0] == 200


@pytest.mark.guard("wrong_status")
def test_what_stock_answers_well_is_left_alone(line, tiny, tmp_path):
    """Byte for byte, except dates and ids."""
    bodies = [
        {"prompt": "x", "max_tokens": 3, "logprobs": True},
        {"prompt": "y", "max_tokens": 3, "stop": ["a"]},
    ]
    answers = []
    for environ in ({}, {"MLX_SHIM": "0"}):
        with Server(line, tiny, tmp_path / "log", environ=environ) as server:
            server.ready()
            answers.append([server.post(body) for body in bodies])
            answers[-1].append(server.get("/nothing/here"))
            answers[-1].append(
                without_ids(Stream(server, {"prompt": "x", "max_tokens": 5}).join().lines)
            )
    for _, answer in (*answers[0][:-1], *answers[1][:-1]):
        if isinstance(answer, dict):
            answer.pop("id", None), answer.pop("created", None)
    assert answers[0] == answers[1]


def without_ids(lines):
    return [
        line.split('"system_fingerprint"')[-1].split('"created"')[0]
        + line[-200:].split("choices")[-1]
        for line in lines
    ]
