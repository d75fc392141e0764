"""`/v1/models` is an empty 200 where there is no Hugging Face cache folder, or where it cannot be read.

Stock sends the headers first and then scans that folder, which raises: a client finds no JSON, the log a traceback. A
machine that serves a model from a path of its own has no such folder. Here what cannot be scanned has no models in it:
the list is what else there is, the model that is served.
"""

from __future__ import annotations

import contextlib
import io
import types
from typing import Any

from ..core import patch, report
from ..core.verdicts import Retired, require
from ..probing import dry_run
from ..probing.dry_run import Anything

UPSTREAM = "mlx-lm 632"
MODULE = "mlx_lm.server"


def probe(server: Any) -> None:
    """Have stock list its models while the scan fails."""
    require(server, "APIHandler.handle_models_request", "scan_cache_dir")
    out = io.BytesIO()
    handler = Anything(
        wfile=out,
        path="/v1/models",
        created=0,
        response_generator=Anything(cli_args=Anything(model=None)),
    )

    def scan_cache_dir(*args: Any, **kwargs: Any) -> Any:
        raise OSError

    with contextlib.suppress(Exception):  # only a body tells that there is nothing to guard
        dry_run.of(server.APIHandler.handle_models_request, scan_cache_dir=scan_cache_dir)(handler)
    if out.getvalue():
        raise Retired("a scan that fails leaves an answer with a body")


def apply(server: Any) -> None:
    patch.wrap(server, "scan_cache_dir", _Scan())


class _Scan:
    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except Exception as error:
            why = f"/v1/models lists nothing of the Hugging Face cache: {report.one_line(error)}"
            if why not in self.said and len(self.said) < 10:  # noqa: PLR2004 - clients ask again and again
                self.said.add(why)
                report.line(why)
            return types.SimpleNamespace(repos=frozenset())
