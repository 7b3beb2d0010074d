"""LoRARequest: vLLM's fields, checked; what other tools have is answered with what to do."""

from pathlib import Path
from typing import Any

import pytest

from batchgen import LoRARequest
from batchgen.api.lora_names import LoRANames, by_adapter
from batchgen.errors import ConfigError, UnknownNameError


def test_its_fields_come_in_the_order_of_elsewhere() -> None:
    made = LoRARequest("sql", 3, Path("adapters/sql"))
    assert (made.lora_name, made.lora_int_id, made.path) == ("sql", 3, "adapters/sql")
    assert LoRARequest("sql") == LoRARequest(lora_name="sql", lora_int_id=0, lora_path="")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_name": ""}, "'lora_name' must be a non-empty text"),
        ({"lora_name": "a", "lora_int_id": -1}, "'lora_int_id' must be a whole number, 0 or more"),
        ({"lora_name": "a", "lora_int_id": True}, "'lora_int_id' must be a whole number"),
        ({"lora_name": "a", "lora_path": 7}, "'lora_path' must be a folder or a hub id; got 7"),
        ({"lora_name": "a", "base_model_name": "b"}, "'base_model_name' is not offered: an adapter is held"),
        ({"lora_name": "a", "lora_pth": "b"}, "did you mean 'lora_path'"),
    ],
)
def test_a_wrong_field_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        LoRARequest(**given)


@pytest.mark.parametrize(
    ("names", "num_slots", "order"),
    [
        ("abab", 2, [0, 1, 2, 3]),
        ("abab", 1, [0, 2, 1, 3]),
        ("ca-ba-c", 3, [0, 6, 1, 4, 2, 5, 3]),
        ("---", 1, [0, 1, 2]),
        ("", 1, []),
    ],
)
def test_prompts_of_an_adapter_stand_together_if_there_are_more_than_slots(
    names: str, num_slots: int, order: list[int]
) -> None:
    loras = [None if name == "-" else LoRARequest(name) for name in names]
    assert by_adapter(loras, num_slots) == order


def test_only_what_is_new_has_to_be_loaded() -> None:
    names = LoRANames(True)
    first, second = LoRARequest("a", 1, "p"), LoRARequest("b", 2, "q")
    assert names.to_load([first, None, second, first]) == [first, second]
    names.loaded(first)
    assert names.to_load([first, second, LoRARequest("a")]) == [second]
    moved = LoRARequest("a", 1, "elsewhere")
    assert names.to_load([moved]) == [moved]
    names.forget("a")
    with pytest.raises(ConfigError, match="'a' is not loaded; give its lora_path"):
        names.to_load([LoRARequest("a")])
