"""Run metrics: the one place that names them, stores them and serves them.

Every output (history, Prometheus, TensorBoard, Weights & Biases, trackio, the live page) uses the names of `METRICS`;
Prometheus alone puts `torchspec_lite_` in front. A name ends in its unit, and in `_total` when it only ever grows.
"""

import difflib
import importlib
import json
import threading
import time as clock
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchspec_lite.config import MetricsConfig
from torchspec_lite.errors import UserError
from torchspec_lite.history import History, history_table, read_history

__all__ = ["METRICS", "Metric", "Metrics", "history_table", "read_history"]

PREFIX = "torchspec_lite_"
VERSIONS_SERVED = 8
"""Newest drafter versions that the Prometheus endpoint keeps a series for."""


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


def _gauge(name: str, unit: str, help: str, *labels: str) -> Metric:
    return Metric(name, unit, "gauge", help, labels)


def _counter(name: str, unit: str, help: str, *labels: str) -> Metric:
    return Metric(name, unit, "counter", help, labels)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # data
        _gauge("samples", "samples", "Samples of the ledger now in each state.", "state"),
        _counter("prompts_total", "prompts", "Prompts whose sample is trained, durable or rejected."),
        _counter("tokens_streamed_total", "tokens", "Tokens whose hidden states reached a trainer."),
        _counter("tokens_trained_total", "tokens", "Tokens trained, each pass counted."),
        _gauge("tokens_streamed_per_second", "tokens/s", "Rate of streamed tokens over the last seconds."),
        _gauge("tokens_trained_per_second", "tokens/s", "Rate of trained tokens over the last seconds."),
        _counter("rejected_total", "samples", "Samples rejected, by the kind of reason.", "reason"),
        _counter("refused_total", "samples", "Messages a receiver refused, by the kind of reason.", "reason"),
        # training
        _gauge("loss", "nats", "Training loss of an optimizer step, weighted over the unrolled steps."),
        _gauge("loss_per_step", "nats", "Training loss of unrolled step k.", "k"),
        _gauge("learning_rate", "", "Learning rate of the optimizer step."),
        _gauge("grad_norm", "", "Gradient norm before it is cut."),
        _counter("optimizer_steps_total", "steps", "Optimizer steps taken."),
        _counter("skipped_steps_total", "steps", "Optimizer steps skipped for a non-finite gradient."),
        _counter("phase_seconds_total", "seconds", "Time of trainer rank 0 spent in each phase: wait, teacher, forward, backward, "
                 "optimizer, export, restore.", "phase"),
        # acceptance length: tokens for each target forward, the bonus token included
        _gauge("predicted_acceptance_length", "tokens", "Acceptance length the trainer predicts.", "split"),
        _gauge("predicted_acceptance_rate", "ratio", "Predicted joint acceptance rate at a position.", "position"),
        _gauge("served_acceptance_length", "tokens", "Acceptance length that real requests get, all replicas."),
        _gauge("live_acceptance_length", "tokens", "Acceptance length of the last seconds, all requests and versions."),
        _gauge("served_acceptance_length_by_version", "tokens", "The same for one drafter version.", "version"),
        _gauge("served_acceptance_length_by_replica", "tokens", "The same for one replica.", "replica"),
        _gauge("served_acceptance_rate", "ratio", "Joint rate of acceptance at a draft position, served.", "position"),
        _gauge("train_serve_gap", "tokens", "Predicted (held-out, walked) less served acceptance length."),
        # served traffic as training data
        _counter("traffic_requests_total", "requests", "Users' requests, with capture on."),
        _counter("traffic_excluded_total", "requests", "Requests whose sender forbade capture."),
        _counter("traffic_sampled_total", "requests", "Requests chosen for capture."),
        _counter("traffic_second_answers_total", "requests", "Answers that the target gave for the trainers alone."),
        _counter("traffic_sent_tokens_total", "tokens", "Tokens of served requests sent to the trainers."),
        _counter("traffic_left_out_total", "requests", "Requests chosen and not sent, by the kind of reason.", "reason"),
        # versions and serving
        _gauge("drafter_version", "", "Newest drafter version exported."),
        _gauge("serving_drafter_version", "", "Drafter version that a replica serves.", "replica"),
        _gauge("swap_seconds", "seconds", "Time the last swap of a replica took.", "replica"),
        _gauge("running_requests", "requests", "Requests running on a replica.", "replica"),
        _counter("served_requests_total", "requests", "Requests answered by all replicas."),
        _counter("served_tokens_total", "tokens", "Tokens written by all replicas."),
        _counter("draft_rounds_total", "rounds", "Draft rounds of all replicas."),
        _counter("rollouts_total", "versions", "Versions judged, by outcome.", "outcome"),
        _counter("alarms_total", "alarms", "Alarms raised."),
        # flow
        _gauge("buffer_bytes", "bytes", "Bytes waiting: sender, receiver or reuse buffer.", "buffer"),
        _gauge("buffer_samples", "samples", "Samples waiting: sender, receiver or reuse buffer.", "buffer"),
        _gauge("credit_bytes", "bytes", "Credit the receivers have left to give."),
        _gauge("credit_samples", "samples", "Credit the receivers have left to give."),
        _gauge("wait_share", "ratio", "Share of the last seconds spent waiting: target or trainer.", "role"),
        # drift (EAGLE 3.1), on held-out samples
        _gauge("feature_norm", "", "Mean norm of the feature that unrolled step k reads.", "k"),
        _gauge("sink_mass", "ratio", "Attention mass on a document's first tokens at step k.", "k"),
        _gauge("own_mass", "ratio", "Attention mass on the row's own drafted keys at step k.", "k"),
    )
}


