"""`python -m shim probe` where no server can be asked."""

from __future__ import annotations

import pytest

from kit.harness import free_port
from shim import cli


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("http://127.0.0.1:{port}", "--timeout", "600ms"), 1),
        (("127.0.0.1:{port}", "--timeout", "soon"), 2),
        (("ftp://127.0.0.1:{port}",), 2),
        (("http://127.0.0.1:99999",), 2),
        (("http://127.0.0.1:{port}", "--key-file", "/nonexistent"), 2),
    ],
)
def test_a_restart_is_for_a_server_that_does_not_listen(arguments, status, tmp_path, capsys):
    mark = tmp_path / "restarted"
    given = [part.format(port=free_port()) for part in arguments]
    with pytest.raises(SystemExit) as ended:
        cli.main(["probe", *given, "--restart", f"touch {mark}"])
    assert ended.value.code == status
    assert mark.exists() == (status == 1)
    assert capsys.readouterr().out
