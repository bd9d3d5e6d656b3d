"""Measure how much sooner a run ends with more machines, at the same loss: `make study-speedup`.

The machines are those of `study_exchange.py`: virtual, with the worker's codec, anchor, error
feedback and round schedule. The speed-up of R machines is the steps that one machine alone needs to
their loss, over the steps of each of them. Each training's result is a line in
build/study/speedup-results.jsonl: a study that was interrupted continues where it stopped.

    --known   use the results in docs/benchmarks/speedup.jsonl, and train only what it lacks
    --report  train nothing; write the document and the worker's fit from the results there are
    --quick   five minutes; writes neither

BARNRAISE_STUDY=mini trains instead, in ten minutes, what shows from how many rounds on all values
are better than one in 64, and writes docs/benchmarks/speedup_limit.jsonl. BARNRAISE_STUDY=medium
compares Muon with AdamW, in half an hour, and writes docs/benchmarks/speedup_medium.jsonl.
"""

import json

import speedup_report
import study_report
from muon_plan import MEDIUM_STEPS, MuonPlan
from speedup_plan import SpeedupPlan
from study_exchange import parse_arguments, read_results, run_stages
from study_model import FOLDER, NAME, prepare_text

LIMIT_RESULTS = speedup_report.RESULTS.with_name("speedup_limit.jsonl")
MEDIUM_RESULTS = speedup_report.RESULTS.with_name("speedup_medium.jsonl")


def main() -> None:
    """Train what is missing and write the report."""
    arguments = parse_arguments((__doc__ or "").partition("\n")[0])
    plan = SpeedupPlan(quick=arguments.quick)
    if NAME in ("mini", "medium"):
        muon = MuonPlan(MEDIUM_STEPS, is_medium=True)
        path, stages = {
            "mini": (LIMIT_RESULTS, [plan.limit_cases]),
            "medium": (MEDIUM_RESULTS, [muon.tune, muon.compare_four]),
        }[NAME]
        prepare_text()
        run_stages(stages, read_results(path), path, arguments)
        return
    path = FOLDER / f"speedup-{'quick' if arguments.quick else 'results'}.jsonl"
    prepare_text()
    if arguments.quick:
        path.unlink(missing_ok=True)
    # Some of these trainings are the exchange study's as well.
    documents = [study_report.RESULTS, speedup_report.RESULTS]
    documented = documents if arguments.known or arguments.report else []
    results = read_results(*documented, path)
    if not arguments.report:
        run_stages(plan.stages(), results, path, arguments)
    if not arguments.quick:
        speedup_report.write_document(plan, results)
    print(json.dumps(speedup_report.compute_figures(plan, results)))


if __name__ == "__main__":
    main()
