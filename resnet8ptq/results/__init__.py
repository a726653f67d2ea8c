"""Results for programs: a finished run or a sweep as typed values, and as a pandas frame.

    from resnet8ptq import results

    sweep = results.load_sweep()  # the newest one of mlruns/
    frame = sweep.to_frame()  # a row for each run
    best = sweep.choice("smallest")  # as the report recommends it
    print(best.label, best.loss, best.loss_upper_bound, best.verdict)

`resnet8ptq verdict` gives a shell the verdict on a run or a sweep, as JSON and an exit code.
"""

from resnet8ptq.report.recommend import Recommendation
from resnet8ptq.results.lookup import load_run, load_sweep
from resnet8ptq.results.summaries import SweepSummary
from resnet8ptq.tracking.record import RunRecord, to_frame

__all__ = ["Recommendation", "RunRecord", "SweepSummary", "load_run", "load_sweep", "to_frame"]
