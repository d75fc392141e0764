"""Two ranks under mlx.launch: a death on either ends that rank with 70, and the job ends rather than hangs."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from harness import REPO, VENVS, Inconclusive, Server, clean_environ, free_port


class Job(Server):
    def __init__(self, line, model, log, environ):
        self.sockets = []
        self.port, self.log, self.line = free_port(), log, line
        launcher = str(VENVS / line / "bin" / "mlx.launch")
        server = str(VENVS / line / "bin" / "mlx_lm.server")
        command = [launcher, "-n", "2", "--backend", "ring", "--starting-port", str(free_port()), "--"]
        command += [server, "--model", str(model.path), *model.args, "--port", str(self.port)]
        reader, self.stdin = os.pipe()  # mlx.launch reads its stdin, and spins where that has ended
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, env=clean_environ(**environ), stdin=reader, stdout=out, stderr=out, start_new_session=True
            )
        os.close(reader)

    def __exit__(self, *_):
        super().__exit__()
        os.close(self.stdin)

    def _answers(self):
        self.log.touch()
        return super()._answers()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_on_one_rank_ends_the_job(line, faulty, tmp_path, rank):
    model = faulty(kind="RuntimeError", rank=rank)
    with Job(line, model, tmp_path / "log", {"PYTHONPATH": str(REPO)}) as job:
        job.ready()
        model.fire()
        job.send_and_leave({"prompt": "x"})
        job.wait_exit(60)
        assert f"Node with rank {rank} exited with code 70" in job.text()
        assert any("RuntimeError: the model's forward failed" in x for x in job.shim_lines())


def test_control_stock_hangs_when_rank_0_dies(line, faulty, tmp_path):
    model = faulty(kind="RuntimeError", rank=0)
    with Job(line, model, tmp_path / "log", {}) as job:
        job.ready()
        model.fire()
        job.send_and_leave({"prompt": "x"})
        try:
            job.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)
        else:
            raise Inconclusive(f"the stock job ended by itself: {job.text()[-2000:]}")
