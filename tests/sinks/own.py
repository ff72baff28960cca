"""Sinks that misbehave, and one that writes down what it is sent; named in log.sinks as tests.sinks.own:Name."""

import json
import os
import sys
import time

from hpclm.sinks import RefusedError


class Written:
    """Appends the rows to a file in the run directory."""

    def __init__(self, run):
        self.path = run.out / "written.jsonl"
        self.id = run.id

    def send(self, rows, before):
        with self.path.open("a") as file:
            for row in rows:
                file.write(json.dumps({**row, "id": self.id, "before": before}) + "\n")

    def close(self, code):
        with self.path.open("a") as file:
            file.write(json.dumps({"code": code}) + "\n")


class Refuses(Written):
    """Cannot be reached, and its library prints."""

    def __init__(self, run):
        print("line of a library", flush=True)
        print("line of a library", file=sys.stderr, flush=True)
        raise ConnectionError("no route to host")


class Breaks(Written):
    """Fails whenever it is sent something."""

    def send(self, rows, before):
        raise OSError(28, "No space left on device")


class Blocks(Written):
    """Never answers."""

    def send(self, rows, before):
        time.sleep(3600)


class Dies(Written):
    """Takes its process with it."""

    def send(self, rows, before):
        os.kill(os.getpid(), 9)


class Choosy(Written):
    """Fails at first, each time in another way; refuses some rows, and renames a metric."""

    failures = (ConnectionError, ValueError, TypeError, KeyError, SystemExit)

    substitutes = {"a,b": "a_b"}  # noqa: RUF012 - as a sink may have it

    def send(self, rows, before):
        failed = self.path.with_name("failed")
        count = failed.stat().st_size if failed.exists() else 0
        if count < len(self.failures):
            failed.write_bytes(bytes(count + 1))
            raise self.failures[count]("no route to host")
        for row in rows:
            if row["step"] in (3, 5):
                raise RefusedError(f"I do not like {row['step']}")
        super().send(rows, before)
