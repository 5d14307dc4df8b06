"""The command line: gpukern doctor | lab | layer | bench | record. Small functions; the work is done elsewhere."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gpukern import bench, device, doctor, record, table
from gpukern import layer as layers
from gpukern.op import InputError

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
# What a user can put right: told in one line, without a traceback.
REFUSALS = (InputError, device.LimitError, device.DeviceError, ImportError)

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("doctor")
def doctor_command(as_json: AsJson = False) -> None:
    """Say what this machine is, what is missing and what to do. Exits with 0 only if the course can run."""
    report = doctor.examine()
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        _print_report(report)
    raise typer.Exit(0 if report.ok else 1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(context: typer.Context) -> None:
    """Open the course in JupyterLab. Further arguments are JupyterLab's."""
    lessons = sorted(NOTEBOOKS.glob("00_*.ipynb"))
    if not lessons:
        raise InputError(f"there is no lesson in {NOTEBOOKS}: run this in the course's checkout, after `make setup`.")
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={NOTEBOOKS.parent}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    raise typer.Exit(subprocess.call([*command, *context.args, str(lessons[0])]))


@app.command()
def layer(
    config: Annotated[str | None, typer.Option(help="tiny (the default), gpt2, c4096 or trained.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="A GPT-2 checkpoint in safetensors, instead of a config.")
    ] = None,
    index: Annotated[int, typer.Option(help="Which layer of the checkpoint or of the trained model.")] = 0,
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "prefill",
    tokens: Annotated[int | None, typer.Option(help="New tokens T; 16 in prefill, 1 in decode.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens attended to, S; T in prefill, 128 in decode.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences B.")] = 1,
    plan: Annotated[str, typer.Option(help="reference, numba, triton, flash, fused, one_kernel, compile.")] = "triton",
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; default by config.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run one transformer layer by a plan and print its eight-stage table. Exits with 1 if a result is wrong."""
    step = table.step_named(phase, tokens, context, batch)
    result = table.layer_table(table.layer_named(config, weights, index, dtype), layers.plan(plan), step)
    print(json.dumps(result, indent=1)) if as_json else Console().print(table.as_rich(result))
    raise typer.Exit(0 if table.right(result) else 1)


@app.command("bench")
def bench_command(
    what: Annotated[str, typer.Argument(help="simulator, or (on a card) peers.")],
    only: Annotated[str, typer.Option(help='Only comparisons with this in their name, e.g. "numba".')] = "",
    as_json: AsJson = False,
) -> None:
    """Compare costs within one run, as ratios. Exits with 1 if a ratio is not what it should be."""
    if what not in bench.BENCHES:
        raise InputError(f"there is no benchmark {what!r}; there are {', '.join(bench.BENCHES)}.")
    results = []
    for result in bench.BENCHES[what](only):
        results.append(result)
        if not as_json:
            print("ok " if result.ok else "NOT", result, flush=True)
    if not results:
        raise InputError(f"no comparison has {only!r} in its name.")
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    raise typer.Exit(0 if all(result.ok for result in results) else 1)


@app.command("record")
def record_command(
    sweeps: Annotated[list[str] | None, typer.Argument(help="tiles, plans; both if none is named.")] = None,
    only: Annotated[str, typer.Option(help='Only jobs with this in their name, e.g. "gpt2 decode".')] = "",
) -> None:
    """Measure the declared sweeps on this machine's card and keep the rows in gpukern/recorded/."""
    for sweep in sweeps or record.SWEEPS:
        record.record(sweep, print, only)


def _print_report(report: doctor.Report) -> None:
    card = report.card
    where = "the simulated GPU, with the limits of an " if card["simulated"] else ""
    facts = Table(show_header=False, box=None)
    facts.add_row("mode", report.mode)
    facts.add_row("card", f"{where}{card['name']}")
    facts.add_row("", f"compute capability {card['compute_capability']}, {card['sms']} SMs")
    facts.add_row("", f"{card['memory_bytes'] / 1e9:.0f} GB memory, {card['l2_bytes'] / 2**20:.0f} MB L2")
    if card["driver"]:
        facts.add_row("driver", card["driver"])
    facts.add_row("python", report.python)
    for package, version in report.packages.items():
        facts.add_row(package, version or "missing")
    console = Console()
    console.print(facts)
    for problem in report.problems:
        console.print(f"\n{problem.level}: {problem.what}\n  fix: {problem.fix}", markup=False, highlight=False)
    console.print("\nThe course can run here." if report.ok else "\nThe course cannot run here yet.")


def main() -> None:
    """Entry point. Refusals become one line on stderr and exit code 2."""
    try:
        app()
    except REFUSALS as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
