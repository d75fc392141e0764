"""A request cannot make the server contact its own machine; in stock one line (the control) can."""

from __future__ import annotations

import shutil

import pytest

from kit.harness import NEWEST, REPO, Inconclusive, Server
from kit.listener import Listener, redirect, whole
from shim.cli import tiny_model

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] if p['type'] == 'text' else '<|patch|>' }}{% endfor %}"
    "{% endif %}\n"
    "{% endfor %}assistant: "
)


@pytest.fixture
def sees(tmp_path):
    """A tiny model that takes images."""
    vision = {"patch_size": 2, "merge_size": 1}
    folder = tiny_model.make(
        tmp_path / "sees",
        model_file="image_model.py",
        vision_config=vision,
        processor_type="muse_spark",
    )
    shutil.copy(REPO / "tests" / "kit" / "models" / "image_model.py", folder)
    config = folder / "tokenizer_config.json"
    text = config.read_text()
    config.write_text(
        text.replace(tiny_model._TEMPLATE.replace("\n", "\\n"), TEMPLATE.replace("\n", "\\n"))
    )
    assert config.read_text() != text
    return folder


def serve(model, tmp_path, line=NEWEST, **environ):
    return Server(line, model, tmp_path / "log", args=("--trust-remote-code",), environ=environ)


def image(url, **more):
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        **more,
    }


def parts(*parts, **more):
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, **more}


def said(answer):
    status, body = answer
    assert status == 200, body
    return body["choices"][0]["message"]["content"]


def refused(answer, *words):
    status, body = answer
    assert status == 400, (status, body)
    assert (body["error"]["code"], body["error"]["param"]) == ("invalid_value", "messages"), body
    assert all(word in body["error"]["message"] for word in words), body
    assert len(body["error"]["message"]) < 400


def downloaded(model, home):
    """The model as the hub's cache has it: some/model."""
    folder = home / "hub" / "models--some--model"
    shutil.copytree(model, folder / "snapshots" / "1234")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1234")
    return home


@pytest.mark.guard("request_forgery")
def test_nothing_inside_is_contacted(tiny, sees, tmp_path):
    home = downloaded(sees, tmp_path / "home")
    with Listener() as inside, serve(tiny, tmp_path, HF_HOME=str(home)) as server:
        server.ready()
        # The loaded model takes text only.
        for body in (
            image(inside.url()),
            image(inside.url(), model=str(tiny)),
            image("data:image/png;base64,AAAA"),
            parts({"type": "input_image", "image_url": inside.url()}),
            parts({"type": "image", "image": inside.url()}),
            image(inside.url(), stream=True),
            image("HTTP" + inside.url()[4:]),
            image("http://no.such.host.test/"),
        ):
            refused(server.post(body, CHAT), "this model takes text only")
        refused(
            server.post(image(inside.url(), model="some/where"), CHAT),
            "not known before it is loaded",
        )
        refused(
            server.post(image(inside.url(), model=str(tmp_path)), CHAT),
            "not known before it is loaded",
        )
        # One that is not loaded takes images, by its config; then it is loaded.
        refused(
            server.post(image(inside.url(), model="some/model"), CHAT), "not at a public address"
        )
        refused(server.post(image(inside.url(), model=str(sees)), CHAT), "not at a public address")
        said(
            server.post(
                {
                    "messages": [{"role": "user", "content": "Good morning"}],
                    "model": str(sees),
                    "max_tokens": 2,
                },
                CHAT,
            )
        )
        refused(
            server.post(image(inside.url(), model=str(tiny)), CHAT), "this model takes text only"
        )
        for host in (
            "127.0.0.1",
            "localhost",
            "2130706433",
            "0x7f.1",
            "127.1",
            "[::ffff:127.0.0.1]",
            "0",
            "[::1]",
        ):
            refused(
                server.post(image(inside.url(host=host), model=str(sees)), CHAT),
                "not at a public address",
            )
        for url, words in {
            "HTTP" + inside.url()[4:]: "begins with none",
            "ftp://127.0.0.1/": "begins with none",
            "": "begins with none",
            "http://u:p@127.0.0.1/": "user name",
            "http://127.0.0.1:0/": "port",
            "http://127.0.0.1:99999/": "port",
            "http://127.0.0.1/" + "x" * 10**6: "characters",
            "http://a/\n": "control",
            "http://[": "not a URL",
            "http://\ud800/": "half a surrogate pair",
        }.items():
            refused(server.post(image(url, model=str(sees)), CHAT), words)
        for url in (5, True, ["http://127.0.0.1/"], {"a": 1}):
            refused(
                server.post(parts({"type": "image_url", "image_url": {"url": url}}), CHAT),
                "is a string",
            )
        many = [{"type": "image", "image": inside.url()}] * 33
        refused(server.post(parts(*many, model=str(sees)), CHAT), "33 images", "at most 32")
        # What stock refuses by itself.
        for messages in (
            5,
            "x",
            [5],
            ["x"],
            [{"role": "user", "content": ["x"]}],
            {"role": "user"},
        ):
            assert server.post({"messages": messages}, CHAT)[0] == 400
        # A few bytes may be many pixels, and many images are too many however small.
        refused(
            server.post(image("data:image/png;base64,YWJjIQ==", model=str(sees)), CHAT),
            "64008000 pixels",
        )
        small = {"type": "image", "image": "data:image/png;base64,AQIDBA=="}
        refused(server.post(parts(*[small] * 33, model=str(sees)), CHAT), "33 images", "at most 32")
        # An image in the request itself does not concern the guard.
        assert said(server.post(image("data:image/png;base64,AQIDBA==", model=str(sees)), CHAT))
        assert inside.connections == 0
        assert said(
            server.post(
                {"messages": [{"role": "user", "content": "Still there?"}], "max_tokens": 4}, CHAT
            )
        )


