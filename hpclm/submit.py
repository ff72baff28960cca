"""``python -m hpclm.submit``: the command ``hpclm submit``. In Python, hpclm.submit is a function."""

from hpclm.node import import_errors

if __name__ == "hpclm.submit":  # the module would replace the function
    raise ImportError(
        "hpclm.submit is a function: import hpclm and call it; on a command line, use python -m hpclm.submit",
        name=__name__,
    )

if __name__ == "__main__":
    import_errors.report_uncaught()
    from hpclm.node import preemption

    preemption.catch_from_the_start("submit")  # before the other imports, which take a while
    from hpclm import cli
    from hpclm.node import failures

    raise SystemExit(failures.run(cli.function("submit")))
