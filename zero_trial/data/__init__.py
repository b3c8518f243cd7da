"""Real text and images on this machine, cut into samples, with baselines of the loss."""

from zero_trial.data.corpora import (
    ByteDataset,
    Corpus,
    Fingerprint,
    local_corpus,
    unigram_bits_per_byte,
    xz_bits_per_byte,
)
from zero_trial.data.images import GlyphImages, glyph_images, image_folder

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
