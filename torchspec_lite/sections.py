"""The sections of a run's configuration: every key, its type, its default and what it means."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

LABEL = "[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
NodeLabels = dict[Annotated[str, Field(pattern=f"^(?:[a-z0-9.-]+/)?{LABEL}$")], Annotated[str, Field(pattern=f"^{LABEL}$")]]
"""Labels as Ray's nodes bear them."""


class Section(BaseModel):
    """A group of keys. An unknown key is an error; values are checked when they are set."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)

    def __setattr__(self, name, value):
        before = dict(self.__dict__)
        try:
            super().__setattr__(name, value)
        except ValidationError:
            # pydantic checks rules between keys only after it has set the value.
            self.__dict__.update(before)
            raise


class TargetConfig(Section):
    model: str
    """Folder, hub name, or `smollm2` for the small real target that a Python package ships."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the target's weights and states, in capture and in serving."""
    max_model_len: int = Field(default=2048, ge=32)
    """Longest prompt plus answer in tokens that an engine accepts."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs (or CPU sockets) one engine is split over."""
    trust_remote_code: bool = False
    """Let the target's folder run its own Python code. Off unless you trust its author."""


class DataConfig(Section):
    train: list[str] = []
    """Conversation JSONL files to learn from; `demo` names the prompts shipped with the project."""
    held_out: list[str] = []
    """Conversation JSONL files never learned from; acceptance length is measured on these. `demo` as above."""
    mode: Literal["generate", "replay"] = "generate"
    """`generate`: the target writes the answer. `replay`: the file's answer is read."""
    max_length: int = Field(default=512, ge=8)
    """Longest sample in tokens, prompt and answer; a longer one is truncated if supervision is left, else rejected."""
    max_answer_tokens: int = Field(default=128, ge=1)
    """Tokens the target may write for one prompt in `generate` mode."""
    temperature: float = Field(default=0.0, ge=0.0)
    """Sampling temperature of written answers; 0 is greedy."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Stop after this many prompts (None: all of them)."""
    epochs: int = Field(default=1, ge=1)
    """How often the prompt list is gone through."""
    held_out_prompts: int = Field(default=24, ge=1)
    """Held-out conversations captured once and kept in the trainer's memory to predict acceptance."""
    max_reject_share: float = Field(default=0.2, ge=0.0, le=1.0)
    """More rejected samples than this share of those finished (after 50) stops the run."""


class CaptureConfig(Section):
    workers: int = Field(default=1, ge=1)
    """Target workers, each a Ray actor with its own frozen engine."""
    layer_ids: list[int] | None = None
    """Residual streams to capture, id i = the stream entering layer i. None: those of the drafter that the run starts from,
    else 2, N//2, N-3 (from 7 layers)."""
    max_num_seqs: int = Field(default=16, ge=1)
    """Conversations an engine works on at once."""
    max_num_batched_tokens: int = Field(default=2048, ge=32)
    """Tokens of one engine step; longer prefills are chunked."""
    kv_cache_mib: int = Field(default=512, ge=16)
    """Key/value memory of one capture engine on a CPU, MiB."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of GPU memory one capture engine takes."""
    cpus: float = Field(default=1, gt=0)
    """Ray CPUs a target worker reserves; its engine runs that many threads (rounded up)."""
    gpus: float = Field(default=0, ge=0)
    """Ray GPUs a target worker reserves; all of them are on one node."""
    node: NodeLabels = {}
    """Labels of the nodes that may run target workers, as in `ray start --labels role=capture`; empty: any node."""
    tokens_per_s: float | None = Field(default=None, gt=0)
    """Tokens a second that one target worker is expected to capture: `--dry-run` works out the network from it."""


