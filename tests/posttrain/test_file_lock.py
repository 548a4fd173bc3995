"""Locks that end with their process, however it ends."""

import subprocess
import sys

import pytest

from posttrain.errors import RunFolderError
from posttrain.file_lock import hold

HOLDER = """
import sys, time
from pathlib import Path
from posttrain.file_lock import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_free_once_its_holder_was_killed(tmp_path, root):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "new")], stdout=subprocess.PIPE, cwd=root, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match="new is being written by another process"), hold(tmp_path / "new", 0):
            pass
    finally:
        holder.kill()
        holder.wait()
    with hold(tmp_path / "new", 0):
        pass
    with hold(tmp_path / "new", 0):
        assert (tmp_path / "new" / ".lock").exists()
