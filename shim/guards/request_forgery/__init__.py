"""Whoever can send a request can have the server fetch any URL, from any network that it can reach.

The URL of an image is opened before the model is even asked, whether or not it takes images: in this machine, in its
network, through any redirect, without a limit of size. Here a request for a model that takes none is refused without a
look, and an image is fetched from public addresses alone, within limits (image_fetch). Those who need others say so
with MLX_SHIM_IMAGE_FETCH.
"""

from __future__ import annotations

import base64
import io
import sys
import threading
from pathlib import Path
from typing import Any

from ...core import errors, patch, report, settings
from ...core.verdicts import Incompatible, Retired, require
from ...engine import anatomy
from ...engine.state import engine
from . import image_fetch
from .image_fetch import Allowance, CannotFetch

UPSTREAM = "no issue known; seen on 0.32.2"
MODULE = "mlx_lm.server"

MAX_PIXELS = (
    64_000_000  # of all images of a request: they take seconds to decode, and everybody waits
)

_FIELD = "messages"
_REMOTE = (
    "http://",
    "https://",
)  # as stock tells them: "HTTP://" is not fetched by it, and refused by it later
_local = threading.local()  # .handler: whose request this thread reads


def probe(server: Any) -> None:
    if not hasattr(server, "_inline_image_urls") and not hasattr(server, "urlopen"):
        raise Retired("this version fetches nothing that a request names")
    require(
        server,
        "_inline_image_urls",
        "_image_parts",
        "_image_url",
        "urlopen",
        "load",
        "load_processor",
    )
    require(server, "APIHandler.handle_chat_completions")
    url = "http://127.0.0.1:1/"
    if url not in _opened_by(server, url):
        raise Incompatible(
            "mlx_lm.server fetches images by other means than urlopen, or no longer everywhere"
        )


def _opened_by(server: Any, url: str) -> list[Any]:
    """What stock opens for a message with such an image; nothing is opened."""
    opened: list[Any] = []

    def note(asked: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(asked)
        raise InterruptedError

    stock, server.urlopen = server.urlopen, note
    try:
        server._inline_image_urls([{"content": [{"type": "image_url", "image_url": {"url": url}}]}])
    except InterruptedError:
        pass
    finally:
        server.urlopen = stock
    return opened


def apply(server: Any) -> None:
    def inline(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        _inline(server, args[0] if args else kwargs["messages"])

    patch.wrap(server, "_inline_image_urls", inline)
    patch.wrap(server, "APIHandler.handle_chat_completions", _handle_chat_completions)


def _handle_chat_completions(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    _local.handler = instance
    try:
        return wrapped(*args, **kwargs)
    finally:
        _local.handler = None


def _inline(server: Any, messages: Any) -> None:
    """As stock: each http(s) URL becomes a data URL. Raises ShimError, and what stock raises at messages that are none."""
    parts = list(server._image_parts(messages))
    urls = [server._image_url(part) for part in parts]
    for url in urls:
        if not isinstance(url, str):
            raise errors.invalid(
                _FIELD, f"the URL of an image is a string, not {type(url).__name__}"
            )
    remote = [(part, url) for part, url in zip(parts, urls, strict=True) if url.startswith(_REMOTE)]
    handler = getattr(_local, "handler", None)
    if parts and handler is not None:
        _refuse_unless_taken(server, handler, fetching=bool(remote))
    for url in urls:
        if not url.startswith((*_REMOTE, "data:")):
            raise _refusal(url, "begins with none of http://, https:// and data:")
    if remote:
        _fetch_all(remote)
    _refuse_large(server, parts)


def _refuse_large(server: Any, parts: list[dict[str, Any]]) -> None:
    """Images are decoded in the generation thread, all of them before the first is used, and a small file may be a large one."""
    if len(parts) > image_fetch.MAX_IMAGES:
        raise errors.invalid(
            _FIELD,
            f"messages has {len(parts)} images; at most {image_fetch.MAX_IMAGES} are accepted",
        )
    pixels = sum(_pixels(server._image_url(part)) for part in parts)
    if pixels > MAX_PIXELS:
        raise errors.invalid(
            _FIELD, f"the images have {pixels} pixels; at most {MAX_PIXELS} in all are accepted"
        )


def _pixels(url: str) -> int:
    """By its header; 0 for what is no image, which stock refuses when it decodes it."""
    try:
        from PIL import Image  # as stock does it, where there is an image

        width, height = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size
        return int(width) * int(height)
    except Exception as error:
        report.debug(f"no telling how large an image is: {error!r}")
        return 0


def _fetch_all(remote: list[tuple[dict[str, Any], str]]) -> None:
    policy = settings.current.image_fetch
    if policy == "off":
        raise errors.invalid(_FIELD, "this server fetches no images; send them as data: URLs")
    if len(remote) > image_fetch.MAX_IMAGES:
        given = f"messages has {len(remote)} images to fetch"
        raise errors.invalid(
            _FIELD, f"{given}; at most {image_fetch.MAX_IMAGES} are accepted, or data: URLs"
        )
    targets = [_parsed(url) for _, url in remote]  # all of them before the first is asked
    allowance = Allowance()
    for (part, url), target in zip(remote, targets, strict=True):
        try:
            mime, data = image_fetch.fetch(target, allowance, public=policy == "public")
        except CannotFetch as error:
            raise _refusal(url, str(error)) from error
        part.clear()
        part.update(
            type="image_url",
            image_url={"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"},
        )


def _parsed(url: str) -> image_fetch.Target:
    try:
        return image_fetch.parse(url)
    except CannotFetch as error:
        raise _refusal(url, str(error)) from error


def _refusal(url: str, why: str) -> errors.ShimError:
    return errors.invalid(_FIELD, f"the image {report.one_line(url[:200], 80)} {why}")


def _refuse_unless_taken(server: Any, handler: Any, *, fetching: bool) -> None:
    """Raise ShimError where the model that is asked takes no images, or where only a download would tell."""
    taken = _takes_images(
        server, anatomy.provider_of(handler.response_generator), handler.requested_model
    )
    if taken is None and fetching:
        raise errors.invalid(
            _FIELD, "whether this model takes images is not known before it is loaded, and until then none is fetched; "
            "send it a request without one first, or the image as a data: URL",
        )  # fmt: skip
    if taken is False:
        raise errors.invalid(_FIELD, "messages has an image, and this model takes text only")


def _takes_images(server: Any, provider: Any, requested: str) -> bool | None:
    """By the very test of stock's ModelProvider; for a model that is not the loaded one, asked about its config."""
    name = provider._model_map.get(requested, requested)
    if not engine.loading:
        processor, key = provider.processor, provider.model_key
        if key is not None and key[0] == name and not engine.loading:
            return processor is not None
    try:
        folder = _folder_of(name)
        return None if folder is None else _would_take_images(server, folder)
    except Exception as error:  # it cannot be loaded either, and then stock says why
        report.debug(f"no telling whether a model takes images: {error!r}")
        return None


def _folder_of(name: str | None) -> Path | None:
    """Where the model's config.json is on this machine, or None."""
    if name is None:
        return None
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache  # stock has imported it

    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _would_take_images(server: Any, folder: Path) -> bool:
    utils = sys.modules[server.load.__module__]
    config = utils.load_config(folder)
    module = (
        "custom_model" if config.get("model_file") else utils._get_classes(config)[0].__module__
    )
    stand_in = type(
        "Model", (), {"__module__": module}
    )()  # stock looks at the module of the model's class alone
    return server.load_processor(stand_in, config) is not None
