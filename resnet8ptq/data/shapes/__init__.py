"""The embedded data set `shapes`: its pictures and a ResNet8 trained on them."""

from pathlib import Path

WEIGHTS = Path(__file__).with_name("resnet8.h5")
