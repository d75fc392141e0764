"""`/v1/models` answers 200 with no body where the Hugging Face cache is missing or unreadable.

Stock sends the headers and then scans that folder. The scan raises: the client gets no JSON, and
the log a traceback. A machine that serves a model from a path of its own has no such folder. Here
a scan that fails counts as one that found no models: the list has only the model that is served.
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

# Different reasons that are reported: clients ask again and again.
MOST_REASONS = 10


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

    # Only an answer with a body shows that stock does not have the defect.
    with contextlib.suppress(Exception):
        dry_run.of(server.APIHandler.handle_models_request, scan_cache_dir=scan_cache_dir)(handler)
    if out.getvalue():
        raise Retired("a scan that fails leaves an answer with a body")


def apply(server: Any) -> None:
    patch.wrap(server, "scan_cache_dir", _Scan())


class _Scan:
    """Wraps the scan: where it fails stock gets an empty result, and the reason is told once."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except Exception as error:
            why = f"/v1/models lists nothing of the Hugging Face cache: {report.one_line(error)}"
            if why not in self.said and len(self.said) < MOST_REASONS:
                self.said.add(why)
                report.line(why)
            return types.SimpleNamespace(repos=frozenset())
