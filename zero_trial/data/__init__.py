"""Real text that is already on the machine, cut into training windows, with baselines that give a loss its meaning."""

from zero_trial.data.baselines import unigram_bits_per_byte, xz_bits_per_byte
from zero_trial.data.corpus import Corpus, Fingerprint, local_corpus
from zero_trial.data.windows import ByteDataset

__all__ = ["ByteDataset", "Corpus", "Fingerprint", "local_corpus", "unigram_bits_per_byte", "xz_bits_per_byte"]
