"""A Ray session: a cluster of this machine's own, or a connection to a running one."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.config import RayConfig
from posttrain.errors import ConfigError
from posttrain.runtime.progress import ProgressBoard
from posttrain.runtime.worker import WORKER_ENVIRONMENT

# The store holds only small messages so far; Ray's default is 30% of the memory.
OBJECT_STORE_MB = 200
# Set before Ray is imported: it reads them then. Train must not move workers away from the folder that relative paths mean.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # A process each, that a run on one machine has no use for.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # The head asks for a token by default and clients send none: one mode for both.
    "RAY_AUTH_MODE": "token",
    # A job (`ray job submit`) may have environment variables of its own beside those that workers get here.
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
}


# Ray's own switch (false by default on macOS and Windows): a node's address is 127.0.0.1, and its processes listen there alone.
# Of itself Ray resolves that address to the machine's and listens on every interface. It is read when Ray is imported.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@contextmanager
def ray_session(config: RayConfig, *, other_cpus: float = 0) -> Iterator[None]:
    """Connect to Ray as the recipe says; disconnect, and stop what was started here, at the end.

    A session that is already open (tests, a notebook) is used and left open.

    Args:
        other_cpus: cores that actors beside the workers will ask a cluster started here for.

    Raises:
        ConfigError: the cluster cannot be reached, or offers less than the recipe asks for.
    """
    address = config.address or os.environ.get("RAY_ADDRESS")
    alone = not address and config.listen == "loopback"
    for name, value in (RAY_ENVIRONMENT | (LOOPBACK if alone else {})).items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        _check_resources(config)
        yield
        return
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "posttrain"}
    workers_environment = {**WORKER_ENVIRONMENT, **config.env}
    if address:
        try:
            ray.init(address=address, runtime_env={"env_vars": workers_environment}, **common)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"ray.address: cannot connect to {address!r}: {error}") from error
    else:
        # Workers of a cluster started here inherit this environment, and must find posttrain wherever it lies.
        os.environ.update(workers_environment)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_package_root(), os.environ.get("PYTHONPATH", "")]))
        ray.init(
            # Without it Ray would join any cluster that was ever started here by `ray start` and still runs, or fail for that.
            address="local",
            num_cpus=_local_cpus(config, other_cpus),
            include_dashboard=config.dashboard,
            object_store_memory=(config.object_store_memory_mb or OBJECT_STORE_MB) * 2**20,
            **common,
        )
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        _check_resources(config)
        yield
    finally:
        ray.shutdown()


def start_board() -> Any:
    """Start the ProgressBoard actor and return its handle."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Beside the driver, which could not go on without it: another node may be lost.
    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(ProgressBoard).remote()  # pyright: ignore


def gpus_per_worker(config: RayConfig) -> float:
    """GPUs that a worker gets: what the recipe says, else one where the cluster has any."""
    if config.gpus_per_worker is not None:
        return config.gpus_per_worker
    import ray

    return 1.0 if ray.cluster_resources().get("GPU", 0) >= 1 else 0.0


def _local_cpus(config: RayConfig, other_cpus: float) -> int:
    """A small machine runs a bigger recipe slowly, rather than waiting for ever for cores that it does not have."""
    if config.num_cpus is not None:
        return config.num_cpus
    return max(os.cpu_count() or 1, math.ceil(config.num_workers * config.cpus_per_worker + other_cpus))


def _package_root() -> str:
    spec = importlib.util.find_spec("posttrain")
    assert spec is not None and spec.origin is not None, "this module is part of posttrain"
    return str(Path(spec.origin).parents[1])


def _check_resources(config: RayConfig) -> None:
    """Ray would wait without a word for resources that never come."""
    import ray

    offered = ray.cluster_resources()
    asked = {"CPU": config.num_workers * config.cpus_per_worker, "GPU": config.num_workers * gpus_per_worker(config)}
    for kind, amount in asked.items():
        if amount > offered.get(kind, 0):
            raise ConfigError(
                f"ray: {config.num_workers} workers ask for {amount:g} {kind}s, and the cluster has {offered.get(kind, 0):g}; "
                f"lower ray.num_workers, ray.cpus_per_worker or ray.gpus_per_worker, or add machines"
            )