class Metrics:
    """Records values under the registered names, from any thread of one process.

    `options` switches the outputs on. `prometheus_port` is the bound port, or None when the endpoint is off.
    Raises UserError when another process records this run, a port is taken or an output's package is missing.
    """

    def __init__(self, run_dir: Path | str, options: MetricsConfig = MetricsConfig(), run_config: dict | None = None):
        run_dir = Path(run_dir)
        self._history = History(run_dir)
        self._lock = threading.Lock()
        self._latest: dict[str, dict[tuple[str, ...], float]] = {}  # name → label values → value
        self._sinks: list[tuple[Callable, Callable]] = []
        self._server = None
        self.prometheus_port: int | None = None
        try:
            if options.tensorboard:
                self._sinks.append(_tensorboard(run_dir))
            if options.wandb:
                self._sinks.append(_tracker("wandb", run_dir, run_config))
            if options.trackio:
                self._sinks.append(_tracker("trackio", run_dir, run_config))
            if options.prometheus_port is not None:
                self._serve(options.prometheus_port)
        except BaseException:
            self.close()
            raise

    def record(
        self,
        values: dict[str, float],
        step: int | None = None,
        labels: dict[str, str | int] | None = None,
        time: float | None = None,
    ) -> None:
        """Record values of one moment, all with the same labels: `record({"loss": 2.1}, step=7)`.

        A counter's value is its total, not its growth. Raises ValueError for a name that is not registered or labels
        that are not exactly the metric's.
        """
        labels = {key: str(value) for key, value in sorted((labels or {}).items())}
        time = clock.time() if time is None else time
        values = {name: float(value) for name, value in values.items()}
        for name in values:
            _check(name, labels)
        with self._lock:
            for name, value in values.items():
                self._keep(METRICS[name], labels, value)
            self._history.append(time, step, json.dumps(labels), values)
            suffix = "".join(f"/{key}={value}" for key, value in labels.items())
            for write, _ in self._sinks:
                write({name + suffix: value for name, value in values.items()}, step, time)

    def forget(self, label: str, value: str | int) -> None:
        """Stop serving the series of something that is gone, a replica say; its history stays."""
        with self._lock:
            for name, series in self._latest.items():
                if label in METRICS[name].labels:
                    place = METRICS[name].labels.index(label)
                    for key in [key for key in series if key[place] == str(value)]:
                        del series[key]

    def collect(self):
        """The newest values as Prometheus families (prometheus_client's collector protocol)."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            latest = {name: dict(series) for name, series in self._latest.items()}
        for name, series in latest.items():
            metric = METRICS[name]
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            samples = family(PREFIX + name, metric.help, labels=metric.labels)
            for values, value in series.items():
                samples.add_metric(values, value)
            yield samples

    def close(self) -> None:
        """Roll the history into Parquet and end every output."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None
        for _, close in self._sinks:
            close()
        self._sinks = []
        self._history.close()

    def _keep(self, metric: Metric, labels: dict[str, str], value: float) -> None:
        series = self._latest.setdefault(metric.name, {})
        series[tuple(labels[key] for key in metric.labels)] = value
        if metric.labels == ("version",) and len(series) > VERSIONS_SERVED:
            del series[min(series, key=lambda key: int(key[0]))]

    def _serve(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise UserError(
                f"metrics.prometheus_port {port}: {error.strerror or error}; choose another, or 0 for a free one"
            ) from error
        self.prometheus_port = self._server[0].server_port


def _check(name: str, labels: dict[str, str]) -> None:
    if name not in METRICS:
        nearest = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)
        raise ValueError(f"metric {name!r} is not registered in torchspec_lite/metrics.py; nearest: {nearest[0]}")
    if set(labels) != set(METRICS[name].labels):
        raise ValueError(f"metric {name!r} has the labels {METRICS[name].labels}, got {tuple(labels)}")


def _need(package: str, switch: str):
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"metrics.{switch} is on but {package} does not import ({error}); "
            f"pip install {package.split('.')[0] if switch != 'tensorboard' else 'tensorboard'}"
        ) from error


def _tensorboard(run_dir: Path) -> tuple[Callable, Callable]:
    writer = _need("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run_dir / "tensorboard"))

    def write(values: dict[str, float], step: int | None, time: float) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, global_step=step, walltime=time)

    return write, writer.close


def _tracker(package: str, run_dir: Path, run_config: dict | None) -> tuple[Callable, Callable]:
    """Weights & Biases or trackio, which share these three calls. `run_config` must hold no secret."""
    tracker = _need(package, package)
    tracker.init(project="torchspec-lite", name=run_dir.name, config=run_config or {})

    def write(values: dict[str, float], step: int | None, time: float) -> None:
        tracker.log(values if step is None else {**values, "step": step})  # their own step must never fall, ours may

    return write, tracker.finish
