"""Structured output: grammars that a sample's text must conform to, by way of the library llguidance.

Nothing of the library is imported before the first grammar.
"""

DEAD_END = "the grammar and the other sampling parameters together allow no token here"
