"""Quality filters and deduplication, under the name design document 000 gives them: see `penstock.corpus`."""

from penstock.corpus.decontamination import *
from penstock.corpus.dedup.stages import *
from penstock.corpus.pii import *
from penstock.corpus.quality.filters import *
