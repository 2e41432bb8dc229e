"""A fresh environment with real distributions in it, built by pip or given as wheels."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Environment:
    """A virtual environment that pip of this one installs into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        site = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        # Torch and the build tools are seen through a path, since a second copy of torch would be gigabytes. A .pth
        # adds the folder without processing the .pth files in it, so this environment's editable install stays out.
        (site / "test_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    def run(self, *args: str, check: bool = True) -> str:
        return self.process(self.python, *args, check=check)

    def command(self, name: str, *args: str) -> tuple[int, str]:
        """A console script of the environment: exit status and everything it printed."""
        done = subprocess.run(
            [self.folder / "bin" / name, *args], capture_output=True, text=True, cwd=self.folder, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def install(self, *what: Path) -> None:
        self.process(
            sys.executable,
            *("-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-index", "--no-deps"),
            *("--no-build-isolation", "--no-compile", "--disable-pip-version-check"),
            *map(str, what),
        )

    def process(self, *args: object, check: bool = True) -> str:
        done = subprocess.run(
            [str(arg) for arg in args], capture_output=True, text=True, cwd=self.folder, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"{args} failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout


def wheel(folder: Path, distribution: str, source: str, entry_point: str = "") -> Path:
    """A wheel of one module that is named as the distribution, with one entry point of ours."""
    module = distribution.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    files = {
        f"{module}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[dsa_dispatch.backends]\n{module} = {entry_point or module}\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path
