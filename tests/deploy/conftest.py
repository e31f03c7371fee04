"""What secrets.sh makes is made once for all tests here: each `plimsoll keys new` is a start of Python."""

from __future__ import annotations

import shutil

import pytest

from tests.deploy.stand import make_secrets


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A folder that secrets.sh has filled, and what it said. Not to be changed."""
    folder = tmp_path_factory.mktemp("secrets")
    said = make_secrets(folder)
    assert said.returncode == 0, said.stderr
    return folder, said


@pytest.fixture(scope="session")
def own_copy(made):
    """`own_copy(folder)` fills a folder as secrets.sh did."""
    return lambda folder: shutil.copytree(made[0], folder, dirs_exist_ok=True)
