"""Host. Trains drafters for a target: data, trainers, export. Needs the package's extra "train"."""

from jaxspec.train.config import TrainConfig as TrainConfig
from jaxspec.train.run import train as train
