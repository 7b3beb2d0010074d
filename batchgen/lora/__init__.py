"""LoRA adapters: their files, what they add to a model's layers, and the slots that they are computed in.

What this file gives needs no torch.
"""

from batchgen.lora.adapter_facts import AdapterFacts, check_adapter

__all__ = ["AdapterFacts", "check_adapter"]
