"""Section: what every section of a job file has in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


def refuse(key: str, message: str) -> PydanticCustomError:
    """An error about another key of the same section than the one pydantic would name."""
    return PydanticCustomError("refused", "{message}", {"key": key, "message": message})


class Section(BaseModel):
    """A section: unknown keys refused, types strict, never changed after."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), populate_by_name=True
    )

    def given(self) -> dict[str, Any]:
        """The keys that the job file sets, with their values."""
        return {
            name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set
        }
