"""Sinks that misbehave, and one that writes down what it is sent; named in log.sinks as tests.sinks.own:Name."""

import json
import time


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
    """Cannot be reached."""

    def __init__(self, run):
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
        import os

        os.kill(os.getpid(), 9)


class Chatty(Written):
    """Its library prints without end, and a process that the library has started prints a lot."""

    def __init__(self, run):
        import subprocess
        import sys
        import threading

        super().__init__(run)
        code = "for number in range(1_000_000): print(number, 'from a process of the library')"
        subprocess.Popen([sys.executable, "-c", code])
        threading.Thread(target=self.print, daemon=True).start()

    def print(self):
        import itertools

        for number in itertools.count():
            print(f"line {number} of a library that prints {'a lot' * 1000}", flush=True)
