"""Host. Corpora to train drafters on: made by the model itself, kept as token shards."""

from jaxspec.train.data.recipe import DataConfig as DataConfig
from jaxspec.train.data.recipe import make_corpus as make_corpus
from jaxspec.train.data.shards import Corpus as Corpus
from jaxspec.train.data.shards import Record as Record
from jaxspec.train.data.shards import read_corpus as read_corpus
from jaxspec.train.data.shards import write_shard as write_shard
