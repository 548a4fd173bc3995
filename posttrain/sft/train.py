"""The SFT stage on one worker: packed rows -> PackedSFTTrainer -> sft/checkpoint-N, sft/final."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import trl
from trl import SFTConfig

from posttrain.config import Recipe
from posttrain.data.collate import collate
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import RunFolderError
from posttrain.models.loading import load_model
from posttrain.run_folder import RunFolder
from posttrain.runtime.checkpoints import barrier
from posttrain.runtime.deepspeed import trainer_arguments
from posttrain.runtime.worker import StageStopped, WorkerContext
from posttrain.sft.dataset import load_rows, prepare
from posttrain.sft.trainer import PackedSFTTrainer, RunFolderCallback
