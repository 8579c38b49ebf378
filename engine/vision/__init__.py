"""The V4.1 vision tower: image geometry, preprocessing, encoder and aligner."""
