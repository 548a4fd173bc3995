"""A recipe's stages in order: what `posttrain run`, `sft`, `grpo` and `eval` call.

    open the run folder -> prepare (tokenizer, SFT rows, base/) -> Ray -> each unfinished stage behind its bar -> summary
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.config import Recipe
from posttrain.errors import PosttrainError
from posttrain.run_folder import RunFolder
from posttrain.runtime.launch import POLL_SECONDS, StageHandle, launch
from posttrain.runtime.progress import Bar, Outcome, Report
from posttrain.runtime.session import ray_session, start_board

INTERRUPTED = 130
RAY_STAGES = ("sft", "grpo", "eval")
