"""The command line. Every command imports what it needs when it runs, so that small ones start fast.

Exit codes: `exit_codes`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from policy_service.cli import exit_codes
from policy_service.cli.errors import report_error, require_text
from policy_service.cli.grpc_core import choose_poller
from policy_service.cli.output import say, warnings
from policy_service.cli.process_options import ProcessFlags, process_options

app = typer.Typer(
    name="policy-service",
    help="Resilience decisions for LLM and API gateways.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Check, show and describe the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")

SWITCH = ""
"""What the help shows as the value of an option that takes none."""
JsonFlag = Annotated[bool, typer.Option("--json", metavar=SWITCH, help="Print JSON.")]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code (`exit_codes`)."""
    try:
        require_text(sys.argv[1:] if argv is None else argv)
        app(args=argv, standalone_mode=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else exit_codes.FAILED if stop.code else exit_codes.OK
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.OK
    except Exception as error:
        return report_error(error)
    return exit_codes.OK


@app.command()
@process_options
def serve(flags: ProcessFlags) -> int:
    """Run the service until SIGTERM."""
    loaded = flags.load()
    choose_poller(os.environ)
    from policy_service.cli.serve import run

    warnings(loaded.warnings)
    return run(loaded.config, loaded.environment)


@app.command()
def demo(
    fast: Annotated[
        bool, typer.Option("--fast", metavar=SWITCH, help="A short run without pauses for reading.")
    ] = False,
) -> None:
    """Show the service at work: upstreams that misbehave, a small gateway, every decision with its reason."""
    from policy_service.cli import demo as demonstration

    raise typer.Exit(demonstration.run(fast=fast))


@app.command()
def bench(
    seconds: Annotated[
        float | None, typer.Option(min=0.1, max=600, help="Length of each measurement; 5, with --envoy 20.")
    ] = None,
    as_json: JsonFlag = False,
    with_envoy: Annotated[
        bool, typer.Option("--envoy", metavar=SWITCH, help="Measure the Envoy door instead.")
    ] = False,
) -> None:
    """Measure the service against a bare gRPC echo with the same messages, or its Envoy door against an empty one."""
    from policy_service.cli import bench as measurement

    length = seconds or (20.0 if with_envoy else 5.0)
    raise typer.Exit(measurement.run(seconds=length, as_json=as_json, with_envoy=with_envoy))


@app.command()
def conformance(
    target: Annotated[str, typer.Option(help="host:port of a gateway that you start yourself.")] = "",
    command: Annotated[str, typer.Option(help="Command that starts the gateway; it listens at $GATEWAY_LISTEN.")] = "",
    only: Annotated[list[str] | None, typer.Option(help="Judge this rule only; may be repeated.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Play this case only; may be repeated.")] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Feature that the gateway has not; may be repeated.")
    ] = None,
    list_rules: Annotated[bool, typer.Option("--list", metavar=SWITCH, help="Show the rules and end.")] = False,
    as_json: JsonFlag = False,
    base_port: Annotated[
        int, typer.Option(min=0, max=65_000, help="Port of the scripted service, upstreams follow; 0: free ones.")
    ] = 0,
    wait_s: Annotated[float, typer.Option(min=0, max=3_600, help="How long the gateway may take to listen.")] = 60.0,
    log: Annotated[Path | None, typer.Option(help="File for what the gateway prints.")] = None,
    path: Annotated[str, typer.Option(help="Where clients post completions.")] = "/v1/chat/completions",
    model: Annotated[str, typer.Option(help="Model that clients ask for.")] = "conformance",
    client_key: Annotated[str, typer.Option(help="Bearer key of clients.")] = "client-key-of-the-conformance-kit",
) -> None:
    """Judge a gateway, in whatever language: does it ask, wait, go, report and release as an integration has to?"""
    from policy_service.cli import conformance as kit
    from policy_service.cli.conformance.scripted_client import GatewayAccess

    if list_rules:
        raise typer.Exit(kit.show_rules())
    access = GatewayAccess("", path, model, client_key)
    options = kit.Options(target, command, only or (), case or (), without or (), base_port, wait_s, log, access)
    raise typer.Exit(kit.run(options, as_json=as_json))


@app.command()
def classify(
    catalogue: Annotated[Path | None, typer.Option(help="Catalogue file with providers, rules and settings.")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Catalogue file in force now: show only what --catalogue would change.")
    ] = None,
) -> None:
    """Say what the service would make of upstream errors: JSON lines on standard input, verdicts on standard output."""
    from policy_service.cli.classify import dry_run, run

    if compare is not None:
        raise typer.Exit(dry_run(compare, catalogue, sys.stdin, sys.stdout))
    raise typer.Exit(run(catalogue, sys.stdin, sys.stdout))