class StreamConfig(Section):
    host: str = "127.0.0.1"
    """Interface a trainer's receiver binds to, by address or by interface name; never all of them."""
    budget_mib: int = Field(default=256, ge=1)
    """Most memory a receiver's waiting samples may take, MiB; credits never exceed it."""
    max_samples: int = Field(default=256, ge=1)
    """Most samples waiting in one receiver."""
    sender_budget_mib: int = Field(default=128, ge=1)
    """Most memory a sender's unsent samples may take, MiB; beyond it the engine is held back."""
    encrypt: Literal["auto", "on", "off"] = "auto"
    """CURVE encryption; `auto`: on for every interface that is not loopback."""
    link_gbit: float | None = Field(default=None, gt=0)
    """What a node's network carries, Gbit/s: `--dry-run` checks the stream against it. None: not known."""
    shared_memory: bool = True
    """On one host, pass tensors through shared memory and only handles over ZeroMQ."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between heartbeats; a peer silent for three of them counts as gone."""
    wait_s: float = Field(default=300.0, gt=0)
    """Longest wait of a sender for credit before it gives up with an error that names the receiver."""


class DrafterConfigSection(Section):
    fc_norm: bool = True
    """RMSNorm on each captured state before `fc` (EAGLE 3.1; false for EAGLE 3)."""
    norm_output: bool = True
    """Feed the normed output back at the next step (EAGLE 3.1; false for EAGLE 3)."""
    draft_vocab_size: int | None = Field(default=8192, ge=2)
    """Tokens the drafter may propose, chosen from what the target writes. None: the whole vocabulary."""
    vocab_samples: int = Field(default=64, ge=1)
    """Samples, first in order, whose tokens decide the draft vocabulary."""
    intermediate_size: int | None = Field(default=None, ge=8)
    """Width of the drafter's MLP. None: the target's."""
    init_from: str | None = None
    """Drafter folder to start from (ours, vLLM style or speculators format). None: a fresh drafter."""


class TrainerConfig(Section):
    ranks: int = Field(default=1, ge=1)
    """Trainer workers; they hold one drafter together (DDP or FSDP2)."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library between ranks; `auto`: nccl with GPUs, else gloo."""
    shard: Literal["ddp", "fsdp"] = "ddp"
    """`ddp` keeps a whole drafter on each rank; `fsdp` (FSDP2) splits it."""
    ttt_steps: int = Field(default=4, ge=1, le=16)
    """Unrolled training-time-test steps K."""
    step_decay: float = Field(default=0.8, gt=0, le=1)
    """Weight of step k is step_decay ** k."""
    loss: Literal["cross_entropy", "total_variation", "log_acceptance"] = "cross_entropy"
    """`cross_entropy` against the target's distribution; `total_variation`, acceptance itself; `log_acceptance`, its
    logarithm, which learns from a poor start too."""
    supervise: Literal["answers", "all"] = "answers"
    """Tokens that a drafter learns to draft: those of answers only, or those of prompts too, for which the target's states
    and distribution come with the sample anyway. `all` teaches more from the same samples and makes a step as much dearer."""
    batch_tokens: int = Field(default=2048, ge=16)
    """Tokens of one optimizer step on one rank, packed without padding."""
    micro_batch_tokens: int | None = Field(default=None, ge=16)
    """Tokens of one forward and backward; fewer than batch_tokens accumulates gradients. None: batch_tokens."""
    reuse: int = Field(default=1, ge=1)
    """Times each streamed sample is trained, from a bounded buffer in memory."""
    reuse_buffer_mib: int = Field(default=512, ge=1)
    """Memory of that buffer, MiB."""
    ordered: bool = False
    """Draw samples strictly in the run's order instead of at random: a repeated run sees the same batches."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of matrix products; weights, softmax, loss and optimizer state are fp32 always."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """After warm-up. `cosine` and `wsd` fall over what is left of the run."""
    warmup_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradient norm is cut to this."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Decay of the weights' moving average that exports use; 0 exports the weights themselves."""
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many optimizer steps."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Stop leasing new prompts after this many minutes of training; what was streamed is still trained."""
    export_every: int = Field(default=50, ge=1)
    """Optimizer steps between drafter versions; a checkpoint is written with each."""
    compile: bool = True
    """torch.compile of the fused pieces where it pays."""
    recompute: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    cpus: float = Field(default=1, gt=0)
    """Ray CPUs a trainer reserves; it runs that many threads (rounded up)."""
    gpus: float = Field(default=0, ge=0)
    """Ray GPUs a trainer reserves; a fraction shares one."""
    node: NodeLabels = {}
    """Labels of the nodes that may run trainers; empty: any node."""
    seed: int = 0

    @model_validator(mode="after")
    def _micro_batches_fit(self):
        if self.micro_batch_tokens is not None and self.micro_batch_tokens > self.batch_tokens:
            raise ValueError("micro_batch_tokens must not exceed batch_tokens")
        return self


