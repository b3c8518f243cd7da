"""Real text and images that are already on the machine, cut into training samples, with baselines that give a loss its meaning."""

from zero_trial.data.baselines import unigram_bits_per_byte, xz_bits_per_byte
from zero_trial.data.corpus import Corpus, Fingerprint, local_corpus
from zero_trial.data.glyphs import GlyphImages, glyph_images
from zero_trial.data.image_folder import image_folder
from zero_trial.data.windows import ByteDataset

__all__ = [
    "ByteDataset",
    "Corpus",
    "Fingerprint",
    "GlyphImages",
    "glyph_images",
    "image_folder",
    "local_corpus",
    "unigram_bits_per_byte",
    "xz_bits_per_byte",
]
