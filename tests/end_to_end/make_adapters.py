"""Trains LoRA adapters with peft, and keeps beside each what peft's own merged model says.

    python make_adapters.py MODEL FOLDER [--only WORD ...] [--steps N]

MODEL is a folder of float weights with a tokenizer. FOLDER gets, for each recipe, the adapter as peft saves
it (RECIPE/) and RECIPE.safetensors: prompts, and of the merged model the greedy tokens and the float32 logits
of all positions. test_lora_trained.py holds batchgen to them. It imports nothing of batchgen.
"""

import argparse
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

# What the adapters learn: verses that no tiny random model knows.
TEXT = (
    "Tyger Tyger, burning bright, In the forests of the night; What immortal hand or eye, Could frame thy "
    "fearful symmetry? In what distant deeps or skies, Burnt the fire of thine eyes? On what wings dare he "
    "aspire? What the hand, dare seize the fire? "
)
PROMPTS = ("Tyger Tyger, ", "In what distant", "12 + 30 = ", "Größe: ")
NUM_TOKENS = 24
CONTEXT, BATCH = 64, 8

RECIPES: dict[str, dict[str, Any]] = {
    "linear": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "rslora": {
        "r": 16,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    },
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 12, "down_proj": 2},
        "alpha_pattern": {"v_proj": 32},
        "layers_to_transform": [1],
        "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"],
    },
    "ends": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj", "embed_tokens", "lm_head"]},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="recipes whose names hold one of these words")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    for name, recipe in RECIPES.items():
        if not options.only or any(word in name for word in options.only):
            make(options.model, options.folder, name, recipe, options.steps)


def make(base: Path, folder: Path, name: str, recipe: dict[str, Any], steps: int) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.1, **recipe))
    losses = train(wrapped, torch.tensor(tokenizer(TEXT)["input_ids"]), steps)
    wrapped.save_pretrained(folder / name)
    print(f"{name}: loss {losses[0]:.2f} -> {losses[-1]:.2f} in {steps} steps", flush=True)
    # Merged, the adapters of an embedding and of a head that are one tensor would both change both.
    is_tied = wrapped.config.tie_word_embeddings and "lm_head" in recipe["target_modules"]
    adapted = wrapped.eval() if is_tied else wrapped.merge_and_unload().eval()
    save_expected(adapted, tokenizer, folder / f"{name}.safetensors")


def train(model: Any, ids: torch.Tensor, steps: int) -> list[float]:
    """Steps of AdamW on stretches of the text; the loss of each."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    model.train()
    losses = []
    # A tokenizer with long words leaves few.
    length = min(CONTEXT, len(ids) // 2)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - length, (BATCH,))
        batch = torch.stack([ids[start : start + length] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@torch.no_grad()
def save_expected(model: Any, tokenizer: Any, path: Path) -> None:
    model.generation_config.eos_token_id = None  # every text has its full length
    expected: dict[str, torch.Tensor] = {}
    for number, text in enumerate(PROMPTS):
        prompt = torch.tensor([tokenizer(text)["input_ids"]])
        greedy = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NUM_TOKENS
        )
        expected[f"ids.{number}"], expected[f"length.{number}"] = greedy[0], torch.tensor(prompt.shape[1])
        expected[f"logits.{number}"] = model(greedy).logits[0].contiguous()
    save_file(expected, path)


if __name__ == "__main__":
    main()
