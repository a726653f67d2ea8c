"""Other words for settings, options and commands, for messages about unknown words."""

from resnet8ptq.core.descriptor import find_backends

KEYS = {
    "model": "model.path",
    "network": "model.path",
    "input": "model.path",
    "onnx": "model.path",
    "model_path": "model.path",
    "data": "data.root",
    "dataset": "data.root",
    "data_dir": "data.root",
    "data_path": "data.root",
    "images": "data.root",
    "batch_size": "evaluate.batch_size",
    "epochs": "qat.epochs",
    "bits": "dtype",
    "algorithm": "method",
    "output": "hydra.run.dir",
    "output_dir": "hydra.run.dir",
}
COMMANDS = {  # other names of commands
    "inspect": "run +analysis=inspect",
    "diagnose": "run +analysis=diagnose",
    "profile": "run +analysis=profile",
    "sensitivity": "run +analysis=sensitivity",
    "quantize": "run",
    "ptq": "run",
    "sweep": "run -m",
    "compare": "run -m",
    "export": "deploy",
    "evaluate": "judge",
    "validate": "judge",
    "serve": "ui",
    "mlflow": "ui",
}
_GPU = "device=cuda learns on a GPU; artifacts are measured on the CPU, or by target.command"
ABSENT = {  # keys without a counterpart
    "gpu": _GPU,
    "cuda": _GPU,
    "jobs": "for parallel jobs, add -m hydra/launcher=processes",
    "goal": "it belongs to ship: try ship goal=fastest, goal=smallest or goal=best",
    "minutes": "it belongs to ship: try ship minutes=10; for a run, max_seconds=600",
    "server": "start MLflow's own server for a team: docs/server.md",
    "report.reference": "results of other tools on ResNet8 are in studies/tools.md",
}


def _names_of_backends() -> dict[str, str]:
    """Return the names of backends by their names in other tools."""
    names: dict[str, str] = {}
    for backend in find_backends().values():
        names |= dict.fromkeys(backend.other_names, backend.name)
    return names


PATHS = {"data": "data.root", "model": "model.path"}  # groups for which a path may be typed
_TENSORRT = "onnx: TensorRT reads its QDQ files"
OPTIONS = {  # by config group, or by a key that takes one of several words
    "backend": {
        "tensorrt": _TENSORRT,
        "trt": _TENSORRT,
        **_names_of_backends(),
    },
    "dtype": {
        "int4": "w4a8",
        "uint4": "w4a8",
        "4": "w4a8",
        "8": "int8",
        "16": "w8a16",
        "int16": "w8a16",
        "float32": "fp32",
        "float16": "fp16",
        "half": "fp16",
        "float": "fp32",
        "s8s8": "int8",
        "u8u8": "uint8",
    },
    "hydra/launcher": {"joblib": "processes", "ray": "ray_local", "submitit_slurm": "slurm"},
    "device": {"gpu": "cuda"},
    "calib": {"kl": "entropy", "max": "minmax", "ema": "moving_average"},
    "preprocess": {
        "imagenet": "torchvision_imagenet",
        "none": "raw",
        "tf": "symmetric",
        "0..1": "unit",
    },
    "data": {
        "npz": "arrays",
        "numpy": "arrays",
        "csv": "table",
        "imagefolder": "folder",
        "hf": "huggingface",
    },
}
