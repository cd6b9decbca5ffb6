"""Who runs where: the plan of a run, its memory and its bandwidth, before anything is started."""

import math
from dataclasses import asdict, dataclass, field, replace

import torch

from torchspec_lite.config import Config
from torchspec_lite.errors import UserError
from torchspec_lite.keys import is_loopback
from torchspec_lite.sections import TrainerConfig
from torchspec_lite.target import TargetInfo

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ENGINE_OVERHEAD = 900 << 20
"""Memory of a vLLM actor and its engine process beside weights and cache, measured on a CPU (VLLM 0.32)."""
TRAINER_OVERHEAD = 700 << 20
OPTIMIZER_BYTES = 16
"""fp32 weight, gradient and two AdamW moments of one parameter."""
ENCRYPTED_BYTES_PER_S = 650e6
"""What one core encrypts or decrypts by CURVE; each end of a stream has one thread for it."""


@dataclass(frozen=True)
class Role:
    """`count` alike Ray actors: logical CPUs and GPUs each, and an estimate of each one's memory in bytes.

    `section` is the config's. `node` are the labels their nodes must have. `stream` is what each sends into the stream
    or takes out of it, bytes a second as `capture.tokens_per_s` expects; 0 when nothing is expected or streamed.
    `gpu_memory` is the least that lies on each of an actor's GPUs: weights and optimizer state, without an engine's keys
    and values (they take what is left) and without activations; 0 without GPUs.
    """

    name: str
    count: int
    cpus: float
    gpus: float
    memory: int
    gpu_memory: int = 0
    section: str = ""
    node: dict[str, str] = field(default_factory=dict)
    stream: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What a run will start and move. `bytes_per_token` is what one captured token puts on the stream."""

    run_dir: str
    target: str
    layer_ids: tuple[int, ...]
    roles: tuple[Role, ...]
    bytes_per_token: int
    drafter_parameters: int
    stream_budget: int
    encrypted: bool
    doubts: tuple[str, ...] = ()
    """What may not work, a sentence each."""

    @property
    def cpus(self) -> float:
        return sum(role.count * role.cpus for role in self.roles)

    @property
    def gpus(self) -> float:
        return sum(role.count * role.gpus for role in self.roles)

    @property
    def memory(self) -> int:
        return sum(role.count * role.memory for role in self.roles)

    def values(self) -> dict:
        """The plan as plain values, sums included."""
        return asdict(self) | {"cpus": self.cpus, "gpus": self.gpus, "memory": self.memory}


def make_plan(config: Config, info: TargetInfo, only: str | None = None) -> Plan:
    """Work out a run's actors and needs from its config and target. `only`: of the role of that name alone.

    Raises UserError when a role cannot use the GPUs that it is given.
    """
    layer_ids = tuple(config.capture.layer_ids or info.default_layer_ids())
    drafter = drafter_parameters(config, info, layer_ids)
    split = config.target.tensor_parallel_size
    served = info.weight_bytes + drafter * BYTES[config.target.dtype]
    frozen = 2 * info.vocab_size * info.hidden_size * BYTES[config.target.dtype]
    trained = drafter * OPTIMIZER_BYTES + frozen
    # Beside a GPU's copy the target's embedding and head stay in main memory: drafters from folders are checked with them.
    kept = frozen if config.trainer.gpus else 0
    buffers = config.stream.budget_mib + config.trainer.reuse_buffer_mib << 20
    bytes_per_token = (len(layer_ids) + 1) * info.hidden_size * BYTES[config.target.dtype] + 5
    captured = (config.capture.tokens_per_s or 0.0) * bytes_per_token
    workers = target_workers(config)
    roles = [
        _role("target worker", workers, "capture", config.capture, info.weight_bytes // split,
              cpu=info.weight_bytes + (config.capture.kv_cache_mib << 20),
              always=(config.stream.sender_budget_mib << 20) + ENGINE_OVERHEAD, stream=captured),
        _role("trainer", config.trainer.ranks, "trainer", config.trainer, trained, cpu=trained,
              always=kept + buffers + TRAINER_OVERHEAD, stream=captured * workers / config.trainer.ranks),
    ]
    if config.serve.replicas and not config.serve.external:
        roles.append(_role("serving replica", config.serve.replicas, "serve", config.serve, served // split,
                           cpu=served + (config.serve.kv_cache_mib << 20), always=ENGINE_OVERHEAD))
    roles = tuple(role for role in roles if role.count and only in (None, role.name))
    for role in roles:
        if role.section == "trainer":
            _check_trainer_gpus(config.trainer)
        else:
            _check_engine_gpus(role, split)
    plan = Plan(
        run_dir=str(config.run_dir), target=info.fingerprint, layer_ids=layer_ids, roles=roles,
        bytes_per_token=bytes_per_token, drafter_parameters=drafter, stream_budget=config.stream.budget_mib << 20,
        encrypted=config.stream.encrypt == "on" or config.stream.encrypt == "auto" and not is_loopback(config.stream.host))
    return replace(plan, doubts=tuple(_network_doubts(config, plan)))


def _check_engine_gpus(role: Role, tensor_parallel_size: int) -> None:
    """Raise UserError for GPUs that a role's engines cannot use."""
    key, gpus = f"{role.section}.gpus", role.gpus
    if not gpus and torch.version.cuda is not None:
        # It would take GPU 0, which Ray holds for others.
        enough = tensor_parallel_size if tensor_parallel_size > 1 else "1 (or a share such as 0.3)"
        raise UserError(f"{key} is 0, but the vLLM here is its GPU build, which cannot run on CPUs: set {key}={enough}")
    if gpus > 1 and gpus % 1:
        raise UserError(f"{key} is {gpus:g}; Ray gives a share of one GPU, or whole ones")
    if gpus and tensor_parallel_size > 1 and gpus != tensor_parallel_size:
        raise UserError(f"{key} is {gpus:g} but target.tensor_parallel_size is {tensor_parallel_size}; one engine needs that "
                        "many whole GPUs")


