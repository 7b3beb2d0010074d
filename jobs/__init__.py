"""Jobs: a dataset goes in, rows run through an engine, Arrow shards come out."""
