"""A rank that does what its words say, in the place of a training process; and a launcher of such ranks.

python -m tests.launch.stand_in rank FOLDER WORD...     a rank: see ACTS
python -m tests.launch.stand_in launch local|mpi|srun OUT SETTINGS WORD...    a launcher of such ranks
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import events

STUBBORN = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 10, 12, 15)]; time.sleep(3600)"  # longer than a test waits
SLEEP = [sys.executable, "-c", STUBBORN]


def daemon():
    """A grandchild in a new session, whose parent is gone, that ignores all signals it can, with a bare environment."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for handle in (0, 1, 2):
                os.dup2(null, handle)
            os.execve(sys.executable, [*SLEEP[:2], SLEEP[2] + f"  # {MARK}"], {})
        os._exit(0)
    os.wait()


MARK = ""


def rank(folder, *words):
    global MARK
    me = int(
        os.environ.get("RANK")
        or os.environ.get("OMPI_COMM_WORLD_RANK")
        or os.environ.get("PMI_RANK")
        or os.environ.get("SLURM_PROCID", "0")
    )
    folder = Path(folder)
    MARK = f"{folder}"
    got = []

    def note(number, frame):
        got.append(number)
        with (folder / f"signals-{me}").open("a") as file:
            file.write(f"{signal.Signals(number).name}\n")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, note)
    for word in words:
        act, _, rest = word.partition("=")
        who, _, value = rest.partition(":") if ":" in rest else ("", "", rest)
        if who and me != int(who):
            continue
        if act == "children":
            subprocess.Popen([*SLEEP[:2], SLEEP[2] + f"  # {MARK}"])
            subprocess.Popen([*SLEEP[:2], SLEEP[2] + f"  # {MARK}"], start_new_session=True)
            daemon()
        elif act == "child":
            subprocess.Popen([*SLEEP[:2], SLEEP[2] + f"  # {MARK}"], start_new_session=True)
        elif act == "print":
            os.write(1, f"{value}\n".encode())  # at once: a launcher may mix up what print writes in two pieces
        elif act == "error":
            os.write(2, f"{value}\n".encode())
        elif act == "env":
            line = f"{me} {os.uname().nodename} {value}={os.environ.get(value)}\n"
            os.write(1, line.encode())
        elif act == "ready":
            (folder / f"ready-{me}").write_text(str(os.getpid()))
        elif act == "meet":  # wait until so many ranks are ready, and so hear signals
            while len(list(folder.glob("ready-*"))) < int(value):
                time.sleep(0.01)
        elif act == "hear":  # wait for a signal
            while not got:
                time.sleep(0.01)
        elif act == "phase":  # one of two ranks, which end so many starts as before a phase
            with (folder / f"starts-{me}").open("a") as starts:
                starts.write("1")
            number = (folder / f"starts-{me}").stat().st_size
            while sum(path.stat().st_size >= number for path in folder.glob("starts-*")) < 2:
                time.sleep(0.01)
            if number <= int(value):
                if me == 0:
                    events.note(folder, "ended", state="phase", code=85)
                while len(events.of_kind(folder, "ended")) < number:  # mpirun ends all ranks with the first
                    time.sleep(0.01)
                sys.exit(85)
        elif act == "exit":
            sys.exit(int(value))
        elif act == "kill":
            os.kill(os.getpid(), int(value))
        elif act == "sleep":  # in vain, unless it is said how long
            time.sleep(float(value or 3600))
        elif act == "obey":  # run until a signal, and end at once
            while not got:
                time.sleep(0.01)
            sys.exit(0)
        elif act == "warned":  # run until a signal, then "save" until the test says so, and ask to be started again
            while not (got and (folder / "saved").exists()):
                time.sleep(0.01)
            sys.exit(85)
    sys.exit(0)


def launch(how, out, overrides, *words):
    from importlib import import_module

    from hpclm import config
    from hpclm.launch.foreground import Launch

    settings = config.load(None, [f"out={out}", *overrides.split()])
    program = [sys.executable, "-u", "-m", "tests.launch.stand_in", "rank", out, *words]
    return import_module(f"hpclm.launch.{how}").run(Launch(settings, ["a", "command"], instead=program))


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb == "rank":
        rank(*rest)
    from hpclm.node import failures

    sys.exit(failures.run(lambda words: launch(*words), rest))
