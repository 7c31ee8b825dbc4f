"""The package as a whole."""

import importlib
import pkgutil
import subprocess
import sys

import greedysnake


def test_every_module_imports_and_has_a_docstring():
    for module in pkgutil.walk_packages(greedysnake.__path__, "greedysnake."):
        if not module.name.endswith("__main__"):
            assert importlib.import_module(module.name).__doc__, module.name


def test_public_names_exist():
    for name in greedysnake.__all__:
        assert getattr(greedysnake, name) is not None


def test_schedules_need_no_torch():
    code = "import sys, greedysnake.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_does_not_load_torch():
    code = "import sys, greedysnake.cli.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
