"""A client can make the server fetch any URL, from any network that the server can reach.

Stock opens the URL of an image before it looks at the model, even if the model takes no images. The
URL may be on this machine or in its network, redirects are followed, and the size has no limit.
Here a request with an image for a model that takes none is refused, and nothing is fetched. For
other models the shim fetches images only from public addresses, and within limits (image_fetch).
MLX_SHIM_IMAGE_FETCH allows other addresses.
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

# For all images of a request: they take seconds to decode, and all other requests wait.
MAX_PIXELS = 64_000_000

_FIELD = "messages"
# Stock compares in this way too: it does not fetch "HTTP://", and refuses it later.
_REMOTE = ("http://", "https://")
# .handler: the handler whose request this thread reads.
_local = threading.local()


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
        raise Incompatible("mlx_lm.server does not fetch every image by urlopen")


def _opened_by(server: Any, url: str) -> list[Any]:
    """The URLs that stock would open for a message with such an image; nothing is opened."""
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
        _inline(server, patch.given(wrapped, args, kwargs, "messages", 0))

    patch.wrap(server, "_inline_image_urls", inline)
    patch.wrap(server, "APIHandler.handle_chat_completions", _handle_chat_completions)


def _handle_chat_completions(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    _local.handler = instance
    try:
        return wrapped(*args, **kwargs)
    finally:
        _local.handler = None


def _inline(server: Any, messages: Any) -> None:
    """Turn each http(s) URL into a data URL, as stock does.

    Raises ShimError, and for invalid messages the exceptions of stock.
    """
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
    """Refuse too many images, or too many pixels: a small file may be a large image.

    The generation thread decodes all images of a request before it uses the first.
    """
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
    """The pixels of an image by its header; 0 for other data, which stock refuses to decode."""
    with report.contained("the size of an image is not known", report.debug):
        # Stock too imports it only for an image.
        from PIL import Image

        width, height = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size
        return int(width) * int(height)
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
    # All URLs are parsed before the first is fetched.
    targets = [_parsed(url) for _, url in remote]
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
    """Raise ShimError if the model takes no images, or if only its download would tell."""
    provider = anatomy.provider_of(handler.response_generator)
    taken = _takes_images(server, provider, handler.requested_model)
    if taken is None and fetching:
        raise errors.invalid(
            _FIELD,
            "whether this model takes images is not known before it is loaded, and until then "
            "none is fetched; send it a request without one first, or the image as a data: URL",
        )
    if taken is False:
        raise errors.invalid(_FIELD, "messages has an image, and this model takes text only")


def _takes_images(server: Any, provider: Any, requested: str) -> bool | None:
    """Whether the model takes images, by the test of stock's ModelProvider; None if not known.

    For a model that is not loaded, the test gets its config.
    """
    name = provider._model_map.get(requested, requested)
    if not engine.loading:
        processor, key = provider.processor, provider.model_key
        if key is not None and key[0] == name and not engine.loading:
            return processor is not None
    # If this fails, the model cannot be loaded either, and stock says why.
    with report.contained("whether a model takes images is not known", report.debug):
        folder = _folder_of(name)
        return None if folder is None else _would_take_images(server, folder)
    return None


def _folder_of(name: str | None) -> Path | None:
    """The folder on this machine with the model's config.json, or None."""
    if name is None:
        return None
    if Path(name).exists():
        return Path(name)
    # Stock has imported it.
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _would_take_images(server: Any, folder: Path) -> bool:
    utils = sys.modules[server.load.__module__]
    config = utils.load_config(folder)
    module = "custom_model"
    if not config.get("model_file"):
        module = utils._get_classes(config)[0].__module__
    # Stock looks only at the module of the model's class.
    stand_in = type("Model", (), {"__module__": module})()
    return server.load_processor(stand_in, config) is not None