def _check_trainer_gpus(options: TrainerConfig) -> None:
    """Raise UserError for GPUs that trainers cannot use, or cannot meet over."""
    if options.gpus > 1:
        raise UserError(f"trainer.gpus is {options.gpus:g}, but a trainer uses one GPU: set trainer.gpus=1 and raise "
                        "trainer.ranks")
    if not options.gpus and options.backend == "nccl":
        raise UserError("trainer.backend is nccl, which needs GPUs, but trainer.gpus is 0: set trainer.gpus=1, or "
                        "trainer.backend=gloo")
    if 0 < options.gpus < 1 < options.ranks and options.backend != "gloo":
        raise UserError(f"trainer.gpus is {options.gpus:g} with trainer.ranks={options.ranks}, and two ranks may come to share "
                        "a GPU, which NCCL refuses: set trainer.gpus=1, or trainer.backend=gloo")


def _role(name: str, count: int, key: str, section, gpu_memory: int, cpu: int, always: int, stream: float = 0.0) -> Role:
    """A role with the CPUs and GPUs of its config section; `cpu` bytes lie in main memory only without GPUs."""
    on_gpu = section.gpus > 0
    return Role(name, count, section.cpus, section.gpus, always + cpu * (not on_gpu), gpu_memory * on_gpu, key,
                dict(section.node), stream)


def _network_doubts(config: Config, plan: Plan) -> list[str]:
    """What the stream asks of the network and of one core's encryption, against what they give."""
    doubts = []
    for role in plan.roles:
        if plan.encrypted and role.stream > ENCRYPTED_BYTES_PER_S:
            doubts.append(f"one {role.name} streams {role.stream / 1e9:.2f} GB/s, and the one core that encrypts there manages "
                          f"about {ENCRYPTED_BYTES_PER_S / 1e9:.2f}; have more of them, or trust the network: stream.encrypt=off")
        link = (config.stream.link_gbit or 0.0) / 8 * 1e9
        if link and not is_loopback(config.stream.host) and role.stream * role.count > link:
            together = f" if all {role.count} are on one node" if role.count > 1 else ""
            doubts.append(f"{role.name}: {role.stream * role.count / 1e9:.2f} GB/s of stream{together}, and a link of "
                          f"{config.stream.link_gbit:g} Gbit/s carries {link / 1e9:.2f}; spread them over nodes, or expect "
                          f"at most {link / plan.bytes_per_token:,.0f} tokens/s")
    return doubts


def target_workers(config: Config) -> int:
    """How many there are: none in a run without prompts of its own, which learns from served traffic alone."""
    return config.capture.workers if config.data.train or config.data.held_out else 0


def drafter_parameters(config: Config, info: TargetInfo, layer_ids: tuple[int, ...]) -> int:
    """Number of trainable parameters of the drafter that the config asks for."""
    hidden, head = info.hidden_size, info.head_dim
    attention = (info.num_attention_heads + 2 * info.num_key_value_heads) * head * 2 * hidden
    attention += info.num_attention_heads * head * hidden
    mlp = 3 * hidden * (config.drafter.intermediate_size or info.intermediate_size)
    vocabulary = config.drafter.draft_vocab_size or info.vocab_size
    return len(layer_ids) * hidden * hidden + attention + mlp + vocabulary * hidden


def threads(cpus: float) -> int:
    """Threads of a process that reserves this many logical CPUs."""
    return max(1, math.ceil(cpus))


def render(plan: Plan) -> str:
    """The plan as a table for people."""
    lines = [f"run directory   {plan.run_dir}", f"target          {plan.target}",
             f"captured        layer ids {list(plan.layer_ids)} and the last one, {plan.bytes_per_token:,} bytes a token",
             f"drafter         {plan.drafter_parameters / 1e6:.1f} M trainable parameters",
             f"stream          at most {plan.stream_budget >> 20} MiB waiting in each trainer, "
             f"{'encrypted' if plan.encrypted else 'not encrypted (loopback)'}",
             f"{'role':<16}{'actors':>7}{'CPUs':>7}{'GPUs':>7}{'memory each':>14}{'on each GPU':>14}{'stream each':>14}"]
    for role in plan.roles:
        on_gpu = f"{role.gpu_memory / 2**30:.1f} GiB" if role.gpus else ""
        stream = f"{role.stream / 1e9:.3f} GB/s" if role.stream else ""
        labels = "".join(f"  {key}={value}" for key, value in role.node.items())
        lines.append(f"{role.name:<16}{role.count:>7}{role.cpus:>7g}{role.gpus:>7g}{role.memory / 2**30:>10.1f} GiB"
                     f"{on_gpu:>14}{stream:>14}{labels}".rstrip())
    lines.append(f"{'all':<16}{sum(role.count for role in plan.roles):>7}{plan.cpus:>7g}{plan.gpus:>7g}"
                 f"{plan.memory / 2**30:>10.1f} GiB")
    for rate in (1_000, 30_000):
        lines.append(f"stream at {rate:>6,} tokens/s: {rate * plan.bytes_per_token / 1e9:.3f} GB/s into the trainers")
    return "\n".join(lines + [f"WARNING         {doubt}" for doubt in plan.doubts])
