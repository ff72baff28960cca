"""``python -m hpclm.train``: the command ``hpclm train``, under the name that job templates use. In Python, hpclm.train is a function."""

from hpclm.node import import_errors

if __name__ == "hpclm.train":  # the module would replace the function
    raise ImportError(
        "hpclm.train is a function: import hpclm; on a command line: python -m hpclm.train", name=__name__
    )

if __name__ == "__main__":
    import_errors.report_uncaught()
    from hpclm.node import parent, preemption

    parent.end_with_launcher("train")
    preemption.catch_from_the_start("train")  # before the other imports, which take a while
    from hpclm import cli
    from hpclm.node import ends, failures

    ended = failures.run(cli.function("train"))
    ends.note(ended)
    raise SystemExit(ended)
