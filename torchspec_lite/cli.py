"""The command line, `torchspec-lite …`: train, serve, eval, status, rollout, dashboard, doctor.

What needs Ray or vLLM lives in cluster/ and workers/ and is imported by the command that uses it, so that the library
itself stays free of both (this file is the one place where an arrow points outwards).
"""

import argparse
import contextlib
import json
import logging
import sys
from pathlib import Path

from torchspec_lite import __version__
from torchspec_lite.errors import UserError
from torchspec_lite.logs import log_crash


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 the run failed, 2 something a person must mend, 130 Ctrl-C."""
    options = parse(arguments)
    try:
        # What libraries print goes to standard error: standard output is the result's alone.
        with contextlib.redirect_stdout(sys.stderr):
            return options.command(options) or 0
    except UserError as error:
        if options.json:
            print(json.dumps({"error": str(error), "failed": True}), file=sys.__stdout__)
        print(f"torchspec-lite: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("torchspec-lite: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        line = log_crash(error, logging.getLogger("torchspec_lite"))
        if options.json:
            print(json.dumps({"error": line, "failed": True}), file=sys.__stdout__)
        return 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command and its options. Overrides may follow a flag (`--resume trainer.max_minutes=60`), which argparse alone
    refuses."""
    options, rest = parser().parse_known_args(arguments)
    if "overrides" in options and not any(word.startswith("-") for word in rest):
        options.overrides += rest
    elif rest:
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="torchspec-lite", description=(
        "Train a speculative-decoding drafter online and roll it into the vLLM pool that serves your users."))
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="command")

    train = _command(commands, "train", _train, "capture, train, serve and roll out, as CONFIG says")
    _config_arguments(train)
    train.add_argument("--dry-run", action="store_true", help="print the plan (actors, memory, bandwidth); start nothing")
    train.add_argument("--resume", action="store_true", help="continue the run directory from its newest checkpoint")

    serve = _command(commands, "serve", _serve, "serve a drafter with its target, OpenAI-compatible, without training")
    _config_arguments(serve)

    evaluate = _command(commands, "eval", _evaluate, "measure a drafter: acceptance length and tokens/s, by vLLM itself")
    evaluate.add_argument("drafter", help="drafter directory")
    evaluate.add_argument("--target", required=True, help="the target: folder, hub name or smollm2")
    evaluate.add_argument("--prompts", required=True, nargs="+", help="conversation JSONL files")
    evaluate.add_argument("--limit", type=_positive, help="use this many prompts of each file")
    evaluate.add_argument("--num-speculative-tokens", type=_positive, default=3)
    evaluate.add_argument("--max-tokens", type=_positive, default=128)
    evaluate.add_argument("--concurrency", type=_positive, default=8)
    evaluate.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")

    status = _command(commands, "status", _status, "what a run is doing or has done")
    status.add_argument("run_dir")

    rollout = _command(commands, "rollout", _rollout, "look at the rollout, or overrule it")
    rollout.add_argument("run_dir")
    rollout.add_argument("action", choices=("status", "pause", "resume", "promote", "rollback"))
    rollout.add_argument("version", nargs="?", type=_version, help="version for promote; 0 is the one that the run began with")

    dashboard = _command(commands, "dashboard", _dashboard, "open the live page for a running or finished run")
    dashboard.add_argument("run_dir")
    dashboard.add_argument("--host", default="127.0.0.1")
    dashboard.add_argument("--port", type=int, default=8090)
    dashboard.add_argument("--token", help="needed when the host is not loopback; env:NAME reads a variable")

    _command(commands, "doctor", _doctor, "check this machine and say what to do")
    return top


def _command(commands, name, function, text):
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(command=function)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    return command


def _config_arguments(command):
    command.add_argument("config", help="YAML file")
    command.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="override keys of the file")


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _version(text):
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a version's number")
    return value


def _train(options):
    from torchspec_lite import config as configs
    config = configs.load(options.config, options.overrides)
    if options.dry_run:
        from cluster.dry_run import dry_run
        return _print(dry_run(config), options.json)
    from cluster import run
    return _print(run.train(config, resume=options.resume, quiet=options.json), options.json)


def _serve(options):
    from torchspec_lite import config as configs
    config = configs.load(options.config, options.overrides)
    from cluster import serving
    return serving.serve(config, as_json=options.json)


def _evaluate(options):
    from torchspec_lite.target_folder import resolve_target
    from workers.evaluate import evaluate, render
    result = evaluate(Path(options.drafter), resolve_target(options.target), [Path(path) for path in options.prompts],
                      num_speculative_tokens=options.num_speculative_tokens, max_tokens=options.max_tokens,
                      concurrency=options.concurrency, limit=options.limit, dtype=options.dtype)
    return _print((result, render(result)), options.json)


def _status(options):
    from torchspec_lite.snapshot import render_status, status
    values = status(Path(options.run_dir))
    return _print((values, render_status(values)), options.json)


def _rollout(options):
    from cluster.rollout_control import control
    return _print(control(Path(options.run_dir), options.action, options.version), options.json)


def _dashboard(options):
    from cluster.dashboard import run_dashboard
    from torchspec_lite.config import resolve_secret
    run_dashboard(Path(options.run_dir), options.host, options.port, resolve_secret(options.token, "--token"), options.json)


def _doctor(options):
    from cluster.doctor import doctor, render
    checks = doctor()
    _print(({"checks": [vars(check) for check in checks]}, render(checks)), options.json)
    return int(any(check.status == "fail" for check in checks))


def _print(result: tuple[dict, str], as_json: bool) -> int:
    """Print a result as one JSON object or as text; a result may say by `failed` that the run did not succeed."""
    values, text = result
    print(json.dumps(values) if as_json else text, file=sys.__stdout__, flush=True)
    return int(bool(values.get("failed")))


if __name__ == "__main__":
    sys.exit(main())