@pytest.mark.control("request_forgery")
def test_control_stock_contacts_its_own_machine_for_a_model_that_takes_text_only(tiny, tmp_path):
    with Listener() as inside, serve(tiny, tmp_path, MLX_SHIM_REQUEST_FORGERY="0") as server:
        server.ready().post(image(inside.url()), CHAT)
        if not inside.connections:
            raise Inconclusive("stock contacted nobody")


@pytest.mark.guard("request_forgery")
def test_a_fetched_image_is_what_stock_makes_of_it(sees, tmp_path):
    replies = {
        "/a": whole(b"\x10\x80\xf0."),
        "/b": whole(b"\xf0\x10\x80."),
        "/c": redirect("/b"),
        "/none": whole(b""),
    }
    answers = []
    for environ in ({"MLX_SHIM_IMAGE_FETCH": "any"}, {"MLX_SHIM_REQUEST_FORGERY": "0"}):
        with Listener(replies.get) as listener, serve(sees, tmp_path, **environ) as server:
            server.ready()
            asked = [image(listener.url(path)) for path in ("/a", "/b", "/c")]
            asked.append(
                parts(*({"type": "image", "image": listener.url(path)} for path in ("/b", "/a")))
            )
            asked.append(
                parts(
                    {"type": "input_image", "image_url": listener.url("/a")},
                    {"type": "text", "text": "And?"},
                )
            )
            answers.append([said(server.post(body, CHAT)) for body in asked])
            assert server.post(image(listener.url("/none")), CHAT)[0] == 400
            assert listener.connections == 8
    assert answers[0] == answers[1]
    assert len(set(answers[0][:2])) == 2, "what it says depends on the picture"
    with Listener() as listener, serve(sees, tmp_path, MLX_SHIM_IMAGE_FETCH="off") as server:
        refused(server.ready().post(image(listener.url()), CHAT), "fetches no images")
        assert said(server.post(image("data:image/png;base64,EIDwLg=="), CHAT)) == answers[0][0]
        assert listener.connections == 0


@pytest.mark.guard("request_forgery")
def test_the_line_that_fetches_nothing(tiny, tmp_path):
    with Listener() as inside, serve(tiny, tmp_path, line="0.31.3") as server:
        status, answer = server.ready().post(image(inside.url()), CHAT)
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
        assert inside.connections == 0
        assert server.get("/health")[1]["guards"]["request_forgery"] == "retired"