class ServeConfig(Section):
    replicas: int = Field(default=1, ge=0)
    """Serving replicas behind one OpenAI-compatible endpoint; 0: train only."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """HTTP port of the endpoint; 0 picks a free one."""
    model_name: str | None = None
    """Name clients ask for. None: the target's."""
    api_key: str | None = None
    """Clients must send `Authorization: Bearer …`; needed when host is not loopback. `env:NAME` reads a variable."""
    num_speculative_tokens: int = Field(default=3, ge=1, le=16)
    """Tokens drafted in one round, k."""
    max_num_seqs: int = Field(default=16, ge=1)
    kv_cache_mib: int = Field(default=256, ge=16)
    """Key/value memory of one replica on a CPU, MiB."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    cpus: float = Field(default=1, gt=0)
    gpus: float = Field(default=0, ge=0)
    """Ray GPUs a replica reserves; a fraction shares one, several are on one node."""
    node: NodeLabels = {}
    """Labels of the nodes that may run replicas; empty: any node."""
    external: list[str] = []
    """Addresses of `vllm serve` processes of your own to roll drafters into, in place of a pool (docs/your-traffic.md)."""
    drafter: str | None = None
    """Drafter folder that `torchspec-lite serve` starts with. None: the run's newest promoted version."""
    max_concurrency_for_speculation: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Above this many running requests (1 or more) a replica stops drafting, but not while it answers shadow prompts or
    probes. `auto`: by `break_even` and the acceptance length of its latest rounds. None: it always drafts."""
    break_even: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]] = {}
    """Acceptance length that drafting needs to pay, by requests at once, as `python -m benchmarks.serving` prints it; the
    live state then says when drafting costs more than it gives. Empty: not known."""
    autoscaling: dict[str, int | float] | None = None
    """Ray Serve's `autoscaling_config` (min_replicas, max_replicas, …) in place of a fixed number of replicas."""

    @model_validator(mode="after")
    def _auto_knows_where_it_pays(self):
        if self.max_concurrency_for_speculation == "auto" and not self.break_even:
            raise ValueError("max_concurrency_for_speculation: auto needs break_even; `python -m benchmarks.serving` prints it")
        return self


class RolloutConfig(Section):
    canary_share: float = Field(default=0.25, gt=0, le=1)
    """Share of replicas that try a new version first (at least one replica)."""
    min_rounds: int = Field(default=200, ge=1)
    """Draft rounds that both sides need before they are compared."""
    confidence: float = Field(default=0.9, gt=0.5, lt=1)
    """Confidence of the interval on the difference in acceptance length."""
    worse_margin: float = Field(default=0.03, ge=0)
    """A new version is rolled back when it is worse than the serving one by more than this acceptance length."""
    alarm_acceptance: float = Field(default=1.02, ge=1)
    """Acceptance length at or under this after a swap is an alarm and rolls back at once."""
    shadow_prompts: int = Field(default=16, ge=1)
    """Held-out prompts sent at low priority when traffic is too thin to compare."""
    shadow_tokens: int = Field(default=64, ge=1)
    """Tokens asked for on each shadow prompt."""
    wait_s: float = Field(default=600, gt=0)
    """Longest wait for a decision; after it the mean decides: what is better is promoted, all else rolled back."""
    min_capacity: float = Field(default=0.5, ge=0, le=1)
    """Share of replicas that must stay ready while one is changed."""
    gate_margin: float = Field(default=0.05, ge=0)
    """A version whose predicted acceptance is lower than the serving one's by more than this is not tried."""
    parity: float = Field(default=0.98, ge=0, le=1)
    """Least share of drafted tokens on which trainer and server must agree, checked on the canary for each version tried."""
    keep: int = Field(default=5, ge=1)
    """Drafter versions kept beside the promoted one, its parent and the best."""


