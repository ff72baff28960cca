"""Python imports this where `tools/test_costs.py --lines` records lines: coverage then says for which test a process or a fork runs them."""

import os
from pathlib import Path

if "HPCLM_CURRENT_TEST" in os.environ:
    import coverage

    CURRENT = Path(os.environ["HPCLM_CURRENT_TEST"])

    def tell_test() -> None:
        """Take the name of the test that runs now."""
        if (measuring := coverage.Coverage.current()) and CURRENT.exists():
            measuring.switch_context(CURRENT.read_text())

    tell_test()
    os.register_at_fork(after_in_child=tell_test)
