"""What nodes have, and whether a plan fits on them: found out before anything is started."""

import math
from dataclasses import dataclass, field

from cluster.doctor import available_memory, nvidia_smi
from cluster.placement import Plan, Role
from torchspec_lite.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Node:
    """What one node can give: logical CPUs, whole GPUs, bytes of main memory; and its Ray labels."""

    name: str
    cpus: float
    gpus: int
    memory: int
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Room:
    """What is left on a node while actors are put there."""

    node: Node
    cpus: float
    gpus: list[float]
    memory: int
    actors: list[str]

    def take(self, role: Role) -> bool:
        """Put one actor here if its CPUs, GPUs and labels allow it. Memory is only counted: it is an estimate."""
        if not _labelled(self.node, role) or role.cpus > self.cpus + 1e-6:
            return False
        free = [place for place, left in enumerate(self.gpus) if left >= min(role.gpus, 1) - 1e-6]
        if len(free) < math.ceil(role.gpus):
            return False
        if role.gpus >= 1:
            for place in [place for place in free if self.gpus[place] == 1][:int(role.gpus)]:
                self.gpus[place] = 0.0
        elif role.gpus:
            self.gpus[min(free, key=lambda place: self.gpus[place])] -= role.gpus
        self.cpus -= role.cpus
        self.memory -= role.memory
        self.actors.append(role.name)
        return True


def this_machine() -> Node:
    """The machine this runs on, for a run that starts its own Ray: logical CPUs are as many as the plan wants."""
    listing = nvidia_smi()
    return Node("this machine", math.inf, len((listing or "").splitlines()), available_memory())


def ray_nodes(found: list[dict]) -> list[Node]:
    """The living nodes among what `ray.nodes()` tells."""
    return [Node(node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0), int(node["Resources"].get("GPU", 0)),
                 int(node["Resources"].get("memory", 0)), node.get("Labels", {})) for node in found if node["Alive"]]


def check_fit(plan: Plan, nodes: list[Node]) -> list[str]:
    """Raise UserError when the nodes can never hold the plan, whose actors would then wait for ever; the doubts that
    remain, a sentence each."""
    for role in plan.roles:
        _check_one(role, nodes)
    for name, need, have in (("CPU", plan.cpus, sum(node.cpus for node in nodes)),
                             ("GPU", plan.gpus, sum(node.gpus for node in nodes))):
        if need > have + 1e-6:
            raise UserError(f"the plan needs {need:g} {name}s but {_names(nodes)} {_has(nodes)} {have:g}; lower capture/trainer/"
                            f"serve.{name.lower()}s (fractions are allowed) or their counts, or add nodes")
    rooms = [Room(node, node.cpus, [1.0] * node.gpus, node.memory, []) for node in nodes]
    actors = [role for role in sorted(plan.roles, key=lambda role: (-role.gpus, -role.cpus)) for _ in range(role.count)]
    left = [role.name for role in actors if not any(room.take(role) for room in rooms)]
    doubts = [f"{left.count(name)} × {name} may find no node with room: the nodes have enough in all, but not side by side"
              for name in dict.fromkeys(left)]
    for room in rooms:
        if room.memory < 0:
            doubts.append(f"{room.node.name}: {_together(room.actors)} want about {(room.node.memory - room.memory) / GIB:.1f} GiB "
                          f"of memory there and it has {room.node.memory / GIB:.1f}; lower stream.budget_mib, "
                          "trainer.reuse_buffer_mib or the kv_cache_mib keys, or spread the roles (capture.node, …)")
    return doubts


def _check_one(role: Role, nodes: list[Node]) -> None:
    """One actor is on one node, so its labels, CPUs and GPUs must be there together."""
    section = role.section
    labelled = [node for node in nodes if _labelled(node, role)]
    if not labelled:
        wanted = ",".join(f"{key}={value}" for key, value in role.node.items())
        raise UserError(f"{section}.node: no node is labelled {wanted}; start one with `ray start --labels {wanted}`, or "
                        f"change {section}.node")
    for name, need, most in (("GPU", math.ceil(role.gpus), lambda node: node.gpus), ("CPU", role.cpus, lambda node: node.cpus)):
        labelled = [node for node in labelled if most(node) >= need - 1e-6] or _refuse(role, name, max(map(most, labelled)))


def _refuse(role: Role, name: str, most: float):
    need = role.gpus if name == "GPU" else role.cpus
    raise UserError(f"one {role.name} needs {need:g} {name}s on one node, and of the nodes that may run it none has more than "
                    f"{most:g}; lower {role.section}.{name.lower()}s")


def _labelled(node: Node, role: Role) -> bool:
    return all(node.labels.get(key) == value for key, value in role.node.items())


def _names(nodes: list[Node]) -> str:
    return nodes[0].name if len(nodes) == 1 else f"the {len(nodes)} nodes"


def _has(nodes: list[Node]) -> str:
    return "has" if len(nodes) == 1 else "have"


def _together(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
