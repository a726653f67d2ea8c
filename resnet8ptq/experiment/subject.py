"""The network of an analysis, and the samples to measure it on."""

from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.experiment.compatibility import load, make_task
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.samples import Samples, draw_to_analyse
from resnet8ptq.experiment.settings import Settings


def open_subject(settings: Settings, run: Recorder) -> tuple[Evaluator, Samples]:
    """Read data and network, draw the samples, and log the task.

    The measured samples are the tuning samples: training samples that do not calibrate.
    """
    config = settings.config
    data, fp32 = load(settings)
    samples = draw_to_analyse(config, data)
    name = f"the training samples of {data.name}"
    task = make_task(config.task, data, fp32, samples.held_out, name)
    run.log_params(task.describe())
    return Evaluator(settings.quantizer, fp32, task, config.evaluate.batch_size), samples
