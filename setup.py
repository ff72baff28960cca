"""Build hpclm with the presets and job templates, which are at the top of the repository, inside the package."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = {"configs": "*.yaml", "slurm": "*.sbatch"}


class BuildPackage(build_py):
    """Also copies the shipped folders; hpclm/shipped.py finds them. An editable install reads them where they are."""

    def run(self):
        """Build the package as usual, then add the folders."""
        super().run()
        if self.editable_mode:
            return
        for name, pattern in SHIPPED.items():
            target = Path(self.build_lib, "hpclm", name)
            self.mkpath(str(target))
            for path in sorted(Path(name).glob(pattern)):
                self.copy_file(str(path), str(target / path.name))


setup(cmdclass={"build_py": BuildPackage})
