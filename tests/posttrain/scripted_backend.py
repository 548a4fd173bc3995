"""A backend for tests of the cluster; a module of its own, so that Ray's workers can import it."""

import os
import signal
import time
from pathlib import Path

from posttrain.errors import DataError
from posttrain.inference import Text


class Scripted:
    """A backend whose samples say who drew them; the first engine that reaches the prompt `dies` is killed in its middle."""

    def __init__(self, folder: str, dies: str = "", fails: str = "") -> None:
        self.folder, self.dies, self.fails = Path(folder), dies, fails

    def generate(self, prompts):
        for prompt in prompts:
            for sample in prompt.samples:
                if prompt.id == self.fails:
                    raise DataError(f"row {prompt.id}: refused")
                if prompt.id == self.dies and sample == 1 and (self.dies == "p-always" or self._first()):
                    time.sleep(0.2)  # what was yielded before leaves the process first
                    os.kill(os.getpid(), signal.SIGKILL)
                yield Text(prompt_id=prompt.id, sample=sample, text=f"{prompt.seed}/{sample}/{os.getpid()}", finish_reason="stop")

    def _first(self) -> bool:
        try:
            (self.folder / "died").mkdir()
        except FileExistsError:
            return False
        return True

    def identity(self):
        return {}

    def close(self):
        pass
