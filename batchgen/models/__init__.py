"""Model files and the decoder that runs them. Importing this package loads no torch."""
