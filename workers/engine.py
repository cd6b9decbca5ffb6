"""How a vLLM engine of this project is set up: arguments and environment, the same for capture and for serving."""

import math

from torchspec_lite.config import StreamConfig, TargetConfig


def engine_args(target: TargetConfig, path: str, *, max_num_seqs: int, kv_cache_mib: int,
                gpu_memory_utilization: float, gpus: float, max_num_batched_tokens: int | None,
                prefix_caching: bool, seeds: bool, compiled: bool = False) -> dict:
    """Keyword arguments of `vllm.AsyncEngineArgs` for the target in folder `path`.

    Without GPUs the key/value memory is `kv_cache_mib` MiB; with GPUs it is what `gpu_memory_utilization` leaves.
    `compiled` lets inductor compile the model on a CPU, which costs tens of seconds at every start and gains little
    on a small model; on a GPU vLLM always compiles and records CUDA graphs. `max_num_batched_tokens` None: vLLM's own.
    `seeds`: requests may bring a sampling seed.
    """
    args = {
        "model": path,
        "dtype": target.dtype,
        "max_model_len": target.max_model_len,
        "tensor_parallel_size": target.tensor_parallel_size,
        "trust_remote_code": target.trust_remote_code,
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": prefix_caching,
        "enable_log_requests": False,
    }
    if max_num_batched_tokens is not None:
        args["max_num_batched_tokens"] = max(max_num_batched_tokens, max_num_seqs)
    if gpus > 0:
        args["gpu_memory_utilization"] = gpu_memory_utilization
    else:
        args["kv_cache_memory_bytes"] = kv_cache_mib << 20
        args["enforce_eager"] = not compiled
        if seeds:
            # vLLM 0.32 on a CPU dies of a seeded request whose prefill is chunked (it rewinds the generator by an
            # offset that only GPU generators have), so no prefill may be chunked.
            args["enable_chunked_prefill"] = False
            args["max_num_batched_tokens"] = max(max_num_batched_tokens or 0, target.max_model_len)
    return args


def engine_env(cpus: float, gpus: float, tensor_parallel_size: int = 1) -> dict[str, str]:
    """Environment an engine's process must have before it imports torch and vLLM (Ray: `runtime_env.env_vars`).

    `cpus` rounded up is the number of threads. VLLM_CPU_KVCACHE_SPACE, which overrides the configured memory, must be
    absent; it cannot be unset from here.
    """
    env = {
        "OMP_NUM_THREADS": str(max(1, math.ceil(cpus))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # Standard output belongs to the command, which may have been asked for JSON.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # A target is always a local folder by the time an engine opens it.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if gpus == 0 and tensor_parallel_size == 1:
        # One process less (460 MB and 8 s): the engine core runs the model itself. AsyncLLM still has its own process.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    elif gpus == 0:
        # Ranks then run OMP_NUM_THREADS threads each; vLLM's own binding wants one memory node a rank.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return env


def capture_args(stream: StreamConfig, *, layer_ids: tuple[int, ...], num_layers: int, fingerprint: str,
                 identity: str, gpus: float) -> dict:
    """Further arguments that make an engine of `engine_args` capture: states `layer_ids` and the one before the norm.

    Requests are captured that carry a `workers.ticket.Ticket`; samples bear `fingerprint`, senders are called
    `identity`.
    """
    args = {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*layer_ids, num_layers]}},
        },
        "kv_transfer_config": {
            "kv_connector": "CaptureConnector",
            "kv_connector_module_path": "workers.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "layer_ids": list(layer_ids), "fingerprint": fingerprint, "identity": identity,
                "budget_bytes": stream.sender_budget_mib << 20, "heartbeat_s": stream.heartbeat_s,
                "wait_s": stream.wait_s, "shared_memory": stream.shared_memory,
            },
        },
        "worker_extension_cls": "workers.connector.CaptureExtension",
    }
    if gpus == 0:
        # On a GPU the doubled rows of a decode step cost next to nothing, and vLLM's own scheduler runs ahead of it.
        args["scheduler_cls"] = "workers.scheduler.CaptureScheduler"
    return args