class TrafficConfig(Section):
    fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of users' requests whose states the serving replicas stream to the trainers. 0: none is ever captured."""
    whole_prompts: bool = True
    """Sampled requests do not read the prefix cache, so that samples start at their first token. Off: what the cache had is
    left out of the sample."""
    max_tokens_per_s: float | None = Field(default=None, gt=0)
    """Most tokens a replica captures in a second, on average."""
    prefer_low_acceptance: float = Field(default=0.5, ge=0, le=1)
    """Requests drafted better than the average are left out with this probability: the others teach more."""
    general_share: float = Field(default=0.25, ge=0, lt=1)
    """Least share of trained tokens that comes from data.train, against forgetting; samples of it that have had their
    passes are rehearsed."""
    budget_mib: int = Field(default=64, ge=1)
    """Memory of a replica's captured states that wait for the trainers, MiB; beyond it no further request is captured."""
    max_age_s: float = Field(default=3600, gt=0)
    """Captured requests older than this leave the trainers' memory, trained or not."""
    window: int = Field(default=16, ge=4)
    """Most captured requests that wait to be predicted on, which tells what a drafter is worth on present traffic. They are
    trained on when that is done, which takes half as many at least, when as many newer ones have come, or after half of `max_age_s`."""
    second_answers: int = Field(default=0, ge=0)
    """Times that the target answers a sampled request's prompt once more, at temperature 1, for the trainers alone: the same
    traffic teaches more. Only while training does not rest and few requests run (traffic.second_answers_below)."""
    second_answers_below: int = Field(default=4, ge=1)
    """A replica on which fewer requests run than this, second answers included, begins another. Those that run beside
    users' requests slow them."""
    opt_out_key: str | None = None
    """A second API key that is accepted too, whose requests are never captured; `env:NAME` reads a variable."""
    export_margin: float = Field(default=0.02, ge=0)
    """A version is exported when it is predicted to be better than the serving one on the window by this acceptance
    length."""
    blend: list[Annotated[float, Field(gt=0, lt=1)]] = [0.8]
    """A version may also be exported from so far along the way from the drafter that served when training began or woke
    to the trained weights, where it is predicted to be better there: it then forgets less too. Each is a prediction more
    at every look."""
    rest_after: int = Field(default=4, ge=1)
    """Training rests after this many looks in a row at which nothing was gained and the serving version's acceptance did
    not fall by wake_drop; a look is due every trainer.export_every steps."""
    wake_drop: float = Field(default=0.05, gt=0)
    """Training wakes when the serving version's predicted acceptance on the window fell by this since it began to rest."""


class DashboardConfig(Section):
    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = Field(default=8090, ge=0, le=65535)
    """Port of the live page; 0 picks a free one."""
    token: str | None = None
    """Needed when host is not loopback; `env:NAME` reads a variable."""


class MetricsConfig(Section):
    prometheus_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the run's Prometheus endpoint on loopback; None: off, 0 picks a free one."""
    tensorboard: bool = False
    wandb: bool = False
    trackio: bool = False


class RayConfig(Section):
    address: str | None = None
    """Cluster to join; `auto`: the one on this machine. None: the one that RAY_ADDRESS names, as it does inside `ray job
    submit`, else one is started here."""
    object_store_mib: int = Field(default=128, ge=80)
    """Ray's object store when a cluster is started here; the run's data does not pass through it."""
    num_cpus: int | None = Field(default=None, ge=1)
    """Logical CPUs of a cluster started here. None: enough for the plan."""
