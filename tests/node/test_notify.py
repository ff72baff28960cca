"""job.notify: a real receiver of webhooks, and runs that fail, finish and start again."""

import json
import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from hpclm import cli
from hpclm.node.notify import Notifier
from tests.forks import Ranks


@contextmanager
def serving(server):
    """The port of a server that answers meanwhile in a thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def webhook(status=204, location=""):
    """The URL of a receiver that answers with ``status``, and what it has received."""
    received = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.end_headers()

        def log_message(self, *_):
            pass

    with serving(HTTPServer(("127.0.0.1", 0), Receiver)) as port:
        yield f"http://127.0.0.1:{port}/hook", received


@contextmanager
def counting():
    """HOST:PORT of a listener, and the connections it has had."""
    connected = []

    class Listener(socketserver.BaseRequestHandler):
        def handle(self):
            connected.append(self.client_address)

    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Listener)) as port:
        yield f"127.0.0.1:{port}", connected


def test_a_run_notifies_when_it_finishes_restarts_and_fails(tiny, tmp_path, monkeypatch):
    with webhook() as (url, received):
        monkeypatch.setenv("TEAM_HOOK", url)
        words = [*tiny(), "job.notify=[$TEAM_HOOK]"]
        assert cli.main(["train", *words, "stop_at=4"]) == 0
        assert cli.main(["train", *words, "optim.nonfinite_limit=1", "optim.lr=1e30", "optim.clip=0"]) == 93
    about = [(said["event"], said["run"], said["attempt"]) for said in received]
    assert about == [("finished", "run", 1), ("restarted", "run", 2), ("failed", "run", 2)]
    assert received[0]["message"].startswith("stopped at step 4 (stop_at)")
    assert received[1]["message"] == "attempt 2 resumes from step 4; stopped at step 4 (stop_at)"
    assert "not finite" in received[2]["message"] and received[2]["out"] == str(tmp_path / "run")
    assert received[2]["text"].startswith("hpclm: run has failed (")


@pytest.mark.whole
def test_a_run_whose_rank_is_killed_notifies_once(tiny, tmp_path):
    with webhook() as (url, received):
        with Ranks(2, [*tiny(), "budget.steps=100000", "job.notify=[$TEAM_HOOK]"], TEAM_HOOK=url) as ranks:
            ranks.wait_for(tmp_path / "run", 6)
            ranks.processes[1].kill()
            ranks.wait()
        assert [said["event"] for said in received] == ["failed"]
        assert "rank 1" in received[0]["message"] and "left no message: killed" in received[0]["message"]


def test_what_cannot_be_delivered_is_a_warning(caplog):
    with Notifier(
        ["http://127.0.0.1:1/services/secret"], "run", "runs/run", env={"API_TOKEN": "do-not-tell"}
    ) as notifier:
        notifier.failed("the token do-not-tell was refused")
        notifier.failed("again")
    [warning] = [record.getMessage() for record in caplog.records]
    assert "was not notified that the run failed" in warning
    assert "secret" not in warning  # the path of a webhook is its password


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("scheme", ["http", "ftp"])
def test_a_webhook_that_redirects_is_not_followed(status, scheme, caplog):
    with (
        counting() as (address, connected),
        webhook(status, f"{scheme}://{address}/elsewhere") as (url, received),
        Notifier([url], "run", "runs/run", env={}) as notifier,
    ):
        notifier.failed("message")
    assert len(received) == 1 and not connected
    [warning] = [record.getMessage() for record in caplog.records]
    assert f"HTTP Error {status}" in warning and "hook" not in warning and "elsewhere" not in warning


@pytest.mark.parametrize("scheme", ["ftp", "file", "data"])
def test_only_http_reaches_a_webhook(scheme, caplog):
    with counting() as (address, connected):
        target = f"{scheme}://{address}/services/secret"
        with Notifier(["$HOOK"], "run", "runs/run", env={"HOOK": target}) as notifier:
            notifier.failed("message")
    assert not connected
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith("job.notify: $HOOK was not notified that the run failed") and "secret" not in warning


@pytest.mark.parametrize("target, wanted", [
    ("ftp://example.org", "it must be a webhook"),
    ("mailto:you@example.org", "for mail, let Slurm send it"),
    ("$NOT_THERE", "the environment variable NOT_THERE must hold"),
    ("https://me:hunter2@example.org/", "export it as an environment variable"),
    ("https://example.org/services/hunter2", "job.notify=[$TEAM_HOOK]"),
    ("htps://example.org/services/hunter2", "it must be"),
])  # fmt: skip
def test_a_target_that_cannot_be_notified_is_refused_before_the_start(target, wanted, tiny, capsys):
    assert cli.main(["train", *tiny("run", f"job.notify=['{target}']")]) == 64
    said = capsys.readouterr().err
    assert wanted in said and "hunter2" not in said
