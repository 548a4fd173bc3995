"""Making, loading and saving checkpoints: Hugging Face folders with safetensors, and never a silently random weight."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from posttrain.errors import CheckpointError, ConfigError
from posttrain.models.hub import check_available
from posttrain.models.sizes import resolve
from posttrain.models.sse_h import SSEHConfig, SSEHForCausalLM

# Fields of a configuration that describe no architecture, yet belong into `init`.
_OTHER_FIELDS = ("pad_token_id", "bos_token_id", "eos_token_id", "use_cache")


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    """ "bfloat16", "float16", "float32" (or torch's own) -> torch.dtype; None is float32. Raises ConfigError."""
    if dtype is None:
        return torch.float32
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype={dtype!r}, but it must be one of float32, bfloat16, float16")
    return found


def make_config(fields: Mapping[str, Any]) -> SSEHConfig:
    """SSEHConfig from a recipe's fields. Raises ConfigError on an unknown field (naming the nearest) or a bad value."""
    known = [*SSEHConfig.__dataclass_fields__]
    for name in fields:
        if name != "model_type" and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"unknown model field {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    try:
        # The plain checks first: transformers wraps what its own raise.
        resolve({k: v for k, v in fields.items() if k not in _OTHER_FIELDS})
        return SSEHConfig(**{k: v for k, v in fields.items() if k != "model_type"})
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConfigError(f"model configuration: {error}") from error


def new_model(
    config: Mapping[str, Any] | SSEHConfig,
    seed: int,
    *,
    dtype: str | torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> SSEHForCausalLM:
    """A freshly initialised model; the same seed gives the same weights, and the global random state stays as it was."""
    if not isinstance(config, SSEHConfig):
        config = make_config(config)
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed every GPU too, whose states fork_rng leaves alone here.
        torch.default_generator.manual_seed(seed)
        model = SSEHForCausalLM(config)
    # The plain method: transformers' own `to` hides its signature from type checkers.
    nn.Module.to(model, device=torch.device(device), dtype=parse_dtype(dtype))
    return model.eval()


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> SSEHForCausalLM:
    """The SSE-H model in a folder or under a hub id, in eval mode.

    Args:
        dtype: of the weights; None keeps the checkpoint's own.
        trust_remote_code: for hub ids whose configuration is code; safetensors are the only weights read.

    Raises:
        CheckpointError: the folder is missing or incomplete, weights are missing, unexpected or of another shape, or the
            checkpoint is of another family.
    """
    name = str(path)
    folder = Path(path)
    if folder.exists():
        _check_folder(folder)
    else:
        check_available(name, revision=revision)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, revision=revision)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise CheckpointError(f"{name}: its configuration cannot be read ({error})") from error
    if not isinstance(config, SSEHConfig):
        raise CheckpointError(
            f"{name} is a checkpoint of the family {config.model_type!r}, but this command needs 'sse_h'; convert it first"
        )
    try:
        options: dict[str, Any] = {} if revision is None else {"revision": revision}
        loaded: Any = SSEHForCausalLM.from_pretrained(
            name,
            config=config,
            dtype="auto" if dtype is None else parse_dtype(dtype),
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{name}: its weights cannot be read ({error})") from error
    model, report = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(kind):
            found = sorted(str(key) for key in report[kind])
            raise CheckpointError(
                f"{name}: {len(found)} {kind.replace('_', ' ')}, e.g. {', '.join(found[:3])}; it does not fit its config.json"
            )
    return model.to(device).eval()


def save_model(model: PreTrainedModel, folder: str | Path) -> None:
    """Writes config.json and safetensors into `folder`. Atomicity is the caller's: write beside, then rename."""
    model.save_pretrained(folder)


def _check_folder(folder: Path) -> None:
    """Raises CheckpointError where a local folder lacks its configuration or any of its weight files."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a checkpoint is a folder with config.json and *.safetensors")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: config.json is missing; is this a checkpoint folder?")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            parts = set(json.loads(index.read_text())["weight_map"].values())
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index}: cannot be read ({error})") from error
    else:
        parts = {"model.safetensors"}
    absent = sorted(part for part in parts if not (folder / part).is_file())
    if absent:
        raise CheckpointError(f"{folder}: incomplete, {', '.join(absent[:3])} missing (only safetensors are read)")
