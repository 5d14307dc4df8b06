"""What this machine's card counts for the cases of cases.py, under Nsight Compute, and how the numbers are kept.

As a script (what Nsight Compute watches): `python hardware.py results.json` launches every case LAUNCHES times, in
order, and writes the sum of each result. A case's number is the least of its launches: now and then other traffic in
the SM costs one wavefront more. `counters(folder)` runs that script under `ncu` and returns what the card counted.
"""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

# Our counter -> Nsight Compute's metrics, which are summed.
METRICS = {
    "global_load_requests": ["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"],
    "global_load_sectors": ["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"],
    "global_store_requests": ["l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"],
    "global_store_sectors": ["l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"],
    "shared_load_requests": ["smsp__inst_executed_op_shared_ld_pred_on_any.sum"],
    "shared_load_wavefronts": ["l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"],
    "shared_load_bank_conflicts": ["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"],
    "shared_store_requests": ["smsp__inst_executed_op_shared_st_pred_on_any.sum"],
    "shared_store_wavefronts": ["l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum"],
    "shared_store_bank_conflicts": ["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum"],
    "atomics": [
        "smsp__sass_inst_executed_op_global_atom.sum",
        "smsp__sass_inst_executed_op_global_red.sum",
        "smsp__inst_executed_op_shared_atom.sum",
    ],
    "branches": ["smsp__inst_executed_op_branch.sum"],
    "divergent_branches": ["smsp__sass_branch_targets_threads_divergent.sum"],
    "fadd": ["smsp__sass_thread_inst_executed_op_fadd_pred_on.sum"],
    "fmul": ["smsp__sass_thread_inst_executed_op_fmul_pred_on.sum"],
    "ffma": ["smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"],
    "registers": ["launch__registers_per_thread"],
    "shared_bytes": ["launch__shared_mem_per_block"],
    "occupancy_percent": ["sm__maximum_warps_per_active_cycle_pct"],
}


LAUNCHES = 3


def counters(folder: Path) -> list[dict]:
    """One row a case, as this machine's card counts; result: the sum of what the kernel wrote. Needs `ncu`."""
    results = folder / "results.json"
    metrics = ",".join(metric for metrics in METRICS.values() for metric in metrics)
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--metrics", metrics, sys.executable, __file__, str(results)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or '"ID"' not in done.stdout:
        raise RuntimeError(f"ncu failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    table = csv.DictReader(io.StringIO(done.stdout[done.stdout.index('"ID"') :]))
    lines = [line for line in table if line["ID"]]  # the first line holds units
    found = []
    results = json.loads(results.read_text())
    if len(lines) != LAUNCHES * len(results):
        raise RuntimeError(f"{len(lines)} launches were profiled, not {LAUNCHES} of each of {len(results)} cases")
    for n, (name, result) in enumerate(results.items()):
        launches = [_numbers(line) for line in lines[n * LAUNCHES : (n + 1) * LAUNCHES]]
        found.append({"case": name, **{key: min(one[key] for one in launches) for key in METRICS}, "result": result})
    return found


def _numbers(line: dict) -> dict:
    """Whole numbers but for a percentage, which keeps its fraction."""
    sums = {
        counter: sum(float(line[metric].replace(",", "")) for metric in names if line.get(metric))
        for counter, names in METRICS.items()
    }
    return {counter: int(n) if n == int(n) else n for counter, n in sums.items()}


def keep(path: Path, rows: list[dict], run: dict) -> None:
    """Write rows as CSV, and where they come from beside it as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    path.with_suffix(".json").write_text(json.dumps({"runs": [run]}, indent=1) + "\n")


def main(results: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from validation.cases import CASES
    from validation.triton_cases import TRITON_CASES

    sums = {}
    for case in (*CASES.values(), *TRITON_CASES.values()):
        for _ in range(LAUNCHES):
            arguments = case.arguments()
            case.launch(arguments)
        sums[case.name] = case.result(arguments)
    Path(results).write_text(json.dumps(sums, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
