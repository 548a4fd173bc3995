"""What a stage's processes ask of a cluster, and whether it has that: said before anything is loaded.

bundles = grpo_bundles(recipe, gpus)        [Bundle("learner", 16 CPUs, 1 GPU), Bundle("generator 0", 1 CPU, 1 GPU), ...]
check(bundles, nodes())                     a ConfigError that says what is asked and what each node has
reserve(bundles)                            a placement group: all of them, or an error; generators stay inside it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.config import Recipe
from posttrain.errors import ConfigError

# Other jobs may be about to end; longer than this, the user should know.
RESERVE_LIMIT_S = 300.0
TINY = 1e-6


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What one process holds, all of it on one node; fractions of a GPU are shared by several."""

    kind: str
    cpus: float
    gpus: float

    def resources(self) -> dict[str, float]:
        """As Ray takes it; a bundle must not be empty."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount > 0} or {"CPU": TINY}


@dataclass(frozen=True, kw_only=True)
class Node:
    """What a node of the cluster has."""

    name: str
    cpus: float
    gpus: float


def grpo_bundles(recipe: Recipe, gpus: float) -> list[Bundle]:
    """The learners' and the generators' of a GRPO stage. `gpus`: of a process where the recipe does not say."""
    learner = recipe.ray.gpus_per_worker
    generator = recipe.grpo.gpus_per_generator
    learners = [Bundle(kind="learner", cpus=recipe.ray.cpus_per_worker, gpus=gpus if learner is None else learner)]
    generators = [
        Bundle(kind="generator", cpus=recipe.grpo.cpus_per_generator, gpus=gpus if generator is None else generator)
    ] * recipe.grpo.generators
    return learners * recipe.grpo.learners + (generators if recipe.grpo.placement == "split" else [])


def nodes() -> list[Node]:
    """The living nodes of the cluster that Ray is connected to."""
    import ray

    return [
        Node(
            name=node["NodeManagerHostname"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def check(bundles: Sequence[Bundle], offered: Sequence[Node]) -> None:
    """See that the bundles fit onto the nodes, the big ones first.

    Raises:
        ConfigError: they do not, even on an idle cluster.
    """
    free = [[node.gpus, node.cpus] for node in offered]
    for bundle in sorted(bundles, key=lambda bundle: (bundle.gpus, bundle.cpus), reverse=True):
        place = next((f for f in free if f[0] >= bundle.gpus - TINY and f[1] >= bundle.cpus - TINY), None)
        if place is None:
            raise ConfigError(
                f"ray: {describe(bundles)} do not fit onto the cluster: it has {describe_nodes(offered)}, and no node has "
                f"{bundle.cpus:g} CPUs and {bundle.gpus:g} GPUs left for a {bundle.kind}. Ask for less (grpo.learners, "
                "grpo.generators, ray.cpus_per_worker, ray.gpus_per_worker, grpo.cpus_per_generator, grpo.gpus_per_generator; "
                "fractions of a GPU are allowed), or add nodes"
            )
        place[0] -= bundle.gpus
        place[1] -= bundle.cpus


def describe(bundles: Sequence[Bundle]) -> str:
    """For example: 1 learner (16 CPUs, 1 GPUs) and 7 generators (1 CPUs, 1 GPUs)."""
    counts = Counter(bundles)
    return " and ".join(
        f"{count} {bundle.kind}{'s' * (count > 1)} ({bundle.cpus:g} CPUs, {bundle.gpus:g} GPUs{' each' * (count > 1)})"
        for bundle, count in counts.items()
    )


def describe_nodes(offered: Sequence[Node]) -> str:
    return (
        "; ".join(
            f"{count} x ({cpus:g} CPUs, {gpus:g} GPUs)"
            for (cpus, gpus), count in Counter((n.cpus, n.gpus) for n in offered).items()
        )
        or "no node"
    )


def reserve(bundles: Sequence[Bundle], *, limit_s: float = RESERVE_LIMIT_S) -> Any:
    """A placement group of the bundles, together on few nodes where they fit.

    Raises:
        ConfigError: other jobs hold what they need, and have not let go within `limit_s`.
    """
    import ray
    from ray.exceptions import GetTimeoutError
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([bundle.resources() for bundle in bundles], strategy="PACK", name="posttrain")
    try:
        ray.get(group.ready(), timeout=limit_s)
    except GetTimeoutError:
        free = {kind: f"{amount:g}" for kind, amount in ray.available_resources().items() if kind in ("CPU", "GPU")}
        remove_placement_group(group)
        raise ConfigError(
            f"ray: {describe(bundles)} were not to be had for {limit_s:.0f} s: the cluster has {describe_nodes(nodes())}, of "
            f"which {free or 'nothing'} is free; wait for the other jobs, or ask for less"
        ) from None
    return group