@app.command()
@process_options
def envoy(
    flags: ProcessFlags,
    policy: Annotated[str, typer.Option(help="host:port or unix:/path of the policy service.")] = "127.0.0.1:50051",
    door: Annotated[str, typer.Option(help="host:port or unix:/path to serve Envoy on.")] = "127.0.0.1:50061",
    policy_ca: Annotated[Path | None, typer.Option(help="Authority of the service's certificate (PEM).")] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the bearer key for the service.")] = None,
) -> int:
    """Serve Envoy's external processing as a process of its own (`serve --envoy` needs none)."""
    loaded = flags.load()
    choose_poller(os.environ)
    from policy_service.cli.envoy import Place, run

    return run(loaded, Place(policy, door, policy_ca, key_file))


@app.command("envoy-config")
def envoy_config(
    catalogue: Annotated[Path, typer.Option(help="Catalogue file with connections and routes.")],
    out: Annotated[Path, typer.Option(help="File to write; - for standard output.")] = Path("-"),
    listen: Annotated[str, typer.Option(help="host:port that clients call.")] = "127.0.0.1:10000",
    admin: Annotated[str, typer.Option(help="host:port of Envoy's own pages; empty: none.")] = "127.0.0.1:9901",
    policy: Annotated[
        str, typer.Option(help="host:port or unix:/path of `serve --envoy`; of several ones, with commas.")
    ] = "127.0.0.1:50051",
    policy_key: Annotated[str, typer.Option(help="Variable of Envoy with the bearer key for the service.")] = "",
    fail_mode: Annotated[str, typer.Option(help="While the service is away: open or closed.")] = "closed",
    layout: Annotated[str, typer.Option(help="separate: a cluster a connection; shared: override_host.")] = "separate",
    credentials: Annotated[str, typer.Option(help="none, environment, or files:<directory>.")] = "none",
    max_wait_ms: Annotated[int, typer.Option(min=0, max=300_000, help="envoy.max_wait_ms of the service.")] = 0,
    ca_file: Annotated[Path | None, typer.Option(help="Authorities of upstream certificates (PEM).")] = None,
) -> None:
    """Write a whole Envoy bootstrap from a catalogue: clusters, TLS, both filters, retries, fail mode."""
    from policy_service.cli.envoy_config import Wishes, run

    wishes = Wishes(listen, admin, policy, policy_key, fail_mode, layout, credentials, max_wait_ms, ca_file)
    raise typer.Exit(run(catalogue, out, wishes))


@app.command()
@process_options
def migrate(
    flags: ProcessFlags,
    check: Annotated[bool, typer.Option("--check", metavar=SWITCH, help="Only compare; change nothing.")] = False,
) -> int:
    """Bring the schema of an existing Postgres to this release."""
    from policy_service.cli.migrate import run

    return run(flags.load(), check_only=check)


@app.command()
@process_options
def healthcheck(
    flags: ProcessFlags,
    address: Annotated[
        str, typer.Option(help="host:port or unix:/path; default: where this configuration listens.")
    ] = "",
    service: Annotated[str, typer.Option(help="Name to ask for: readiness, liveness, or a service.")] = "readiness",
    timeout_ms: Annotated[int, typer.Option(min=1, max=60_000, help="Longest wait for the answer.")] = 2_000,
    tls_ca: Annotated[Path | None, typer.Option(help="Authority of the server's certificate (PEM).")] = None,
) -> int:
    """Ask a running service whether it serves; for container probes."""
    from policy_service.cli.healthcheck import Probe, run

    return run(flags.load(), Probe(address, service, timeout_ms, tls_ca))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    say(installed("policy-service"))


@config_app.command("check")
@process_options
def config_check(
    flags: ProcessFlags,
    as_json: JsonFlag = False,
    strict: Annotated[bool, typer.Option("--strict", metavar=SWITCH, help="Warnings count as problems.")] = False,
) -> int:
    """Check configuration and catalogue: every problem, every warning, and what overrides what."""
    from policy_service.cli.config import check

    return check(flags, as_json=as_json, strict=strict)


@config_app.command("show")
@process_options
def config_show(
    flags: ProcessFlags,
    as_json: JsonFlag = False,
    policy: Annotated[
        bool, typer.Option("--policy", metavar=SWITCH, help="Also the policy settings in force.")
    ] = False,
) -> int:
    """Show the configuration in force with the source of each value; secrets are hidden."""
    from policy_service.cli.config import show

    return show(flags, as_json=as_json, policy=policy)


@config_app.command("schema")
def config_schema(
    catalogue: Annotated[
        bool, typer.Option("--catalogue", metavar=SWITCH, help="The schema of catalogue files.")
    ] = False,
) -> None:
    """Print the JSON schema of the configuration file, or of catalogue files."""
    from policy_service.cli.config import schema

    say(schema(catalogue=catalogue))


@config_app.command("docs")
def config_docs(
    out: Annotated[Path, typer.Option(help="File to write; - for standard output.")] = Path(
        "docs/reference/configuration.md"
    ),
    check: Annotated[
        bool, typer.Option("--check", metavar=SWITCH, help="Write nothing; fail if the file is out of date.")
    ] = False,
) -> None:
    """Write the configuration reference from the models, and the reference of signals and rules beside it."""
    from policy_service.cli.config import docs

    raise typer.Exit(docs(out, check_only=check))


if __name__ == "__main__":
    sys.exit(main())
