"""Text to token ids and back, and chat templates. Importing it loads neither torch nor transformers."""

from batchgen.tokenizer.load import load_tokenizer, tokenizer_of
from batchgen.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "tokenizer_of"]
