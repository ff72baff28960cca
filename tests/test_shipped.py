"""What comes along with the package."""

from hpclm.base import shipped
from tests.runs import ROOT


def test_presets_and_pages_are_named_by_their_paths_those_of_the_top_first():
    names = [*shipped.presets()]
    depths = [name.count("/") for name in names]
    assert depths == sorted(depths) and {"debug", "recipes/bigscience"} <= {*names}
    pages = shipped.pages()
    assert pages["architecture"] == ROOT / "ARCHITECTURE.md" and pages["data"] == ROOT / "docs/data.md"
    assert not shipped.installed()
