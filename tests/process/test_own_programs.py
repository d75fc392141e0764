"""Programs that use stock's generator in ways of their own.

The shim once took each for one that had died or stalled.
"""

from __future__ import annotations

import os
import textwrap

import pytest

from kit.harness import REPO, clean_environ, free_port, run_program

SHORT = {"MLX_SHIM_DECODE_STALL": "2s", "MLX_SHIM_PREFILL_STALL": "3s", "MLX_SHIM_CRASH_LOOP": "0"}

# Every program begins with this: a generator of the tiny model, a request, and functions for HTTP.
PRELUDE = """
import http.client, json, os, queue, sys, threading, time
import mlx.core as mx
import mlx_lm.server as server

MODEL, PORT = sys.argv[1], int(sys.argv[2])
GUARDED = os.environ["MLX_SHIM"] == "1"

def provider():
    made = []
    run, server.run = server.run, lambda host, port, provider, **_: made.append(provider)
    line, sys.argv = sys.argv, ["x", "--model", MODEL, "--log-level", "ERROR"]
    server.main()
    sys.argv, server.run = line, run
    return made[0]

def make(kind=None):
    return (kind or server.ResponseGenerator)(provider(), server.LRUPromptCache(10))

def request():
    return server.CompletionRequest("text", "hello", [], None, None)

def arguments(tokens):
    return server.GenerationArguments(
        model=server.ModelDescription("default_model", "default_model", None),
        sampling=server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1),
        logits=server.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
        stop_words=[], max_tokens=tokens, num_draft_tokens=3, logprobs=False, top_logprobs=-1,
        seed=None, chat_template_kwargs=None)

def tokens(generator, n=4):
    return len(list(generator.generate(request(), arguments(n))[1]))

def post():
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 2}))
    return connection.getresponse().read()

def health():
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    connection.request("GET", "/health")
    return json.loads(connection.getresponse().read())

def serve(generator):
    def handle(*args, **named):
        return server.APIHandler(generator, *args, system_fingerprint="f", **named)
    http_server = server.ThreadingHTTPServer(("127.0.0.1", PORT), handle)
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
"""

PROGRAMS = {
    "it shows an exception by the hook, of no thread": """
        generator = make()
        try:
            1 / 0
        except ZeroDivisionError as error:
            told = (type(error), error, error.__traceback__, None)
            threading.excepthook(threading.ExceptHookArgs(told))
        assert tokens(generator) == 4
        generator.stop_and_join()
    """,
    "it closes its HTTP server and goes on": """
        class Own(server.ThreadingHTTPServer):
            def __init__(self, *args):
                super().__init__(*args)
                made.append(self)
        made, generator = [], make()
        thread = threading.Thread(
            target=lambda: server._run_http_server("127.0.0.1", PORT, generator, Own)
        )
        thread.start()
        while not made:
            time.sleep(0.05)
        post()
        made[0].shutdown(); made[0].server_close(); thread.join()
        time.sleep(1)
        assert tokens(generator) == 4
        generator.stop_and_join()
    """,
    "its loop is its own, and so is its stop": """
        class Own(server.ResponseGenerator):
            def __init__(self, *args):
                self.done = threading.Event()
                super().__init__(*args)
            def _generate(self):
                self.model_provider.load_default()
                self.done.wait()
            def stop_and_join(self):
                self.done.set()
                self._generation_thread.join()
        make(Own).stop_and_join()
        time.sleep(1)
    """,
    "it puts messages of its own on the queue of requests": """
        class Own(server.ResponseGenerator):
            def _next_request(self, *args, **named):
                item = super()._next_request(*args, **named)
                return None if item is not None and item[1] == "ping" else item
        generator = make(Own)
        generator.requests.put((queue.Queue(), "ping"))
        time.sleep(5)
        assert tokens(generator) == 4
        generator.stop_and_join()
    """,
    "it stops a request and stays idle": """
        generator = make()
        context, answer = generator.generate(request(), arguments(100_000))
        next(iter(answer))
        context.stop()
        time.sleep(5)
        assert tokens(generator) == 4
        generator.stop_and_join()
    """,
    "its generation thread is no thread": """
        from concurrent.futures import ThreadPoolExecutor
        class Handle:
            def __init__(self, target):
                self.future = ThreadPoolExecutor(1).submit(target)
            def start(self):
                pass
            def join(self, timeout=None):
                self.future.result(timeout)
            def is_alive(self):
                return not self.future.done()
        server.Thread = Handle
        generator = make()
        serve(generator)
        assert b"choices" in post()
        assert not GUARDED or health()["status"] == "ok"
        generator.stop_and_join()
    """,
    "it answers the first requests itself": """
        stock = server.APIHandler.handle_completion
        answered = []
        def handle_completion(self, asked, stop_words):
            answered.append(1)
            if len(answered) > 3:
                return stock(self, asked, stop_words)
            self._set_completion_headers(200)
            self.end_headers()
            self.wfile.write(b"{}")
        server.APIHandler.handle_completion = handle_completion
        generator = make()
        serve(generator)
        for _ in range(3):
            post()
        time.sleep(1)
        for _ in range(3):
            post()
        time.sleep(1)
        assert not GUARDED or "unseen" not in health(), health()
        generator.stop_and_join()
    """,
}


@pytest.mark.parametrize("shim", [True, False], ids=["shim", "stock"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_healthy_program_comes_to_its_end(line, tiny, tmp_path, program, shim):
    """Stock runs it as well, which shows that the program itself is sound."""
    path = tmp_path / "program.py"
    path.write_text(
        PRELUDE
        + textwrap.dedent(PROGRAMS[program])
        + "\nprint('CAME TO ITS END', flush=True)\nos._exit(0)\n"
    )
    environ = clean_environ(**SHORT, PYTHONPATH=str(REPO), MLX_SHIM="1" if shim else "0")
    status, text = run_program(line, path, str(tiny), str(free_port()), environ=environ)
    assert "CAME TO ITS END" in text, f"status {status}: {text[-3000:]}"
    assert status == os.EX_OK
