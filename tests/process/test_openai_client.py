"""The real openai client: its exception classes, and its retries."""

from __future__ import annotations

import openai
import pytest

from kit.harness import KILLER, Server, wait_until

pytestmark = pytest.mark.usefixtures("killable")


def test_the_openai_client(line, faulty, tmp_path):
    """Its exception classes and its retries: 503 is retried, 400 is not, an error event raises."""
    model = faulty(kind="RuntimeError", delay=0.02)
    environ = {"MLX_SHIM_WHILE_LOADING": "reject", "MLX_SHIM_EXIT_GRACE": "10s"}
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        server.ready()
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=2
        )
        done = client.completions.create(model="default_model", prompt="x", max_tokens=3)
        assert done.usage.completion_tokens == 3
        before = server.text().count("POST /v1/chat/completions")
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(
                model="default_model", messages=[{"content": "no role"}], max_tokens=3
            )
        assert bad.value.code == "invalid_request"
        assert server.text().count("POST /v1/chat/completions") == before + 1, (
            "a 400 is not tried again"
        )
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="/no/such/model", prompt="x")
        # Loads it again. Served alone.
        client.completions.create(model="default_model", prompt="x", max_tokens=1)
        stream = client.completions.create(
            model="default_model", prompt="x", max_tokens=5000, stream=True
        )
        with pytest.raises(openai.APIError) as cut:
            for n, _ in enumerate(stream):
                if n == 3:
                    model.fire()
        assert cut.value.code == "engine_dead"
        assert server.wait_exit(30) == 70


def test_the_openai_client_retries_a_503(line, tiny, tmp_path):
    with Server(line, tiny, tmp_path / "log", environ={"MLX_SHIM_GENERATION_DEATH": "0"}) as server:
        server.ready().send_and_leave(KILLER)
        assert wait_until(lambda: server.get("/health")[1]["status"] == "dead", 10)
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 0, 10)
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=1
        )
        before = server.text().count("POST /v1/completions")
        with pytest.raises(openai.InternalServerError) as dead:
            client.completions.create(model="default_model", prompt="x")
        assert dead.value.status_code == 503
        assert server.text().count("POST /v1/completions") == before + 2
