"""table: `gpukern layer` for every config, phase and plan, its exit codes, and one line for what it refuses."""

import json
import math
import sys

import pytest
import torch
from safetensors.torch import save_file

from gpukern import cli, device, table
from gpukern.layer import PLANS, Layer, Step, plan, train
from gpukern.simulate import report
from gpukern.simulate.lockstep import launch as lockstep


@pytest.fixture
def layer_command(monkeypatch, capsys):
    """Run `gpukern layer ARGUMENTS` in this process; returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpukern", "layer", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code or 0, *capsys.readouterr())

    return run


def wanted(config: str, phase: str) -> list[str]:
    """Arguments of a step that was recorded; small where the simulated GPU will run it."""
    sizes = {"prefill": ["--tokens", "16"], "decode": ["--context", "16" if config in ("tiny", "trained") else "128"]}
    return ["--config", config, "--phase", phase, *sizes[phase], "--json"]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("config", ["tiny", "gpt2", "c4096", "trained"])
def test_every_config_phase_and_plan(layer_command, monkeypatch, config, phase, name):
    if device.simulated():  # larger runs take the simulated GPU too long for a test
        monkeypatch.setattr(table, "SIMULATED_FLOPS", {"torch": 1e8, "triton": 5e6, "numba": 5e6})
    code, out, err = layer_command(*wanted(config, phase), "--plan", name)
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert (result["plan"], result["step"]["phase"], result["config"]["name"]) == (name, phase, config)
    step = Step(*(result["step"][axis] for axis in "BTS"))
    assert [part["part"] for part in result["parts"]] == [part.name for part in PLANS[name].at(step).parts]
    entries = [*result["parts"], result["total"]]
    for entry in entries:
        assert entry["status"] == "ok" and entry["time_us"] > 0 and 0 < entry["share"] < 1.05
        assert entry["error"] <= entry["tolerance"] and entry["check"] in ("counted", "measured", "recorded")
        assert entry["time_source"].startswith("recorded on H200" if device.simulated() else "measured")
    assert sum(part["bytes"] for part in result["parts"]) == result["total"]["bytes"]
    assert sum(part["flops"] for part in result["parts"]) == result["total"]["flops"]
    assert result["total"]["launches"] == (None if name == "compile" else len(result["parts"]))


def test_a_step_that_was_not_recorded_is_run_and_says_that_it_has_no_time(layer_command):
    code, out, _ = layer_command("--config", "tiny", "--tokens", "5", "--plan", "flash", "--json")
    result = json.loads(out)
    assert code == 0
    if device.simulated():
        assert result["total"]["time_us"] is None and "was not recorded; the nearest is" in result["total"]["status"]
        assert result["total"]["check"] == "counted"
    assert result["total"]["error"] <= result["total"]["tolerance"]


def test_the_table_for_a_person(layer_command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    code, out, _ = layer_command("--config", "c4096", "--tokens", "2048", "--plan", "flash")
    assert code == 0
    for word in ("scores+", "triton_flash", "6 launches", "8 round", "reads back", "T=2048"):
        assert word in out
    if device.simulated():
        assert "recorded on H200" in out and "Not run here" in out


def test_a_wrong_result_exits_with_1(layer_command, monkeypatch):
    monkeypatch.setattr(Layer, "tolerance", lambda self, part=None: 1e-12)
    code, out, _ = layer_command("--config", "tiny", "--tokens", "4", "--plan", "triton")
    assert code == 1 and "WRONG" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "T=0"),
        (["--tokens", "-3"], "T=-3"),
        (["--batch", "0"], "B=0"),
        (["--tokens", "9", "--context", "4"], "S=4"),
        (["--phase", "decode", "--tokens", "2"], "one new token"),
        (["--phase", "train"], "use prefill or decode"),
        (["--plan", "fast"], "unknown plan 'fast'; known are reference"),
        (["--config", "gpt9"], "unknown config 'gpt9'"),
        (["--dtype", "float64"], "unknown dtype 'float64'"),
        (["--weights", "nowhere.safetensors"], "nowhere.safetensors: no such file"),
        (["--config", "trained", "--index", "7"], "there is no layer 7"),
        (["--config", "tiny", "--index", "1"], "--index chooses a layer of a checkpoint"),
        (["--config", "gpt2", "--weights", "x.safetensors"], "give one of them"),
        (["--dtype", ""], "unknown dtype ''"),
        (["--phase", "decode", "--context", "1"], "at least one before it"),
        (["--phase", "decode", "--context", "0"], "at least one before it"),
        (["--weights", "."], "is a folder"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(layer_command, arguments, message):
    code, out, err = layer_command(*arguments, "--json")
    assert (code, out) == (2, "")
    assert message in err and err.startswith("error: ") and len(err.splitlines()) == 1


def test_a_gpt2_checkpoint_by_path(layer_command, tmp_path):
    torch.manual_seed(0)
    model = train.Model(V=7, C=64, H=1, F=96, layers=2, context=8, dropout=0.0)
    path = tmp_path / "model.safetensors"
    save_file({name: weight.clone() for name, weight in model.state_dict().items()}, path)
    code, out, _ = layer_command("--weights", str(path), "--index", "1", "--tokens", "3", "--plan", "triton", "--json")
    result = json.loads(out)
    assert code == 0 and result["config"]["first_norm"] and result["total"]["error"] <= result["total"]["tolerance"]
    path.write_bytes(path.read_bytes()[:-10])
    code, out, err = layer_command("--weights", str(path), "--json")
    assert (code, out) == (2, "") and "not a whole safetensors file" in err


@pytest.mark.skipif(not device.simulated(), reason="on a card everything is run")
@pytest.mark.parametrize(
    "arguments", [["--phase", "decode", "--context", "100000000"], ["--tokens", "20000", "--plan", "reference"]]
)
def test_what_does_not_fit_into_memory_is_not_run(layer_command, arguments):
    code, out, _ = layer_command(*arguments, "--json")
    result = json.loads(out)
    assert code == 0 and result["total"]["check"] is None and "was not recorded" in result["total"]["status"]


@pytest.mark.skipif(not device.simulated(), reason="on a card everything is run")
@pytest.mark.parametrize(
    ("name", "step"), [("triton", Step(500, 1, 128)), ("triton", Step(1, 2048, 2048)), ("numba", Step(1, 2048, 2048))]
)
def test_many_small_programs_are_not_run(monkeypatch, name, step):
    monkeypatch.setattr(Layer, "run_part", lambda *_: pytest.fail("it was run"))
    layer = Layer.random("tiny")
    assert sum(cost.flops for cost in layer.costs(plan(name), step)) < table.SIMULATED_FLOPS[name]
    assert table.held_bytes(layer, step) < table.SIMULATED_BYTES
    table.layer_table(layer, plan(name), step)


@pytest.mark.skipif(not device.simulated(), reason="counts what the simulated GPU launches")
@pytest.mark.parametrize("name", ["numba", "triton"])
def test_the_programs_that_a_run_launches(monkeypatch, name):
    """The estimate is within a third of what the simulated GPU is asked to launch."""
    layer, step = Layer.random("tiny"), Step(2, 40, 40)
    reports = []
    monkeypatch.setattr(lockstep, "keep", reports.append)
    monkeypatch.setattr(report, "keep", reports.append)
    layer.run(*layer.inputs(step), name)
    programs = sum(math.prod(one.grid) for one in reports)
    assert programs / 1.33 < table.launched(layer, plan(name), step) < 1.33 * programs


@pytest.mark.skipif(not device.simulated(), reason="on a card everything is run")
def test_what_the_simulated_gpu_would_take_too_long_for_is_not_run(monkeypatch):
    monkeypatch.setattr(Layer, "run_part", lambda *_: pytest.fail("it was run"))
    layer = Layer.random("c4096", torch.bfloat16)
    result = table.layer_table(layer, plan("numba"), Step(1, 2048, 2048))
    assert result["total"]["check"] == "recorded" and "weights" not in vars(layer)
