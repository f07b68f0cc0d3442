"""Images for vision encoders: decoding, tiling and normalised pixel values.  Needs Pillow."""
