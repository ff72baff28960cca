"""Build hpclm with what is beside the package in a clone (hpclm/base/shipped.py), and with a README for a package index."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = (
    "configs/**/*.yaml",
    "slurm/**/*.sbatch",
    "slurm/**/*.yaml",
    "docs/**/*.md",
    "docs/**/*.png",
    "docs/**/*.svg",
)
SHIPPED = (*FOLDERS, "ARCHITECTURE.md", "CHANGELOG.md")
HERE = Path(__file__).parent


class BuildPackage(build_py):
    """Also copies the shipped folders; hpclm/base/shipped.py finds them. An editable install reads them where they are."""

    def run(self):
        """Build the package as usual, then add the folders."""
        super().run()
        if self.editable_mode:
            return
        for path in (path for pattern in SHIPPED for path in sorted(Path().glob(pattern))):
            target = Path(self.build_lib, "hpclm", path)
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


def description() -> str:
    """The README without what only works in a clone: pictures are left out, links to pages become the command that shows them."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^(!\[.*\]\((?!https?:).*\)|\[[^]]*\]\(README.*\))\n+", "", text, flags=re.M)
    text = re.sub(r"\[[^]]*\]\(docs/([\w/-]+)\.md(?:#[\w-]*)?\)", r"`hpclm docs \1`", text)
    text = re.sub(r"\[([A-Z]+)\.md\]\(\1\.md\)", lambda match: f"`hpclm docs {match[1].lower()}`", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


setup(
    cmdclass={"build_py": BuildPackage}, long_description=description(), long_description_content_type="text/markdown"
)
