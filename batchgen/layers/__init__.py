"""The layers of a decoder: linear layers that may be shared among ranks, the embedding, the rotation."""
